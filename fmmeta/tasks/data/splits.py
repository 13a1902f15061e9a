"""Classes or tasks of the train, validation and test splits, from a JSON file or by a hash of their names.

A unit is what a split lists: a class, or a named task. A model stores the splits that it was trained with in
its fmmeta.json as `datasets`. A later command on the same data keeps these splits, unless a setting names
others; it then prints which trained classes it tests on. Data are the same if their contents are equal, or if
a data set of the same name has the same classes.

Rows are identified by their contents (`rows.content_key`), whatever the names of their classes, their files
and their order: those of a held-out split that are trained on are named, in one run and against earlier ones.
"""

import hashlib
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Warn
from fmmeta.common.security import inside, redact
from fmmeta.common.text import any_of, counted, nearest, shortened
from fmmeta.config.json_files import read_object
from fmmeta.config.settings import Config
from fmmeta.tasks.data.token_store import Contents, digest

SPLITS = ("train", "valid", "test")
SPLIT_SETTINGS = ("class_splits", "task_splits", "class_split")
Splits = dict[str, list[str]]


def read_splits(name: str, config: Config, named_tasks: bool, notice: Callable[[str], None]) -> Splits | None:
    """Splits from the file that a setting names, else from the file in the data folder, else None.

    With several data sets --class_split applies to those that have named splits.
    """
    setting, other = ("task_splits", "class_splits") if named_tasks else ("class_splits", "task_splits")
    if getattr(config, other) is not None:
        raise UsageError(
            f"{other}={getattr(config, other)} does not fit: dataset={name}"
            f" {'names its tasks' if named_tasks else 'has no task column'}; use --{setting}"
        )

    def without_names(why: str) -> None:
        if config.class_split is not None:
            text = f"class_split={config.class_split} is not used for {name}: {why}"
            if len(config.dataset) == 1:
                raise UsageError(f"{text}; give --{setting} a file of named splits, or leave it out")
            notice(Warn(text))

    path = getattr(config, setting)
    if path is None:
        beside = Path(name) / f"{setting}.json"
        if not beside.is_file():
            without_names("there is no file of splits")
            return None
        path = inside(Path(name), beside)
        notice(f"{setting}: {path}")
    splits: Any = read_object(setting, str(path), '{"train": [...], "valid": [...], "test": [...]}')[1]
    if isinstance(splits.get("datasets"), list):  # fmmeta.json of a model
        stored = [one for one in splits["datasets"] if isinstance(one, dict) and "splits" in one]
        if len(splits["datasets"]) > 1:
            stored = [one for one in stored if one.get("dataset") == label(name)]
        splits = stored[-1]["splits"] if stored else None
    if isinstance(splits, dict) and splits and all(isinstance(part, dict) for part in splits.values()):
        chosen = config.class_split or next(iter(splits))
        if chosen not in splits:
            raise UsageError(f"class_split={chosen} is not in {path}; it has {', '.join(splits)}")
        splits = splits[chosen]
    else:
        without_names(f"{path} holds one split only")
    if not lists_by_name(splits) or "train" not in splits:
        raise UsageError(
            f'{setting}={path} holds no splits; write {{"train": [...], "valid": [...], "test": [...]}}'
        )
    for split in splits:
        if split not in SPLITS:
            raise UsageError(
                f"{setting}={path} names a split {shortened(split)}{nearest(split, SPLITS)}; use"
                f" {any_of(SPLITS)}"
            )
    return {split: [str(unit) for unit in units] for split, units in splits.items()}


def lists_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(units, list) for units in value.values())


