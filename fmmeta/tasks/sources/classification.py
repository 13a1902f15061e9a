"""Sources of N-way K-shot episodes, and of episodes that share one numbering of all classes."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import ClassKey, Draw, EpisodeShape, RowsByClass, TaskSource


class ClassSource(TaskSource):
    """N-way episodes over labelled rows, from named tasks or from one set of classes, which has the name "".

    A named task is one item. A set of classes has an item per class: the anchor class, which is in each
    episode of the item, beside random others. So every class, and every stratum, is drawn equally often.

    parts [rows of the store]: pre-assigns rows, 0 to the query set, 1, 2, ... to the support set; each of
    these contributes equally many support rows of a class, the first ones the remainder. None: all rows can
    be in either set.
    """

    def __init__(
        self,
        store: TokenStore,
        tasks: Mapping[str, RowsByClass],
        strata: Mapping[str, str],
        shape: EpisodeShape,
        parts: np.ndarray | None = None,
    ) -> None:
        self.store, self.tasks, self.shape, self.parts = store, tasks, shape, parts
        self.draws: list[tuple[RowsByClass, str | None]] = []  # classes of each item, and its anchor class
        self.row_tokens: list[float] = []  # mean of each item
        items, lengths = list[Item](), store.lengths()
        for task, classes in tasks.items():
            mean = float(lengths[np.concatenate(list(classes.values()))].mean())
            tokens = round(shape.mean_rows(len(classes)) * mean)
            for anchor in [None] if task else classes:
                name = anchor or task
                items.append(Item(name, strata[name], tokens))
                self.draws.append((classes, anchor))
                self.row_tokens.append(mean)
        self.items = Items.of(items)

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        if self.shape.fixed:
            return super().size(item, seed)
        return round(self.row_tokens[item] * self.shape.rows(seed, len(self.draws[item][0])))

    def class_keys(self) -> list[ClassKey]:
        return [(task, name) if task else (name,) for task, classes in self.tasks.items() for name in classes]

    def class_key(self, item: int, name: str) -> ClassKey:
        return (name,) if self.draws[item][1] else (self.items.names[item], name)

    def draw(self, task: Task) -> Draw:
        rng = np.random.default_rng(task.seed)
        rows, anchor = self.draws[task.item]
        n_way = self.shape.draw_n_way(rng, len(rows))
        shots = self.shape.draw_k_shot(rng, n_way)
        others = [name for name in rows if name != anchor]
        chosen = [others[i] for i in rng.choice(len(others), n_way - (anchor is not None), replace=False)]
        if anchor is not None:
            chosen.append(anchor)
        classes = [chosen[i] for i in rng.permutation(n_way)]
        support, query = list[tuple[int, int]](), list[tuple[int, int]]()
        for label, name in enumerate(classes):
            for pairs, picked in zip(
                (support, query), self._pick(rng, rows[name], int(shots[label])), strict=True
            ):
                pairs += [(int(row), label) for row in picked]
        return Draw(task, self.store, support, query, tuple(classes))

    def _pick(self, rng: np.random.Generator, rows: np.ndarray, shots: int) -> tuple[np.ndarray, np.ndarray]:
        """Support and query rows of a class."""
        num_query = self.shape.num_query
        if self.parts is None:
            shots = min(shots, len(rows) - num_query)
            drawn = rows[rng.choice(len(rows), shots + num_query, replace=False)]
            return drawn[:shots], drawn[shots:]
        own, kinds = self.parts[rows], int(self.parts.max())
        counts = [num_query, *(shots // kinds + (number < shots % kinds) for number in range(kinds))]
        query, *support = (
            rng.choice(rows[own == part], count, replace=False) for part, count in enumerate(counts)
        )
        return np.concatenate(support), query


class GlobalLabelSource(TaskSource):
    """The episodes of another source with labels that number the classes of all tasks, for one classifier.

    Classes of different data sets or named tasks are different, also if their names are equal.
    """

    def __init__(self, source: TaskSource) -> None:
        self.source, self.items = source, source.items
        self.numbers = {key: number for number, key in enumerate(source.class_keys())}
        self.classes = tuple("/".join(key) for key in self.numbers)

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        return self.source.size(item, seed)

    def draw(self, task: Task) -> Draw:
        draw = self.source.draw(task)
        number = [self.numbers[self.source.class_key(task.item, name)] for name in draw.classes]
        support, query = (
            [(row, number[label]) for row, label in rows] for rows in (draw.support, draw.query)
        )
        return replace(draw, support=support, query=query, classes=self.classes)
