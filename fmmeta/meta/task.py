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
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.hessian import Hessian, HvpOptions
from fmmeta.meta.inner_loop import (
    EvaluationMethod,
    InnerLoop,
    InnerResult,
    InnerSteps,
    Trajectory,
    no_poll,
)
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.parallel.workers.base import PassStats, Worker, all_finite
from fmmeta.tasks.batching import Episode, MicroBatch
from fmmeta.tasks.schedule.meta_batches import Task


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


def restored(task: "TaskRun", error: BaseException | None) -> bool:
    """`TaskRun.on_end` of a task without a schedule."""
    if error is None and task.result is None:
        task.restore()
    return False


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
    adapted: what `adapt` returned. drawn: the task of the schedule, with name, stratum and seed. on_end:
    called where `with task` ends, with the error that has ended it, if one has; returns whether to suppress
    it. result: of the task, once it has its meta-gradient.
    """

    setup: Setup
    worker: Worker
    meta: MetaParameters
    episode: Episode
    into: MetaGradient
    outer_step: int = 0
    between_passes: Callable[[], None] = no_poll
    drawn: Task | None = None
    on_end: Callable[["TaskRun", BaseException | None], bool] = restored
    adapted: InnerResult | None = field(default=None, init=False)
    path: Trajectory | None = field(default=None, init=False)
    steps: InnerSteps | None = field(default=None, init=False)
    result: TaskResult | None = field(default=None, init=False)
    has_ended: bool = field(default=False, init=False)

    def __enter__(self) -> "TaskRun":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.has_ended = True
        return self.on_end(self, error)

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
        self.path = path
        self.adapted = self.inner.adapt(self.worker, self.theta, self.support, path, self.between_passes)
        return self.adapted

    def step(self, batches: Sequence[MicroBatch] | None = None, lr: float | None = None) -> PassStats:
        """Take one step of the inner optimizer, and return the pass before it.

        batches: of the task (default: the support set, or its sample). lr: in place of `inner_lr`, times the
        factors of the layers. The first step initialises the head, as `head_init` says. The trajectory is
        recorded for `backward` if the algorithm of the settings is of second order or learns rates.
        Collective: group.
        """
        if self.result is not None:
            raise UsageError("step after backward: the task has ended; take the steps before backward")
        config, learned = self.config, self.inner.rates.learned
        if self.steps is None:
            path = self.trajectory(find(config.algorithm).order)
            start = self.inner.begin(self.worker, self.theta, self.support, tracked=True)
            if start.means is not None and start.saved is None:
                self.between_passes()  # the support set's features took a pass
            self.path, self.steps = path, InnerSteps(self.inner, self.worker, start, self.support, path)
            self.adapted = InnerResult(start.means, self.steps.passes, self.steps.sets)
        elif learned != "no" and len(self.steps.passes) >= self.inner.steps:
            raise UsageError(
                f"inner_steps={self.inner.steps} with inner_lr_learned={learned}: a task has as many steps as"
                " there are rates; raise inner_steps"
            )
        if lr is not None and learned != "no":
            raise UsageError(f"lr={lr} with inner_lr_learned={learned}: the rates are learned; leave lr out")
        factor = 1.0 if lr is None else lr / config.inner_lr
        stats = self.steps.take(None if batches is self.support else batches, factor)
        self.between_passes()
        return stats

    def loss(self, batches: Sequence[MicroBatch] | None = None) -> float:
        """The mean loss over a set (default: the query set) at the worker's weights. Collective: group."""
        loss = self.worker.forward(self.query if batches is None else batches).loss
        self.between_passes()
        return loss

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The scalar product of two vectors [S] over the whole model. Collective: group."""
        return self.worker.dot(a, b)

    def restore(self) -> None:
        """Let the worker hold theta again. Collective: group."""
        if self.adapted is not None:
            self.worker.write(self.theta)

    def trajectory(
        self, order: int, steps: int | None = None, every: bool = False, online: bool = False
    ) -> Trajectory | None:
        """What `backward` needs of the inner steps; None if it needs nothing.

        steps: their number, if it is known. every: all phi_k are needed. online: for `backward_online`.
        """
        config, inner = self.config, self.inner
        learned = inner.rates.learned != "no"
        if order == 1 and not learned and not every and not online:
            return None
        gib = 2**32 if config.trajectory_memory_gib is None else config.trajectory_memory_gib
        keeps_states = order > 1 and not inner.optimizer.is_linear
        first = 0 if every or steps is None else self._first_step(order, steps)
        return Trajectory(int(gib * 2**30), learned or online, keeps_states, first, online and not learned)

    def _first_step(self, order: int, steps: int) -> int:
        """The first of the inner steps that is differentiated."""
        back = steps if self.config.truncate_steps is None else self.config.truncate_steps
        return max(0, steps - back) if order > 1 else steps

    def gradient(self, batches: Sequence[MicroBatch], weight: float = 1.0) -> tuple[Tensor, PassStats]:
        """`weight` times the gradient of the mean loss over a whole set (not the samples of
        --support_batch_size) at the worker's weights, a new vector [S]; zeros if it is not finite.

        Collective: group.
        """
        vector = self.worker.zeros()
        return vector, self.worker.gradient(batches, vector, weight)

    def hessian(self, batches: Sequence[MicroBatch] | None = None) -> Hessian:
        """Products with the Hessian of the loss over a set (default: the support set)."""
        batches = self.support if batches is None else batches
        return self.setup.hvp.hessian(self.worker, batches, self.between_passes)

    def backward(
        self,
        batches: Sequence[MicroBatch] | None = None,
        order: int = 1,
        weight: float = 1.0,
        step_weights: Sequence[float] = (),
    ) -> TaskResult:
        """Add `weight` times the meta-gradient of the mean loss over a set (default: the query set); the
        worker holds theta afterwards.

        order: 1, the gradient at the worker's weights; 2, the exact one, through the recorded steps. Learned
        rates, and class means with `prototype_gradient`, get their gradient with both. step_weights: of the
        loss at phi_1 .. phi_K, summing to 1; none: all on phi_K. Without steps nothing is in between, and
        without a trajectory or class means the gradient needs no vector. Collective: group.
        """
        if weight <= 0:
            raise UsageError(f"weight={weight} of a task is not above 0; give a positive one, or no backward")
        if self.result is not None:
            raise UsageError("backward twice: a task has one meta-gradient; give all batches at once")
        batches, passes = self.query if batches is None else batches, self.passes
        if order > 1 and self.path is None and passes:
            raise UsageError(
                f"order={order} with algorithm={self.config.algorithm}, which keeps no trajectory of the"
                " inner steps; use algorithm=maml in the settings"
            )
        looks_back = order > 1 or self.inner.rates.learned != "no" or any(step_weights[:-1])
        path = self.path if looks_back else None
        if path is None and not (self.adapted and self.inner.head.backprop_through_means):
            factor = weight if all_finite(passes) else 0.0
            restore = self.theta if self.adapted else None  # at no extra cost
            query = self.worker.gradient(batches, self.into.running, factor, restore)
            if finite := bool(factor) and query.finite:
                self.into.count(weight)
            without_loss = PassStats(torch.full_like(query.stats, torch.nan))
            self.result = TaskResult(weight, finite, passes[0] if passes else without_loss, query)
        else:
            v, query = self.gradient(batches, step_weights[-1] if step_weights else 1.0)
            hessian = self.hessian()
            extra = {} if path is None else self.through_steps(hessian, path, v, order, step_weights)
            self.result = self.add_through_head(v, query, hessian, extra, weight)
        return self.result

    def backward_online(self, order: int) -> TaskResult:
        """Add the meta-gradient of the mean over the inner steps of the loss that each step learns from, at
        the weights before the step: its gradient is the direction of the inner loop's SGD. No query pass.

        order: as in `backward`. Needs the path of `trajectory(..., online=True)`. Collective: group.
        """
        assert self.path is not None
        v, hessian = self.worker.zeros(), self.hessian()
        extra = self.through_steps(hessian, self.path, v, order, (), 1 / len(self.passes))
        self.result = self.add_through_head(v, PassStats.mean(self.passes), hessian, extra)
        return self.result

    @property
    def passes(self) -> list[PassStats]:
        """Of the inner steps."""
        return self.adapted.passes if self.adapted else []

    def through_steps(
        self,
        hessian: Hessian,
        path: Trajectory,
        v: Tensor,
        order: int,
        weights: Sequence[float],
        online: float = 0.0,
    ) -> dict[str, Tensor]:
        """Turn v = dL/dphi_K [S] into dL/dphi_0 in place; return the gradient of learned rates.

        weights: see `backward`. online: the weight of each step's own loss, before the step. All passes are
        added to those of `hessian`. Collective: group.
        """
        worker, optimizer, steps = self.worker, self.inner.optimizer, len(path.steps)
        first = self._first_step(order, steps)
        rates = self.inner.rates if self.steps is None else self.steps.rates
        sets = self.adapted.sets if self.adapted else [None] * steps
        hessians = {id(None): hessian}
        learned = rates.meta_parameter
        extra = {} if learned is None else {"rates": torch.zeros_like(learned)}
        w, bars = v, dict[str, Tensor]()  # of one kind of optimizer each
        if first < steps and optimizer.is_linear:
            w = torch.zeros_like(v)
        elif first < steps:
            bars = optimizer.zero_state(v.numel(), v.device).vectors
        for k in reversed(range(steps)):
            u, clip = path.take_direction(k), path.clips.get(k, 1.0)
            if extra and u is not None:
                rates.add_gradient_(extra["rates"], worker, k, v, u if clip == 1 else u * clip)
            bar_u = rates.scale_(k, v.neg(), slice(0, v.numel())) if k >= first else v
            if clip < 1 and k >= first and u is not None:
                bar_u = rates.through_clip(k, worker, bar_u, u, clip, self.inner.max_grad_norm)
            if online and u is not None:
                v.add_(u, alpha=online)
            del u
            if k >= first and not (online and k == steps - 1):  # no later loss depends on that step
                if (key := id(sets[k])) not in hessians:
                    hessians[key] = replace(self.hessian(sets[k]), passes=hessian.passes)
                if optimizer.is_linear:
                    v += hessians[key].times(path.phi(k), w.mul_(optimizer.momentum).add_(bar_u))
                else:
                    phi = path.phi(k)
                    pull = partial(optimizer.pull, phi, path.state(k), k + 1, bar_u, bars, v)
                    v += hessians[key].times(phi, pull)
            if k > 0 and weights and weights[k - 1]:
                hessian.between_passes()
                worker.write(path.phi(k))
                hessian.passes.append(worker.gradient(self.query, v, weights[k - 1]))
            path.drop(k)
        if path.total is not None:
            v.add_(path.total, alpha=online)
        return extra

    def add_displacement(self) -> TaskResult:
        """Add theta - phi_K after `adapt`; the query set is evaluated at phi_K. Collective: group."""
        assert self.adapted is not None
        query = self.worker.forward(self.query)
        finite = all_finite([*self.adapted.passes, query])
        if finite:
            self.worker.displacement(self.theta, self.into.running)
            self.into.count()
        self.worker.write(self.theta)
        self.result = TaskResult(1.0, finite, self.adapted.passes[0], query)
        return self.result

    def add_through_head(
        self,
        v: Tensor,
        query: PassStats,
        hessian: Hessian,
        extra: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
    ) -> TaskResult:
        """Take v = dL/dphi_0 [S] through the initial head, restore theta, add the task if all its passes and
        v are finite.

        extra: gradients of learned rates. weight: of the task. Collective: group.
        """
        assert self.adapted is not None
        self.between_passes()
        head = self.inner.head.backward(self.worker, v, self.theta, self.support, self.adapted.means)
        self.worker.write(self.theta)
        finite = all_finite([*self.adapted.passes, query, *hessian.passes, *head])
        finite = finite and math.isfinite(self.worker.dot(v, v))  # v may overflow between finite passes
        if finite:
            self.into.add(v, weight, extra)
        return TaskResult(weight, finite, self.adapted.passes[0], query)


Rule = Callable[[TaskRun], TaskResult]
"""Adds the meta-gradient of a task. Collective: group."""
MultiTaskRule = Callable[[Sequence[TaskRun]], Iterable[TaskResult]]
"""Adds those of several tasks, whose rows share passes. Collective: group."""
