"""Checks finite differences: compares the meta-gradient of a task with that at half the difference step.

Truncation falls to a quarter when the step is halved, rounding doubles: if neither matters the two agree.
This measures the error of the differences; the tests compare the formula with autograd.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from fmmeta.meta.rule import MetaGradient, MetaParameters, Rule
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode

TRUSTED = 0.02  # relative difference above which a meta-gradient is called inexact


class FiniteDifferenceRule(Rule, Protocol):
    """A rule that takes differences, and can take them at another step."""

    def with_step_scale(self, scale: float) -> "FiniteDifferenceRule": ...


@dataclass(frozen=True)
class Check:
    """cosine and |g - g_half| / |g| over the meta-parameters; both NaN if a pass was not finite."""

    cosine: float
    relative: float
    precision: str

    @property
    def text(self) -> str:
        """The result in one line, with advice if the differences are inexact."""
        line = (
            "check_meta_gradient: at half the difference step the meta-gradient of the first task differs by"
            f" {self.relative:.1e} of its length (cosine {self.cosine:.6f})"
        )
        if self.relative <= TRUSTED:
            return f"{line}; the differences can be trusted"
        if self.precision == "bf16":
            return (
                f"{line}; WARNING: gradients rounded to bf16 make these differences meaningless; set bf16 to"
                " false (--bf16 false, and in the DeepSpeed file), or use --algorithm fomaml"
            )
        return (
            f"{line}; WARNING: the loss bends too sharply or its gradient is too noisy for differences; lower"
            " --inner_lr or --inner_steps, or use --algorithm fomaml"
        )


def check(
    rule: FiniteDifferenceRule, worker: Worker, meta: MetaParameters, episode: Episode, precision: str
) -> Check:
    """Run `rule` on one task twice. Collective: group."""
    sums = []
    for scale in (1.0, 0.5):
        into = MetaGradient(meta.theta)
        if not rule.with_step_scale(scale).task_gradient(worker, meta, episode, into).finite:
            return Check(math.nan, math.nan, precision)
        if "head" in worker.params.groups:
            into.sum[worker.params.groups["head"]] = 0
        sums.append(into.sum)
    a, b = sums
    size = math.sqrt(worker.dot(a, a))
    if not size:
        return Check(math.nan, math.nan, precision)
    cosine = worker.dot(a, b) / (size * math.sqrt(worker.dot(b, b)))
    a.sub_(b)
    return Check(cosine, math.sqrt(worker.dot(a, a)) / size, precision)
