"""iMAML: the meta-gradient at the end of a proximal inner loop, without backpropagation through its steps.

    phi* = argmin L_support(phi) + lambda / 2 |phi - phi_0|^2
    g = (I + H(phi*) / lambda)^-1 grad L_query(phi*)        H: Hessian of the support loss

Rajeswaran, Finn, Kakade, Levine, "Meta-Learning with Implicit Gradients", 2019 (arXiv 1909.04630), lemma 1,
solved by conjugate gradients (their algorithm 2) with the Hessian-vector products of hessian.py. `lambda`
is --proximal_weight. The formula holds near the minimum (enough inner steps) and where lambda exceeds the
Hessian's most negative eigenvalue: conjugate gradients then meet only directions of positive curvature. A
direction of negative curvature shows that lambda is too small: the solution so far is used, and the run logs
a warning. Cost per task: K + 1 + 2 C + 2 passes for C conjugate-gradient steps, five shards, no trajectory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.hessian import Hessian
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel import costs

UNSOLVED = 0.5  # a residual above this is no solution


def imaml(task: TaskRun) -> TaskResult:
    task.adapt()
    phi = task.worker.read()
    b, query = task.gradient(task.query)
    hessian = task.hessian()
    solution, numbers = solve(task, hessian, phi, b)
    return replace(task.add_through_head(solution, query, hessian), numbers=numbers)


def solve(task: TaskRun, hessian: Hessian, phi: Tensor, b: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Solve A x = b by conjugate gradients (Hestenes, Stiefel 1952) from zero; return x and its numbers.

    They are |b - A x| / |b|, and whether a direction of negative curvature was met. Collective: group.
    """
    dot, proximal = task.worker.dot, task.inner.proximal
    x, residual, search, convex = torch.zeros_like(b), b.clone(), b.clone(), True
    size = initial = dot(residual, residual)
    for step in range(task.config.cg_steps):
        if size <= 1e-12 * initial:
            break
        image = hessian.times(phi, search).div_(proximal).add_(search)
        curvature = dot(search, image)
        convex = curvature > 0
        if not convex:
            x = x if step else b
            break
        x.add_(search, alpha=size / curvature)
        residual.sub_(image, alpha=size / curvature)
        before, size = size, dot(residual, residual)
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
    imaml,
    reference.implicit,
    order=2,
    supports=frozenset(
        {
            "proximal_weight",
            "cg_steps",
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
