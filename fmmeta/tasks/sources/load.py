"""Loads data sets by name into task sources, one per split.

    name -> rows -> columns -> tokens (token_store.py) -> classes or named tasks -> train | valid | test
         -> TaskSource

On each node one rank runs this before the others (training/build.py), which then find the finished store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import data_files, hub_rows, open_hub, read_file
from fmmeta.tasks.data.splits import SPLITS, check_splits, own_splits, read_splits
from fmmeta.tasks.data.token_store import TokenStore, digest, files_digest, prepare
from fmmeta.tasks.data.used_splits import Splits, UsedSplits, doubts, label
from fmmeta.tasks.sources.base import GlobalLabelSource, Mixture, TaskSource, short_names
from fmmeta.tasks.sources.rows_by_class import make_source, shape_of, strata_of
from fmmeta.tasks.sources.task_files import FolderSource, task_files
from fmmeta.tasks.suites.letters import letters
from fmmeta.tasks.suites.marks import ASKED, CLASSES, SHOWN, marks, part_of

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
    used: list[UsedSplits]  # of the data sets that are no suites


Loaded = tuple[dict[str, TaskSource], str, str, UsedSplits | None]
"""Sources by split, fingerprint, summary, splits."""


def load_sources(
    config: Config, tokenizer: Any, notice: Notice, trained: Sequence[UsedSplits] = ()
) -> Sources:
    """Read, split, check and tokenise `config.dataset`. Raises `UsageError` for whatever would fail later.

    trained: what the models at hand were trained with. Their splits are kept where no setting names others.
    """
    loaded = [load_one(name, config, tokenizer, notice, trained) for name in config.dataset]
    for name, (made, *_) in zip(config.dataset, loaded, strict=True):
        if "train" not in made:
            raise UsageError(
                f"dataset={name} has nothing to train on: its train split is empty; fix the split file"
            )
    fingerprint, summary = loaded[0][1], "; ".join(text for _, _, text, _ in loaded)
    if len(loaded) == 1:
        made = loaded[0][0]
    else:
        names = short_names(config.dataset)
        made = {
            split: Mixture(
                {name: one[split] for name, (one, *_) in zip(names, loaded, strict=True) if split in one}
            )
            for split in SPLITS
            if any(split in one for one, *_ in loaded)
        }
        fingerprint = digest([one for _, one, *_ in loaded])
    train = GlobalLabelSource(made["train"]) if config.joint_head else made["train"]
    return Sources(
        train,
        made.get("valid"),
        made.get("test"),
        fingerprint,
        summary,
        [used for *_, used in loaded if used],
    )


def load_one(
    name: str, config: Config, tokenizer: Any, notice: Notice, trained: Sequence[UsedSplits]
) -> Loaded:
    if name in SUITES:
        check_suite(name, config)
        rows, splits = SUITES[name]()
        content = digest([row.values for row in rows])  # the generator may change
        store = prepare(name, content, lambda bad: rows, config, tokenizer, notice)
        parts = (
            np.array([part_of(text) for text in store.table.column("left").to_pylist()])
            if name == "marks"
            else None
        )
        if config.class_splits or config.task_splits or config.class_split:
            raise UsageError(
                f"dataset={name} has its own splits; leave --class_splits, --task_splits and"
                " --class_split out"
            )
        return from_store(name, store, splits, config, notice, None, parts)
    files = task_files(name, config.max_length)
    if files is not None:
        return from_folder(
            name, FolderSource(files, shape_of(config), config, tokenizer), config, notice, trained
        )
    found = data_files(name)
    if found is None:
        parts = open_hub(name, config.dataset_config_name)
        content = digest([part._fingerprint for part in parts.values()])
        store = prepare(name, content, lambda bad: hub_rows(name, parts), config, tokenizer, notice)
    else:
        most, content = config.max_file_gib, files_digest(found)
        store = prepare(
            name,
            content,
            lambda bad: [row for file in found for row in read_file(file, bad, most)],
            config,
            tokenizer,
            notice,
        )
    splits, used = choose_splits(
        name, content, config, strata_of(store), bool(store.task.names[0]), notice, trained
    )
    return from_store(name, store, splits, config, notice, used)


def check_suite(name: str, config: Config) -> None:
    """Refuse episodes that `marks` does not have."""
    if name != "marks":
        return
    if config.task_type != "classification":
        raise UsageError(
            f"dataset=marks has classes and no answers, and task_type={config.task_type}; use classification"
        )
    for setting, value, most in (
        ("k_shot", config.most_shots, CLASSES * SHOWN),
        ("num_query", config.num_query, ASKED),
    ):
        if value > most:
            raise UsageError(
                f"{setting}={value} is above the {most} texts of a class of dataset=marks; lower it"
            )


def from_store(
    name: str,
    store: TokenStore,
    splits: Splits,
    config: Config,
    notice: Notice,
    used: UsedSplits | None,
    parts: np.ndarray | None = None,
) -> Loaded:
    """Sources over the rows of a store. `parts`: see PartedSource."""
    strata = strata_of(store)
    made = {
        split: source
        for split in SPLITS
        if (source := make_source(config, store, splits.get(split, []), strata, split, notice, parts))
    }
    seen = hashlib.sha256((store.fingerprint + json.dumps(splits, sort_keys=True)).encode())
    summary = (
        f"{name}: {len(store)} rows, {counts(strata, splits, 'tasks' if store.task.names[0] else 'classes')}"
    )
    return made, seen.hexdigest(), summary, used


def from_folder(
    name: str, source: FolderSource, config: Config, notice: Notice, trained: Sequence[UsedSplits]
) -> Loaded:
    """Sources over files that are tasks, none of which is read yet."""
    strata = {item.name: item.stratum for item in source.items}
    splits, used = choose_splits(name, source.fingerprint, config, strata, True, notice, trained)
    place = {task: number for number, task in enumerate(source.items.names)}
    made: dict[str, TaskSource] = {
        split: source.part([place[task] for task in splits[split]]) for split in SPLITS if splits.get(split)
    }
    fingerprint = digest([source.fingerprint, splits])
    return (
        made,
        fingerprint,
        f"{name}: {len(source.items)} task files, {counts(strata, splits, 'tasks')}",
        used,
    )


def choose_splits(
    name: str,
    content: str,
    config: Config,
    strata: Mapping[str, str],
    named_tasks: bool,
    notice: Notice,
    trained: Sequence[UsedSplits],
) -> tuple[Splits, UsedSplits]:
    """Those that a setting names, that the model was trained with, stored beside the data, or by a hash;
    the first there are.

    content: digest of the data. Classes that are tested although the model was trained on them are named.
    """
    noun, least, held_out = ("task", 1, None) if named_tasks else ("class", config.n_way, None)
    splits = None
    if not (config.class_splits or config.task_splits or config.class_split):
        found = (
            (one.restored(content, label(name), noun, strata), one.held_out) for one in reversed(trained)
        )
        splits, held_out = next((pair for pair in found if pair[0]), (None, None))
        if splits is not None:
            notice(f"{label(name)}: the splits that the model was trained with")
    splits = splits or read_splits(name, config, named_tasks, notice)
    if splits is None:
        splits, held_out = own_splits(strata, least, notice), least
    check_splits(splits, strata, noun)
    used = UsedSplits.of(name, content, noun, splits, held_out)
    for text in doubts(trained, config, used, splits):
        notice(text)
    return splits, used


def counts(strata: Mapping[str, str], splits: Mapping[str, list[str]], noun: str) -> str:
    sizes = ", ".join(f"{len(splits.get(split, []))} {split}" for split in SPLITS)
    return f"{len(set(strata.values()))} strata; {noun}: {sizes}"


def stratum_weights(config: Config) -> dict[str, float]:
    """--mix_weights by the stratum that each data set is."""
    return (
        dict(zip(short_names(config.dataset), config.mix_weights, strict=True)) if config.mix_weights else {}
    )
