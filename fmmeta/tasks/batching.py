"""Tokenised examples, and sets of them split into this rank's micro-batches.

A set (support or query) is split over the ranks of a group so that every rank gets the same number of
micro-batches, rows of similar length are together, and the weights make the losses add up to the mean over
the whole set. Sets of several tasks are joined where their rows go through a model together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # no loss is taken at this label


@dataclass(frozen=True)
class Example:
    """One row: its tokens, and its class or (causal_lm) one label per token, IGNORE on the prompt.

    numbers: the row of each token, counted from 1, where several rows share a sequence (packing.py).
    """

    input_ids: Sequence[int]
    labels: int | Sequence[int]
    numbers: Sequence[int] = ()

    @property
    def label_tokens(self) -> int:
        return 1 if isinstance(self.labels, int) else sum(label != IGNORE for label in self.labels)


@dataclass
class MicroBatch:
    """Rows that go through the model together, padded to the longest of them.

    attention_mask [B, T]: 0 on padding; elsewhere the number of the row, which is 1 unless rows share a
    sequence. labels: class per row [B], or token per position [B, T] with IGNORE where no loss is taken.
    weights [B]: 1 / (rows or label tokens of the whole set); 0 for a row that only fills the batch.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    weights: Tensor
    classes: int = 0  # of this episode, where that is fewer than the head has; 0: all of them

    def to(self, device: torch.device) -> MicroBatch:
        if self.input_ids.device == device:
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        changed = map(change, (self.input_ids, self.attention_mask, self.labels, self.weights))
        return MicroBatch(*changed, classes=self.classes)

    @property
    def tokens(self) -> int:
        """Tokens of the rows that count, padding left out."""
        return int((self.attention_mask[self.weights > 0] > 0).sum())


@dataclass(frozen=True)
class Episode:
    """An episode as this rank's micro-batches.

    `prompted`: the query with the support set before it, for in-context learning.
    """

    support: list[MicroBatch]
    query: list[MicroBatch]
    prompted: list[MicroBatch] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of this rank's support and query rows, padding left out."""
        return sum(b.tokens for b in self.support), sum(b.tokens for b in self.query)

    def pin_memory(self) -> Episode:
        return Episode(
            *([batch.pin_memory() for batch in part] for part in (self.support, self.query, self.prompted))
        )


