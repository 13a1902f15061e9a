"""From the names of data sets to task sources, one per split.

    name -> rows -> columns -> tokens (store.py) -> members (classes or named tasks) -> train | valid | test -> TaskSource

On each node one rank runs this before the others (build.py), so that the others find the store made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmmeta.config import Config, UsageError
from fmmeta.tasks.builtin import letters
from fmmeta.tasks.folder import FolderSource, task_files
from fmmeta.tasks.marks import ASKED, CLASSES, SHOWN, marks, part_of
from fmmeta.tasks.members import make_source, shape_of, strata_of
from fmmeta.tasks.rows import data_files, hub_rows, open_hub, read_file
from fmmeta.tasks.source import AllClasses, Mixture, TaskSource, short_names
from fmmeta.tasks.splits import SPLITS, check_splits, own_splits, read_splits
from fmmeta.tasks.store import Store, digest, files_digest, prepare

Notice = Callable[[str], None]
SUITES = {"letters": letters, "marks": marks}


@dataclass
class Sources:
    """One source per split; valid and test are None where there are too few members to hold any out."""

    train: TaskSource
    valid: TaskSource | None
    test: TaskSource | None
    fingerprint: str
    summary: str


Loaded = tuple[dict[str, TaskSource], str, str]
"""Sources by split, fingerprint, summary."""


def load_sources(config: Config, tokenizer: Any, notice: Notice) -> Sources:
    """Read, split, check and tokenise `config.dataset`. Raises `UsageError` for whatever would fail later."""
    loaded = [load_one(name, config, tokenizer, notice) for name in config.dataset]
    for name, (made, _, _) in zip(config.dataset, loaded, strict=True):
        if "train" not in made:
            raise UsageError(f"dataset={name} has nothing to train on: its train split is empty; mend the split file")
    fingerprint, summary = loaded[0][1], "; ".join(text for _, _, text in loaded)
    if len(loaded) == 1:
        made = loaded[0][0]
    else:
        names = short_names(config.dataset)
        made = {split: Mixture({name: one[split] for name, (one, _, _) in zip(names, loaded, strict=True) if split in one})
                for split in SPLITS if any(split in one for one, _, _ in loaded)}  # fmt: skip
        fingerprint = digest([one for _, one, _ in loaded])
    train = AllClasses(made["train"]) if config.joint_head else made["train"]
    return Sources(train, made.get("valid"), made.get("test"), fingerprint, summary)


def load_one(name: str, config: Config, tokenizer: Any, notice: Notice) -> Loaded:
    if name in SUITES:
        check_suite(name, config)
        rows, splits = SUITES[name]()
        content = digest([row.values for row in rows])  # the generator may change
        store = prepare(name, content, lambda bad: rows, config, tokenizer, notice)
        parts = np.array([part_of(text) for text in store.table.column("left").to_pylist()]) if name == "marks" else None
        return from_store(name, store, splits, config, notice, parts)
    files = task_files(name, config.max_length)
    if files is not None:
        return from_folder(name, FolderSource(files, shape_of(config), config, tokenizer), config, notice)
    found = data_files(name)
    if found is None:
        parts = open_hub(name, config.dataset_config_name)
        content = digest([part._fingerprint for part in parts.values()])
        store = prepare(name, content, lambda bad: hub_rows(name, parts), config, tokenizer, notice)
    else:
        most = config.max_file_gib
        store = prepare(name, files_digest(found), lambda bad: [row for file in found for row in read_file(file, bad, most)],
                        config, tokenizer, notice)  # fmt: skip
    return from_store(name, store, None, config, notice)


def check_suite(name: str, config: Config) -> None:
    """Refuse episodes that `marks` does not have."""
    if name != "marks":
        return
    if config.task_type != "classification":
        raise UsageError(f"dataset=marks has classes and no answers, and task_type={config.task_type}; use classification")
    for setting, value, most in (("k_shot", config.most_shots, CLASSES * SHOWN), ("num_query", config.num_query, ASKED)):
        if value > most:
            raise UsageError(f"{setting}={value} is above the {most} texts of a class of dataset=marks; lower it")


def from_store(name: str, store: Store, splits: dict[str, list[str]] | None, config: Config, notice: Notice,
               parts: np.ndarray | None = None) -> Loaded:  # fmt: skip
    """Sources over the rows of a store. `parts`: see PartedSource."""
    named_tasks = bool(store.task.names[0])
    strata = strata_of(store)
    if splits and (config.class_splits or config.task_splits or config.split):
        raise UsageError(f"dataset={name} has splits of its own; leave --class_splits, --task_splits and --split out")
    splits = splits or choose_splits(name, config, strata, named_tasks, notice)
    made = {
        split: source
        for split in SPLITS
        if (source := make_source(config, store, splits.get(split, []), strata, split, notice, parts))
    }
    seen = hashlib.sha256((store.fingerprint + json.dumps(splits, sort_keys=True)).encode())
    summary = f"{name}: {len(store)} rows, {counts(strata, splits, 'tasks' if named_tasks else 'classes')}"
    return made, seen.hexdigest(), summary


def from_folder(name: str, source: FolderSource, config: Config, notice: Notice) -> Loaded:
    """Sources over files that are tasks, none of which is read yet."""
    strata = {item.name: item.stratum for item in source.items}
    splits = choose_splits(name, config, strata, True, notice)
    place = {task: number for number, task in enumerate(source.items.names)}
    made: dict[str, TaskSource] = {
        split: source.part([place[task] for task in splits[split]]) for split in SPLITS if splits.get(split)
    }
    fingerprint = digest([source.fingerprint, splits])
    return made, fingerprint, f"{name}: {len(source.items)} task files, {counts(strata, splits, 'tasks')}"


def choose_splits(
    name: str, config: Config, strata: Mapping[str, str], named_tasks: bool, notice: Notice
) -> dict[str, list[str]]:
    splits = read_splits(name, config, named_tasks, notice)
    if splits is None:
        splits = own_splits(strata, 1 if named_tasks else config.n_way, notice)
    check_splits(splits, strata, "task" if named_tasks else "class")
    return splits


def counts(strata: Mapping[str, str], splits: Mapping[str, list[str]], noun: str) -> str:
    sizes = ", ".join(f"{len(splits.get(split, []))} {split}" for split in SPLITS)
    return f"{len(set(strata.values()))} strata; {noun}: {sizes}"


def stratum_weights(config: Config) -> dict[str, float]:
    """--mix_weights by the stratum that each data set is."""
    return dict(zip(short_names(config.dataset), config.mix_weights, strict=True)) if config.mix_weights else {}
