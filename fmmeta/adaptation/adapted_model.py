"""The result of `adapt`: a model that has learned one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fmmeta.adaptation.single_process import Answer, LoadedModel
from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened
from fmmeta.tasks.data.columns import broken_text


@dataclass(repr=False)
class AdaptedModel:
    """A model that has learned one task.

    labels: names of the classes, sorted; empty for causal_lm. inner_steps: steps that were taken. left_out:
    accuracy on the examples that were left out to choose them, None if none were. predictions: answers to the
    query set. output_dir: the folder that was written, if any. loaded: the model.
    """

    labels: tuple[str, ...]
    inner_steps: int
    left_out: float | None
    loaded: LoadedModel
    predictions: list[Answer] = field(default_factory=list)
    output_dir: str | None = None

    def __repr__(self) -> str:
        config = self.loaded.config
        left_out, accuracy = (
            None if share is None else f"{share:.4f}" for share in (self.left_out, self.accuracy)
        )
        return (
            f"{type(self).__name__}(base={config.model_name_or_path!r}, task_type={config.task_type!r},"
            f" labels={self.labels!r}, inner_steps={self.inner_steps}, left_out={left_out},"
            f" accuracy={accuracy}, output_dir={self.output_dir!r})"
        )

    @property
    def accuracy(self) -> float | None:
        """Share of correct answers to the query set, between 0 and 1; None without a query set."""
        if not self.predictions:
            return None
        return sum(one.output == one.truth for one in self.predictions) / len(self.predictions)

    def predict(self, texts: Sequence[str], max_new_tokens: int = 64) -> list[Answer]:
        """Answer new inputs.

        texts: non-empty strings; max_new_tokens: longest answer of a language model. Returns an `Answer` for
        each, in their order: `output` is a class with its probability as `score`, or a generated text. Raises
        `UsageError` for an input that is not a text.

        >>> import fmmeta
        >>> pairs = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]
        >>> adapted = fmmeta.adapt("tiny", pairs, inner_steps=10, early_stopping=False)
        >>> adapted.labels, [answer.output in adapted.labels for answer in adapted.predict(["green", "six"])]
        (('colour', 'number'), [True, True])
        """
        if isinstance(texts, str):
            raise UsageError(f"texts={shortened(texts)} is one text; give a list of texts")
        for index, text in enumerate(texts := list(texts)):
            if not isinstance(text, str):
                raise UsageError(f"texts[{index}]={shortened(text)} is no text; give strings")
            if not text:
                raise UsageError(f"texts[{index}] is empty; fix it")
            if wrong := broken_text(text):
                raise UsageError(f"texts[{index}] has {wrong}; fix it")
        return self.loaded.answer(texts, max_new_tokens) if texts else []
