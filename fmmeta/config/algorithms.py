"""`AlgorithmSpec`, which describes an algorithm to the rest of the package, and the registry.

No other module compares an algorithm's name: all read the fields of `find(name)`. A spec is in the file of
its rule and is imported when a Config names it, so that this module needs no torch and a new algorithm is one
file: `--algorithm my_module:spec`. A package that is installed may name its specs as entry points of the
group `fmmeta.algorithms`: `--algorithm NAME`.

The outer optimizers are optimizers of torch that act element by element, so that they work on shards.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import import_named, one_line
from fmmeta.common.text import nearest


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm: its rule, its conflicts, its costs.

    rule: (Setup, outer step) -> Rule (fmmeta/meta/rule.py); None: a baseline that trains nothing.
    reference: the rule in plain PyTorch, (ReferenceTask) -> Gradients (fmmeta/meta/reference.py); the parity
    tests compare the rule with it.
    """

    name: str
    rule: Any = None
    reference: Callable[[Any], Any] | None = None
    order: int = 1  # derivatives of the inner loop that the meta-gradient takes, 1 or 2
    adapts: str = "all"  # what the inner loop changes: all, body or head
    frozen_body: bool = False  # a task does not change the body: features are computed once
    multi_task: str | None = None  # several tasks in a pass over adapters, by gradient: query or displacement
    task_type: str | None = None  # the only one that it works with
    all_classes: bool = False  # one head is trained over the classes of all training tasks
    in_prompt: bool = False  # the support set is part of the prompt and is not trained on
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of settings that were left open
    supports: frozenset[str] = frozenset()  # settings with SettingRule.per_algorithm, and some more
    conflicts: Callable[[Any], Iterator[str]] = lambda config: iter(())  # a line for each conflict
    passes: Callable[[Any, int], Any] | None = None  # (Config, support forwards) -> costs.Passes
    work_shards: int = 0  # vectors of theta's length that it needs while a task runs
    adds_directly: Callable[[Any], bool] = lambda config: False  # its gradient needs no vector beside the sum
    numbers: tuple[str, ...] = ()  # names of TaskResult.numbers, means of which go into metrics.jsonl
    warning: Callable[[Any, Mapping[str, float]], str | None] = lambda config, values: None

    @property
    def trains_nothing(self) -> bool:
        """Whether nothing is trained."""
        return self.rule is None

    @property
    def takes_differences(self) -> bool:
        """Whether it takes Hessian-vector products, which are finite differences of gradients."""
        return "check_meta_gradient" in self.supports


NONE = AlgorithmSpec("none", supports=frozenset({"offload_outer"}))
"""Evaluates the weights as they are."""

RULES = "fmmeta.meta.algorithms"
BUILT_IN = {
    "fomaml": f"{RULES}.unrolled:FOMAML",
    "maml": f"{RULES}.unrolled:MAML",
    "reptile": f"{RULES}.reptile:spec",
    "imaml": f"{RULES}.imaml:spec",
    "anil": f"{RULES}.anil:ANIL",
    "boil": f"{RULES}.unrolled:BOIL",
    "proto_maml": f"{RULES}.unrolled:PROTO_MAML",
    "meta_sgd": f"{RULES}.unrolled:META_SGD",
    "joint": f"{RULES}.baselines:JOINT",
    "protonet": f"{RULES}.anil:PROTONET",
    "none": "fmmeta.config.algorithms:NONE",
    "in_context": f"{RULES}.baselines:IN_CONTEXT",
}
"""Name -> module:spec."""


PLUG_INS = "fmmeta.algorithms"
"""Group of entry points: installed packages name their specs there."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages, by name; built-in names come first."""
    return {one.name: one for one in entry_points(group=PLUG_INS) if one.name not in BUILT_IN}


def find(name: str) -> AlgorithmSpec:
    """The spec of a built-in name, of an installed package's entry point, or of `module:spec`.

    Raises `UsageError` in one line.
    """
    if name in BUILT_IN:
        return pkgutil.resolve_name(BUILT_IN[name])
    if ":" in name:
        found = import_named("algorithm", name, "an AlgorithmSpec")
    elif name in installed():
        try:
            found = installed()[name].load()
        except Exception as error:  # importing runs the package's code, which may raise anything
            raise UsageError(
                f"algorithm={name} cannot be imported from {installed()[name].value} ({one_line(error)});"
                " correct or remove the package that installs it"
            ) from None
    else:
        names = (*BUILT_IN, *installed())
        raise UsageError(
            f"algorithm={name} is unknown{nearest(name, names)}; use {', '.join(names)}, or module:spec of"
            " another"
        )
    if not isinstance(found, AlgorithmSpec):
        raise UsageError(
            f"algorithm={name} is a {type(found).__name__} and no AlgorithmSpec; name one"
            " (examples/custom_rule.py)"
        )
    return found


def supporting(setting: str) -> list[str]:
    """Names of the built-in algorithms that support a setting."""
    return [name for name in BUILT_IN if setting in find(name).supports]


@dataclass(frozen=True)
class OuterOptimizerSpec:
    """An optimizer of torch that acts element by element, so that it works on shards.

    torch_class: name in `torch.optim`. moments: vectors that it stores per parameter, by torch's names.
    options: arguments of torch, and the settings that give them. fixed: other arguments.
    """

    torch_class: str
    moments: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=lambda: {"eps": "adam_epsilon"})
    fixed: Mapping[str, bool] = field(default_factory=dict)


OUTER_OPTIMIZERS = {
    "adamw": OuterOptimizerSpec("AdamW", ("exp_avg", "exp_avg_sq")),
    "sgd": OuterOptimizerSpec("SGD", options={}),
    "nesterov": OuterOptimizerSpec(
        "SGD", ("momentum_buffer",), {"momentum": "outer_momentum"}, {"nesterov": True}
    ),
    "adagrad": OuterOptimizerSpec("Adagrad", ("sum",)),
    "adamax": OuterOptimizerSpec("Adamax", ("exp_avg", "exp_inf")),
    "nadam": OuterOptimizerSpec("NAdam", ("exp_avg", "exp_avg_sq")),
    "radam": OuterOptimizerSpec("RAdam", ("exp_avg", "exp_avg_sq")),
    "rmsprop": OuterOptimizerSpec("RMSprop", ("square_avg",)),
}
