"""Groups the rows of a token store by task and class, and drops tasks and classes with too few rows."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.sources.base import EpisodeShape, RowsByClass, TaskSource
from fmmeta.tasks.sources.classification import ClassSource
from fmmeta.tasks.sources.pairs import PairSource


def strata_of(store: TokenStore) -> dict[str, str]:
    """The stratum of each unit of splits: that of its last row."""
    found = store.table.group_by("unit", use_threads=False).aggregate([("stratum", "last")])
    return dict(zip(found["unit"].to_pylist(), found["stratum_last"].to_pylist(), strict=True))


def make_source(
    config: Config,
    store: TokenStore,
    units: Sequence[str],
    strata: Mapping[str, str],
    split: str,
    notice: Callable[[str], None],
    parts: np.ndarray | None = None,
) -> TaskSource:
    """The source of one split with these units (classes or named tasks). `parts`: see ClassSource.

    Classes and tasks with too few rows for an episode are dropped with a notice, or (on_bad_task=raise)
    refused by a `UsageError`.
    """
    wanted, shape = set(units), EpisodeShape.of(config)
    tasks = group_rows(store, classes=config.task_type == "classification")
    if store.named_tasks:
        tasks = {task: classes for task, classes in tasks.items() if task in wanted}
    else:
        tasks = {"": {name: rows for name, rows in tasks[""].items() if name in wanted}}
    for task, classes in list(tasks.items()):
        for name, problem in problems(task, classes, shape, split):
            if config.on_bad_task == "raise":
                raise UsageError(problem)
            notice(f"left out: {problem}")
            if name is None:
                del tasks[task]
            else:
                del classes[name]
    if not tasks:
        raise UsageError(
            f"k_shot={config.k_shot}: no {'task' if store.named_tasks else 'class'} of the {split} split has"
            f" enough rows; lower k_shot, num_query={config.num_query} or n_way={config.n_way}"
        )
    if config.task_type == "causal_lm":
        return PairSource(store, tasks, strata, shape)
    return ClassSource(store, tasks, strata, shape, parts)


def group_rows(store: TokenStore, classes: bool) -> dict[str, dict[str, np.ndarray]]:
    """Row numbers by task and class (without `classes` one class, named ""), both in order of first
    appearance.
    """
    keys = ["task", "target"] if classes else ["task"]
    rows = store.table.select(keys).append_column("row", [np.arange(len(store))])
    found = rows.group_by(keys, use_threads=False).aggregate([("row", "list")])
    groups = zip(found.select(keys).to_pylist(), found["row_list"], strict=True)
    grouped: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for group, numbers in sorted(groups, key=lambda pair: pair[1][0].as_py()):
        grouped[group["task"]][group.get("target", "")] = numbers.values.to_numpy()
    return grouped


def problems(
    task: str, classes: RowsByClass, shape: EpisodeShape, split: str
) -> Iterator[tuple[str | None, str]]:
    """Classes with too few rows, as (class, error); then (None, error) if too few classes remain."""
    needed, of_task = shape.k_shot + shape.num_query, f" of task {task!r}" if task else ""
    small = {name: len(rows) for name, rows in classes.items() if len(rows) < needed}
    remaining = len(classes) - len(small)
    for name, count in small.items():
        what = f"class {name!r}{of_task}" if name else f"task {task!r}"
        need = f"k_shot={shape.k_shot} and num_query={shape.num_query} need {needed} rows"
        yield name, f"{need}, but {what} has {count}; lower them or leave it out of the {split} split"
    if remaining < shape.n_way:
        where = f"task {task!r}" if task else f"the {split} split"
        yield None, f"n_way={shape.n_way} is above the {remaining} classes of {where}; lower n_way"
