"""Task sources: list the tasks of a split without reading data, and draw the rows of an episode on demand.

TaskSource.items                 the items that tasks are drawn from, for the schedule
TaskSource.draw(task) -> Draw    row numbers of support and query, a pure function of the task's seed
EpisodeTransform                 from an episode to another one; the first that reads replaces numbers by rows

ClassSource                      N-way K-shot episodes
PairSource                       episodes of input/output pairs
Mixture                          several data sets as one source
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task

RowsByClass = dict[str, np.ndarray]
"""Row numbers of a token store by class. Rows without classes (causal_lm) have the single key ""."""


ClassKey = tuple[str, ...]
"""Identifies a class among all classes of a source: (data set, task, name), parts that all share left out."""


@dataclass(frozen=True)
class EpisodeShape:
    """Numbers of classes and of support examples per class (both may be a range), and of query examples per
    class.

    An episode of input/output pairs has one class in this sense. all_classes: every episode has all classes
    of its task, whatever `n_way` is. names: rows that `name_rows` adds to each class, for the expected size.
    """

    n_way: int
    k_shot: int
    num_query: int
    n_way_max: int
    k_shot_max: int
    all_classes: bool = False
    names: int = 0

    @classmethod
    def of(cls, config: Config) -> "EpisodeShape":
        most, names = config.largest_way, int(config.label_names is not None)
        n_way = min(config.n_way, most)
        return cls(n_way, config.k_shot, config.num_query, most, config.most_shots, names=names)

    def draw_n_way(self, rng: np.random.Generator, available: int) -> int:
        """Number of classes. It is drawn first, so that the size of an episode depends on its seed alone."""
        if self.all_classes:
            return available
        most = min(self.n_way_max, available)
        return self.n_way if most <= self.n_way else int(rng.integers(self.n_way, most + 1))

    def draw_k_shot(self, rng: np.random.Generator, n_way: int) -> np.ndarray:
        """Support examples of each class [n_way], drawn second; uneven, as in Meta-Dataset (Triantafillou et
        al. 2020).
        """
        if self.k_shot_max <= self.k_shot:
            return np.full(n_way, self.k_shot)
        return rng.integers(self.k_shot, self.k_shot_max + 1, n_way)

    def rows(self, seed: tuple[int, ...], available: int) -> int:
        """Rows of the episode that `seed` draws from `available` classes."""
        rng = np.random.default_rng(seed)
        n_way = self.draw_n_way(rng, available)
        return int(self.draw_k_shot(rng, n_way).sum()) + n_way * (self.names + self.num_query)

    def mean_rows(self, available: int) -> float:
        """Rows of an episode from `available` classes, on average."""
        per_class = (self.k_shot + self.k_shot_max) / 2 + self.names + self.num_query
        return (self.n_way + min(self.n_way_max, available)) / 2 * per_class


@dataclass(frozen=True)
class EpisodeRows:
    """The support and query rows of a task, each an `Example`, or what an `EpisodeTransform` makes one of.

    classes: name of each label, if rows have some. samples: the support rows of each inner step; empty: each
    step has all of them. facts: what answers are read with (`Learner.facts`).
    """

    task: Task
    support: list[Any]
    query: list[Any]
    classes: tuple[str, ...] = ()
    samples: tuple[list[Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def encoded(self, encoder: Any, labels: Sequence[Sequence[int]] = ()) -> "EpisodeRows":
        """The rows, each an `Example`. encoder: has their `facts` and `examples`. labels: of the rows of
        both sets, where `classes` are known. Raises `UsageError`.
        """
        facts = {} if labels else {**encoder.facts(self.support, self.query)}
        support, query = (encoder.examples(rows, facts) for rows in (self.support, self.query))
        for rows, numbers in zip((support, query), labels, strict=False):
            rows[:] = [replace(one, labels=label) for one, label in zip(rows, numbers, strict=True)]
        return EpisodeRows(self.task, support, query, tuple(facts.pop("names", self.classes)), facts=facts)


EpisodeTransform = Callable[[Any, np.random.Generator], Any]
"""From an episode (`EpisodeRows`) to another one. The generator is seeded by the task's seed alone."""
STREAM = 1 << 20  # part of the seeds of transforms, which differ from the seeds that draw rows


def transformed(episode: Any, transforms: Iterable[EpisodeTransform]) -> Any:
    """The episode after all transforms, in order, which share a generator."""
    rng = np.random.default_rng((*episode.task.seed, STREAM))
    for transform in transforms:
        episode = transform(episode, rng)
    return episode


