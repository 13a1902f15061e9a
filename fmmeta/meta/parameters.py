"""The meta-parameters: what training changes, and what evaluation and export are given.

The live ones are changed in place by the outer step, and replaced by a resume or an elastic state transfer.
Code that needs other weights (the initial ones, the best validated, an interpolation) gets a copy and passes
it on; no code sets other values in the live tensors temporarily, so that a checkpoint taken at any moment
holds what was learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import InnerState

KEPT_MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # of inner AdamW


@dataclass(frozen=True)
class MetaParameters:
    """theta: fp32 [S], this rank's part of the model. rates: learned inner rates, float64 [K, L] by layer or
    fp32 [S] by element; None where they are fixed. kept: the moments that every inner loop starts with; None
    where it starts with zeros, and in copies.
    """

    theta: Tensor
    rates: Tensor | None = None
    kept: InnerState | None = None

    @classmethod
    def of(cls, theta: Tensor, inner: InnerLoop) -> "MetaParameters":
        """Those of a run. The inner loop reads the same rates and moments, and never changes them."""
        return cls(theta, inner.rates.meta_parameter, inner.optimizer.kept)

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor]) -> "MetaParameters":
        return cls(tensors["theta"], tensors.get("rates"))

    def named(self) -> dict[str, Tensor]:
        """theta and learned rates by field name; no entry for fixed rates."""
        return {"theta": self.theta} | ({} if self.rates is None else {"rates": self.rates})

    @property
    def extra(self) -> dict[str, Tensor]:
        """What is summed over tasks besides theta: tensors of these shapes, by name."""
        kept = {} if self.kept is None else dict.fromkeys(KEPT_MOMENTS, self.theta)
        return kept if self.rates is None else {"rates": self.rates, **kept}

    def snapshot(self) -> "MetaParameters":
        """A copy in host memory."""
        return self.from_named({name: value.to("cpu", copy=True) for name, value in self.named().items()})

    def interpolated(self, initial: "MetaParameters", share: float) -> "MetaParameters":
        """share theta_0 + (1 - share) theta in host memory, with these rates."""
        return MetaParameters(self.theta.to("cpu", copy=True).lerp_(initial.theta.cpu(), share), self.rates)

    def add_state(self, state: "StateDict") -> None:
        """Add theta, rates and kept moments, uncopied, to what a checkpoint holds."""
        state.add("", self.named())
        if self.kept is not None:
            state.add("kept.", self.kept.vectors)
            state.numbers["kept.count"] = self.kept.count

    def load_state(self, state: "StateDict") -> None:
        """Set the values that `add_state` gave, in place, on any layout and device."""
        for name, value in self.named().items():
            value.copy_(state.tensors(name)[""])
        if self.kept is not None:
            saved = state.tensors("kept.")
            self.kept.vectors = {name: v.to(self.theta.device, copy=True) for name, v in saved.items()}
            self.kept.count = int(state.numbers.get("kept.count", 0))


@dataclass
class StateDict:
    """What a checkpoint holds, by name: vectors [S] of this rank, tables (equal on all), JSON values."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """The facts that the outer optimizer and the kept moments share."""
        return self.facts.setdefault("numbers", {})

    def add(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors under `prefix` and their names. Only vectors [S] have one dimension."""
        for name, value in tensors.items():
            (self.vectors if value.ndim == 1 else self.tables)[prefix + name] = value

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Vectors and tables whose names begin with `prefix`, without it."""
        both = {**self.vectors, **self.tables}
        return {name.removeprefix(prefix): both[name] for name in both if name.startswith(prefix)}
