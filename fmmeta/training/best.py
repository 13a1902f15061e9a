"""The weights with the highest validation accuracy so far, in host memory and in every checkpoint, for the
end of the run.
"""

import math

from fmmeta.meta.parameters import MetaParameters, StateDict

PREFIX = "best "  # of the names of vectors and tables in a checkpoint


class Best:
    """A copy of the best meta-parameters and their score. Local; every rank decides alike."""

    def __init__(self) -> None:
        self.meta_params: MetaParameters | None = None
        self.step, self.accuracy, self.loss = 0, -math.inf, math.inf

    def update(self, meta_params: MetaParameters, step: int, accuracy: float, loss: float) -> None:
        """Copy the meta-parameters if they score higher than the best before (of equals, if their loss is
        lower).
        """
        loss = loss if math.isfinite(loss) else math.inf  # the worst, and equal to itself
        if (accuracy, -loss) > (self.accuracy, -self.loss):
            self.step, self.accuracy, self.loss = step, accuracy, loss
            self.meta_params = meta_params.snapshot()

    @property
    def text(self) -> str:
        """Which weights are exported."""
        if self.meta_params is None:
            return "load_best_model_at_end: no validation was done; the last weights are exported"
        return f"best of the validated weights: outer step {self.step}, accuracy {100 * self.accuracy:.1f} %"

    def add_state(self, state: StateDict) -> None:
        """Add the copy and its score to what a checkpoint holds."""
        if self.meta_params is not None:
            state.add(PREFIX, self.meta_params.named())
            state.facts["best"] = {"step": self.step, "accuracy": self.accuracy, "loss": self.loss}

    def load_state(self, state: StateDict) -> None:
        """Restore what `add_state` gave, if there was a copy."""
        saved, copy = state.facts["best"], state.tensors(PREFIX)
        self.meta_params = MetaParameters.from_named(copy).snapshot() if copy else None
        if saved:
            self.step, self.accuracy = saved["step"], saved["accuracy"]
            self.loss = math.inf if saved["loss"] is None else saved["loss"]  # JSON has no infinity
