"""The gradient noise scale of the meta-batch: from how many tasks on a larger meta-batch gains little.

    g_i: meta-gradient of task i, weight w_i;   G_B: their weighted mean, as it is before clipping
    small = sum w_i |g_i|^2 / sum w_i           E small = |G|^2 + tr(Sigma)
    big   = |G_B|^2                             E big   = |G|^2 + tr(Sigma) / B,   B = (sum w_i)^2 / sum w_i^2

    |G|^2 ~ (B big - small) / (B - 1)           tr(Sigma) ~ (small - big) / (1 - 1 / B)
    noise scale = mean of tr(Sigma) over outer steps / mean of |G|^2 over outer steps

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (arXiv 1812.06162), appendix A.1 with
batches of 1 and of B tasks; with equal weights B is the number of finite tasks. Both estimates are unbiased
where the tasks are independent draws; their ratio is not, so that each is averaged first. The meta-gradients
are computed in any case: the measurement takes no pass. Each rank adds the squares of its shard in fp64;
their sum over the ranks is one number in the reduction of the metrics.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fmmeta.parallel.param_map import INNER_ONLY
from fmmeta.parallel.workers.base import Worker, add_local_dot

DECAY = 0.98  # of the averages: about the last 50 outer steps


class TaskSquares(NamedTuple):
    """Sums over the finite tasks of an outer step, of all groups: w, w^2, and w |g|^2."""

    weight: float
    weight_squared: float
    square: float


def local_square(worker: Worker, gradient: Tensor) -> float:
    """This rank's part of the squared norm of a task's meta-gradient [S], without what only the inner loop
    changes. Local: the part of each rank of a group counts, or where every rank holds the whole model that of
    rank 0.
    """
    no_meta = worker.params.groups.get(INNER_ONLY, slice(0, 0))
    total = torch.zeros((), dtype=torch.float64, device=worker.device)
    for part in (slice(0, no_meta.start), slice(no_meta.stop, len(gradient))):
        add_local_dot(worker, total, gradient, gradient, part)
    return float(total)


class NoiseScale:
    """Running means of the two estimates.

    state: [mean of |G|^2, mean of tr(Sigma), number of outer steps], as in a checkpoint.
    """

    def __init__(self, state: Sequence[float] | None = None) -> None:
        self.signal, self.noise, self.count = state or (0.0, 0.0, 0)
        self.last = (math.nan, math.nan)  # estimates of the last outer step

    @property
    def state(self) -> list[float]:
        return [self.signal, self.noise, self.count]

    def add(self, squares: TaskSquares, norm: float) -> None:
        """Count an outer step. norm: of the mean meta-gradient before clipping.

        A step with fewer than two finite tasks, or with a mean that is not finite, has no estimate.
        """
        self.last = estimates(squares, norm)
        if not all(map(math.isfinite, self.last)):
            return
        weight = max(1 - DECAY, 1 / (self.count + 1))
        self.signal += weight * (self.last[0] - self.signal)
        self.noise += weight * (self.last[1] - self.noise)
        self.count += 1

    @property
    def tasks(self) -> float:
        """The noise scale in tasks; NaN before the first estimate and where noise hides the mean gradient."""
        return max(0.0, self.noise) / self.signal if self.signal > 0 else math.nan

    def advice(self, used: int) -> str:
        """One sentence: the meta-batch size that the noise scale suggests. used: tasks of an outer step."""
        if math.isnan(self.tasks):
            return (
                f"noise scale unknown: the noise of {used} tasks per outer step hides the mean gradient; use"
                " more tasks, or measure over more outer steps"
            )
        share = 100 * used / (used + self.tasks)
        return (
            f"noise scale {self.tasks:.3g} tasks, which is the suggested meta-batch: an outer step of"
            f" {used} tasks makes {share:.0f} % of the progress of one over all tasks, one of the noise scale"
            " 50 %"
        )

    @property
    def values(self) -> dict[str, float]:
        """For metrics.jsonl: estimates of the last outer step, and the smoothed noise scale."""
        signal, noise = self.last
        return {"gradient_square": signal, "gradient_variance": noise, "noise_scale": self.tasks}


def estimates(squares: TaskSquares, norm: float) -> tuple[float, float]:
    """Unbiased |G|^2 and tr(Sigma) of an outer step; NaN for fewer than two tasks.

    >>> estimates(TaskSquares(2.0, 2.0, 10.0), 2.0)  # two tasks, |g|^2 = 5 on average, |mean|^2 = 4
    (3.0, 2.0)
    """
    if squares.weight == 0 or not math.isfinite(norm):
        return math.nan, math.nan
    tasks = squares.weight**2 / squares.weight_squared
    if tasks < 1.5:
        return math.nan, math.nan
    small, big = squares.square / squares.weight, norm**2
    return (tasks * big - small) / (tasks - 1), (small - big) / (1 - 1 / tasks)
