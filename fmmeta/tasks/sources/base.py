"""Task sources: list their tasks without reading data, and draw the rows of an episode on demand.

    TaskSource.items                 what there is, for the schedule
    TaskSource.draw(task) -> Draw    which rows support and query are, a pure function of the task's seed
    Draw.episode() -> Episode        their tokens

Kinds: N-way episodes over labelled rows, support and query pairs of named tasks (causal_lm), a mixture of
sources, and episodes that share one numbering of all classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task


@dataclass(frozen=True)
class Shape:
    """How large episodes are: classes, support examples per class (both possibly a range), query examples per
    class.

    Pairs of named tasks have one class in this sense.
    """

    n_way: int
    k_shot: int
    num_query: int
    n_way_max: int
    k_shot_max: int
    every: bool = False  # all classes there are, whatever n_way says

    def ways(self, rng: np.random.Generator, available: int) -> int:
        """Number of classes of an episode. Drawn first, so that the size is known from the seed alone."""
        if self.every:
            return available
        most = min(self.n_way_max, available)
        return self.n_way if most <= self.n_way else int(rng.integers(self.n_way, most + 1))

    def shots(self, rng: np.random.Generator, ways: int) -> np.ndarray:
        """Support examples of each class [ways], drawn second: uneven, as in Meta-Dataset (Triantafillou et
        al. 2020).
        """
        if self.k_shot_max <= self.k_shot:
            return np.full(ways, self.k_shot)
        return rng.integers(self.k_shot, self.k_shot_max + 1, ways)

    @property
    def fixed(self) -> bool:
        return self.n_way_max <= self.n_way and self.k_shot_max <= self.k_shot and not self.every

    def rows(self, seed: tuple[int, ...], available: int) -> int:
        """Rows of the episode that `seed` will draw."""
        rng = np.random.default_rng(seed)
        ways = self.ways(rng, available)
        return int(self.shots(rng, ways).sum()) + ways * self.num_query


@dataclass(frozen=True)
class EpisodeRows:
    """What one task shows (support) and asks (query). `classes`: name of each label, empty for causal_lm."""

    task: Task
    support: list[Example]
    query: list[Example]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """An episode as row numbers of a store, and the label of each row in this episode."""

    task: Task
    store: TokenStore
    support: list[tuple[int, int]]  # row, label
    query: list[tuple[int, int]]
    classes: tuple[str, ...] = ()

    def episode(self) -> EpisodeRows:
        """Read the tokens. Raises `OSError` if the store's file has changed."""
        self.store.check()
        support, query = (
            [self._example(row, label) for row, label in rows] for rows in (self.support, self.query)
        )
        return EpisodeRows(self.task, support, query, self.classes)

    def _example(self, row: int, label: int) -> Example:
        ids = TokenStore.cell(self.store.ids, row).tolist()
        return Example(ids, label if self.classes else TokenStore.cell(self.store.labels, row).tolist())


Known = Mapping[str, tuple[str, ...]]
"""Classes that an item's episodes may have, by name -> what tells each from all others of the source (data
set, task, name).
"""


class TaskSource(ABC):
    """Tasks of one split."""

    items: Items
    classes: tuple[
        str, ...
    ] = ()  # what labels number, where all episodes number the same classes; else each its own

    @abstractmethod
    def draw(self, task: Task) -> Draw:
        """The rows of a task's episode. Raises `OSError` or `UsageError` if they cannot be read."""

    def known(self) -> list[Known]:
        """The classes of each item. Raises `UsageError` where they are not known yet."""
        raise UsageError(
            "algorithm=joint needs the classes of all training tasks, and those of a folder of task files are"
            " not known before each is drawn; put the tasks into one file with a task column"
        )

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        """Expected tokens of the episode that (item, seed) will draw."""
        return int(self.items.tokens[item])

    def episode(self, task: Task) -> EpisodeRows:
        return self.draw(task).episode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.items)} items, {len(self.items.strata)} strata)"


