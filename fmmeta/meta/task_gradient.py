"""The meta-gradient of one task, and the protocol of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import Episode


@dataclass(frozen=True)
class TaskGradient:
    """The meta-gradient of one task, fp32 [S], and its weight in the mean.

    vector: the gradient, or None if the rule has already added it to `total`; `shards` returns it and fails
    if it is None. finite: whether every pass was finite on every rank of the group; a meta-gradient that is
    not finite must not be used. extra: gradients of what is not theta (learned rates, kept moments), by name;
    numbers: for metrics.jsonl, means over tasks.
    """

    vector: Tensor | None
    weight: float
    finite: bool
    support: PassStats  # first inner step: theta on the support set
    query: PassStats
    extra: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def shards(self) -> Tensor:
        assert self.vector is not None, "the rule was given a sum to add it to"
        return self.vector


class Rule(Protocol):
    """A meta-gradient rule: it finds theta in the worker, leaves theta in the worker, and does not
    communicate outside its group.
    """

    @property
    def inner(self) -> InnerLoop:
        """How a task is learned: in evaluation as in training."""
        ...

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        """Meta-gradient of one task; a rule that needs no vector for it may add it to `total` itself.

        Collective: group.
        """
        ...


class MultiTaskRule(Protocol):
    """What takes several tasks in one pass."""

    def directions(
        self, worker: Worker, theta: Tensor, episodes: Sequence[Episode], total: Tensor | None = None
    ) -> list[TaskGradient]:
        """Meta-gradients of some tasks, each a vector or added to `total`. Collective: group."""
        ...
