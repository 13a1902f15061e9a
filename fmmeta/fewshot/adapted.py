"""A model that has learned one task: what `adapt` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fmmeta.fewshot.predict import Answer, answer
from fmmeta.fewshot.single import Single


@dataclass
class Adapted:
    """What `adapt` gives; its model is in `single`. `left_out`: accuracy on examples left out, None where none could be."""

    labels: tuple[str, ...]
    inner_steps: int
    left_out: float | None
    single: Single
    predictions: list[Answer] = field(default_factory=list)

    @property
    def accuracy(self) -> float | None:
        """Share of the query set that is right; None without one."""
        return sum(one.output == one.truth for one in self.predictions) / len(self.predictions) if self.predictions else None

    def predict(self, texts: Sequence[str], max_new_tokens: int = 64) -> list[Answer]:
        """Answers to new inputs."""
        return answer(self.single, texts, max_new_tokens)
