"""The contract of a meta-gradient rule: it adds the meta-gradient of one task to that of the outer step.

    worker, theta  -->  passes over the episode  -->  into.sum += weight * g,  into.weight += weight

The worker holds theta before and after a rule. A rule does not communicate outside its group. A task with a
pass that is not finite on a rank of the group adds nothing. docs/algorithms.md shows how a rule is chosen;
examples/custom_rule.py is one. A module with a rule needs the names in `__all__`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fmmeta.meta.inner_loop import InnerLoop, no_poll
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import Episode

__all__ = ["InnerLoop", "MetaGradient", "MetaParameters", "MultiTaskRule", "Rule", "TaskResult", "no_poll"]


@dataclass(frozen=True)
class TaskResult:
    """The numbers of one task; its meta-gradient [S] is in the MetaGradient that the rule was given.

    weight: of the task in the mean. finite: whether all passes were finite on all ranks of the group; if not,
    the task added nothing. support: the first pass over the support set. numbers: for metrics.jsonl, by the
    names in `AlgorithmSpec.numbers`; means over tasks are logged.
    """

    weight: float
    finite: bool
    support: PassStats
    query: PassStats
    numbers: dict[str, float] = field(default_factory=dict)


class Rule(Protocol):
    """How a task's meta-gradient is computed."""

    @property
    def inner(self) -> InnerLoop:
        """The inner loop that evaluation runs; usually that of the rule too."""
        ...

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        """Add the weighted meta-gradient of one task to `into`.

        The rule leaves the worker at theta, and calls no collective on a condition that ranks of the group
        may see differently (`PassStats.finite` is equal on all of them). The outer step ignores the slice of
        `into.sum` that belongs to a head which every task initialises.

        meta: theta (which the worker holds) and learned rates. into: a rule passes `into.sum` [S] to
        `worker.gradient`, `displacement` or `vjp`, which leave it unchanged if a pass is not finite, and then
        calls `into.count`; or it passes a gradient that it computed as a vector to `into.add`.
        between_passes: a hook to call between any two passes; the loop counts the passes with it, for the
        watchdog's report of a hang. Collective: group.
        """
        ...


class MultiTaskRule(Protocol):
    """A rule that takes several tasks in one pass."""

    def task_gradients(
        self,
        worker: Worker,
        meta: MetaParameters,
        episodes: Sequence[Episode],
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> Iterable[TaskResult]:
        """Add the meta-gradients of several tasks; see `Rule.task_gradient`. Collective: group."""
        ...
