"""`AlgorithmSpec`, which describes an algorithm to the rest of the package, and the registry.

No other module compares an algorithm's name: all read the fields of `find(name)`. A spec is in the file of
its rule and is imported when a Config names it, so that this module needs no torch and a new algorithm is one
file: `--algorithm my_module:spec`. A package that is installed may name its specs as entry points of the
group `fmmeta.algorithms`: `--algorithm NAME`.

An outer optimizer is one of torch that acts element by element, so that it works on shards: a name of
`OUTER_OPTIMIZERS`, or `--outer_optimizer my_module:name`. torch is imported for the latter alone.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import any_of
from fmmeta.config.registry import find_spec


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm: its rule, its conflicts, its costs.

    rule: a Rule (fmmeta/meta/task.py), TaskRun -> TaskResult; None: a baseline that trains nothing.
    several: a MultiTaskRule for --tasks_per_pass, where tasks share passes of a frozen body.
    reference: the rule in plain PyTorch, (ReferenceTask) -> Gradients (fmmeta/meta/reference.py); the parity
    tests compare the rule with it.
    """

    name: str
    rule: Callable[[Any], Any] | None = None
    reference: Callable[[Any], Any] | None = None
    order: int = 1  # derivatives of the inner loop that the meta-gradient takes, 1 or 2
    adapts: str = "all"  # what the inner loop changes by default, as --inner_parameters has it
    frozen_body: bool = False  # a task does not change the body: features are computed once
    several: Callable[[Any], Any] | None = None
    multi_task: str | None = None  # several tasks in a pass over adapters, by gradient: query or displacement
    needs: str = ""  # a field of LearnerSpec that a kind of task must have, or any: a key of KINDS
    all_classes: bool = False  # one head is trained over the classes of all training tasks
    method: str = "finetune"  # of `fmmeta evaluate`, which learns a task as in training
    evaluation: Any = None  # the EvaluationMethod of runs (fmmeta/meta/inner_loop.py); None: the inner loop
    learning: str = ""  # how a task is learned without an inner loop, for tables
    rows_before_query: Callable[[Any], int] = lambda config: 0  # support rows in the prompt of a query
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


NONE = AlgorithmSpec("none", supports=frozenset({"offload_outer", "inner_parameters"}))
"""Evaluates the weights as they are."""

KINDS = {"of_classes": "classes", "generates": "generated answers", "ordered": "streams"}
"""What messages call the kinds of task that an algorithm may need, by the field of LearnerSpec."""
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
    "ttt": f"{RULES}.ttt:TTT",
    "joint": f"{RULES}.baselines:JOINT",
    "protonet": f"{RULES}.anil:PROTONET",
    "none": "fmmeta.config.algorithms:NONE",
    "in_context": f"{RULES}.baselines:IN_CONTEXT",
    "meta_icl": f"{RULES}.baselines:META_ICL",
}
"""Name -> module:spec."""


def find(name: str) -> AlgorithmSpec:
    """The spec of a built-in name, of an installed package's entry point, or of `module:spec`.

    Raises `UsageError` in one line.
    """
    return find_spec(
        "algorithm", name, BUILT_IN, "fmmeta.algorithms", AlgorithmSpec, "examples/custom_rule.py"
    )


def bf16_by_default(algorithm: str, by_autograd: bool) -> bool:
    """Whether bf16 is the default on GPUs: not for finite differences of gradients. by_autograd: whether the
    products of an algorithm that may take them are computed by autograd, as those of adapters.
    """
    return by_autograd or not find(algorithm).takes_differences


def supporting(setting: str) -> list[str]:
    """Names of the built-in algorithms that support a setting."""
    return [name for name in BUILT_IN if setting in find(name).supports]


