"""The meta-parameters, which training changes and which evaluation and export get; and the meta-gradient.

    rules add each task (task.py)  -->  reduction over `cross`, a mean  -->  outer step (outer_step.py)

The live meta-parameters are changed in place by the outer step, and replaced by a resume or an elastic state
transfer. Code that needs other weights (the initial ones, the best validated, an interpolation) gets a copy
and passes it on; no code sets other values in the live tensors temporarily, so that a checkpoint taken at any
moment holds what was learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.parallel.collectives import Communicator, Reduction
from fmmeta.parallel.param_map import add_to, pieces


@dataclass(frozen=True)
class MetaParameters:
    """theta: fp32 [S], this rank's part of the model. rates: learned inner rates, float64 [K, L] by layer or
    fp32 [S] by element; None where they are fixed.
    """

    theta: Tensor
    rates: Tensor | None = None

    @classmethod
    def of(cls, theta: Tensor, inner: InnerLoop) -> "MetaParameters":
        """Those of a run. The inner loop reads the same rates, and never changes them."""
        return cls(theta, inner.rates.meta_parameter)

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor]) -> "MetaParameters":
        return cls(tensors["theta"], tensors.get("rates"))

    def named(self) -> dict[str, Tensor]:
        """theta and learned rates by field name; no entry for fixed rates."""
        return {"theta": self.theta, **self.extra}

    @property
    def extra(self) -> dict[str, Tensor]:
        """What is summed over tasks besides theta: tensors of these shapes, by name."""
        return {} if self.rates is None else {"rates": self.rates}

    def snapshot(self) -> "MetaParameters":
        """A copy in host memory."""
        return self.from_named({name: value.to("cpu", copy=True) for name, value in self.named().items()})

    def interpolated(self, initial: "MetaParameters", share: float) -> "MetaParameters":
        """share theta_0 + (1 - share) theta in host memory, with these rates."""
        return MetaParameters(self.theta.to("cpu", copy=True).lerp_(initial.theta.cpu(), share), self.rates)

    def add_state(self, state: "StateDict") -> None:
        """Add theta and rates, uncopied, to what a checkpoint holds."""
        state.add("", self.named())

    def load_state(self, state: "StateDict") -> None:
        """Set the values that `add_state` gave, in place, on any layout and device.

        Rates that were not learned before, or in another shape, keep their initial values
        (--accept_changed_settings).
        """
        for name, value in self.named().items():
            saved = state.tensors(name)
            if name == "theta" or (saved and saved[""].shape == value.shape):
                value.copy_(saved[""])


@dataclass
class StateDict:
    """What a checkpoint holds, by name: vectors [S] of this rank, tables (equal on all), JSON values."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Scalars of the outer optimizer."""
        return self.facts.setdefault("numbers", {})

    def add(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors under `prefix` and their names. Only vectors [S] have one dimension."""
        for name, value in tensors.items():
            (self.vectors if value.ndim == 1 else self.tables)[prefix + name] = value

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Vectors and tables whose names begin with `prefix`, without it."""
        both = {**self.vectors, **self.tables}
        return {name.removeprefix(prefix): both[name] for name in both if name.startswith(prefix)}


class MetaGradient:
    """Weighted sums over the tasks of this group, then over those of all groups.

    running: the sum of meta-gradients, fp32 [S], on the device of theta; workers add to it. extra: of
    gradients of learned rates, by name. weight: of the tasks.
    """

    def __init__(self, theta: Tensor, extra: Mapping[str, Tensor] | None = None) -> None:
        self.pinned = theta.is_pinned()
        self.running = torch.zeros_like(theta, pin_memory=self.pinned)
        self.extra = {name: torch.zeros_like(like) for name, like in (extra or {}).items()}
        self.weight = 0.0

    def add(self, vector: Tensor, weight: float = 1.0, extra: Mapping[str, Tensor] | None = None) -> None:
        """Add a finite task with the meta-gradient `vector` [S]."""
        for part, more in pieces(vector.device, self.running, vector):
            add_to(part, more, weight)
        self.count(weight, extra)

    def count(self, weight: float = 1.0, extra: Mapping[str, Tensor] | None = None) -> None:
        """Add the weight and the extras of a finite task whose meta-gradient is in `sum` already.

        extra: a value for each of `self.extra`; others are ignored.
        """
        for name, total in self.extra.items():
            total.add_((extra or {})[name].to(total.device), alpha=weight)
        self.weight += weight

    def merge(self, other: "MetaGradient") -> None:
        """Add the sums of another."""
        others = other.sums
        for name, total in self.sums.items():
            total.add_(others[name])
        self.weight += other.weight

    @property
    def sum(self) -> Tensor:
        """The sum of meta-gradients, once everything is added to it that a device has yet to add."""
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        return self.running

    @sum.setter
    def sum(self, value: Tensor) -> None:
        self.running = value

    @property
    def sums(self) -> dict[str, Tensor]:
        """All sums by name; that of theta is the last one."""
        return {**self.extra, "theta": self.sum}

    def begin_reduce(
        self, cross: Communicator, weight: float, comm_dtype: torch.dtype | None = None
    ) -> "PendingMean | None":
        """Start the all-reduce of all sums across groups; None if `weight`, that of all groups, is 0.

        One reduction of the rank's shard, whatever the number of tasks and inner steps. Add nothing while it
        is pending. comm_dtype: dtype in which gradients are sent. Collective: cross.
        """
        if weight == 0:
            return None
        sums = self.sums
        reductions = {name: cross.begin_sum_(total, comm_dtype) for name, total in sums.items()}
        return PendingMean(sums, weight, reductions)

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