@dataclass(frozen=True)
class Draw(EpisodeRows):
    """An episode whose rows are (row number of `store`, label in this episode) pairs."""

    store: Any = field(kw_only=True)  # a TokenStore, or what has its methods for rows
    keys: tuple[ClassKey, ...] = field(default=(), kw_only=True)  # of the classes
    notices: tuple[str, ...] = field(default=(), kw_only=True)  # of a file that was read for it

    def episode(self, rng: Any = None) -> EpisodeRows:
        """An `EpisodeTransform`: read the tokens, or encode the rows.

        Raises `OSError` if the store's file has changed, and as `TokenStore.examples` does.
        """
        self.store.check()
        return self.read()

    def read(self) -> EpisodeRows:
        """See `episode`."""
        support, query = ([row for row, _ in rows] for rows in (self.support, self.query))
        labels = [[label for _, label in rows] for rows in (self.support, self.query)] if self.classes else ()
        return EpisodeRows(self.task, support, query, self.classes).encoded(self.store, labels)

    def identity(self) -> Any:
        """What two evaluations that are compared must have in common, as JSON."""
        texts = [[self.store.text(side, row) for side in ("input", "target")] for row, _ in self.query]
        return [self.classes, self.support, self.query, texts]


def name_rows(draw: Draw, rng: Any = None) -> Draw:
    """An `EpisodeTransform`: after the support rows of each class, the row with its name (--label_names)."""
    support = list[tuple[int, int]]()
    for (label, rows), key in zip(groupby(draw.support, itemgetter(1)), draw.keys, strict=True):
        support += [*rows, (draw.store.label_rows[key[-1]], label)]
    return replace(draw, support=support)


def number_classes(numbers: Mapping[ClassKey, int], draw: Draw, rng: Any = None) -> Draw:
    """An `EpisodeTransform`: labels that number the classes of all tasks, for one classifier."""
    number = [numbers[key] for key in draw.keys]
    support, query = ([(row, number[label]) for row, label in rows] for rows in (draw.support, draw.query))
    return replace(draw, support=support, query=query, classes=tuple(map("/".join, numbers)))


class TaskSource(ABC):
    """Tasks of one split."""

    items: Items
    kind = "task"  # what an item is: `class`, of one set, or a named `task`

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.items)} items, {len(self.items.strata)} strata)"

    @abstractmethod
    def draw(self, task: Task) -> Draw:
        """The rows of a task's episode. Raises `OSError` or `UsageError` if they cannot be read."""

    def class_keys(self, setting: str = "algorithm=joint") -> list[ClassKey]:
        """All classes. setting: that needs them, for messages. Raises `UsageError` if data has to be read for
        it.
        """
        raise UsageError(
            f"{setting} needs the names of all classes, and those of a folder of task files are not known"
            " before each is drawn; put the tasks into one file with a task column"
        )

    def num_rows(self) -> int:
        """All rows. Raises `UsageError` if the source has to read data to count them."""
        raise UsageError(
            "outer_epochs needs the number of rows, and those of a folder of task files are not known before"
            " each is drawn; give outer_steps, or put the tasks into one file with a task column"
        )

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        """Expected tokens of the episode of (item, seed)."""
        return int(self.items.tokens[item])

    @abstractmethod
    def part(self, chosen: np.ndarray) -> "TaskSource":
        """The source of some items: classes or tasks. chosen: bool [items]."""

    def folds(self, most: int) -> int:
        """How many parts to divide the items into: at least two, at most `most`."""
        return max(2, min(most, len(self.items)))


def those_named(tasks: Mapping[str, RowsByClass], names: Collection[str]) -> dict[str, RowsByClass]:
    """The named tasks, or of one set of classes, which has the name "", the named classes."""
    if "" in tasks:
        return {"": {name: rows for name, rows in tasks[""].items() if name in names}}
    return {task: classes for task, classes in tasks.items() if task in names}


