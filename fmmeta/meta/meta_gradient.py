"""The meta-gradient: accumulated over the tasks of this group, then reduced once across groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.parallel.process_groups import Communicator


class MetaGradient:
    """Weighted sums of the directions of this group's tasks, then of all groups': of theta, and of the extras
    by name.
    """

    def __init__(self, theta: Tensor, extra: Mapping[str, Tensor] | None = None) -> None:
        self.sum, self.weight = (
            torch.zeros_like(theta, pin_memory=theta.is_pinned()),
            0.0,
        )  # at home, where theta is
        self.extra = {name: torch.zeros_like(like) for name, like in (extra or {}).items()}

    def add(self, direction: TaskGradient) -> None:
        """Count a task, and add what it has not added itself, unless it is not finite: then neither its
        direction nor its weight counts.
        """
        if direction.finite:
            if direction.vector is not None:
                self.sum.add_(direction.shards.to(self.sum.device), alpha=direction.weight)
            for name, total in self.extra.items():
                total.add_(direction.extra[name], alpha=direction.weight)
            self.weight += direction.weight

    def reduce(self, cross: Communicator, weight: float, wire: torch.dtype | None = None) -> Tensor | None:
        """Mean over the tasks of all groups, or None if none was finite; `extra` then holds means as well.

        `weight`: summed over all groups; `wire`: dtype of what travels.

        One reduction of the rank's shard, whatever the number of tasks and inner steps. Collective: cross.
        """
        means = self.begin(cross, weight, wire)
        return None if means is None else self.end(means)

    def begin(
        self, cross: Communicator, weight: float, wire: torch.dtype | None = None
    ) -> Iterator[slice] | None:
        """Begin `reduce`; return an iterator of slices of `sum`, or None where the weight is 0.

        Exhaust it exactly once. Each slice holds the mean when it is yielded, and `extra` is complete before
        the first. Add nothing in between. Collective: cross.
        """
        if weight == 0:
            return None
        begun = [cross.begin_sum_(total, wire) for total in (*self.extra.values(), self.sum)]
        return self._means(begun, weight)

    def _means(self, begun: Sequence[Iterator[slice]], weight: float) -> Iterator[slice]:
        for total, places in zip(self.extra.values(), begun, strict=False):
            for place in places:
                total.view(-1)[place].div_(weight)
        for place in begun[-1]:
            self.sum[place].div_(weight)
            yield place

    def end(self, means: Iterator[slice]) -> Tensor:
        """Wait for all of them."""
        for _ in means:
            pass
        return self.sum

    def clear(self) -> None:
        for total in (self.sum, *self.extra.values()):
            total.zero_()
        self.weight = 0.0
