"""From settings to the parts that rules are made of: the inner loop, and meta-gradients through it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.in_context import InContext
from fmmeta.meta.classifier_head import HeadInit
from fmmeta.meta.inner_loop import InnerLoop, Learning
from fmmeta.meta.inner_lrs import HEAD, Layers, Rates
from fmmeta.meta.inner_optimizers import inner_rule
from fmmeta.meta.second_order.hessian import HvpOptions
from fmmeta.meta.second_order.unroll import FINAL_ONLY, Unrolled
from fmmeta.parallel.workers.base import Worker


@dataclass(frozen=True)
class Setup:
    """What every rule may draw on."""

    config: Config
    inner: InnerLoop
    curvature: HvpOptions

    def learning(self, rates: Tensor | None = None) -> Learning:
        """How evaluation learns a task; `rates`: learned inner rates in place of the live ones."""
        return InContext() if self.config.algorithm == "in_context" else self.inner.variant(rates)

    def unrolled(self, outer_step: int, order: int = 2) -> Unrolled:
        """The meta-gradient through the inner loop at an outer step: first order first, if the settings say
        so.
        """
        config = self.config
        if outer_step < config.first_order_steps:
            order = 1
        gib = config.trajectory_memory_gib
        budget = 2**62 if gib is None else int(gib * 2**30)
        counts = step_counts(config.inner_steps, outer_step, config.multi_step_loss_steps)
        return Unrolled(self.inner, order, counts, self.curvature, budget)


def setup(config: Config, worker: Worker, head_names: tuple[str, ...], classes: int, bf16: bool) -> Setup:
    """Build the inner loop that `config` describes for the worker's model. Collective: group."""
    head = HeadInit(config.head_init, head_names, classes, config.prototype_gradient, config.joint_head)
    proximal = config.proximal_weight if config.algorithm == "imaml" else 0.0
    inner = InnerLoop(
        config.inner_steps, rates_of(config, worker, head_names), inner_rule(config), head, proximal
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
    element = torch.zeros(worker.params.numel, device=worker.home)
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
    if config.algorithm in ("anil", "boil"):
        return lambda name: float((name == HEAD) == (config.algorithm == "anil"))
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


def step_counts(inner_steps: int, outer_step: int, multi_step_loss_steps: int) -> tuple[float, ...]:
    """Weights of the query loss at phi_1 .. phi_K: 1/K each at outer step 0, all on phi_K from
    `multi_step_loss_steps` on.

    Linear in between (Antoniou et al. 2019, section 4, "multi-step loss optimization": annealed towards the
    last step).
    """
    if outer_step >= multi_step_loss_steps:
        return FINAL_ONLY
    early = (1 - outer_step / multi_step_loss_steps) / inner_steps
    return (*[early] * (inner_steps - 1), 1 - early * (inner_steps - 1))
