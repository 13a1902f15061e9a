"""The meta-gradient: accumulated over the tasks of this group, then reduced once across groups.

rules add each task (rule.py)  -->  reduction over `cross`, a mean  -->  outer step (outer_step.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmmeta.parallel.collectives import Communicator, Reduction


class MetaGradient:
    """Weighted sums over the tasks of this group, then over those of all groups.

    sum: of meta-gradients, fp32 [S], on the device of theta. extra: of the other results of tasks (gradients
    of learned rates, kept inner moments), by name. weight: of the tasks.
    """

    def __init__(self, theta: Tensor, extra: Mapping[str, Tensor] | None = None) -> None:
        self.sum = torch.zeros_like(theta, pin_memory=theta.is_pinned())
        self.extra = {name: torch.zeros_like(like) for name, like in (extra or {}).items()}
        self.weight = 0.0

    def add(self, vector: Tensor, weight: float = 1.0, extra: Mapping[str, Tensor] | None = None) -> None:
        """Add a finite task with the meta-gradient `vector` [S]."""
        self.sum.add_(vector.to(self.sum.device), alpha=weight)
        self.count(weight, extra)

    def count(self, weight: float = 1.0, extra: Mapping[str, Tensor] | None = None) -> None:
        """Add the weight and the extras of a finite task whose meta-gradient is in `sum` already.

        extra: a value for each of `self.extra`; others are ignored.
        """
        for name, total in self.extra.items():
            total.add_((extra or {})[name], alpha=weight)
        self.weight += weight

    def merge(self, other: "MetaGradient") -> None:
        """Add the sums of another."""
        for name, total in self.sums.items():
            total.add_(other.sums[name])
        self.weight += other.weight

    @property
    def sums(self) -> dict[str, Tensor]:
        """All sums by name; that of theta is the last one."""
        return {**self.extra, "theta": self.sum}

    def begin_reduce(
        self, cross: Communicator, weight: float, comm_dtype: torch.dtype | None = None
    ) -> "PendingMean | None":
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