def own_splits(strata: Mapping[str, str], least: int, notice: Callable[[str], None]) -> Splits:
    """60/20/20 by a hash of the names, with at least `least` units in the validation and in the test split.

    Fewer than four times `least` units have no validation split, so that at least as many are trained on as
    are held out. Fewer than three times `least` are all trained on.
    """
    units = sorted(strata, key=lambda unit: hashlib.sha256(unit.encode()).digest())
    if len(units) < 3 * least:
        notice(
            f"no split file, and {len(units)} are too few to hold out {least}: all are trained on,"
            " none tested"
        )
        return {"train": units}
    tested = max(least, len(units) // 5)
    validated = tested if len(units) >= 4 * least else 0
    trained = len(units) - tested - validated
    notice(f"no split file: {trained} train, {validated} valid, {tested} test, by a hash of their names")
    return {
        "test": units[:tested],
        "valid": units[tested : tested + validated],
        "train": units[tested + validated :],
    }


def check_splits(splits: Splits, strata: Mapping[str, str], noun: str) -> None:
    """Raise `UsageError` for a unit that the data set does not have, or that is listed twice."""
    split_of: dict[str, str] = {}
    for split, units in splits.items():
        for unit in units:
            if unit not in strata:
                raise UsageError(
                    f"the {split} split names the {noun} {unit!r}, which the data set does not have; "
                    "fix the split file"
                )
            if unit in split_of:
                both = f"in the {split_of[unit]} and the {split} split"
                where = f"twice in the {split} split" if split_of[unit] == split else both
                raise UsageError(f"the {noun} {unit!r} is {where}; list it once")
            split_of[unit] = split


MOST_NAMES = 10_000  # stored by name; of more names a digest is stored, and `held_out` of own_splits
SHOWN = 5  # names in a message
MOST_ROWS = 4096  # trained rows that are stored, those with the least keys


def keys_of(contents: Contents, units: Iterable[str]) -> np.ndarray:
    """The keys of the rows of some units, uint64, ascending, each once."""
    found = [contents[unit] for unit in units if unit in contents]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)


@dataclass(frozen=True)
class UsedSplits:
    """The splits of one data set."""

    dataset: str  # its name without a path
    content: str  # digest of the data
    noun: str  # class or task
    digest: str  # of the splits
    trained: int  # number of names trained on
    held_out: int | None = None  # `least` of `own_splits`, if the splits come from it
    splits: Splits | None = None  # None for more than MOST_NAMES names
    rows: str | None = None  # keys of trained rows, at most MOST_ROWS: base64 of little-endian uint64

    @staticmethod
    def of(
        name: str, content: str, noun: str, splits: Splits, held_out: int | None, contents: Contents
    ) -> "UsedSplits":
        trained, stored = splits.get("train", ()), sum(map(len, splits.values())) <= MOST_NAMES
        keys = keys_of(contents, trained)[:MOST_ROWS].astype("<u8")
        return UsedSplits(
            label(name),
            content,
            noun,
            digest(splits),
            len(trained),
            held_out,
            splits if stored else None,
            b64encode(keys.tobytes()).decode(),
        )

    def trained_rows(self, keys: np.ndarray) -> tuple[int, int]:
        """How many of these rows were trained on, and of how many that is known."""
        mine = np.frombuffer(b64decode(self.rows or ""), "<u8")
        if len(mine) == MOST_ROWS:
            keys = keys[keys <= mine[-1]]
        return int(np.isin(keys, mine).sum()), len(keys)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def nouns(self) -> str:
        return "classes" if self.noun == "class" else "tasks"

    @property
    def setting(self) -> str:
        """The setting that names a file of such splits."""
        return f"{self.noun}_splits"

    def has_data_of(self, other: "UsedSplits") -> bool:
        """Whether both are splits of the same data, by their contents or by the name of the data set."""
        return self.noun == other.noun and (self.content == other.content or self.dataset == other.dataset)

    def trained_names(self, noun: str) -> set[str]:
        """The stored names of classes or tasks trained on."""
        return set((self.splits or {}).get("train", ())) if noun == self.noun else set()

    def restored(self, content: str, dataset: str, noun: str, strata: Mapping[str, str]) -> Splits | None:
        """The splits, if the data are the same and have these classes or tasks (`strata`); else None."""
        same, splits = content == self.content, self.splits
        if splits is None and same and self.held_out is not None:
            made = own_splits(strata, self.held_out, lambda text: None)
            splits = made if digest(made) == self.digest else None
        names = {name for units in (splits or {}).values() for name in units}
        fits = names <= set(strata) if same else dataset == self.dataset and names == set(strata)
        return splits if fits and noun == self.noun else None


def label(name: str) -> str:
    """The name of a data set without the path to it."""
    return redact(os.path.basename(os.path.abspath(name)) if Path(name).exists() else name)


def few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def known_rows(trained: Iterable[UsedSplits], where: str, noun: str, contents: Contents) -> Iterator[str]:
    """Warnings about rows `where` that a model was trained on in classes or tasks (`noun`) of other names."""
    for before in trained:
        names = before.trained_names(noun)
        others = [unit for unit in contents if unit not in names]
        found, count = before.trained_rows(keys_of(contents, others))
        if found:
            units = [unit for unit in others if before.trained_rows(contents[unit])[0]]
            named = f" ({few(units)})" if any(units) else ""  # rows of one task have no class
            yield (
                f"{where}: {found} of {counted(count, 'row')}{named} are rows that the model was"
                f" trained on with dataset={before.dataset}, by their contents; scores on them are not those"
                " on new rows: leave them out"
            )


