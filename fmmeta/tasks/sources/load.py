"""Loads data sets by name into task sources, one per split.

    name -> rows -> columns -> tokens (token_store.py) -> classes or named tasks -> train | valid | test
         -> TaskSource

On each node one rank runs this before the others (training/build.py), which then find the finished store.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import data_files, hub_rows, open_hub, read_file
from fmmeta.tasks.data.splits import SPLIT_SETTINGS, SPLITS, Splits, check_splits, own_splits, read_splits
from fmmeta.tasks.data.token_store import TokenStore, digest, files_digest, prepare
from fmmeta.tasks.data.used_splits import UsedSplits, doubts, label
from fmmeta.tasks.sources.base import EpisodeShape, TaskSource
from fmmeta.tasks.sources.classification import GlobalLabelSource
from fmmeta.tasks.sources.mixture import Mixture, short_names
from fmmeta.tasks.sources.rows_by_class import make_source, strata_of
from fmmeta.tasks.sources.task_files import FolderSource, task_files
from fmmeta.tasks.suites.letters import letters
from fmmeta.tasks.suites.marks import check_episodes, marks, part_of

Notice = Callable[[str], None]
SUITES = {"letters": letters, "marks": marks}


@dataclass
class Sources:
    """One source per split; valid and test are None where too few classes or tasks exist to hold any out."""

    train: TaskSource
    valid: TaskSource | None
    test: TaskSource | None
    fingerprint: str
    summary: str
    used: list[UsedSplits]  # of each data set that is not a suite


def load_sources(
    config: Config, tokenizer: Any, notice: Notice, trained: Sequence[UsedSplits] = ()
) -> Sources:
    """Read, split, check and tokenise `config.dataset`. Raises `UsageError` for data that would fail later.

    trained: splits that the models in use were trained with. They are kept unless a setting names others.
    """
    loaded = [load_one(name, config, tokenizer, notice, trained) for name in config.dataset]
    sources = loaded[0]
    if len(loaded) > 1:
        mixed: dict[str, Any] = {}
        for split in SPLITS:
            named = zip(short_names(config.dataset), (getattr(one, split) for one in loaded), strict=True)
            present = {name: source for name, source in named if source is not None}
            mixed[split] = Mixture(present) if present else None
        sources = Sources(
            **mixed,
            fingerprint=digest([one.fingerprint for one in loaded]),
            summary="; ".join(one.summary for one in loaded),
            used=[used for one in loaded for used in one.used],
        )
    if config.joint_head:
        sources.train = GlobalLabelSource(sources.train)
    return sources


def load_one(
    name: str, config: Config, tokenizer: Any, notice: Notice, trained: Sequence[UsedSplits]
) -> Sources:
    """The sources of one data set."""
    if name in SUITES:
        return load_suite(name, config, tokenizer, notice)
    task_per_file = task_files(name, config.max_length)
    if task_per_file is not None:
        source = FolderSource(task_per_file, EpisodeShape.of(config), config, tokenizer)
        strata = {item.name: item.stratum for item in source.items}
        splits, used = choose_splits(name, source.fingerprint, config, strata, True, notice, trained)
        by_split = {split: source.only(splits[split]) for split in SPLITS if splits.get(split)}
        fingerprint, size = digest([source.fingerprint, splits]), f"{len(source.items)} task files"
        return summarised(name, by_split, fingerprint, size, "tasks", splits, strata, [used])
    files = data_files(name)
    if files is None:
        parts = open_hub(name, config.dataset_config_name)
        content = digest([part._fingerprint for part in parts.values()])
        store = prepare(name, content, lambda bad: hub_rows(name, parts), config, tokenizer, notice)
    else:
        content = files_digest(files)
        store = prepare(
            name,
            content,
            lambda bad: [row for file in files for row in read_file(file, bad, config.max_file_gib)],
            config,
            tokenizer,
            notice,
        )
    splits, used = choose_splits(name, content, config, strata_of(store), store.named_tasks, notice, trained)
    return from_store(name, store, splits, config, notice, [used])


def load_suite(name: str, config: Config, tokenizer: Any, notice: Notice) -> Sources:
    """The sources of a generated data set."""
    if name == "marks":
        check_episodes(config)
    rows, splits = SUITES[name]()
    content = digest([row.values for row in rows])  # the generator may change
    store = prepare(name, content, lambda bad: rows, config, tokenizer, notice)
    if any(getattr(config, setting) for setting in SPLIT_SETTINGS):
        raise UsageError(
            f"dataset={name} has its own splits; leave --class_splits, --task_splits and --class_split out"
        )
    parts = np.array(list(map(part_of, store.table["input"].to_pylist()))) if name == "marks" else None
    return from_store(name, store, splits, config, notice, [], parts)


def from_store(
    name: str,
    store: TokenStore,
    splits: Splits,
    config: Config,
    notice: Notice,
    used: list[UsedSplits],
    parts: np.ndarray | None = None,
) -> Sources:
    """Sources over the rows of a store. `parts`: see ClassSource."""
    strata = strata_of(store)
    by_split = {
        split: make_source(config, store, splits[split], strata, split, notice, parts)
        for split in SPLITS
        if splits.get(split)
    }
    fingerprint = hashlib.sha256(
        (store.fingerprint + json.dumps(splits, sort_keys=True)).encode()
    ).hexdigest()
    noun = "tasks" if store.named_tasks else "classes"
    return summarised(name, by_split, fingerprint, f"{len(store)} rows", noun, splits, strata, used)


def summarised(
    name: str,
    by_split: Mapping[str, TaskSource],
    fingerprint: str,
    size: str,
    noun: str,
    splits: Splits,
    strata: Mapping[str, str],
    used: list[UsedSplits],
) -> Sources:
    """The sources of a data set with a summary line. Raises `UsageError` if the train split is empty."""
    if "train" not in by_split:
        raise UsageError(
            f"dataset={name} has nothing to train on: its train split is empty; fix the split file"
        )
    sizes = ", ".join(f"{len(splits.get(split, []))} {split}" for split in SPLITS)
    summary = f"{name}: {size}, {len(set(strata.values()))} strata; {noun}: {sizes}"
    valid, test = by_split.get("valid"), by_split.get("test")
    return Sources(by_split["train"], valid, test, fingerprint, summary, used)


def choose_splits(
    name: str,
    content: str,
    config: Config,
    strata: Mapping[str, str],
    named_tasks: bool,
    notice: Notice,
    trained: Sequence[UsedSplits],
) -> tuple[Splits, UsedSplits]:
    """The first available of: the splits that a setting names, those that the model was trained with, those
    stored beside the data, splits by a hash of the names.

    content: digest of the data. Prints the held-out classes that the model was trained on.
    """
    noun, least = ("task", 1) if named_tasks else ("class", config.n_way)
    splits, held_out = None, None
    if not any(getattr(config, setting) for setting in SPLIT_SETTINGS):
        for one in reversed(trained):
            splits, held_out = one.restored(content, label(name), noun, strata), one.held_out
            if splits:
                notice(f"{label(name)}: the splits that the model was trained with")
                break
    if not splits:
        splits, held_out = read_splits(name, config, named_tasks, notice), None
    if splits is None:
        splits, held_out = own_splits(strata, least, notice), least
    check_splits(splits, strata, noun)
    used = UsedSplits.of(name, content, noun, splits, held_out)
    for text in doubts(trained, config, used, splits):
        notice(text)
    return splits, used
