"""Tasks of a user's function: rows of any kind, drawn by number.

    Tasks(draw, train=1000, test=100)    draw(seed) -> (support rows, query rows), a pure function
        --dataset module:name, or MetaTrainer(dataset=Tasks(...))

Rows are what the learner's `encode` takes: of classification dictionaries with a text and a class, of
causal_lm with an input and an output, of your learner any picklable objects. Nothing is read before training,
so that a function may ask a database, or generate.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_named, source_of
from fmmeta.config.fields import default_of, refuse_first, shown
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import RowEncoder, encode
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.data.rows import Table, rows_of, tabulate
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import Draw, TaskSource

Rows = Sequence[Any]
UNREAD = (  # settings that say how tasks are drawn from rows, which the function does
    *("dataset_config_name", "dataset_split", "dataset_revision", "stratum_column", "stratify_by"),
    *("task_column", "class_splits", "class_split", "task_splits", "k_shot", "k_shot_max", "num_query"),
    *("label_names", "class_weights"),
)


@dataclass(frozen=True)
class Tasks:
    """Tasks by number. train, valid, test: how many; those of validation follow those of training.

    draw: number of a task -> its support and query rows: always the same ones. name: in messages and files.
    stratum: number of a task -> its stratum, for meta-batches with equal shares; None: all in one.

    >>> from fmmeta import Tasks
    >>> Tasks(lambda seed: ([(f"text {seed}", "a")], [(f"more {seed}", "a")]), train=100, test=20)
    Tasks(train=100, valid=0, test=20)
    """

    draw: Callable[[int], tuple[Rows, Rows]]
    train: int
    valid: int = 0
    test: int = 0
    name: str = "tasks"
    stratum: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        counts = [self.train, self.valid, self.test]
        if (
            not callable(self.draw)
            or any(type(one) is not int or one < 0 for one in counts)
            or not self.train
        ):
            raise UsageError(
                f"{self!r}: give a function draw(seed) -> (support, query) and numbers of tasks, at least one"
                " of them to train on"
            )

    def __repr__(self) -> str:
        return f"Tasks(train={self.train}, valid={self.valid}, test={self.test})"

    def numbers(self, split: str) -> range:
        """The numbers of the tasks of train, valid or test."""
        first = {"train": 0, "valid": self.train, "test": self.train + self.valid}[split]
        return range(first, first + getattr(self, split))

    @property
    def fingerprint(self) -> str:
        """A digest of the counts and the source of `draw`, without the functions that it calls."""
        return digest([self.name, repr(self), source_of(self.draw)])


@dataclass(frozen=True)
class OwnRows:
    """Rows that a function has drawn, in place of a `TokenStore`: a row is its own number.

    encoder: of the rows.
    """

    encoder: RowEncoder

    def check(self) -> None:
        """Nothing is left to read."""

    def value(self, row: Any) -> Any:
        return row

    def text(self, column: str, row: Any) -> str:
        """What identifies a row, as its input; it has no other columns."""
        return repr(row) if column == "input" else ""


class OwnSource(TaskSource):
    """The tasks of a split. numbers: of its tasks."""

    def __init__(self, tasks: Tasks, numbers: Sequence[int], encoder: RowEncoder) -> None:
        self.tasks, self.numbers, self.encoder = tasks, numbers, encoder
        stratum = tasks.stratum or (lambda number: "all")
        self.items = Items.of(Item(f"{tasks.name}/{number}", str(stratum(number)), 1) for number in numbers)

    def draw(self, task: Task) -> Draw:
        number = self.numbers[task.item]
        with usage_errors(f"dataset={self.tasks.name}: draw({number}) failed", "correct the function"):
            support, query = self.tasks.draw(number)
            support, query = [*support], [*query]
        if not support or not query:
            raise UsageError(
                f"dataset={self.tasks.name}: draw({number}) returned no rows; return some of each"
            )
        support, query = ([(row, 0) for row in rows] for rows in (support, query))
        return Draw(task, support, query, store=OwnRows(self.encoder))

    def class_keys(self, setting: str = "algorithm=joint") -> list[Any]:
        raise UsageError(f"{setting} needs the names of all classes, which a function does not tell")

    def num_rows(self) -> int:
        raise UsageError(
            "outer_epochs needs the number of rows, which a function does not tell; give outer_steps"
        )

    def part(self, chosen: np.ndarray) -> "OwnSource":
        return OwnSource(
            self.tasks, [one for one, is_in in zip(self.numbers, chosen, strict=True) if is_in], self.encoder
        )


def tasks_named(name: str) -> Tasks:
    """The tasks of `module:name`. Raises `UsageError`."""
    found = import_named("dataset", name, "fmmeta.Tasks")
    if not isinstance(found, Tasks):
        raise UsageError(f"dataset={name} is a {type(found).__name__}; name an object of fmmeta.Tasks")
    return replace(found, name=name)


def refuse_unread(name: str, config: Config) -> None:
    """Raise `UsageError` for a setting that tasks of a function do not use. name: of the tasks."""
    changed = (one for one in fields(config) if one.name in UNREAD)
    refuse_first(
        (
            getattr(config, one.name) not in (default_of(one), None),
            f"{one.name}={shown(getattr(config, one.name))} means nothing for dataset={name}, whose tasks a"
            " function draws; leave it out",
        )
        for one in changed
    )


def encoder(name: str, config: Config, tokenizer: Any) -> RowEncoder:
    """Encodes rows, dictionaries as a file has them or what the learner takes. name: of the tasks."""
    return (TextEncoder if config.learner.own is None else ReadEncoder)(config, tokenizer, name)


@dataclass(frozen=True)
class ReadEncoder(RowEncoder):
    """Encodes rows that a learner reads, as they are or as dictionaries of columns. name: of the tasks."""

    name: str

    def facts(self, support: Rows, query: Rows) -> dict[str, Any]:
        with self.errors():
            return super().facts(self.read(support), self.read(query))

    def examples(self, rows: Rows, facts: Mapping[str, Any]) -> list[Example]:
        with self.errors():
            return super().examples(self.read(rows), facts)

    def errors(self) -> AbstractContextManager[None]:
        return usage_errors(f"dataset={self.name}: rows of a task cannot be encoded", "correct them")

    def read(self, rows: Rows) -> list[Any]:
        own = self.config.learner.own
        return [own.rows(self.config, [*row])(row) if isinstance(row, Mapping) else row for row in rows]


class TextEncoder(ReadEncoder):
    """Encodes texts, images or pairs; the classes are those of the support set."""

    def facts(self, support: Rows, query: Rows) -> dict[str, Any]:
        if not self.config.learner.of_classes:
            return {}
        names, found = ({*self.table(rows).target} for rows in (support, query))
        if len(names) > self.config.most_classes:
            raise UsageError(f"n_way={self.config.n_way} is below the {len(names)} classes; raise --n_way")
        if unknown := found - names:
            raise UsageError(f"the query set has the class {min(unknown)!r}, and the support set has none")
        return {"names": sorted(names)}

    def examples(self, rows: Rows, facts: Mapping[str, Any]) -> list[Example]:
        table, names = self.table(rows), facts.get("names")
        with self.errors():
            found = encode(self.tokenizer, self.config, table.image or table.input, table.target)
        labels = [names.index(one) for one in table.target] if names else [one.labels for one in found]
        return [replace(one, labels=label) for one, label in zip(found, labels, strict=True)]

    def table(self, rows: Rows) -> Table:
        images = isinstance(self.tokenizer, ImageReader)
        with self.errors():
            return tabulate(
                "rows",
                rows_of("rows", rows, self.config),
                self.config,
                lambda text: None,
                one_task=True,
                unique=False,
                images=images,
            )
