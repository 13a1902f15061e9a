"""Checks finite differences: compares the meta-gradient of a task with that at half the difference step.

Truncation falls to a quarter when the step is halved, rounding doubles: if neither matters the two agree.
They measure the error of the differences, not of the mathematics; that is compared with autograd by the
tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode

TRUSTED = 0.02  # relative difference above which a meta-gradient is called inexact


class Checked(Protocol):
    """A rule that takes differences, and can take them at another step."""

    def direction(self, worker: Worker, theta: Tensor, episode: Episode) -> TaskGradient: ...

    def checked(self, scale: float) -> Checked: ...


@dataclass(frozen=True)
class Check:
    """cosine and |g - g_half| / |g| over the meta-parameters; both NaN if a pass was not finite."""

    cosine: float
    relative: float
    precision: str

    @property
    def text(self) -> str:
        """What to tell the user, in one line."""
        said = (
            "check_meta_gradient: at half the difference step the meta-gradient of the first task differs by"
            f" {self.relative:.1e} of its length (cosine {self.cosine:.6f})"
        )
        if self.relative <= TRUSTED:
            return f"{said}; the differences can be trusted"
        if self.precision == "bf16":
            return (
                f"{said}; WARNING: gradients rounded to bf16 make these differences meaningless; set bf16 to"
                " false (--bf16 false, and in the DeepSpeed file), or use --algorithm fomaml"
            )
        return (
            f"{said}; WARNING: the loss bends too sharply or its gradient is too noisy for differences; lower"
            " --inner_lr or --inner_steps, or use --algorithm fomaml"
        )


def check(rule: Checked, worker: Worker, theta: Tensor, episode: Episode, precision: str) -> Check:
    """Run `rule` on one task twice. Collective: group."""
    full, half = (rule.checked(scale).direction(worker, theta, episode) for scale in (1.0, 0.5))
    if not (full.finite and half.finite):
        return Check(math.nan, math.nan, precision)
    vectors = [full.shards, half.shards]
    head = worker.params.groups.get("head")
    for vector in vectors:
        if head is not None:
            vector[head] = 0
    a, b = vectors
    size = math.sqrt(worker.dot(a, a))
    cosine = worker.dot(a, b) / (size * math.sqrt(worker.dot(b, b))) if size else math.nan
    a.sub_(b)
    return Check(cosine, math.sqrt(worker.dot(a, a)) / size if size else math.nan, precision)
