"""Tokenised (or otherwise encoded) examples, and sets of them split into this rank's micro-batches.

A set (support or query) is split over the ranks of a group so that every rank gets the same number of
micro-batches, rows of similar length are together, and the weights make the losses add up to the mean over
the whole set. Sets of several tasks are joined where their rows go through a model together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fmmeta.common.errors import UsageError

IGNORE = -100  # no loss is taken at this label
PADDING = {
    "input_ids": 0,
    "attention_mask": 0,
    "position_ids": 1,
    "decoder_input_ids": 0,
    "labels": IGNORE,
    "others": IGNORE,
}
"""Padding values of inputs and targets whose last dimension is tokens; position 0 would begin a row."""


@dataclass(frozen=True)
class Example:
    """One row: its tokens, and its class, or one label per token, IGNORE where no loss is taken, as on the
    prompt of causal_lm, or numbers.

    position_ids: of several rows that share a sequence (`pack`), each from 0; empty for a single row.
    values: inputs that are no tokens, by name: tensors of the same shape in every row, such as pixel_values;
    with a collate function the columns of the row too. Such a row has one entry in `input_ids`, which no
    model reads: it counts as one token.
    weight: of the row, or of each of its label tokens, in the mean loss of a set. losses: how many losses the
    row's is the sum of; None: one for each label.
    """

    input_ids: Sequence[int]
    labels: Any
    position_ids: Sequence[int] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    losses: int | None = None

    @property
    def token_labels(self) -> list[int]:
        """The labels of a causal_lm row, one per token."""
        assert not isinstance(self.labels, int), "a class"
        return list(self.labels)

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens of a causal_lm row before its answer."""
        return self.input_ids[: self.token_labels.count(IGNORE)]

    @property
    def label_tokens(self) -> int:
        """What a set's losses are divided by, summed over its rows."""
        if self.losses is not None:
            return self.losses
        return 1 if isinstance(self.labels, int) else sum(label != IGNORE for label in self.labels)


@dataclass
class MicroBatch:
    """Rows that go through the model together, padded to the longest of them.

    inputs: keyword arguments of the model, the first dimension of each is B: input_ids [B, T], and
    attention_mask [B, T] (0 on padding) or, where rows share a sequence, position_ids [B, T], which are 0 at
    the first token of each row and nowhere else; of images pixel_values [B, 3, H, W]; with a collate function
    what it returns, possibly nested in dictionaries, lists and tuples.
    targets: what the learner's losses read, the first dimension of each is B. `labels`: class per row [B], or
    token per position [B, T] with IGNORE where no loss is taken; `classes` [B]: how many of the head's
    classes the row's episode has.
    weights [B]: of a row over the sum of those of all rows or label tokens of the whole set; 0 for a row that
    only fills the batch.
    tokens: of the rows with a weight, without padding.
    kept: by owner, what a learner's frozen blocks make of the rows (learners/frozen_blocks.py); shared with
    copies on other devices.
    """

    inputs: dict[str, Any]
    targets: dict[str, Tensor]
    weights: Tensor
    tokens: int = 0
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def to(self, device: torch.device) -> "MicroBatch":
        if self.weights.device == device:
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return replace(
            self,
            inputs=map_tensors(self.inputs, change),
            targets=map_tensors(self.targets, change),
            weights=change(self.weights),
        )


def sent(values: Any, device: torch.device) -> Tensor:
    """A tensor in host memory, or numbers, on a device; the host does not wait for the copy."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with each tensor changed, in dictionaries, lists and tuples too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(one, change) for one in value)
    return value


Collated = tuple[dict[str, Any], dict[str, Tensor]]
"""Inputs and targets of a micro-batch."""
CollateFn = Callable[[Sequence[Example], int], Collated]
"""From rows and the id of the padding token."""


class SupportSet(list[MicroBatch]):
    """A support set whose inner steps learn from samples of it (--support_batch_size).

    The list is the whole set; `steps` are the micro-batches of each inner step's sample.
    """

    def __init__(self, whole: Iterable[MicroBatch], steps: Iterable[list[MicroBatch]]) -> None:
        super().__init__(whole)
        self.steps = [*steps]


def batches_of_step(support: Sequence[MicroBatch], k: int) -> Sequence[MicroBatch]:
    """The micro-batches that inner step k learns from: the whole set, or its sample."""
    return support.steps[k % len(support.steps)] if isinstance(support, SupportSet) else support


def each_batch(batches: Sequence[MicroBatch], change: Callable[[MicroBatch], MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of a set, or of a set and its samples, each changed."""
    changed = [change(batch) for batch in batches]
    if not isinstance(batches, SupportSet):
        return changed
    return SupportSet(changed, ([change(batch) for batch in step] for step in batches.steps))