@dataclass(frozen=True)
class Batcher:
    """How a group cuts sets into micro-batches: this rank's share, at most `micro_batch_size` rows at a time.

    pack: function from rows (longest first) and a least number of sequences to packed sequences, which then
    count as rows. max_tokens: of a micro-batch, padding included, unless one row alone has more; 0: whatever
    the rows have.
    """

    pad_token_id: int
    micro_batch_size: int = 32
    group_rank: int = 0
    group_size: int = 1
    pack: Callable[[Sequence[Example], int], list[Example]] | None = None
    max_tokens: int = 0

    def deal(self, examples: Sequence[Example], classes: int = 0) -> list[MicroBatch]:
        """This rank's micro-batches of a set; as many as every other rank of the group gets.

        A rank without rows gets one row of weight 0, since it has to join the collectives.
        """
        total = sum(example.label_tokens for example in examples)
        ordered = sorted(examples, key=lambda example: len(example.input_ids), reverse=True)
        if self.pack is not None:
            ordered = self.pack(ordered, self.group_size)
        parts = self._cut(ordered)[self.group_rank :: self.group_size]
        pad = self.pad_token_id
        return [
            collate(part, 1 / total, pad, classes) if part else collate(ordered[-1:], 0.0, pad, classes)
            for part in parts
        ]

    def _cut(self, ordered: Sequence[Example]) -> list[Sequence[Example]]:
        """As many micro-batches of each rank, whose turns come one after the other."""
        if self.max_tokens:
            return cut_by_tokens(ordered, self.micro_batch_size, self.max_tokens, self.group_size)
        rounds = -(-len(ordered) // (self.group_size * self.micro_batch_size))
        return even_parts(ordered, rounds * self.group_size)


def cut_by_tokens(rows: Sequence[Example], most: int, tokens: int, multiple: int) -> list[Sequence[Example]]:
    """Cut rows, longest first, into runs of at most `most` rows and `tokens` tokens with padding; a longer
    row is a run.

    `multiple` divides their number: the largest runs are halved for it, and empty ones added where all have
    one row.
    """
    runs, begin = list[Sequence[Example]](), 0
    while begin < len(rows):
        size = max(1, min(most, tokens // len(rows[begin].input_ids)))
        runs.append(rows[begin : begin + size])
        begin += size
    while len(runs) % multiple:
        largest = max(
            range(len(runs)), key=lambda i: len(runs[i]) > 1 and len(runs[i]) * len(runs[i][0].input_ids)
        )
        whole = runs[largest]
        if len(whole) == 1:
            runs.append(rows[:0])
        else:
            runs[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return runs


def even_parts(rows: Sequence[Example], count: int) -> list[Sequence[Example]]:
    """Cut into `count` runs whose sizes differ by one at most."""
    size, extra = divmod(len(rows), count)
    bounds = [i * size + min(i, extra) for i in range(count + 1)]
    return [rows[a:b] for a, b in pairwise(bounds)]


def collate(rows: Sequence[Example], weight: float, pad_token_id: int, classes: int = 0) -> MicroBatch:
    """Pad rows on the right to the longest of them."""
    longest = max(len(row.input_ids) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    per_token = not isinstance(rows[0].labels, int)
    labels = torch.full((len(rows), longest) if per_token else (len(rows),), IGNORE, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n] = torch.as_tensor(row.input_ids)
        mask[i, :n] = torch.as_tensor(row.numbers) if row.numbers else 1
        if per_token:
            labels[i, :n] = torch.as_tensor(row.labels)
        else:
            labels[i] = row.labels  # type: ignore[assignment]
    return MicroBatch(input_ids, mask, labels, torch.full((len(rows),), weight), classes)


Sets = Sequence[Sequence[MicroBatch]]
"""Micro-batches of one set of each task."""


def merge_task_batches(sets: Sets) -> list[MicroBatch]:
    """The m-th micro-batches of all tasks as one, for every m: as many rows and tokens each, filled with rows
    of weight 0.
    """
    found = []
    for present in zip(*pad_to_same_shape(sets), strict=True):
        parts = [
            torch.cat([getattr(b, name) for b in present])
            for name in ("input_ids", "attention_mask", "labels", "weights")
        ]
        found.append(MicroBatch(*parts, classes=present[0].classes))
    return found


def pad_to_same_shape(sets: Sets) -> list[list[MicroBatch]]:
    """Every task's micro-batches, as many as every other's, the m-th of all of one shape; what fills them
    counts nothing.
    """
    found: list[list[MicroBatch]] = [[] for _ in sets]
    for each in zip_longest(*sets):
        present = [
            batch if batch is not None else empty(own[-1]) for batch, own in zip(each, sets, strict=True)
        ]
        rows, tokens = max(len(b.input_ids) for b in present), max(b.input_ids.shape[1] for b in present)
        for own, batch in zip(found, present, strict=True):
            own.append(widen_rows(batch, rows, tokens))
    return found


def empty(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        batch.input_ids, batch.attention_mask, batch.labels, torch.zeros_like(batch.weights), batch.classes
    )


def widen_rows(batch: MicroBatch, rows: int, tokens: int) -> MicroBatch:
    """Masked tokens, and copies of the last row with weight zero."""
    wider = tokens - batch.input_ids.shape[1]
    more = rows - len(batch.input_ids)
    ids = F.pad(batch.input_ids, (0, wider))
    mask = F.pad(batch.attention_mask, (0, wider))
    labels = F.pad(batch.labels, (0, wider), value=IGNORE) if batch.labels.ndim == 2 else batch.labels
    if more == 0:
        return MicroBatch(ids, mask, labels, batch.weights, batch.classes)
    ids, mask, labels = (
        torch.cat([each, each[-1:].expand(more, *each.shape[1:])]) for each in (ids, mask, labels)
    )
    return MicroBatch(ids, mask, labels, F.pad(batch.weights, (0, more)), batch.classes)
