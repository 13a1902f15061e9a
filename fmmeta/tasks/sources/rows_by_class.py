"""Groups the rows of a token store by task and class, and drops those with too few rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.sources.base import ClassSource, PairSource, Shape, SplitRowsSource, TaskSource


def strata_of(store: TokenStore) -> dict[str, str]:
    """The stratum of each member: that of its last row."""
    codes, from_end = np.unique(store.member.codes[::-1], return_index=True)
    last = store.stratum.codes[len(store) - 1 - from_end]
    return {
        store.member.names[code]: store.stratum.names[stratum]
        for code, stratum in zip(codes, last, strict=True)
    }


def shape_of(config: Config) -> Shape:
    pairs = config.task_type == "causal_lm"
    ways = (1, 1) if pairs else (config.n_way, config.most_classes)
    return Shape(ways[0], config.k_shot, config.num_query, ways[1], config.most_shots)


def make_source(
    config: Config,
    store: TokenStore,
    members: Iterable[str],
    strata: Mapping[str, str],
    split: str,
    notice: Callable[[str], None],
    parts: np.ndarray | None = None,
) -> TaskSource | None:
    """The source of one split, or None if it has no members. `parts`: see PartedSource.

    What no episode can be drawn from is left out with a notice, or (on_bad_task=raise) refused by a
    `UsageError`.
    """
    wanted = set(members)
    if not wanted:
        return None
    pools, shape = group_rows(store, wanted, classes=config.task_type == "classification"), shape_of(config)
    for task, pool in list(pools.items()):
        for name, problem in problems(task, pool, shape, split):
            if config.on_bad_task == "raise":
                raise UsageError(problem)
            notice(f"left out: {problem}")
            if name is None:  # of the whole task
                del pools[task]
            else:
                del pool[name]
    if not any(pools.values()):
        raise UsageError(
            f"k_shot={config.k_shot}: no {'task' if '' not in pools else 'class'} of the {split} split has"
            " rows enough"
        )
    if config.task_type == "causal_lm":
        return PairSource(store, {task: pool[""] for task, pool in pools.items() if pool}, strata, shape)
    return (
        ClassSource(store, pools, strata, shape)
        if parts is None
        else SplitRowsSource(store, pools, strata, shape, parts)
    )


def group_rows(store: TokenStore, wanted: set[str], classes: bool) -> dict[str, dict[str, np.ndarray]]:
    """Row numbers by task and class (one class, named "", without `classes`), both in order of first
    appearance.
    """
    mine = np.flatnonzero(
        np.isin(store.member.codes, [code for code, name in enumerate(store.member.names) if name in wanted])
    )
    right = store.coded("right") if classes else None
    keys = store.task.codes[mine].astype(np.int64)
    if right is not None:
        keys = keys * len(right.names) + right.codes[mine]
    order = np.argsort(keys, kind="stable")
    parts = np.split(mine[order], np.flatnonzero(np.diff(keys[order])) + 1)
    pools: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for rows in sorted(parts, key=lambda rows: int(rows[0])):
        pools[store.task.names[store.task.codes[rows[0]]]][
            right.names[right.codes[rows[0]]] if right else ""
        ] = rows
    return pools


def problems(
    task: str, pool: Mapping[str, np.ndarray], shape: Shape, split: str
) -> Iterable[tuple[str | None, str]]:
    """Classes with too few rows, as (class, what is wrong); then (None, ...) if too few classes are left."""
    needed, left = shape.k_shot + shape.num_query, len(pool)
    for name, rows in list(pool.items()):
        if len(rows) < needed:
            what = (
                f"task {task!r}" if not name else f"class {name!r}" + (f" of task {task!r}" if task else "")
            )
            left -= 1
            yield (
                name,
                (
                    f"k_shot={shape.k_shot} and num_query={shape.num_query} need {needed} rows, but {what} "
                    f"has {len(rows)}; lower them or leave it out of the {split} split"
                ),
            )
    if left < shape.n_way:
        where = f"task {task!r}" if task else f"the {split} split"
        yield None, f"n_way={shape.n_way} is above the {left} classes of {where}; lower n_way"
