"""The meta-gradient: accumulated over the tasks of this group, then reduced once across groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.parallel.collectives import Communicator, Reduction


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

    @property
    def sums(self) -> dict[str, Tensor]:
        """All sums by name; that of theta is the last one."""
        return {**self.extra, "theta": self.sum}

    def begin_reduce(
        self, cross: Communicator, weight: float, comm_dtype: torch.dtype | None = None
    ) -> PendingMean | None:
        """Start the all-reduce of all sums across groups; None if `weight`, that of all groups, is 0.

        One reduction of the rank's shard, whatever the number of tasks and inner steps. Add nothing while it
        is pending. comm_dtype: dtype in which elements are sent. Collective: cross.
        """
        if weight == 0:
            return None
        reductions = {name: cross.begin_sum_(total, comm_dtype) for name, total in self.sums.items()}
        return PendingMean(self.sums, weight, reductions)

    def clear(self) -> None:
        for total in self.sums.values():
            total.zero_()
        self.weight = 0.0


@dataclass
class PendingMean:
    """The mean meta-gradient over the tasks of all groups, whose reductions may be pending.

    sums: tensors by name, `theta` [S] among them. A sum becomes a mean, in place, once it has been divided by
    `weight`. reductions: the pending ones; a sum without an entry has arrived.
    """

    sums: dict[str, Tensor]
    weight: float = 1.0
    reductions: dict[str, Reduction] = field(default_factory=dict)

    def finish(self, name: str) -> Tensor:
        """Wait for one whole sum and divide it; call it once for each name."""
        if name in self.reductions:
            self.reductions[name].wait_all()
        return self.sums[name].div_(self.weight)
