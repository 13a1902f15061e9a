"""The learner of streams: documents that a causal language model learns chunk by chunk.

A row is `--context` tokens without loss and `--chunk` tokens with it, cut out of a document's tokens
(tasks/sources/stream.py). Each row is computed alone, without a cache, so that it goes through every layout.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.learners.base import RowLosses
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch
from fmmeta.tasks.data.columns import Row, RowReader, cell, column_like, pick
from fmmeta.tasks.data.encode import plain_tokens


class StreamLearner(CausalLearner):
    """A causal language model whose tasks are documents. Rows of the data have a text."""

    auto, pipeline = "AutoModelForCausalLM", "text-generation"
    inputs, pair = ("text",), ("text", "rest")  # of a `pair` the tokens are stored
    example: Mapping[str, Any] = {"text": "A document of many lines."}

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        column = str(pick(config, columns, "text_column"))

        def read(row: Row) -> dict[str, str]:
            return {"text": cell(row, column), "rest": ""}

        named = column_like("document", columns)
        return RowReader(read, (column, *([named] if named else [])))

    def per_row(self, losses: Tensor, wrong: Tensor, labels: Tensor) -> RowLosses:
        """Each token is an answer."""
        seen = labels != IGNORE
        return RowLosses(losses.sum(1), (seen & ~wrong).sum(1), seen.sum(1))

    def score(self, batches: Sequence[MicroBatch]) -> None:
        """Rows share no prefix."""

    @classmethod
    def reader(cls, config: Config, tokenizer: Any, ends: Sequence[int]) -> Any:
        """Reads a continuation, with the spaces around it."""
        text = partial(tokenizer.decode, skip_special_tokens=True)
        return SimpleNamespace(ends={*ends, tokenizer.eos_token_id} - {None}, text=text)

    @classmethod
    def content(cls, row: Any) -> Sequence[str]:
        return (row["text"],)

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        """All tokens of a document, without special ones; nothing is cut off."""
        return [Example(plain_tokens(tokenizer, row["text"]), []) for row in rows]
