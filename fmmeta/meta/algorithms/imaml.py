"""iMAML: the meta-gradient at the end of a proximal inner loop, without the way back through its steps.

    phi* = argmin L_support(phi) + lambda / 2 |phi - phi_0|^2
    g = ((1 + damping) I + H(phi*) / lambda)^-1 grad L_query(phi*)        H: Hessian of the support loss

Rajeswaran, Finn, Kakade, Levine, "Meta-Learning with Implicit Gradients", 2019 (arXiv 1909.04630), lemma 1,
solved by conjugate gradients (their algorithm 2) with the Hessian-vector products of hessian.py. `lambda`
is --proximal_weight. The formula holds near the minimum (enough inner steps) and where lambda exceeds the
Hessian's most negative eigenvalue: conjugate gradients then meet only directions of positive curvature. One
that is not is the sign that lambda is too small; the solution so far is used, and the run says so. Cost per
task: K + 1 + 2 C + 2 passes for C conjugate-gradient steps, five shards, no trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import costs, reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.second_order.hessian import Hessian, HvpOptions
from fmmeta.meta.task_gradient import Rule, TaskGradient
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode

UNSOLVED = 0.5  # a residual above this is no solution
NUMBERS: tuple[str, ...] = ("cg_residual", "too_little_proximal_weight")


@dataclass(frozen=True)
class CgResult:
    """residual: |b - A x| / |b|; convex: no direction of negative curvature was met."""

    x: Tensor
    residual: float
    convex: bool


@dataclass(frozen=True)
class Imaml:
    inner: InnerLoop  # with its proximal weight
    steps: int
    damping: float
    curvature: HvpOptions = field(default_factory=HvpOptions)

    def checked(self, scale: float) -> Imaml:
        """The same with finite differences taken at another step."""
        return replace(self, curvature=replace(self.curvature, scale=scale))

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        adapted = self.inner.adapt(worker, theta, episode.support)
        phi = worker.read()
        b, query = worker.gradient(episode.query)
        hessian = self.curvature.of(worker, episode.support)
        solved = self._solve(worker, hessian, phi, b)
        v, more = self.inner.head.back(worker, solved.x, theta, episode.support, adapted.means)
        worker.write(theta)
        finite = all([step.finite for step in [*adapted.passes, query, *hessian.passes, *more]])
        numbers = dict(zip(NUMBERS, (solved.residual, float(not solved.convex)), strict=True))
        return TaskGradient(v, 1.0, finite, adapted.passes[0], query, numbers=numbers)

    def _solve(self, worker: Worker, hessian: Hessian, phi: Tensor, b: Tensor) -> CgResult:
        """Conjugate gradients (Hestenes, Stiefel 1952) from zero. Collective: group."""
        x, residual, search = torch.zeros_like(b), b.clone(), b.clone()
        size = began = worker.dot(residual, residual)
        for step in range(self.steps):
            if size <= 1e-12 * began:
                break
            image = hessian.times(phi, search).div_(self.inner.proximal).add_(search, alpha=1 + self.damping)
            curvature = worker.dot(search, image)
            if not curvature > 0:
                return CgResult(x if step else b, (size / began) ** 0.5, False)
            x.add_(search, alpha=size / curvature)
            residual.sub_(image, alpha=size / curvature)
            before, size = size, worker.dot(residual, residual)
            search.mul_(size / before).add_(residual)
        return CgResult(x, (size / began) ** 0.5 if began else 0.0, True)


def warning(config: Config, values: Mapping[str, float]) -> str | None:
    """What to tell the user of an outer step, or None.

    `values`: means over its tasks.
    """
    weight, share, residual = (
        config.proximal_weight,
        values["too_little_proximal_weight"],
        values["cg_residual"],
    )
    if not share > 0:
        return (
            None
            if not residual > UNSOLVED
            else (
                f"proximal_weight={weight:g} is too small for so few steps of conjugate gradients: on the"
                f" mean over this outer step's tasks they leave {100 * residual:.0f} % of the right-hand"
                " side; raise --proximal_weight or --cg_steps"
            )
        )
    return (
        f"proximal_weight={weight:g} is too small: on {100 * share:.0f} % of this outer step's tasks the"
        " support loss curves downwards more than that somewhere, and the implicit gradient does not exist;"
        " raise --proximal_weight (and lower --inner_lr below its inverse)"
    )


def rule(setup: Setup, outer_step: int) -> Rule:
    config = setup.config
    return Imaml(setup.inner, config.cg_steps, config.cg_damping, setup.curvature)


def passes(config: Config, forwards: int) -> costs.Passes:
    products = 2 * config.cg_steps
    support = config.inner_steps + products + 2 + int(config.prototype_gradient)
    return costs.Passes(support, 1, forwards, 0, products + 3)


def conflicts(config: Config) -> Iterator[str]:
    if config.inner_optimizer == "momentum":
        yield (
            f"inner_optimizer=momentum with algorithm={config.algorithm} is not tested: the proximal loop"
            " only has to reach its minimum; use sgd with more --inner_steps"
        )


spec = AlgorithmSpec(
    "imaml",
    rule,
    reference.implicit,
    order=2,
    supports=frozenset(
        {"proximal_weight", "cg_steps", "cg_damping", "prototype_gradient", "check_meta_gradient"}
    ),
    conflicts=conflicts,
    passes=passes,
    work_shards=costs.WORK,
    numbers=NUMBERS,
    warning=warning,
)
