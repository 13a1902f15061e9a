"""Task sources: from rows to episodes. A source describes its tasks cheaply and draws an episode on demand.

    rows -> columns -> members (classes or named tasks) -> train | valid | test -> TaskSource.episode(task)

Two kinds: N-way episodes over labelled rows, and support/query pairs of named tasks (causal_lm). Drawing an episode is
a pure function of the task's seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fmmeta.config import Config, UsageError
from fmmeta.tasks.batch import Example
from fmmeta.tasks.builtin import letters
from fmmeta.tasks.encode import encode_pairs, encode_texts
from fmmeta.tasks.rows import read_rows
from fmmeta.tasks.schedule import Item, Task
from fmmeta.tasks.splits import SPLITS, check_splits, own_splits, read_splits
from fmmeta.tasks.table import Table, tabulate


@dataclass(frozen=True)
class Episode:
    """What one task shows (support) and asks (query). `classes`: name of each label, empty for causal_lm."""

    task: Task
    support: list[Example]
    query: list[Example]
    classes: tuple[str, ...] = ()


class TaskSource(Protocol):
    """Tasks of one split: cheap descriptions, and episodes drawn from them."""

    @property
    def items(self) -> Sequence[Item]: ...

    def episode(self, task: Task) -> Episode: ...


class PairSource:
    """Named tasks of (input, output) pairs: `k_shot` pairs to learn from, `num_query` to be asked."""

    def __init__(self, tasks: Mapping[str, list[Example]], strata: Mapping[str, str], k_shot: int, num_query: int) -> None:
        self.k_shot, self.num_query = k_shot, num_query
        self.pairs = list(tasks.values())
        drawn = k_shot + num_query
        self.items: Sequence[Item] = [Item(name, strata[name], expected_tokens(rows, drawn)) for name, rows in tasks.items()]

    def episode(self, task: Task) -> Episode:
        rows = self.pairs[task.item]
        drawn = np.random.default_rng(task.seed).choice(len(rows), self.k_shot + self.num_query, replace=False)
        chosen = [rows[i] for i in drawn]
        return Episode(task, chosen[: self.k_shot], chosen[self.k_shot :])


class ClassSource:
    """N-way episodes. `pools`: pool -> class -> texts. An episode draws its classes from one pool.

    Named tasks are pools of their own; one labelled set is a single pool, and each of its classes leads episodes in
    turn, the others being drawn at random, so that every class, and with it every stratum, comes up equally often.
    """

    def __init__(self, pools: Mapping[str, Mapping[str, list[Example]]], strata: Mapping[str, str],
                 n_way: int, k_shot: int, num_query: int) -> None:  # fmt: skip
        self.n_way, self.k_shot, self.num_query = n_way, k_shot, num_query
        items: list[Item] = []
        self.draws: list[tuple[Mapping[str, list[Example]], str | None]] = []  # pool and leading class of each item
        per_class = k_shot + num_query
        for pool_name, pool in pools.items():
            leads: list[str | None] = [None] if pool_name else list(pool)
            tokens = n_way * expected_tokens([row for rows in pool.values() for row in rows], per_class)
            for lead in leads:
                name = lead or pool_name
                items.append(Item(name, strata[name], tokens))
                self.draws.append((pool, lead))
        self.items: Sequence[Item] = items

    def episode(self, task: Task) -> Episode:
        rng = np.random.default_rng(task.seed)
        pool, lead = self.draws[task.item]
        others = [name for name in pool if name != lead]
        wanted = self.n_way - (lead is not None)
        chosen = [others[i] for i in rng.choice(len(others), wanted, replace=False)] + ([lead] if lead else [])
        classes = [chosen[i] for i in rng.permutation(self.n_way)]
        support, query = [], []
        for label, name in enumerate(classes):
            rows = pool[name]
            drawn = rng.choice(len(rows), self.k_shot + self.num_query, replace=False)
            labelled = [replace(rows[i], labels=label) for i in drawn]
            support += labelled[: self.k_shot]
            query += labelled[self.k_shot :]
        return Episode(task, support, query, tuple(classes))


def expected_tokens(rows: Sequence[Example], drawn: int) -> int:
    return round(drawn * sum(len(row.input_ids) for row in rows) / len(rows))


@dataclass
class Sources:
    """One source per split; valid and test are None where there are too few members to hold any out."""

    train: TaskSource
    valid: TaskSource | None
    test: TaskSource | None
    fingerprint: str
    summary: str


def load_sources(config: Config, tokenizer: Any, notice: Callable[[str], None]) -> Sources:
    """Read, split, check and tokenise `config.dataset`. Raises `UsageError` for whatever would fail later."""
    name = config.dataset[0]
    rows, splits = letters() if name == "letters" else (read_rows(name, config.dataset_config_name), None)
    table = tabulate(rows, config, notice)
    named_tasks = table.task[0] != ""
    if splits and (config.class_splits or config.task_splits or config.split):
        raise UsageError(f"dataset={name} has splits of its own; leave --class_splits, --task_splits and --split out")
    splits = splits or read_splits(config, named_tasks, notice)
    strata = dict(zip(table.member, table.stratum, strict=True))
    if splits is None:
        splits = own_splits(strata, 1 if named_tasks else config.n_way, notice)
    check_splits(splits, strata, "task" if named_tasks else "class")
    examples = encode(table, config, tokenizer)
    made = {split: make_source(config, table, examples, splits.get(split, []), strata, split) for split in SPLITS}
    if made["train"] is None:
        raise UsageError(f"dataset={name} has nothing to train on: its train split is empty; mend the split file")
    digest = hashlib.sha256(repr([(e.input_ids, e.labels) for e in examples]).encode())
    digest.update(json.dumps([table.member, table.stratum, splits], sort_keys=True).encode())
    noun = "tasks" if named_tasks else "classes"
    sizes = ", ".join(f"{len(splits.get(split, []))} {split}" for split in SPLITS)
    summary = f"{name}: {len(examples)} rows, {len(set(strata.values()))} strata; {noun}: {sizes}"
    return Sources(made["train"], made["valid"], made["test"], digest.hexdigest(), summary)


def encode(table: Table, config: Config, tokenizer: Any) -> list[Example]:
    if config.task_type == "causal_lm":
        return encode_pairs(tokenizer, table.left, table.right, config.max_length)
    return [Example(ids, -1) for ids in encode_texts(tokenizer, table.left, config.max_length)]


def make_source(config: Config, table: Table, examples: list[Example], members: Iterable[str],
                strata: Mapping[str, str], split: str) -> TaskSource | None:  # fmt: skip
    """The source of one split, or None if it has no members. Raises `UsageError` for what no episode can be drawn from."""
    wanted = set(members)
    if not wanted:
        return None
    needed = config.k_shot + config.num_query
    pools: dict[str, dict[str, list[Example]]] = defaultdict(lambda: defaultdict(list))
    for member, task, right, example in zip(table.member, table.task, table.right, examples, strict=True):
        if member in wanted:
            pools[task]["" if config.task_type == "causal_lm" else right].append(example)
    for task, pool in pools.items():
        for name, rows in pool.items():
            if len(rows) < needed:
                what = f"task {task!r}" if not name else f"class {name!r}" + (f" of task {task!r}" if task else "")
                raise UsageError(f"k_shot={config.k_shot} and num_query={config.num_query} need {needed} rows, but {what} "
                                 f"has {len(rows)}; lower them or leave it out of the {split} split")  # fmt: skip
    if config.task_type == "causal_lm":
        return PairSource({task: pool[""] for task, pool in pools.items()}, strata, config.k_shot, config.num_query)
    for task, pool in pools.items():
        if len(pool) < config.n_way:
            where = f"task {task!r}" if task else f"the {split} split"
            raise UsageError(f"n_way={config.n_way} is above the {len(pool)} classes of {where}; lower n_way")
    return ClassSource(pools, strata, config.n_way, config.k_shot, config.num_query)
