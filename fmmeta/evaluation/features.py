"""Features of a frozen model for the rows of many episodes; each distinct row is computed once.

    rows of all episodes --> distinct rows, by length --> fixed batches, split over groups --> table [R, D]

The batches depend on the rows alone, so that any number of groups computes the same table.

R distinct rows, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Batcher, Example
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.sources.base import Draw

Key = tuple[Path, int]


@dataclass(frozen=True)
class Features:
    """Features of rows, fp32 [R, D] in host memory. `index`: row of the table by store and row."""

    table: Tensor
    index: dict[Key, int]

    def of(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Support features [S, D] and labels [S], query features [Q, D] and labels [Q] of an episode."""
        sets = []
        for rows in (draw.support, draw.query):
            sets.append(self.table[[self.index[draw.store.path, row] for row, _ in rows]])
            sets.append(torch.tensor([label for _, label in rows]))
        return sets[0], sets[1], sets[2], sets[3]


def embed(
    worker: Worker,
    draws: Sequence[Draw],
    batcher: Batcher,
    ranks: ProcessGroups,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Compute the features of every row of `draws` with the weights of the worker. Collective: world."""
    stores: dict[Path, TokenStore] = {draw.store.path: draw.store for draw in draws}
    keys = sorted(
        {(draw.store.path, row) for draw in draws for rows in (draw.support, draw.query) for row, _ in rows}
    )
    for store in stores.values():
        store.check()
    examples = [Example(stores[path].input_ids(row), index) for index, (path, row) in enumerate(keys)]
    examples.sort(key=lambda example: (len(example.input_ids), example.labels))
    size = batcher.micro_batch_size * batcher.group_size
    batches = [examples[begin : begin + size] for begin in range(0, len(examples), size)]
    share = batches[ranks.layout.group_index :: ranks.layout.num_groups]
    computed: list[tuple[Tensor, Tensor]] = []  # rows of the table, and their features
    for done, batch in enumerate(share):
        progress(done, len(share))
        micro_batches = batcher.split(batch)
        for part, features in zip(micro_batches, worker.features(micro_batches), strict=True):
            real = part.weights > 0
            if worker.counts_rows:
                computed.append((part.labels[real], features.cpu()[real]))
    width = computed[0][1].shape[1] if computed else 0  # 0: this rank computes none
    width = max(map(int, ranks.world.gather_bytes(str(width).encode())))
    table = torch.zeros(len(keys), width)
    for rows, features in computed:
        table[rows] = features
    return Features(ranks.world.sum_(table), {key: row for row, key in enumerate(keys)})
