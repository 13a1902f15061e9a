"""Task sources: list the tasks of a split without reading data, and draw the rows of an episode on demand.

TaskSource.items                 the items that tasks are drawn from, for the schedule
TaskSource.draw(task) -> Draw    row numbers of support and query, a pure function of the task's seed
Draw.episode() -> EpisodeRows    the tokens of these rows
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Items, Task

RowsByClass = Mapping[str, np.ndarray]
"""Row numbers of a token store by class. Rows without classes (causal_lm) have the single key ""."""


@dataclass(frozen=True)
class EpisodeShape:
    """Numbers of classes and of support examples per class (both may be a range), and of query examples per
    class.

    An episode of input/output pairs has one class in this sense. all_classes: every episode has all classes
    of its task, whatever `n_way` is.
    """

    n_way: int
    k_shot: int
    num_query: int
    n_way_max: int
    k_shot_max: int
    all_classes: bool = False

    @classmethod
    def of(cls, config: Config) -> "EpisodeShape":
        n_way, most = (config.n_way, config.most_classes) if config.task_type == "classification" else (1, 1)
        return cls(n_way, config.k_shot, config.num_query, most, config.most_shots)

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

    @property
    def fixed(self) -> bool:
        """Whether all episodes have equally many classes and shots."""
        return self.n_way_max <= self.n_way and self.k_shot_max <= self.k_shot and not self.all_classes

    def rows(self, seed: tuple[int, ...], available: int) -> int:
        """Rows of the episode that `seed` draws from `available` classes."""
        rng = np.random.default_rng(seed)
        n_way = self.draw_n_way(rng, available)
        return int(self.draw_k_shot(rng, n_way).sum()) + n_way * self.num_query

    def mean_rows(self, available: int) -> float:
        """Rows of an episode from `available` classes, on average."""
        per_class = (self.k_shot + self.k_shot_max) / 2 + self.num_query
        return (self.n_way + min(self.n_way_max, available)) / 2 * per_class


@dataclass(frozen=True)
class EpisodeRows:
    """The tokenised support and query rows of a task. classes: name of each label, empty for causal_lm."""

    task: Task
    support: list[Example]
    query: list[Example]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """An episode as (row number of `store`, label in this episode) pairs."""

    task: Task
    store: TokenStore
    support: list[tuple[int, int]]
    query: list[tuple[int, int]]
    classes: tuple[str, ...] = ()  # name of each label, empty for causal_lm

    def episode(self) -> EpisodeRows:
        """Read the tokens. Raises `OSError` if the store's file has changed."""
        self.store.check()
        support, query = (
            [
                Example(self.store.input_ids(row), label if self.classes else self.store.labels(row))
                for row, label in rows
            ]
            for rows in (self.support, self.query)
        )
        return EpisodeRows(self.task, support, query, self.classes)


ClassKey = tuple[str, ...]
"""Identifies a class among all classes of a source: (data set, task, name), parts that all share left out."""


class TaskSource(ABC):
    """Tasks of one split."""

    items: Items
    classes: tuple[str, ...] = ()  # names of the labels if all episodes share one numbering of classes

    @abstractmethod
    def draw(self, task: Task) -> Draw:
        """The rows of a task's episode. Raises `OSError` or `UsageError` if they cannot be read."""

    def class_keys(self) -> list[ClassKey]:
        """All classes. Raises `UsageError` if the source has to read data to list them."""
        raise UsageError(
            "algorithm=joint needs the classes of all training tasks, and those of a folder of task files are"
            " not known before each is drawn; put the tasks into one file with a task column"
        )

    def class_key(self, item: int, name: str) -> ClassKey:
        """The key of class `name` in the episodes of an item."""
        raise NotImplementedError

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        """Expected tokens of the episode of (item, seed)."""
        return int(self.items.tokens[item])

    def episode(self, task: Task) -> EpisodeRows:
        return self.draw(task).episode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.items)} items, {len(self.items.strata)} strata)"