@dataclass(frozen=True)
class Episode:
    """An episode as this rank's micro-batches. notices: what the log should say about the file that was read
    for it.
    """

    support: list[MicroBatch]
    query: list[MicroBatch]
    notices: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def tokens(self) -> int:
        """Tokens of this rank's rows, without padding."""
        return sum(batch.tokens for batch in (*self.support, *self.query))

    def pin_memory(self) -> "Episode":
        support, query = (each_batch(part, MicroBatch.pin_memory) for part in (self.support, self.query))
        return Episode(support, query, notices=self.notices)


@dataclass(frozen=True)
class Batcher:
    """Splits sets into micro-batches of at most `micro_batch_size` rows and returns this rank's share.

    pack: function from rows (longest first) and a minimum number of sequences to packed sequences, which then
    count as rows. max_tokens: largest number of tokens of a micro-batch of several rows, with padding; 0: no
    limit. collate_fn: makes the inputs and targets of rows; None: they are padded or stacked. whole_sets:
    refuse a set that is not one micro-batch.
    """

    pad_token_id: int
    micro_batch_size: int = 32
    group_rank: int = 0
    group_size: int = 1
    pack: Callable[[Sequence[Example], int], list[Example]] | None = None
    max_tokens: int = 0
    collate_fn: CollateFn | None = None
    whole_sets: bool = False

    def episode(self, rows: Any) -> Episode:
        """The micro-batches of an episode of examples (`EpisodeRows`), and of the samples of its support
        set.
        """
        sets = [self.split(part, len(rows.classes)) for part in (rows.support, rows.query, *rows.samples)]
        support, query, *samples = sets
        return Episode(SupportSet(support, samples) if samples else support, query)

    def split(self, examples: Sequence[Example], classes: int = 0) -> list[MicroBatch]:
        """Return this rank's micro-batches of a set; every rank of the group gets the same number, none for
        an empty set.

        A rank without rows gets one row of weight 0, because it takes part in the collectives.
        """
        if not examples:
            return []
        # 1 where no label is learned
        total = sum(example.weight * example.label_tokens for example in examples) or 1
        ordered = sorted(examples, key=lambda example: len(example.input_ids), reverse=True)
        if self.pack is not None:
            ordered = self.pack(ordered, self.group_size)
        if self.max_tokens:
            parts = cut_by_tokens(ordered, self.micro_batch_size, self.max_tokens, self.group_size)
        else:
            rounds = -(-len(ordered) // (self.group_size * self.micro_batch_size))
            size, longer = divmod(len(ordered), rounds * self.group_size)  # sizes differ by one at most
            bounds = [i * size + min(i, longer) for i in range(rounds * self.group_size + 1)]
            parts = [ordered[a:b] for a, b in pairwise(bounds)]
        if self.whole_sets and len(parts) > 1:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} and max_tokens_per_micro_batch={self.max_tokens}"
                f" cut the {len(examples)} rows of a set, whose losses depend on each other; raise them"
            )
        batches = []
        for part in parts[self.group_rank :: self.group_size]:
            rows, weight = part or ordered[-1:], 1 / total if part else 0.0
            batch = collate(rows, weight, self.pad_token_id, classes, self.collate_fn)
            batch.weights *= torch.tensor([row.weight for row in rows])
            batches.append(batch)
        return batches


def cut_by_tokens(rows: Sequence[Example], most: int, tokens: int, multiple: int) -> list[Sequence[Example]]:
    """Cut rows, longest first, into runs of at most `most` rows and `tokens` tokens with padding; a longer
    row is a run.

    `multiple` divides the number of runs: the largest ones are halved, and empty runs are added where all
    have one row.
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
        half = len(runs[largest]) // 2
        if half:
            runs[largest : largest + 1] = [runs[largest][:half], runs[largest][half:]]
        else:
            runs.append(rows[:0])
    return runs


def collate(
    rows: Sequence[Example],
    weight: float,
    pad_token_id: int,
    classes: int = 0,
    collate_fn: CollateFn | None = None,
) -> MicroBatch:
    """The micro-batch of some rows, of the same weight. Raises `UsageError`."""
    inputs, targets = (collate_fn or padded)(rows, pad_token_id)
    if classes:
        targets["classes"] = torch.full((len(rows),), classes)
    return MicroBatch(
        inputs,
        targets,
        torch.full((len(rows),), weight),
        sum(len(row.input_ids) for row in rows) if weight else 0,
    )


def padded(rows: Sequence[Example], pad_token_id: int) -> Collated:
    """Pad the tokens of rows on the right to the longest of them, or stack their other inputs.

    Raises `UsageError` for inputs of different shapes.
    """
    inputs: dict[str, Any] = {"input_ids": pad_right([row.input_ids for row in rows], pad_token_id)}
    if rows[0].values:
        inputs = {name: stack(name, [row.values[name] for row in rows]) for name in rows[0].values}
    elif rows[0].position_ids:
        inputs["position_ids"] = pad_right([row.position_ids for row in rows], PADDING["position_ids"])
    else:
        inputs["attention_mask"] = pad_right([[1] * len(row.input_ids) for row in rows], 0)
    return inputs, {"labels": labels_of(rows)}


def labels_of(rows: Sequence[Example]) -> Tensor:
    """The labels of rows: classes [B], or one per token [B, T]."""
    labels: list[Any] = [row.labels for row in rows]
    return torch.tensor(labels) if isinstance(labels[0], int) else pad_right(labels, PADDING["labels"])


def stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The inputs of rows as one tensor [B, ...]. Raises `UsageError` for different shapes."""
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise UsageError(
            f"{name} of a micro-batch have the shapes {list(shapes[0])} and {list(shapes[-1])}; let the image"
            " processor resize images to one size, or use --micro_batch_size 1"
        )
    return torch.stack(list(tensors))