class PairSource(TaskSource):
    """Named tasks of (input, output) pairs: `k_shot` pairs to learn from, `num_query` to be asked.

    `rows`: by task.
    """

    def __init__(
        self, store: TokenStore, rows: Mapping[str, np.ndarray], strata: Mapping[str, str], shape: Shape
    ) -> None:
        self.store, self.shape, self.rows = store, shape, list(rows.values())
        lengths, drawn = store.lengths(), shape.k_shot + shape.num_query
        self.items = Items.of(
            Item(name, strata[name], round(drawn * lengths[own].mean())) for name, own in rows.items()
        )

    def draw(self, task: Task) -> Draw:
        rows = self.rows[task.item]
        drawn = np.random.default_rng(task.seed).choice(
            len(rows), self.shape.k_shot + self.shape.num_query, replace=False
        )
        chosen = [(int(row), 0) for row in rows[drawn]]
        return Draw(task, self.store, chosen[: self.shape.k_shot], chosen[self.shape.k_shot :])


Pool = Mapping[str, np.ndarray]
"""Rows by class; an episode draws its classes from one pool."""


class ClassSource(TaskSource):
    """N-way episodes. Each named task is a pool; one labelled set is a single pool, named "".

    Each class of a labelled set leads episodes in turn, the others being drawn at random, so that every
    class, and with it every stratum, comes up equally often.
    """

    def __init__(
        self, store: TokenStore, pools: Mapping[str, Pool], strata: Mapping[str, str], shape: Shape
    ) -> None:
        self.store, self.shape = store, shape
        items: list[Item] = []
        self.draws: list[tuple[Pool, str | None]] = []  # pool and leading class of each item
        lengths = store.lengths()
        self.row_tokens: list[float] = []
        per_class = (shape.k_shot + shape.k_shot_max) / 2 + shape.num_query
        for pool_name, pool in pools.items():
            leads: list[str | None] = [None] if pool_name else list(pool)
            mean = float(lengths[np.concatenate(list(pool.values()))].mean())
            ways = (shape.n_way + min(shape.n_way_max, len(pool))) / 2
            for lead in leads:
                name = lead or pool_name
                items.append(Item(name, strata[name], round(ways * per_class * mean)))
                self.draws.append((pool, lead))
                self.row_tokens.append(mean)
        self.items = Items.of(items)

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        if self.shape.fixed:
            return super().size(item, seed)
        return round(self.row_tokens[item] * self.shape.rows(seed, len(self.draws[item][0])))

    def known(self) -> list[Known]:
        named = {
            id(pool): {name: (name,) if lead else (item.name, name) for name in pool}
            for item, (pool, lead) in zip(self.items, self.draws, strict=True)
        }
        return [named[id(pool)] for pool, _ in self.draws]

    def draw(self, task: Task) -> Draw:
        rng = np.random.default_rng(task.seed)
        pool, lead = self.draws[task.item]
        ways = self.shape.ways(rng, len(pool))
        shots = self.shape.shots(rng, ways)
        others = [name for name in pool if name != lead]
        chosen = [others[i] for i in rng.choice(len(others), ways - (lead is not None), replace=False)] + (
            [lead] if lead else []
        )
        classes = [chosen[i] for i in rng.permutation(ways)]
        support, query = [], []
        for label, name in enumerate(classes):
            shown, asked = self._pick(rng, pool[name], int(shots[label]))
            support += [(int(row), label) for row in shown]
            query += [(int(row), label) for row in asked]
        return Draw(task, self.store, support, query, tuple(classes))

    def _pick(self, rng: np.random.Generator, rows: np.ndarray, shots: int) -> tuple[np.ndarray, np.ndarray]:
        """Support and query rows of a class."""
        shown = min(shots, len(rows) - self.shape.num_query)
        drawn = rows[rng.choice(len(rows), shown + self.shape.num_query, replace=False)]
        return drawn[:shown], drawn[shown:]


