"""The classes or tasks that a model was trained on, stored in its fmmeta.json as `datasets`.

A later command on the same data keeps these splits, unless a file says otherwise; what it would then test of
the classes that were trained on is named. Data are the same if their contents are, or if a data set of the
same name has the same classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fmmeta.common.security import redact
from fmmeta.config.settings import Config
from fmmeta.tasks.data.splits import own_splits
from fmmeta.tasks.data.token_store import digest

MOST_NAMES = 10_000  # that are stored; of more a digest, and the rule where they come from a hash
SHOWN = 5
Splits = dict[str, list[str]]


@dataclass(frozen=True)
class UsedSplits:
    """The splits of one data set.

    `dataset`: its name without a path; `noun`: class or task; `held_out`: `least` of `own_splits` where the
    splits come from it; `splits`: None for more than MOST_NAMES names; `trained`: number of names trained on.
    """

    dataset: str
    content: str
    noun: str
    digest: str
    trained: int
    held_out: int | None = None
    splits: Splits | None = None

    @staticmethod
    def of(name: str, content: str, noun: str, splits: Splits, held_out: int | None) -> UsedSplits:
        kept = splits if sum(map(len, splits.values())) <= MOST_NAMES else None
        return UsedSplits(
            label(name), content, noun, digest(splits), len(splits.get("train", ())), held_out, kept
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def trained_names(self, noun: str) -> set[str]:
        """The classes or tasks trained on, as far as they are stored."""
        return set((self.splits or {}).get("train", ())) if noun == self.noun else set()

    def restored(self, content: str, dataset: str, noun: str, strata: Mapping[str, str]) -> Splits | None:
        """The splits, for data that are the same and have the classes or tasks of `strata`; else None."""
        if noun != self.noun:
            return None
        if self.splits is None:
            if content != self.content or self.held_out is None:
                return None
            made = own_splits(strata, self.held_out, lambda text: None)
            return made if digest(made) == self.digest else None
        names = {name for part in self.splits.values() for name in part}
        same = (
            names <= set(strata)
            if content == self.content
            else dataset == self.dataset and names == set(strata)
        )
        return self.splits if same else None

    def doubts(self, content: str, dataset: str, noun: str, splits: Splits) -> Iterator[str]:
        """What is wrong with testing on `splits` of the same data."""
        if noun != self.noun or (content != self.content and dataset != self.dataset):
            return
        if self.splits is None:
            if digest(splits) != self.digest:
                what = f"{self.trained} {plural(noun)} of dataset={self.dataset}"
                yield f"the model was trained on {what} by other splits, whose names are not stored"
            return
        for part in ("valid", "test"):
            if shared := sorted(self.trained_names(noun) & set(splits.get(part, ()))):
                yield (
                    f"{len(shared)} of {len(splits[part])} {part} {plural(noun)} ({few(shared)}) were trained"
                    f" on with dataset={self.dataset}"
                )


def label(name: str) -> str:
    """The name of a data set without the path to it."""
    return redact(os.path.basename(os.path.abspath(name)) if Path(name).exists() else name)


def plural(noun: str) -> str:
    return "classes" if noun == "class" else f"{noun}s"


def few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def doubts(trained: Sequence[UsedSplits], config: Config, one: UsedSplits, splits: Splits) -> Iterator[str]:
    """Lines about the classes of `splits` (those of `one`) that are tested although a model was trained on
    them.
    """
    settings = ("class_splits", "task_splits", "class_split")
    given = next(
        (f"{name}={value}" for name in settings if (value := getattr(config, name))), f"dataset={one.dataset}"
    )
    setting = "class_splits" if one.noun == "class" else "task_splits"
    for before in trained:
        file = f"its fmmeta.json as --{setting}" if before.splits else "the file that it was trained with"
        for text in before.doubts(one.content, one.dataset, one.noun, splits):
            yield (
                f"{given}: {text}; use the model's splits: leave {setting} and class_split out, or give"
                f" {file}"
            )


def read(memory: Mapping[str, Any]) -> list[UsedSplits]:
    """`datasets` of an fmmeta.json; none in those of 0.1.0. Raises `ValueError`."""
    listed = memory.get("datasets", [])
    if not isinstance(listed, list) or not all(map(is_record, listed)):
        raise ValueError("datasets should list splits")
    known = [item.name for item in fields(UsedSplits)]
    return [UsedSplits(**{name: value for name, value in one.items() if name in known}) for one in listed]


def is_record(one: Any) -> bool:
    kinds = {"dataset": str, "content": str, "noun": str, "digest": str, "trained": int}
    if not isinstance(one, dict) or not all(isinstance(one.get(name), kind) for name, kind in kinds.items()):
        return False
    splits = one.get("splits", {})
    if not isinstance(splits, dict) or not all(isinstance(part, list) for part in splits.values()):
        return False
    return isinstance(one.get("held_out", 1), int) and all(
        isinstance(name, str) for part in splits.values() for name in part
    )