def pad_right(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Rows of different lengths as one tensor [B, T]."""
    return pad_sequence(
        [torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value
    )


Sets = Sequence[Sequence[MicroBatch]]
"""Micro-batches of one set of each task."""


def merge_task_batches(sets: Sets) -> list[MicroBatch]:
    """Concatenate the m-th micro-batches of all tasks for every m, after `pad_to_same_shape`."""
    return [
        MicroBatch(
            concatenated([batch.inputs for batch in batches]),
            concatenated([batch.targets for batch in batches]),
            torch.cat([batch.weights for batch in batches]),
            sum(batch.tokens for batch in batches),
        )
        for batches in zip(*pad_to_same_shape(sets), strict=True)
    ]


def concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of tensors by name, all with the same names."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def pad_to_same_shape(sets: Sets) -> list[list[MicroBatch]]:
    """Give every task the same number of micro-batches, and the m-th of all tasks the same shape.

    Added rows and micro-batches have weight 0.
    """
    found: list[list[MicroBatch]] = [[] for _ in sets]
    for each in zip_longest(*sets):
        present = [
            batch or replace(own[-1], weights=torch.zeros_like(own[-1].weights), tokens=0)
            for batch, own in zip(each, sets, strict=True)
        ]
        rows, lengths = max(len(batch.weights) for batch in present), dict[str, int]()
        for name, tensor in (
            one for batch in present for one in (*batch.inputs.items(), *batch.targets.items())
        ):
            if name in PADDING and tensor.ndim > 1:
                lengths[name] = max(tensor.shape[-1], lengths.get(name, 0))
        for own, batch in zip(found, present, strict=True):
            own.append(widen(batch, rows, lengths))
    return found


def widen(batch: MicroBatch, rows: int, lengths: Mapping[str, int]) -> MicroBatch:
    """Add masked tokens, and copies of the last row with weight 0. lengths: by name, in tokens."""
    more = rows - len(batch.weights)

    def wider(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if name in lengths:
                tensor = F.pad(tensor, (0, lengths[name] - tensor.shape[-1]), value=PADDING[name])
            found[name] = torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])])
        return found

    return replace(
        batch,
        inputs=wider(batch.inputs),
        targets=wider(batch.targets),
        weights=F.pad(batch.weights, (0, more)),
    )


def pack(rows: Sequence[Example], least: int, length: int) -> list[Example]:
    """Pack `rows` (longest first) into sequences of at most `length` tokens, at least `least` of them if
    there are as many rows.

    Each row joins the shortest sequence if it has room, so that sequences are about equally long (Graham
    1969, longest processing time first). The same rows give the same sequences on every rank.
    """
    tokens = sum(len(row.input_ids) for row in rows)
    bins: list[list[Example]] = [[] for _ in range(max(-(-tokens // length), min(least, len(rows))))]
    filled = [0] * len(bins)
    for row in rows:
        shortest = min(range(len(bins)), key=filled.__getitem__)
        if filled[shortest] and filled[shortest] + len(row.input_ids) > length:
            shortest = len(bins)
            bins.append([])
            filled.append(0)
        bins[shortest].append(row)
        filled[shortest] += len(row.input_ids)
    return sorted(
        (concat_rows(members) for members in bins if members),
        key=lambda sequence: len(sequence.input_ids),
        reverse=True,
    )


def concat_rows(rows: Sequence[Example]) -> Example:
    """One sequence; no loss is taken on the first token of a row.

    Raises `UsageError` for rows of different weights.
    """
    weights = {row.weight for row in rows}
    if len(weights) > 1:
        raise UsageError(
            f"packing=True with rows of the weights {min(weights):g} and {max(weights):g}: a sequence has one"
            " weight; leave --packing out"
        )
    return Example(
        input_ids=[token for row in rows for token in row.input_ids],
        labels=[label for row in rows for label in (IGNORE, *row.token_labels[1:])],
        position_ids=[position for row in rows for position in range(len(row.input_ids))],
        weight=weights.pop(),
    )