def leaks(named: Mapping[str, Mapping[str, Contents]], wanted: Iterable[str]) -> Iterator[str]:
    """Warnings about rows of a held-out split that are in another one too. named: by data set and split."""
    before, splits = np.empty(0, np.uint64), list[str]()
    for split in SPLITS:
        here = [(name, of_split[split]) for name, of_split in named.items()]
        for name, contents in here if before.size and split in wanted else []:
            keys = keys_of(contents, contents)
            if found := int(np.isin(keys, before).sum()):
                units = [unit for unit, some in contents.items() if np.isin(some, before).any()]
                yield (
                    f"dataset={label(name)}: {found} of {counted(len(keys), 'row')} of the {split} split"
                    f" ({few(units)}) are in the {any_of(splits)} split too, by their contents; scores on"
                    " them are not those on new rows: leave them out of one"
                )
        before = np.concatenate([before, *(keys_of(contents, contents) for _, contents in here)])
        splits.append(split)


def doubts(
    trained: Sequence[UsedSplits], config: Config, used: UsedSplits, splits: Splits, contents: Contents
) -> Iterator[str]:
    """Warnings about held-out classes or tasks of `splits` (those of `used`) that a model was trained on.

    Of other data sets equal names count, unless they are numbers; of all data sets, equal rows of units that
    are not named so. contents: of the data of `used`.
    """
    settings = [f"{name}={value}" for name in SPLIT_SETTINGS if (value := getattr(config, name))]
    given = settings[0] if settings else f"dataset={used.dataset}"
    setting, nouns = used.setting, used.nouns
    for before in trained:
        same = used.has_data_of(before)
        advice = f"use the model's splits: leave {setting} and class_split out, or give " + (
            f"its fmmeta.json as --{setting}" if before.splits else "the file that it was trained with"
        )
        for split in ("valid", "test"):
            units = splits.get(split, ())
            held_out = {unit: contents[unit] for unit in units if unit in contents}
            yield from known_rows([before], f"{given}, {split} split", used.noun, held_out)
            shared = sorted(before.trained_names(used.noun) & set(units))
            named = [name for name in shared if not name.isdigit()]
            if same and shared:
                yield (
                    f"{given}: {len(shared)} of {len(units)} {split} {nouns} ({few(shared)}) were"
                    f" trained on with dataset={before.dataset}; {advice}"
                )
            elif named:
                yield (
                    f"{given}: {len(named)} of {len(units)} {split} {nouns} ({few(named)}) have"
                    f" the names of {nouns} that the model was trained on with dataset={before.dataset};"
                    f" if they are the same ones, hold out others: give --{setting}"
                )
        if same and before.splits is None and used.digest != before.digest:
            yield (
                f"{given}: the model was trained on {before.trained} {nouns} of dataset={before.dataset} by"
                f" other splits, whose names are not stored; {advice}"
            )


def is_keys(value: Any) -> bool:
    """Whether a value is base64 of 64-bit numbers."""
    with suppress(ValueError):
        return isinstance(value, str) and len(b64decode(value, validate=True)) % 8 == 0
    return False


def read_used_splits(memory: Mapping[str, Any]) -> list[UsedSplits]:
    """`datasets` of an fmmeta.json; empty where it has none. Raises `ValueError`."""
    listed = memory.get("datasets", [])
    kinds = {"dataset": str, "content": str, "noun": str, "digest": str, "trained": int}
    if not isinstance(listed, list) or not all(
        isinstance(one, dict)
        and all(isinstance(one.get(name), kind) for name, kind in kinds.items())
        and isinstance(one.get("held_out", 1), int)
        and is_keys(one.get("rows", ""))
        and lists_by_name(one.get("splits", {}))
        and all(isinstance(unit, str) for units in one.get("splits", {}).values() for unit in units)
        for one in listed
    ):
        raise ValueError("datasets should list splits")
    known = [item.name for item in fields(UsedSplits)]
    return [UsedSplits(**{name: value for name, value in one.items() if name in known}) for one in listed]
