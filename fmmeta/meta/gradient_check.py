"""`--check_meta_gradient`: compares the meta-gradient of a task with that at half the difference step.

Truncation falls to a quarter there, rounding doubles, and if neither matters the two agree. It measures the
error of the differences; the tests compare the formula with autograd. Products by autograd are compared with
differences, which shows a wrong second derivative of an operation of the model.
"""

import math
from dataclasses import dataclass, replace

from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import Rule, TaskRun
from fmmeta.parallel.param_map import INNER_ONLY

TRUSTED = 0.02  # relative difference above which a meta-gradient is called inexact


@dataclass(frozen=True)
class Check:
    """cosine and |g - g_half| / |g| over the meta-parameters; both NaN if a pass was not finite."""

    cosine: float
    relative: float
    precision: str
    by_autograd: bool = False

    @property
    def text(self) -> str:
        """The result in one line, with advice if the products are inexact."""
        compared = "with second_order=differences" if self.by_autograd else "at half the difference step"
        line = (
            f"check_meta_gradient: {compared} the meta-gradient of the first task differs by"
            f" {self.relative:.1e} of its length (cosine {self.cosine:.6f})"
        )
        if self.relative <= TRUSTED:
            return f"{line}; {'autograd' if self.by_autograd else 'the differences'} can be trusted"
        if self.by_autograd:
            return (
                f"{line}; WARNING: in bf16 and for a sharply bent loss this is expected of differences; else"
                " an operation of the model has a wrong second derivative: compare once more in fp32 with a"
                " lower --inner_lr"
            )
        if self.precision == "bf16":
            return (
                f"{line}; WARNING: gradients rounded to bf16 make these differences meaningless; set bf16 to"
                " false (--bf16 false, and in the DeepSpeed file), or use --algorithm fomaml"
            )
        return (
            f"{line}; WARNING: the loss bends too sharply or its gradient is too noisy for differences; lower"
            " --inner_lr or --inner_steps, or use --algorithm fomaml"
        )


def check(rule: Rule, task: TaskRun, precision: str) -> Check:
    """Run `rule` on a task twice; nothing is added to its sum. Collective: group."""
    hvp, sums = task.setup.hvp, []
    other = replace(hvp, by_autograd=False, scale=1.0 if hvp.by_autograd else 0.5)
    for options in (hvp, other):
        into = MetaGradient(task.theta)
        if not rule(replace(task, setup=replace(task.setup, hvp=options), into=into)).finite:
            return Check(math.nan, math.nan, precision, hvp.by_autograd)
        if INNER_ONLY in task.worker.params.groups:
            into.sum[task.worker.params.groups[INNER_ONLY]] = 0
        sums.append(into.sum)
    (a, b), dot = sums, task.worker.dot
    size = math.sqrt(dot(a, a))
    if not size:
        return Check(math.nan, math.nan, precision, hvp.by_autograd)
    cosine = dot(a, b) / (size * math.sqrt(dot(b, b)))
    a.sub_(b)
    return Check(cosine, math.sqrt(dot(a, a)) / size, precision, hvp.by_autograd)