@dataclass(frozen=True)
class OuterOptimizerSpec:
    """An optimizer of torch that acts element by element, so that it works on shards. `--outer_optimizer
    module:name` names a spec, or a subclass of `torch.optim.Optimizer`.

    torch_class: name in `torch.optim`, or a class whose constructor takes the parameters and `lr`.
    moments: vectors that it stores per parameter, by the names in its state; all else in its state must be
    numbers. options: arguments of the constructor, and the settings that give them. fixed: other arguments.
    Weight decay is fmmeta's: a constructor that has `weight_decay` gets 0.

    >>> OuterOptimizerSpec("Adadelta", ("square_avg", "acc_delta"), {}, {"rho": 0.95}).moments
    ('square_avg', 'acc_delta')
    """

    torch_class: Any
    moments: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=lambda: {"eps": "adam_epsilon"})
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def make(self, params: Any, lr: float, c: Any, **more: Any) -> Any:
        """The optimizer of `params` with the options of a Config."""
        import torch

        named = isinstance(self.torch_class, str)
        make = getattr(torch.optim, self.torch_class) if named else self.torch_class
        options = {name: getattr(c, key) for name, key in self.options.items()}
        if "weight_decay" in signature(make).parameters:
            options["weight_decay"] = 0.0
        return make(params, lr=lr, **options, **self.fixed, **more)

    def step(
        self, value: Any, grad: Any, state: Mapping[str, Any], lr: float, c: Any, **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step on a tensor, in place, from a state that may be empty; its vectors and its numbers
        afterwards, which may be tensors on the device of `value`.
        """
        import torch

        optimizer = self.make([value], lr, c, **more)
        if state:
            optimizer.state[value] = dict(state)
        value.grad = grad
        optimizer.step()
        value.grad = None
        left = {name: item for name, item in optimizer.state[value].items() if item is not None}
        vectors = {name: item for name, item in left.items() if torch.is_tensor(item) and item.ndim > 0}
        return vectors, {name: item for name, item in left.items() if name not in vectors}


OWN_OPTIMIZERS = "docs/how-to/own-learner-source-rule.md"
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

NOT_ELEMENTWISE = {
    "muon": "it orthogonalises whole weight matrices",
    "lbfgs": "its line search evaluates the loss",
    "adafactor": "it keeps moments of whole rows and columns",
    "shampoo": "it multiplies whole matrices",
    "soap": "it rotates whole matrices",
    "lamb": "it takes norms of whole parameters",
    "lars": "it takes norms of whole parameters",
    "sparse_adam": "it takes sparse gradients",
}


def find_outer(name: str) -> OuterOptimizerSpec:
    """The spec of a built-in name or of `module:name`. Raises `UsageError` in one line."""
    if name in OUTER_OPTIMIZERS:
        return OUTER_OPTIMIZERS[name]
    if name.lower() in NOT_ELEMENTWISE:
        raise UsageError(
            f"outer_optimizer={name} does not act element by element: {NOT_ELEMENTWISE[name.lower()]}, and"
            f" theta is held in shards; use {' or '.join(OUTER_OPTIMIZERS)}"
        )
    kind = OuterOptimizerSpec
    return find_spec("outer_optimizer", name, OUTER_OPTIMIZERS, "", kind, OWN_OPTIMIZERS, of_torch)


def of_torch(found: Any) -> Any:
    """The spec of a class of optimizers of torch; anything else as it is."""
    from torch.optim import Optimizer

    is_class = isinstance(found, type) and issubclass(found, Optimizer)
    return OuterOptimizerSpec(found, _moments(found), {}) if is_class else found


@cache
def _moments(torch_class: Any) -> tuple[str, ...]:
    """The vectors in the state of a class after a step; none if it raises, as it then does in the check."""
    import torch

    with suppress(Exception):
        return tuple(
            OuterOptimizerSpec(torch_class, (), {}).step(torch.ones(8), torch.ones(8), {}, 0.1, None)[0]
        )
    return ()


def check_outer(c: Any) -> None:
    """Refuse an outer optimizer of the user that does not work on shards. Raises `UsageError` in one line.

    Three steps on a vector of 8 random numbers, as one parameter of one optimizer, and in two halves with
    nothing but moments and numbers kept between steps: the values must agree.
    """
    import torch

    given, spec = f"outer_optimizer={c.outer_optimizer}", find_outer(c.outer_optimizer)
    random = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(8, generator=random) for _ in range(4))
    whole, halves = start.clone(), [part.clone() for part in start.split(4)]
    moments, numbers = [dict[str, Any](), dict[str, Any]()], dict[str, Any]()
    with usage_errors(
        f"{given} cannot take a step on a vector",
        "use an optimizer that takes lr and acts element by element",
    ):
        kept = spec.make([whole], 0.1, c)
        for grad in grads:
            whole.grad = grad.clone()
            kept.step()
            before = {name: float(item) for name, item in numbers.items()}
            for i, part in enumerate(halves):
                state = {**{name: torch.tensor(x) for name, x in before.items()}, **moments[i]}
                moments[i], numbers = spec.step(part, grad.split(4)[i].clone(), state, 0.1, c)
    other = [name for name in moments[0] if name not in spec.moments or moments[0][name].shape != (4,)]
    if other:
        raise UsageError(
            f"{given} stores {', '.join(other)}, which is no moment that its spec names, a number for each"
            f" element; name it in moments=, now {spec.moments}"
        )
    if not torch.allclose(whole, torch.cat(halves), rtol=1e-4, atol=1e-6):
        raise UsageError(
            f"{given} does not act element by element, with moments and numbers as its only state: a vector"
            f" and its two halves differ after three steps, and theta is held in shards; use"
            f" {any_of(OUTER_OPTIMIZERS)}, or another one that does"
        )


INNER_OPTIMIZERS: tuple[str, ...] = ("sgd", "momentum", "adamw")


def find_inner(name: str) -> Any:
    """The `InnerOptimizer` of the user's `module:name` (fmmeta/meta/inner_optimizers.py).

    Three updates of 8 random numbers, whole, in two halves and by `differentiable`, must agree. Raises
    `UsageError` in one line.
    """
    given, names = f"inner_optimizer={name}", dict.fromkeys(INNER_OPTIMIZERS)
    kind = pkgutil.resolve_name("fmmeta.meta.inner_optimizers:InnerOptimizer")
    found = find_spec("inner_optimizer", name, names, "", kind, OWN_OPTIMIZERS)
    if found.momentum:
        raise UsageError(f"{given} has momentum=, which is for the built-in one; leave that out of yours")
    import torch

    random = torch.Generator().manual_seed(0)
    phi, *grads = (torch.randn(8, generator=random) for _ in range(4))
    one, two = (found.zero_state(8, phi.device).vectors for _ in range(2))
    whole, halves, apart = phi, phi, 0.0
    with usage_errors(
        f"{given} cannot update a vector", "give a direction (gradient, phi, state, step number) -> u"
    ):
        for count, grad in enumerate(grads, 1):
            if found.differentiable is not None:
                before = {key: x.clone() for key, x in one.items()}
                same, _ = found.differentiable(grad, whole, before, count)
            u = found.direction(grad.clone(), whole.clone(), one, count)
            parts = [
                found.direction(
                    grad[part].clone(), halves[part].clone(), {key: x[part] for key, x in two.items()}, count
                )
                for part in (slice(0, 4), slice(4, 8))
            ]
            if found.differentiable is not None:
                apart = max(apart, float((same - u).abs().max() / u.abs().max()))
            whole, halves = whole - 0.1 * u, halves - 0.1 * torch.cat(parts)
    if not torch.allclose(whole, halves, rtol=1e-4, atol=1e-6):
        raise UsageError(
            f"{given} does not act element by element, with vectors changed in place as its only state: a"
            f" vector and its two halves differ after three updates, and phi is held in shards; use"
            f" {any_of(INNER_OPTIMIZERS)}, or another one that does"
        )
    if not apart < 1e-4:
        raise UsageError(
            f"{given}: its differentiable= gives another u than its direction, by {apart:.1e} of the largest"
            " element; correct one of them"
        )
    return found
