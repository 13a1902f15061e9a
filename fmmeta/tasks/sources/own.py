"""Tasks of a user's function: rows of any kind, drawn by number.

    Tasks(draw, train=1000, test=100)    draw(number) -> (support rows, query rows), a pure function
        --dataset module:name, or MetaTrainer(dataset=Tasks(...))

Rows are pairs or dictionaries, as a file has them, or any picklable objects that the learner's `encode`
takes. Nothing is read before training, so that a function may ask a database, or generate.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_named, source_of
from fmmeta.config.fields import default_of, refuse_first, shown
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.rows import prefixed, rows_of
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import Draw, TaskSource

Rows = Sequence[Any]
UNREAD = (  # settings that say how tasks are drawn from rows, which the function does
    *("dataset_config_name", "dataset_split", "dataset_revision", "stratum_column", "stratify_by"),
    *("task_column", "class_splits", "class_split", "task_splits", "k_shot", "k_shot_max", "num_query"),
    *("label_names", "class_weights", "answers"),
)


@dataclass(frozen=True)
class Tasks:
    """Tasks by number. train, valid, test: how many; those of validation follow those of training.

    draw: number of a task -> its support and query rows: always the same ones. An `OSError`, of a connection
    say, is retried three times; other errors are those of a task that cannot be read (on_bad_task). name: in
    messages and files. stratum: number of a task -> its stratum, for meta-batches with equal shares; None:
    all in one.

    >>> from fmmeta import Tasks
    >>> Tasks(lambda n: ([(f"text {n}", "a")], [(f"more {n}", "a")]), train=100, test=20)
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
                f"{self!r}: give a function draw(number) -> (support, query) and numbers of tasks, at least"
                " one of them to train on"
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
    """Rows that a function has drawn and the learner has read, in place of a `TokenStore`: a row is its own
    number.

    name: of the tasks.
    """

    name: str
    encoder: RowEncoder

    @cached_property
    def kind(self) -> Any:
        """The class of the learner."""
        return self.encoder.config.learner.kind

    def check(self) -> None:
        """Nothing is left to read."""

    def value(self, row: Any) -> Any:
        return row

    def text(self, column: str, row: Any) -> str:
        """What identifies a row, as its input; it has no other columns."""
        return repr(row) if column == "input" else ""

    def facts(self, support: Rows, query: Rows) -> dict[str, Any]:
        with self.errors():
            return self.encoder.facts(support, query)

    def examples(self, rows: Rows, facts: Mapping[str, Any]) -> list[Example]:
        with self.errors():
            return self.encoder.examples(rows, facts)

    def read(self, row: Any) -> Any:
        """A pair, or a dictionary as a file has it, as the learner reads it; another object as it is."""
        config, kind = self.encoder.config, self.kind
        if not (kind.pair or isinstance(row, Mapping)):
            return row
        with self.errors():
            (given,) = rows_of("rows", [row], config)
            with prefixed(given.origin):
                return kind.rows(config, self.encoder.tokenizer, [*given.values]).read(given)

    def errors(self) -> AbstractContextManager[None]:
        return usage_errors(f"dataset={self.name}: rows of a task cannot be encoded", "correct them")


class OwnSource(TaskSource):
    """The tasks of a split. numbers: of its tasks."""

    def __init__(self, tasks: Tasks, numbers: Sequence[int], encoder: RowEncoder) -> None:
        self.tasks, self.numbers, self.encoder = tasks, numbers, encoder
        stratum = tasks.stratum or (lambda number: "all")
        self.items = Items.of(Item(f"{tasks.name}/{number}", str(stratum(number)), 1) for number in numbers)

    def draw(self, task: Task) -> Draw:
        number = self.numbers[task.item]
        failed = f"dataset={self.tasks.name}: draw({number}) failed"
        with usage_errors(failed, "correct the function", passes=(OSError,)):  # which is retried
            support, query = self.tasks.draw(number)
            support, query = [*support], [*query]
        if not support or not query:
            raise UsageError(
                f"dataset={self.tasks.name}: draw({number}) returned no rows; return some of each"
            )
        store, classes = OwnRows(self.tasks.name, self.encoder), tuple[str, ...]()
        support, query = ([store.read(row) for row in rows] for rows in (support, query))
        if self.encoder.config.learner.of_classes:
            classes = tuple(store.facts(support, query)["names"])
        support, query = (
            [(row, classes.index(row["label"]) if classes else 0) for row in rows]
            for rows in (support, query)
        )
        return Draw(task, support, query, classes, store=store)

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


def refuse_drawn(source: TaskSource, what: str, fix: str) -> None:
    """Raise `UsageError` for tasks of a function, where `what` reads rows of a data set by their numbers."""
    if isinstance(source, OwnSource):
        raise UsageError(
            f"{what} reads the rows of a data set, and dataset={source.tasks.name} are tasks that a function"
            f" draws; {fix}"
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
