"""A task of an outer step: what a meta-gradient rule gets, does and returns.

    def fomaml(task: TaskRun) -> TaskResult:
        task.adapt()                                    K inner steps on the support set
        return task.backward(task.query)                adds the query gradient to the meta-gradient

A rule is a function of a `TaskRun`. It adds the meta-gradient of the task, weight * g [S], and its weight to
`task.into`; a task with a pass that is not finite on a rank of the group adds nothing. The worker holds theta
before and after a rule. A rule does not communicate outside its group, and calls no collective on a condition
that ranks of the group may see differently (`PassStats.finite` is equal on all of them).
docs/how-to/own-learner-source-rule.md shows how a rule is named; examples/custom_rule.py is one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.hessian import Hessian, HvpOptions
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop, InnerResult, Trajectory, no_poll
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.parallel.workers.base import PassStats, Worker, all_finite
from fmmeta.tasks.batching import Episode, MicroBatch


@dataclass(frozen=True)
class Setup:
    """What the tasks of a run share."""

    config: Config
    inner: InnerLoop
    hvp: HvpOptions

    def evaluation_method(self, rates: Tensor | None = None) -> EvaluationMethod:
        """How evaluation learns a task; `rates`: learned inner rates in place of the live ones."""
        return find(self.config.algorithm).evaluation or self.inner.variant(rates)


@dataclass(frozen=True)
class TaskResult:
    """The numbers of one task; its meta-gradient [S] is in the MetaGradient that it was added to.

    weight: of the task in the mean. finite: whether all passes were finite on all ranks of the group; if not,
    the task added nothing. support: the first pass over the support set. numbers: for metrics.jsonl, by the
    names in `AlgorithmSpec.numbers`; means over tasks are logged.
    """

    weight: float
    finite: bool
    support: PassStats
    query: PassStats
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class TaskRun:
    """One task on the ranks of a group, whose worker holds theta.

    `backward`, `add_displacement` and `add_through_head` end a rule: they add the task and write theta back.
    A rule that ends otherwise writes `task.theta` itself.

    setup: what tasks share; its inner loop has the rates of this task. meta: theta and learned rates. into:
    the sum of meta-gradients over tasks, which a `MultiTaskRule` has once for all of its tasks; the outer
    step ignores the slice of a head that every task initialises. outer_step: the number of outer steps
    applied to theta. between_passes: to be called between any two passes; `adapt` does so for its own. The
    loop counts passes with it, for the watchdog's report of a hang; with --max_staleness it also enters the
    reductions of all groups, and raises where the last outer step has closed, which a rule lets through.
    adapted: what `adapt` returned.
    """

    setup: Setup
    worker: Worker
    meta: MetaParameters
    episode: Episode
    into: MetaGradient
    outer_step: int = 0
    between_passes: Callable[[], None] = no_poll
    adapted: InnerResult | None = field(default=None, init=False)

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def inner(self) -> InnerLoop:
        return self.setup.inner

    @property
    def theta(self) -> Tensor:
        """This rank's part of the meta-parameters, fp32 [S]."""
        return self.meta.theta

    @property
    def support(self) -> Sequence[MicroBatch]:
        return self.episode.support

    @property
    def query(self) -> Sequence[MicroBatch]:
        return self.episode.query

    def adapt(self, path: Trajectory | None = None) -> InnerResult:
        """Take the worker from theta to phi_K by the inner loop; `path` receives phi_0 to phi_{K-1}.

        Collective: group.
        """
        self.adapted = self.inner.adapt(self.worker, self.theta, self.support, path, self.between_passes)
        return self.adapted

    def gradient(self, batches: Sequence[MicroBatch], weight: float = 1.0) -> tuple[Tensor, PassStats]:
        """`weight` times the gradient of the mean loss over a whole set (not the samples of
        --support_batch_size) at the worker's weights, a new vector [S]; zeros if it is not finite.

        Collective: group.
        """
        vector = self.worker.zeros()
        return vector, self.worker.gradient(batches, vector, weight)

    def hessian(self) -> Hessian:
        """Products with the Hessian of the support loss."""
        return self.setup.hvp.hessian(self.worker, self.support, self.between_passes)

    def backward(self, batches: Sequence[MicroBatch]) -> TaskResult:
        """Add the gradient of the mean loss over a set at the worker's weights, of first order and without a
        vector for it; the worker holds theta afterwards. Collective: group.
        """
        passes = self.adapted.passes if self.adapted else []
        weight = 1.0 if all_finite(passes) else 0.0
        restore = self.theta if self.adapted else None  # at no extra cost
        query = self.worker.gradient(batches, self.into.sum, weight, restore)
        if finite := bool(weight) and query.finite:
            self.into.count()
        without_loss = PassStats(torch.full_like(query.stats, torch.nan))
        return TaskResult(1.0, finite, passes[0] if passes else without_loss, query)

    def add_displacement(self) -> TaskResult:
        """Add theta - phi_K after `adapt`; the query set is evaluated at phi_K. Collective: group."""
        assert self.adapted is not None
        query = self.worker.forward(self.query)
        finite = all_finite([*self.adapted.passes, query])
        if finite:
            self.worker.displacement(self.theta, self.into.sum)
            self.into.count()
        self.worker.write(self.theta)
        return TaskResult(1.0, finite, self.adapted.passes[0], query)

    def add_through_head(
        self, v: Tensor, query: PassStats, hessian: Hessian, extra: Mapping[str, Tensor] | None = None
    ) -> TaskResult:
        """Take v = dL/dphi_0 [S] through the initial head, restore theta, add the task if all its passes and
        v are finite.

        extra: gradients of learned rates. Collective: group.
        """
        assert self.adapted is not None
        self.between_passes()
        head = self.inner.head.backward(self.worker, v, self.theta, self.support, self.adapted.means)
        self.worker.write(self.theta)
        finite = all_finite([*self.adapted.passes, query, *hessian.passes, *head])
        finite = finite and math.isfinite(self.worker.dot(v, v))  # v may overflow between finite passes
        if finite:
            self.into.add(v, extra=extra)
        return TaskResult(1.0, finite, self.adapted.passes[0], query)


Rule = Callable[[TaskRun], TaskResult]
"""Adds the meta-gradient of a task. Collective: group."""
MultiTaskRule = Callable[[Sequence[TaskRun]], Iterable[TaskResult]]
"""Adds those of several tasks, whose rows share passes. Collective: group."""
