"""From settings to the parts that rules are made of: the inner loop, and meta-gradients through it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.in_context import InContext
from fmmeta.meta.classifier_head import HeadInit
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop
from fmmeta.meta.inner_lrs import HEAD, Layers, Rates
from fmmeta.meta.inner_optimizers import inner_optimizer
from fmmeta.meta.second_order.hessian import HvpOptions
from fmmeta.parallel.workers.base import Worker


@dataclass(frozen=True)
class Setup:
    """The parts that rules are built from."""

    config: Config
    inner: InnerLoop
    hvp: HvpOptions

    def evaluation_method(self, rates: Tensor | None = None) -> EvaluationMethod:
        """How evaluation learns a task; `rates`: learned inner rates in place of the live ones."""
        return InContext() if find(self.config.algorithm).in_prompt else self.inner.variant(rates)


def setup(config: Config, worker: Worker, head_names: tuple[str, ...], classes: int, bf16: bool) -> Setup:
    """Build the inner loop that `config` describes for the worker's model. Collective: group."""
    head = HeadInit(config.head_init, head_names, classes, config.prototype_gradient, config.joint_head)
    weighs = "proximal_weight" in find(config.algorithm).supports
    proximal = config.proximal_weight if weighs else 0.0
    inner = InnerLoop(
        config.inner_steps, rates_of(config, worker, head_names), inner_optimizer(config), head, proximal
    )
    return Setup(config, inner, HvpOptions("bf16" if bf16 else "fp32"))


def rates_of(config: Config, worker: Worker, head_names: tuple[str, ...]) -> Rates:
    """inner_lr by step and layer; learned rates begin there. Collective: group."""
    layers = Layers.of(worker, head_names)
    steps = max(1, config.inner_steps)
    over_steps = [config.inner_lr * SHAPES[config.inner_lr_schedule](k / steps) for k in range(steps)]
    factors = [layer_factor(config, layers.names)(name) for name in layers.names]
    table = torch.outer(
        torch.tensor(over_steps, dtype=torch.float64), torch.tensor(factors, dtype=torch.float64)
    )
    rates = Rates(layers, table, learned=config.inner_lr_learned)
    if config.inner_lr_learned != "element":
        return rates
    element = torch.zeros(worker.params.numel, device=worker.storage_device)
    element.fill_(1)  # padding included: it has no gradient
    rates.scale_(0, element, slice(0, element.numel()))
    return Rates(layers, torch.ones_like(table), element, "element")


SHAPES: dict[str, Callable[[float], float]] = {  # share of the inner steps done -> factor
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def layer_factor(config: Config, names: tuple[str, ...]) -> Callable[[str], float]:
    """Factor of inner_lr by layer. Raises `UsageError` for a pattern that fits none."""
    adapts = find(config.algorithm).adapts
    if adapts != "all":
        return lambda name: float((name == HEAD) == (adapts == "head"))
    chosen = [
        (pattern, float(factor))
        for pattern, _, factor in (item.rpartition("=") for item in config.inner_lr_groups)
    ]
    for pattern, factor in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"inner_lr_groups={pattern}={factor:g} fits no layer; the layers are {', '.join(names)}"
            )
    return lambda name: next((factor for pattern, factor in chosen if fnmatchcase(name, pattern)), 1.0)
