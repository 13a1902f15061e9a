"""The weights with the highest validation accuracy so far, in host memory and in every checkpoint, for the
end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fmmeta.meta.parameters import MetaParameters

MARK = "best "  # before the names of vectors and tables in a checkpoint


@dataclass(frozen=True)
class BestState:
    """What a checkpoint keeps: vectors [S], tables (equal on every rank) and numbers."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)


class Best:
    """`meta_params`: those that training changes in place. Local; every rank decides alike."""

    def __init__(self, meta_params: MetaParameters) -> None:
        self.meta_params = meta_params
        self.kept: MetaParameters | None = None
        self.step, self.accuracy, self.loss = 0, -math.inf, math.inf

    def update(self, step: int, accuracy: float, loss: float) -> None:
        """Keep the weights as they are if they score higher than those before (of equals, if their loss is
        lower).
        """
        loss = loss if math.isfinite(loss) else math.inf  # the worst, and equal to itself
        if (accuracy, -loss) > (self.accuracy, -self.loss):
            self.step, self.accuracy, self.loss = step, accuracy, loss
            self.kept = self.meta_params.snapshot()

    @property
    def text(self) -> str:
        """Which weights are exported."""
        if self.kept is None:
            return "load_best_model_at_end: no validation was done; the last weights are exported"
        return f"best of the validated weights: outer step {self.step}, accuracy {100 * self.accuracy:.1f} %"

    def state(self) -> BestState:
        if self.kept is None:
            return BestState()
        size = self.meta_params.theta.shape
        named = {f"{MARK}{name}": value for name, value in self.kept.named().items()}
        vectors = {name: value for name, value in named.items() if value.shape == size}
        tables = {name: value for name, value in named.items() if value.shape != size}
        return BestState(vectors, tables, {"step": self.step, "accuracy": self.accuracy, "loss": self.loss})

    def load_state(
        self, vectors: dict[str, Tensor], tables: dict[str, Tensor], numbers: Mapping[str, Any]
    ) -> None:
        """Take what a checkpoint kept out of its vectors and tables."""
        found = {
            name.removeprefix(MARK): source.pop(name).cpu()
            for source in (vectors, tables)
            for name in list(source)
            if name.startswith(MARK)
        }
        self.kept = MetaParameters.from_named(found) if found else None
        if numbers:
            self.step, self.accuracy = numbers["step"], numbers["accuracy"]
            self.loss = math.inf if numbers["loss"] is None else numbers["loss"]  # JSON has no infinity
