"""The result of `adapt`: a model that has learned one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fmmeta.adaptation.predict import Answer, answer
from fmmeta.adaptation.single_process import LoadedModel
from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened
from fmmeta.tasks.data.columns import broken_text


@dataclass(repr=False)
class AdaptedModel:
    """What `adapt` gives; its model is in `single`.

    `left_out`: accuracy on examples left out, None where none could be. `output_dir`: the folder that was
    written, if any.
    """

    labels: tuple[str, ...]
    inner_steps: int
    left_out: float | None
    single: LoadedModel
    predictions: list[Answer] = field(default_factory=list)
    output_dir: str | None = None

    def __repr__(self) -> str:
        config = self.single.config
        left_out, accuracy = (
            None if share is None else f"{share:.4f}" for share in (self.left_out, self.accuracy)
        )
        facts = {"base": config.model_name_or_path, "task_type": config.task_type, "labels": self.labels}
        shown = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        return (
            f"{type(self).__name__}({shown}, inner_steps={self.inner_steps}, left_out={left_out},"
            f" accuracy={accuracy}, output_dir={self.output_dir!r})"
        )

    @property
    def accuracy(self) -> float | None:
        """Share of the query set that is right; None without one."""
        return (
            sum(one.output == one.truth for one in self.predictions) / len(self.predictions)
            if self.predictions
            else None
        )

    def predict(self, texts: Sequence[str], max_new_tokens: int = 64) -> list[Answer]:
        """Answers to new inputs, in their order. Raises `UsageError` for what is no list of texts."""
        if isinstance(texts, str):
            raise UsageError(f"texts={shortened(texts)} is one text; give a list of texts")
        for place, text in enumerate(texts := list(texts)):
            if not isinstance(text, str):
                raise UsageError(f"texts[{place}]={shortened(text)} is no text; give strings")
            if not text:
                raise UsageError(f"texts[{place}] is empty; fix it")
            if wrong := broken_text(text):
                raise UsageError(f"texts[{place}] has {wrong}; fix it")
        if not texts:
            return []
        return answer(self.single, texts, max_new_tokens)