class SplitRowsSource(ClassSource):
    """N-way episodes whose rows are pre-assigned to support or query.

    parts [rows of the store]: 0 for a query row; support rows have other numbers, each of which
    contributes equally many rows of a class, the first ones the remainder.
    """

    def __init__(
        self,
        store: TokenStore,
        pools: Mapping[str, Pool],
        strata: Mapping[str, str],
        shape: Shape,
        parts: np.ndarray,
    ) -> None:
        super().__init__(store, pools, strata, shape)
        self.parts = parts

    def _pick(self, rng: np.random.Generator, rows: np.ndarray, shots: int) -> tuple[np.ndarray, np.ndarray]:
        own, kinds = self.parts[rows], int(self.parts.max())
        counts = [
            self.shape.num_query,
            *(shots // kinds + (number < shots % kinds) for number in range(kinds)),
        ]
        asked, *shown = (
            rng.choice(rows[own == part], count, replace=False) for part, count in enumerate(counts)
        )
        return np.concatenate(shown), asked


class Mixture(TaskSource):
    """Several data sets as one source; each is a stratum."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self.sources = list(sources.values())
        self.items = Items.of(
            Item(f"{name}/{item.name}", name, item.tokens)
            for name, source in sources.items()
            for item in source.items
        )
        self.starts = np.cumsum([0, *(len(source.items) for source in self.sources)])
        self.names = list(sources)

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        source, own = self._find(item)
        return source.size(own, seed)

    def known(self) -> list[Known]:
        return [
            {name: (prefix, *full) for name, full in classes.items()}
            for prefix, source in zip(self.names, self.sources, strict=True)
            for classes in source.known()
        ]

    def draw(self, task: Task) -> Draw:
        source, own = self._find(task.item)
        return replace(source.draw(replace(task, item=own)), task=task)

    def _find(self, item: int) -> tuple[TaskSource, int]:
        which = int(np.searchsorted(self.starts, item, side="right")) - 1
        return self.sources[which], item - int(self.starts[which])


class GlobalLabelSource(TaskSource):
    """The episodes of another source, whose labels number the classes of all its tasks: for one classifier
    over them.

    Classes of different data sets and of different named tasks are different ones, whatever they are called.
    """

    def __init__(self, source: TaskSource) -> None:
        self.source, self.items = source, source.items
        known = source.known()
        numbers = {
            full: number
            for number, full in enumerate(dict.fromkeys(full for one in known for full in one.values()))
        }
        shared = {id(one): {name: numbers[full] for name, full in one.items()} for one in known}
        self.classes = tuple("/".join(full) for full in numbers)
        self.numbers = [shared[id(one)] for one in known]

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        return self.source.size(item, seed)

    def draw(self, task: Task) -> Draw:
        draw = self.source.draw(task)
        number = [self.numbers[task.item][name] for name in draw.classes]
        support, query = (
            [(row, number[label]) for row, label in rows] for rows in (draw.support, draw.query)
        )
        return replace(draw, support=support, query=query, classes=self.classes)


def short_names(datasets: Sequence[str]) -> list[str]:
    """Last parts of the data sets' names, or the names themselves where these are not enough to tell them
    apart.
    """
    short = [Path(name).name.split(".")[0] for name in datasets]
    return short if len(set(short)) == len(short) else list(datasets)


def shares(items: Items, weights: Mapping[str, float], temperature: float) -> np.ndarray | None:
    """Share of each stratum (codes of `items`): `weights` by name, or n ** (1 / temperature); None where
    natural.
    """
    if weights:
        wanted = np.array([weights[name] for name in items.strata])
    elif temperature != 1:
        wanted = np.bincount(items.stratum, minlength=len(items.strata)) ** (1 / temperature)
    else:
        return None
    return wanted / wanted.sum()
