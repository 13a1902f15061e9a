"""The classes or tasks that a model was trained on, stored in its fmmeta.json as `datasets`.

A later command on the same data keeps these splits, unless a setting names others; it then prints which
trained classes it tests on. Data are the same if their contents are equal, or if a data set of the same name
has the same classes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fmmeta.common.security import redact
from fmmeta.config.settings import Config
from fmmeta.tasks.data.splits import SPLIT_SETTINGS, Splits, lists_by_name, own_splits
from fmmeta.tasks.data.token_store import digest

MOST_NAMES = 10_000  # stored by name; of more names a digest is stored, and `held_out` of own_splits
SHOWN = 5  # names in a message


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

    @staticmethod
    def of(name: str, content: str, noun: str, splits: Splits, held_out: int | None) -> "UsedSplits":
        trained, stored = len(splits.get("train", ())), sum(map(len, splits.values())) <= MOST_NAMES
        return UsedSplits(
            label(name), content, noun, digest(splits), trained, held_out, splits if stored else None
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def trained_names(self, noun: str) -> set[str]:
        """The stored names of classes or tasks trained on."""
        return set((self.splits or {}).get("train", ())) if noun == self.noun else set()

    def restored(self, content: str, dataset: str, noun: str, strata: Mapping[str, str]) -> Splits | None:
        """The splits, if the data are the same and have these classes or tasks (`strata`); else None."""
        if noun != self.noun:
            return None
        if self.splits is None:
            if content != self.content or self.held_out is None:
                return None
            made = own_splits(strata, self.held_out, lambda text: None)
            return made if digest(made) == self.digest else None
        names = {name for units in self.splits.values() for name in units}
        if content == self.content:
            same = names <= set(strata)
        else:
            same = dataset == self.dataset and names == set(strata)
        return self.splits if same else None

    def doubts(self, other: "UsedSplits", splits: Splits) -> Iterator[str]:
        """Trained classes or tasks in the held-out part of `splits`, those of `other`, if the data are the
        same.
        """
        if other.noun != self.noun or (other.content != self.content and other.dataset != self.dataset):
            return
        nouns = "classes" if self.noun == "class" else f"{self.noun}s"
        if self.splits is None and other.digest != self.digest:
            what = f"{self.trained} {nouns} of dataset={self.dataset}"
            yield f"the model was trained on {what} by other splits, whose names are not stored"
        for split in ("valid", "test"):
            if shared := sorted(self.trained_names(self.noun) & set(splits.get(split, ()))):
                yield (
                    f"{len(shared)} of {len(splits[split])} {split} {nouns} ({few(shared)}) were trained"
                    f" on with dataset={self.dataset}"
                )


def label(name: str) -> str:
    """The name of a data set without the path to it."""
    return redact(os.path.basename(os.path.abspath(name)) if Path(name).exists() else name)


def few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def doubts(trained: Sequence[UsedSplits], config: Config, used: UsedSplits, splits: Splits) -> Iterator[str]:
    """Warnings about held-out classes of `splits` (those of `used`) that a model was trained on."""
    settings = [f"{name}={value}" for name in SPLIT_SETTINGS if (value := getattr(config, name))]
    given = settings[0] if settings else f"dataset={used.dataset}"
    setting = "class_splits" if used.noun == "class" else "task_splits"
    for before in trained:
        file = f"its fmmeta.json as --{setting}" if before.splits else "the file that it was trained with"
        for text in before.doubts(used, splits):
            yield (
                f"{given}: {text}; use the model's splits: leave {setting} and class_split out, or give"
                f" {file}"
            )


def read(memory: Mapping[str, Any]) -> list[UsedSplits]:
    """`datasets` of an fmmeta.json; empty for those of 0.1.0. Raises `ValueError`."""
    listed = memory.get("datasets", [])
    if not isinstance(listed, list) or not all(map(is_record, listed)):
        raise ValueError("datasets should list splits")
    known = [item.name for item in fields(UsedSplits)]
    return [UsedSplits(**{name: value for name, value in one.items() if name in known}) for one in listed]


def is_record(one: Any) -> bool:
    """Whether a JSON value has the types of `UsedSplits`."""
    kinds = {"dataset": str, "content": str, "noun": str, "digest": str, "trained": int}
    if not isinstance(one, dict) or not lists_by_name(splits := one.get("splits", {})):
        return False
    named = all(isinstance(name, str) for units in splits.values() for name in units)
    typed = all(isinstance(one.get(name), kind) for name, kind in kinds.items())
    return named and typed and isinstance(one.get("held_out", 1), int)
