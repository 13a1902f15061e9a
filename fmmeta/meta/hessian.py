"""Hessian-vector products: by autograd, or from differences of ordinary gradients on every worker.

By autograd (`AutogradHessian`): the gradient of one step is computed with its graph and differentiated again,
and the graph is freed. Exact up to rounding, in bf16 too; for adapters and heads, whose graph is small, on
workers whose ranks hold the whole model (`Worker.differentiates_twice`).

From differences (`DifferenceHessian`):

    H(phi) d  ~  (g(phi + h d) - g(phi - h d)) / 2h        g: gradient of the mean loss over a set

The error is h^2 |third derivative| from truncation plus (rounding of g) / h. The step is therefore chosen by
what it does to the gradient: h such that |H h d| is a fixed share `change` of |g|. On three models
(docs/explanation/meta-gradients.md) the error is smallest, 4e-5 to 2e-4, at a share of 0.004 in fp32 for
every direction tried, where a step of 3e-5 |phi| / |d| errs by up to 0.1.

The share needs |H d|. The first product of a task measures it with a probe step; each later one takes it from
its predecessor. So h is a function of the task alone: not of the layout or of earlier tasks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmmeta.meta.inner_loop import no_poll
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import MicroBatch

CHANGE = {"fp32": 0.004, "bf16": 0.2}  # cube root of a gradient's relative rounding error: 3e-7, 1e-2
PROBE_STEP = {"fp32": 3e-5, "bf16": 3e-2}  # share of |phi|: step of the first product
MAX_STEP = 0.05  # share of |phi|: no step is longer, however flat the loss


@dataclass(frozen=True)
class HvpOptions:
    """How products are computed. `scale`: of the difference step; the gradient check compares 1 with 0.5."""

    precision: str = "fp32"
    scale: float = 1.0
    by_autograd: bool = False

    def hessian(
        self, worker: Worker, batches: Sequence[MicroBatch], between_passes: Callable[[], None]
    ) -> "Hessian":
        made = AutogradHessian if self.by_autograd else DifferenceHessian
        return made(self, worker, batches, between_passes)


@dataclass
class Hessian(ABC):
    """The Hessian of the mean loss over `batches`, for one task. A product changes the worker's weights.

    Of several tasks at a time (by autograd), worker is their `TaskBatch`, batches are their sets, and a
    vector has the parts of all tasks.
    """

    options: HvpOptions
    worker: Any
    batches: Sequence[Any]
    between_passes: Callable[[], None] = no_poll
    passes: list[Any] = field(default_factory=list)

    @abstractmethod
    def times(self, phi: Tensor, d: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """H(phi) d, a new vector fp32 [S]. Collective: group.

        d: a vector [S], or by autograd a function of the gradient at phi.
        """


class AutogradHessian(Hessian):
    """Products by differentiating the gradient's graph, which is freed after each."""

    def times(self, phi: Tensor, d: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        self.between_passes()
        self.worker.write(phi)
        product = self.worker.zeros()
        self.passes.append(self.worker.gradient_vjp(self.batches, d, product))
        return product


@dataclass
class DifferenceHessian(Hessian):
    """Products from differences. relative_curvature: |H d| / (|d| |g|) of the last one."""

    relative_curvature: float | None = None

    def times(self, phi: Tensor, d: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        assert torch.is_tensor(d), "config/conflicts.py refuses such inner optimizers"
        length = self._norm(d)
        if length == 0 or not math.isfinite(length):
            return torch.full_like(d, 0.0 if length == 0 else math.nan)
        size, precision = self._norm(phi), self.options.precision
        if self.relative_curvature is None:
            self._difference(phi, d, PROBE_STEP[precision] * size / length, length)
        step = MAX_STEP * size
        if self.relative_curvature:
            step = min(step, CHANGE[precision] / self.relative_curvature)
        return self._difference(phi, d, self.options.scale * step / length, length)

    def _difference(self, phi: Tensor, d: Tensor, h: float, length: float) -> Tensor:
        self.between_passes()
        self.worker.write(torch.add(phi, d, alpha=h))
        forward = self.worker.zeros()
        result = self.worker.gradient(self.batches, forward, restore=torch.sub(phi, d, alpha=h))
        self.between_passes()
        backward = self.worker.zeros()
        self.passes += [result, self.worker.gradient(self.batches, backward)]
        mean_norm = self._norm(forward + backward) / 2
        product = forward.sub_(backward).div_(2 * h)
        curvature = self._norm(product) / (length * mean_norm) if mean_norm else 0.0
        self.relative_curvature = curvature if math.isfinite(curvature) else 0.0
        return product

    def _norm(self, vector: Tensor) -> float:
        return math.sqrt(self.worker.dot(vector, vector))
