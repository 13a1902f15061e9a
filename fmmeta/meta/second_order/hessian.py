"""Hessian-vector products from differences of ordinary gradients, on every worker.

    H(phi) d  ~  (g(phi + h d) - g(phi - h d)) / 2h        g: gradient of the mean loss over a set

The error is h^2 |third derivative| from truncation plus (rounding of g) / h. The step is therefore chosen by
what it does to the gradient: h such that |H h d| is a fixed share `change` of |g|. On three models
(docs/algorithms.md) the error is smallest, 4e-5 to 2e-4, at a share of 0.004 in fp32 for every direction
tried, where a step of 3e-5 |phi| / |d| errs by up to 0.1.

The share needs |H d|. The first product of a task measures it with a probe; later ones take it from the one
before. So h is a function of the task alone: not of the layout, the precision of a neighbour or the tasks
that went before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import MicroBatch

CHANGE = {"fp32": 0.004, "bf16": 0.2}  # cube root of a gradient's relative rounding error: 3e-7, 1e-2
PROBE = {"fp32": 3e-5, "bf16": 3e-2}  # of |phi|: step of the first look at the curvature
FARTHEST = 0.05  # of |phi|: no step is longer, however flat the loss


@dataclass(frozen=True)
class HvpOptions:
    """How differences are taken. `scale`: of the step; a check compares 1 with 0.5."""

    precision: str = "fp32"
    scale: float = 1.0

    def of(self, worker: Worker, batches: Sequence[MicroBatch]) -> Hessian:
        return Hessian(self, worker, batches)


@dataclass
class Hessian:
    """The Hessian of the mean loss over `batches`, for one task.

    The worker's weights are changed by every product.
    """

    how: HvpOptions
    worker: Worker
    batches: Sequence[MicroBatch]
    passes: list[PassStats] = field(default_factory=list)
    bend: float | None = None  # |H d| / (|d| |g|) of the last product

    def times(self, phi: Tensor, d: Tensor) -> Tensor:
        """H(phi) d, a new vector [S]. Collective: group."""
        length = self._norm(d)
        if length == 0 or not math.isfinite(length):
            return torch.zeros_like(d) if length == 0 else torch.full_like(d, math.nan)
        size = self._norm(phi)
        if self.bend is None:
            self._difference(phi, d, PROBE[self.how.precision] * size / length, length)
        reach = FARTHEST * size
        if self.bend:
            reach = min(reach, CHANGE[self.how.precision] / self.bend)
        return self._difference(phi, d, self.how.scale * reach / length, length)

    def _difference(self, phi: Tensor, d: Tensor, h: float, length: float) -> Tensor:
        self.worker.write(torch.add(phi, d, alpha=h))
        ahead, first = self.worker.gradient(self.batches, restore=torch.sub(phi, d, alpha=h))
        behind, second = self.worker.gradient(self.batches)
        self.passes += [first, second]
        middle = self._norm(ahead + behind) / 2
        product = ahead.sub_(behind).div_(2 * h)
        bend = self._norm(product) / (length * middle) if middle else 0.0
        self.bend = bend if math.isfinite(bend) else 0.0
        return product

    def _norm(self, vector: Tensor) -> float:
        return math.sqrt(self.worker.dot(vector, vector))
