"""Scores of documents that are learned chunk by chunk: bits per byte, of a stretch and by position in it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fmmeta.metrics.scores import EpisodeScore
from fmmeta.parallel.workers.base import PassStats
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.stream import Stretch
from fmmeta.training.scoring import score_of

POSITIONS = (0, 256, 1024, 4096, 16384)
"""Tokens of a stretch where a range of positions begins."""


def stream_score(
    slot: int, task: Task, draw: Stretch, passes: Sequence[PassStats], tokenizer: Any
) -> EpisodeScore:
    """The score of a stretch. passes: over each of its chunks, before the step on it. tokenizer: its tokens
    as texts have the bytes. Local.

    metrics: `bits_per_byte`, and `bits_per_byte_from_P` of the chunks that begin at position P or later, up
    to the next of POSITIONS.
    """
    ranges = dict[str, list[tuple[float, int]]]()
    for number, (row, one) in enumerate(zip(draw.read().support, passes, strict=True)):
        tokens = [label for label in row.labels if label != IGNORE]
        begin = max(begin for begin in POSITIONS if begin <= number * draw.config.chunk)
        bits = one.loss * len(tokens) / math.log(2)
        for name in ("bits_per_byte", f"bits_per_byte_from_{begin}"):
            ranges.setdefault(name, []).append((bits, len(tokenizer.decode(tokens).encode())))
    metrics = {
        name: sum(bits for bits, _ in parts) / sum(size for _, size in parts)
        for name, parts in ranges.items()
    }
    return replace(score_of(slot, task, [PassStats.mean(passes)]), metrics=metrics)
