"""The meta-gradient: accumulated over the tasks of this group, then reduced once across groups.

rules add each task (rule.py)  -->  reduction over `cross`, a mean  -->  outer step (outer_step.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fmmeta.parallel.process_groups import Communicator


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

    def merge(self, other: MetaGradient) -> None:
        """Add the sums of another."""
        self.sum.add_(other.sum)
        for name, total in self.extra.items():
            total.add_(other.extra[name])
        self.weight += other.weight

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
