"""A source of named tasks of (input, output) pairs, for causal language models."""

from collections.abc import Mapping

import numpy as np

from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import Draw, EpisodeShape, RowsByClass, TaskSource


class PairSource(TaskSource):
    """Episodes of `k_shot` support pairs and `num_query` query pairs of a named task."""

    def __init__(
        self,
        store: TokenStore,
        tasks: Mapping[str, RowsByClass],
        strata: Mapping[str, str],
        shape: EpisodeShape,
    ) -> None:
        self.store, self.shape, lengths = store, shape, store.lengths()
        self.rows = [rows[""] for rows in tasks.values()]
        self.items = Items.of(
            Item(name, strata[name], round(shape.mean_rows(1) * lengths[rows].mean()))
            for name, rows in zip(tasks, self.rows, strict=True)
        )

    def draw(self, task: Task) -> Draw:
        rows, k_shot = self.rows[task.item], self.shape.k_shot
        drawn = np.random.default_rng(task.seed).choice(
            len(rows), k_shot + self.shape.num_query, replace=False
        )
        pairs = [(int(row), 0) for row in rows[drawn]]
        return Draw(task, self.store, pairs[:k_shot], pairs[k_shot:])
