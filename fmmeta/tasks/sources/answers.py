"""Rows with classes for a language model, which answers with a text for the class (--answers).

    names      the name of the class
    flipped    the name of another class of the episode
    symbols    a word of one token, which each episode draws for each of its classes

Names say what a class is, so that one model can learn to answer without examples. With the other two no model
can: the support set alone has the answers, and those of one episode exclude those of another.

Wei et al., "Larger language models do in-context learning differently", 2023 (arXiv 2303.03846), section 3
(flipped); Wei et al., "Symbol tuning improves in-context learning in language models", 2023 (arXiv
2305.08298), section 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import IDS_ALONE, RowEncoder, make_prompt
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.sources.base import Draw


@dataclass(frozen=True)
class AnsweredRows:
    """The rows of a token store as an episode reads them. of_class: the answer of each class, by its name."""

    store: TokenStore
    encoder: RowEncoder
    of_class: Mapping[str, str]

    def check(self) -> None:
        """See `TokenStore.check`."""
        self.store.check()

    def text(self, column: str, row: int) -> str:
        """See `TokenStore.text`."""
        text = self.store.text(column, row)
        return self.of_class[text] if column == "target" else text

    def value(self, row: int) -> dict[str, Any]:
        """See `TokenStore.value`."""
        return {"input": self.store.text("input", row), "output": self.text("target", row)}

    def facts(self, support: Sequence[int], query: Sequence[int]) -> dict[str, Any]:
        """See `TokenStore.facts`."""
        return {}

    def examples(self, rows: Sequence[int], facts: Mapping[str, Any]) -> list[Example]:
        """See `TokenStore.examples`."""
        return self.encoder.examples([self.value(row) for row in rows], facts)


@dataclass(frozen=True)
class ClassAnswers:
    """Gives the classes of a draw their answers. symbols: to draw from."""

    encoder: RowEncoder
    symbols: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> "ClassAnswers | None":
        """Those of --answers. Raises `UsageError` where there are fewer symbols than classes."""
        if config.answers is None:
            return None
        symbols = words_of_one_token(config.prompt_template, tokenizer) if config.answers == "symbols" else ()
        if config.answers == "symbols" and len(symbols) < config.largest_way:
            name = "n_way_max" if config.n_way_max else "n_way"
            raise UsageError(
                f"answers=symbols with {name}={config.largest_way}: the tokenizer has {len(symbols)} words of"
                f" one token; lower {name}, or use answers=names"
            )
        return cls(RowEncoder(config, tokenizer), symbols)

    def __call__(self, draw: Draw, rng: np.random.Generator) -> Draw:
        """The draw with its answers, and the support set in random order, in which prompts have it.

        rng: that has drawn the rows.
        """
        answers = draw.classes
        if self.symbols:
            answers = [self.symbols[i] for i in rng.choice(len(self.symbols), len(answers), replace=False)]
        elif self.encoder.config.answers == "flipped":
            turn = int(rng.integers(1, len(answers)))
            answers = (*answers[turn:], *answers[:turn])
        rows = AnsweredRows(draw.store, self.encoder, dict(zip(draw.classes, answers, strict=True)))
        support = [draw.support[i] for i in rng.permutation(len(draw.support))]
        return replace(draw, support=support, store=rows, classes=(), keys=())


@lru_cache(maxsize=2)  # a second of computing, for each split and each file of a task
def words_of_one_token(template: str, tokenizer: Any) -> tuple[str, ...]:
    """The words of lower-case ASCII letters that are one token of an answer, in alphabetical order. Some are
    parts of words.
    """
    prompt = make_prompt(template, tokenizer)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    words = sorted(
        {one for one in map(str.strip, texts) if one.isascii() and one.isalpha() and one.islower()}
    )
    answers = [prompt.answer(word) for word in words]
    tokens = tokenizer(answers, add_special_tokens=False, **IDS_ALONE)["input_ids"] if words else []
    least = min(map(len, tokens), default=0)
    return tuple(word for word, ids in zip(words, tokens, strict=True) if len(ids) == least)
