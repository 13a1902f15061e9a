"""iMAML: the meta-gradient at the end of a proximal inner loop, without backpropagation through its steps.

    phi* = argmin L_support(phi) + lambda / 2 |phi - phi_0|^2
    g = ((1 + damping) I + H(phi*) / lambda)^-1 grad L_query(phi*)        H: Hessian of the support loss

Rajeswaran, Finn, Kakade, Levine, "Meta-Learning with Implicit Gradients", 2019 (arXiv 1909.04630), lemma 1,
solved by conjugate gradients (their algorithm 2) with the Hessian-vector products of hessian.py. `lambda`
is --proximal_weight. The formula holds near the minimum (enough inner steps) and where lambda exceeds the
Hessian's most negative eigenvalue: conjugate gradients then meet only directions of positive curvature. A
direction of negative curvature shows that lambda is too small: the solution so far is used, and the run logs
a warning. Cost per task: K + 1 + 2 C + 2 passes for C conjugate-gradient steps, five shards, no trajectory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import costs, reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.hessian import Hessian, SecondOrderRule
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.rule import TaskResult, no_poll
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode

UNSOLVED = 0.5  # a residual above this is no solution


@dataclass(frozen=True)
class Imaml(SecondOrderRule):
    """steps, damping: of conjugate gradients. The inner loop has a proximal weight."""

    steps: int
    damping: float

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        b = worker.zeros()
        adapted = self.inner.adapt(worker, meta.theta, episode.support, between_passes=between_passes)
        phi = worker.read()
        query = worker.gradient(episode.query, b)
        hessian = self.hvp.hessian(worker, episode.support, between_passes)
        solution, numbers = self._solve(worker, hessian, phi, b)
        result = self.finish_task(hessian, meta, episode, adapted, query, solution, into)
        return replace(result, numbers=numbers)

    def _solve(
        self, worker: Worker, hessian: Hessian, phi: Tensor, b: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Solve A x = b by conjugate gradients (Hestenes, Stiefel 1952) from zero; return x and its numbers.

        They are |b - A x| / |b|, and whether a direction of negative curvature was met. Collective: group.
        """
        x, residual, search, convex = torch.zeros_like(b), b.clone(), b.clone(), True
        size = initial = worker.dot(residual, residual)
        for step in range(self.steps):
            if size <= 1e-12 * initial:
                break
            image = hessian.times(phi, search).div_(self.inner.proximal).add_(search, alpha=1 + self.damping)
            curvature = worker.dot(search, image)
            convex = curvature > 0
            if not convex:
                x = x if step else b
                break
            x.add_(search, alpha=size / curvature)
            residual.sub_(image, alpha=size / curvature)
            before, size = size, worker.dot(residual, residual)
            search.mul_(size / before).add_(residual)
        residual_share = (size / initial) ** 0.5 if initial else 0.0
        return x, {"cg_residual": residual_share, "too_little_proximal_weight": float(not convex)}


def warning(config: Config, values: Mapping[str, float]) -> str | None:
    """A warning after an outer step, or None. values: means over its tasks."""
    residual, share = values["cg_residual"], values["too_little_proximal_weight"]
    if share > 0:
        return (
            f"proximal_weight={config.proximal_weight:g} is too small: on {100 * share:.0f} % of this outer"
            " step's tasks the support loss curves downwards more than that somewhere, and the implicit"
            " gradient does not exist; raise --proximal_weight (and lower --inner_lr below its inverse)"
        )
    if residual > UNSOLVED:
        return (
            f"proximal_weight={config.proximal_weight:g} is too small for so few steps of conjugate"
            f" gradients: on the mean over this outer step's tasks they leave {100 * residual:.0f} % of the"
            " right-hand side; raise --proximal_weight or --cg_steps"
        )
    return None


def rule(setup: Setup, outer_step: int) -> Imaml:
    return Imaml(setup.inner, setup.config.cg_steps, setup.config.cg_damping, hvp=setup.hvp)


def passes(config: Config, forwards: int, by_autograd: bool = False) -> costs.Passes:
    steps, products = config.inner_steps + int(config.prototype_gradient), config.cg_steps
    if by_autograd:
        return costs.Passes(steps, 1, forwards, 0, products + 1, products)
    return costs.Passes(steps + 2 * products + 2, 1, forwards, 0, 2 * products + 3)


def conflicts(config: Config) -> Iterator[str]:
    if config.inner_optimizer != "sgd":
        yield (
            f"inner_optimizer={config.inner_optimizer} with algorithm={config.algorithm} is not tested: the"
            " proximal loop only has to reach its minimum; use sgd with more --inner_steps"
        )


spec = AlgorithmSpec(
    "imaml",
    rule,
    reference.implicit,
    order=2,
    supports=frozenset(
        {
            "proximal_weight",
            "cg_steps",
            "cg_damping",
            "prototype_gradient",
            "check_meta_gradient",
            "second_order",
        }
    ),
    conflicts=conflicts,
    passes=passes,
    work_shards=costs.WORK,
    numbers=("cg_residual", "too_little_proximal_weight"),
    warning=warning,
)