class ClassSource(TaskSource):
    """N-way episodes over labelled rows, from named tasks or from one set of classes, which has the name "".

    A named task is one item. A set of classes has an item per class: the anchor class, which is in each
    episode of the item, beside random others. So every class, and every stratum, is drawn equally often.
    """

    def __init__(
        self,
        store: TokenStore,
        tasks: Mapping[str, RowsByClass],
        strata: Mapping[str, str],
        shape: EpisodeShape,
        answers: Callable[[Draw, np.random.Generator], Draw] | None = None,
    ) -> None:
        """answers: gives each draw the answers of its classes (answers.py)."""
        self.store, self.tasks, self.strata, self.shape = store, tasks, strata, shape
        self.answers = answers
        self.draws: list[tuple[RowsByClass, str | None]] = []  # classes of each item, and its anchor class
        self.row_tokens: list[float] = []  # mean of each item
        items, lengths = list[Item](), store.lengths()
        for task, classes in tasks.items():
            mean = float(lengths[np.concatenate(list(classes.values()))].mean())
            tokens = round(shape.mean_rows(len(classes)) * mean)
            for anchor in [None] if task else classes:
                items.append(Item(anchor or task, strata[anchor or task], tokens))
                self.draws.append((classes, anchor))
                self.row_tokens.append(mean)
        self.items = Items.of(items)
        self.kind = "class" if "" in tasks else "task"

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        return round(self.row_tokens[item] * self.shape.rows(seed, len(self.draws[item][0])))

    def folds(self, most: int) -> int:
        """Parts of one set of classes have at least two of them, if there are four."""
        return super().folds(min(most, len(self.items) // 2) if self.kind == "class" else most)

    def part(self, chosen: np.ndarray) -> "ClassSource":
        """An episode of fewer classes than `n_way` has all of them."""
        names = {item.name for item, is_in in zip(self.items, chosen, strict=True) if is_in}
        shape = self.shape
        if "" in self.tasks:
            shape = replace(shape, n_way=min(shape.n_way, len(names)))
        return type(self)(self.store, those_named(self.tasks, names), self.strata, shape, self.answers)

    def num_rows(self) -> int:
        return sum(len(rows) for classes in self.tasks.values() for rows in classes.values())

    def class_keys(self, setting: str = "") -> list[ClassKey]:
        return [(task, name) if task else (name,) for task, classes in self.tasks.items() for name in classes]

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
        support, query, num_query = list[tuple[int, int]](), list[tuple[int, int]](), self.shape.num_query
        for label, name in enumerate(classes):
            most = min(int(shots[label]), len(rows[name]) - num_query)
            drawn = rows[name][rng.choice(len(rows[name]), most + num_query, replace=False)].tolist()
            support += [(row, label) for row in drawn[:most]]
            query += [(row, label) for row in drawn[most:]]
        of_task = () if anchor is not None else (self.items.names[task.item],)
        keys = tuple((*of_task, name) for name in classes)
        draw = Draw(task, support, query, tuple(classes), store=self.store, keys=keys)
        return self.answers(draw, rng) if self.answers else draw


class PairSource(ClassSource):
    """Episodes of `k_shot` support pairs and `num_query` query pairs of a named task, whose class is ""."""

    def draw(self, task: Task) -> Draw:
        rows, k_shot = self.draws[task.item][0][""], self.shape.k_shot
        drawn = np.random.default_rng(task.seed).choice(
            len(rows), k_shot + self.shape.num_query, replace=False
        )
        pairs = [(int(row), 0) for row in rows[drawn]]
        return Draw(task, pairs[:k_shot], pairs[k_shot:], store=self.store)


class Mixture(TaskSource):
    """Several data sets as one source; each is a stratum."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        self.items = Items.of(
            Item(f"{name}/{item.name}", name, item.tokens)
            for name, source in sources.items()
            for item in source.items
        )
        self.kind = "class" if {one.kind for one in self.sources} == {"class"} else "task"
        self.starts = np.cumsum([0, *(len(source.items) for source in self.sources)])

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        source, own = self._find(item)
        return self.sources[source].size(own, seed)

    def num_rows(self) -> int:
        return sum(source.num_rows() for source in self.sources)

    def folds(self, most: int) -> int:
        return min(source.folds(most) for source in self.sources)

    def part(self, chosen: np.ndarray) -> "Mixture":
        """A data set of which a single class is chosen is left out. Raises `UsageError` if none remains."""
        parts = np.split(chosen, self.starts[1:-1])
        found = {
            name: source.part(part)
            for name, source, part in zip(self.names, self.sources, parts, strict=True)
            if part.sum() > (source.kind == "class")
        }
        if not found:
            raise UsageError(
                f"dataset={' '.join(self.names)}: no data set has two classes in each fold; give validation"
                " classes, or leave tune out"
            )
        return Mixture(found)

    def class_keys(self, setting: str = "algorithm=joint") -> list[ClassKey]:
        return [
            (name, *key)
            for name, source in zip(self.names, self.sources, strict=True)
            for key in source.class_keys(setting)
        ]

    def draw(self, task: Task) -> Draw:
        source, own = self._find(task.item)
        draw = self.sources[source].draw(replace(task, item=own))
        return replace(draw, task=task, keys=tuple((self.names[source], *key) for key in draw.keys))

    def _find(self, item: int) -> tuple[int, int]:
        """The number of an item's source, and the number of the item in it."""
        source = int(np.searchsorted(self.starts, item, side="right")) - 1
        return source, item - int(self.starts[source])


def short_names(datasets: Sequence[str]) -> list[str]:
    """File names of the data sets without endings, or the names as given if two of these are equal."""
    short = [Path(name).name.split(".")[0] for name in datasets]
    return short if len(set(short)) == len(short) else list(datasets)


def stratum_shares(config: Config, items: Items) -> np.ndarray | None:
    """Share of each stratum (codes of `items`) in the tasks; None: in proportion to its items.

    `--mix_weights` names shares by data set; `--mix_temperature T` gives n items a share in proportion to
    n ** (1 / T).
    """
    if config.mix_weights and len(config.dataset) > 1:  # the strata of one data set are its own
        weights = dict(zip(short_names(config.dataset), config.mix_weights, strict=True))
        wanted = np.array([weights[name] for name in items.strata])
    elif config.mix_temperature != 1:
        count = np.bincount(items.stratum, minlength=len(items.strata))
        wanted = (count / count.max()) ** (1 / config.mix_temperature)
    else:
        return None
    return wanted / wanted.sum()
