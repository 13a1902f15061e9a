"""Scores of documents that are learned chunk by chunk: bits per byte, of a stretch and by position in it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fmmeta.metrics.scores import EpisodeScore
from fmmeta.parallel.workers.base import PassStats
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.stream import Stretch
from fmmeta.training.scoring import score_of

TOKEN_BYTES = 8  # of a token in a batch
TOKENS_BEFORE = 8  # decoded before a chunk; a character has at most four, one for each of its bytes
POSITIONS = (0, 256, 1024, 4096, 16384)
"""Tokens of a stretch where a range of positions begins."""


def bits_and_bytes(
    rows: Sequence[Any], passes: Sequence[PassStats], tokenizer: Any
) -> Iterator[tuple[float, int]]:
    """Bits and bytes of the label tokens of each row, by a pass over it. rows: in their order, as `chunked`
    cuts them. Local.

    A character whose tokens two rows share counts in the second one, one that the last row cuts in none.
    """
    before: Sequence[int] = rows[0].input_ids[: rows[0].labels.count(IGNORE)]
    for row, one in zip(rows, passes, strict=True):
        tokens = [label for label in row.labels if label != IGNORE]
        seen = [*before, *tokens]
        size = len(whole_characters(tokenizer, seen)) - len(whole_characters(tokenizer, before))
        before = seen[-TOKENS_BEFORE:]
        yield one.loss * len(tokens) / math.log(2), size


def whole_characters(tokenizer: Any, ids: Sequence[int]) -> bytes:
    """The text of tokens in UTF-8, without the first bytes of a character whose last one is missing."""
    return tokenizer.decode(ids).rstrip("\ufffd").encode()


def stream_score(
    slot: int,
    task: Task,
    draw: Stretch,
    passes: Sequence[PassStats],
    tokenizer: Any,
    seconds: float,
    weight_bytes: float,
) -> EpisodeScore:
    """The score of a stretch. passes: over each of its chunks, before the step on it. tokenizer: its tokens
    as texts have the bytes. seconds: that the passes took. weight_bytes: of the weights that they have
    changed, with what the inner optimizer stores of them. Local.

    metrics: `bits_per_byte`, and `bits_per_byte_from_P` of the chunks that begin at position P or later, up
    to the next of POSITIONS; `tokens_per_second` of a group; `state_bytes`, which go from chunk to chunk: the
    changed weights, the state of the inner optimizer, and the `context` tokens before a chunk.
    """
    rows, context = draw.read().support, draw.config.context
    ranges = dict[str, list[tuple[float, int]]]()
    for number, found in enumerate(bits_and_bytes(rows, passes, tokenizer)):
        begin = max(begin for begin in POSITIONS if begin <= number * draw.config.chunk)
        for name in ("bits_per_byte", f"bits_per_byte_from_{begin}"):
            ranges.setdefault(name, []).append(found)
    metrics = {
        name: sum(bits for bits, _ in parts) / sum(size for _, size in parts)
        for name, parts in ranges.items()
    }
    metrics["tokens_per_second"] = sum(row.label_tokens for row in rows) / seconds
    metrics["state_bytes"] = weight_bytes + context * TOKEN_BYTES
    return replace(score_of(slot, task, [PassStats.mean(passes)]), metrics=metrics)
