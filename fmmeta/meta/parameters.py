"""The meta-parameters: what training changes, and what evaluation and export are given.

The live ones are changed in place by the outer step, and replaced by a resume or an elastic state transfer.
Code that needs other weights (the initial ones, the best validated, an interpolation) gets a copy and passes
it on; no code sets other values in the live tensors temporarily, so that a checkpoint taken at any moment
holds what was learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MetaParameters:
    """theta: fp32 [S], this rank's part of the model. rates: learned inner rates, float64 [K, L] by layer or
    fp32 [S] by element; None where they are fixed.
    """

    theta: Tensor
    rates: Tensor | None = None

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor]) -> MetaParameters:
        return cls(tensors["theta"], tensors.get("rates"))

    def named(self) -> dict[str, Tensor]:
        """By field name; no entry for fixed rates."""
        return {"theta": self.theta} | ({} if self.rates is None else {"rates": self.rates})

    def snapshot(self) -> MetaParameters:
        """A copy in host memory."""
        return self.from_named({name: value.to("cpu", copy=True) for name, value in self.named().items()})

    def interpolated(self, initial: MetaParameters, share: float) -> MetaParameters:
        """share theta_0 + (1 - share) theta in host memory, with these rates."""
        return MetaParameters(self.theta.to("cpu", copy=True).lerp_(initial.theta.cpu(), share), self.rates)
