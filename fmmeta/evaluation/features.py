"""Features of the rows of many episodes by a frozen model: each distinct row is computed once.

    rows of all episodes --> distinct rows, by length --> fixed batches, split over groups --> table [R, D]

Which rows share a batch depends on the rows alone, so that any number of groups computes the same table.

R distinct rows, D features.
"""

from __future__ import annotations

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
    """Features of rows, fp32 [R, D] in host memory, and where each (store, row) is."""

    table: Tensor
    place: dict[Key, int]

    def of(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Support features [S, D] and labels [S], query features [Q, D] and labels [Q] of an episode."""
        sets = []
        for rows in (draw.support, draw.query):
            sets.append(self.table[[self.place[draw.store.path, row] for row, _ in rows]])
            sets.append(torch.tensor([label for _, label in rows]))
        return sets[0], sets[1], sets[2], sets[3]


def embed(
    worker: Worker,
    draws: Sequence[Draw],
    batcher: Batcher,
    ranks: ProcessGroups,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Features of every row of `draws` from the weights that the worker holds. Collective: world."""
    stores: dict[Path, TokenStore] = {draw.store.path: draw.store for draw in draws}
    keys = sorted(
        {(draw.store.path, row) for draw in draws for rows in (draw.support, draw.query) for row, _ in rows}
    )
    for store in stores.values():
        store.check()
    examples = [Example(stores[path].input_ids(row), place) for place, (path, row) in enumerate(keys)]
    examples.sort(key=lambda example: (len(example.input_ids), example.labels))
    size = batcher.micro_batch_size * batcher.group_size
    batches = [examples[begin : begin + size] for begin in range(0, len(examples), size)]
    mine = batches[ranks.layout.group_index :: ranks.layout.num_groups]
    table: Tensor | None = None
    for done, batch in enumerate(mine):
        progress(done, len(mine))
        dealt = batcher.split(batch)
        for part, rows in zip(dealt, worker.features(dealt), strict=True):
            if table is None:
                table = torch.zeros(len(keys), rows.shape[1])
            counted = (
                part.weights > 0 if worker.counts_rows else torch.zeros_like(part.weights, dtype=torch.bool)
            )
            table[part.labels[counted]] = rows.cpu()[counted]
    width = int(
        max(map(float, ranks.world.gather_bytes(str(0 if table is None else table.shape[1]).encode())))
    )
    found = ranks.world.sum_(torch.zeros(len(keys), width) if table is None else table)
    return Features(found, {key: place for place, key in enumerate(keys)})
