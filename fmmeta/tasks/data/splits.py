"""Classes or tasks of the train, validation and test splits, from a JSON file or by a hash of their names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from fmmeta.common.errors import UsageError
from fmmeta.common.security import inside
from fmmeta.config.settings import Config

SPLITS = ("train", "valid", "test")


def read_splits(
    name: str, config: Config, named_tasks: bool, notice: Callable[[str], None]
) -> dict[str, list[str]] | None:
    """Splits from the file given, else from the data folder's own file, else None.

    Of several data sets --class_split concerns those that have named splits.
    """
    alone = len(config.dataset) == 1
    setting, other = ("task_splits", "class_splits") if named_tasks else ("class_splits", "task_splits")
    if getattr(config, other) is not None:
        raise UsageError(
            f"{other}={getattr(config, other)} does not fit: dataset={name} "
            f"{'names its tasks' if named_tasks else 'has no task column'}; use --{setting}"
        )
    path = getattr(config, setting)
    if path is None:
        beside = Path(name) / f"{setting}.json"
        if not beside.is_file():
            if config.class_split is not None and alone:
                raise UsageError(
                    f"class_split={config.class_split} needs a file of splits; give one with --{setting}"
                )
            return None
        path = str(inside(Path(name), beside))
        notice(f"{setting}: {path}")
    if not Path(path).is_file():
        raise UsageError(f"{setting}={path} is not a file; give a JSON file of splits")
    try:
        splits = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{setting}={path} is not JSON ({error}); fix the file") from None
    if isinstance(splits, dict) and isinstance(splits.get("datasets"), list):  # fmmeta.json of a model
        splits = next(
            (
                one["splits"]
                for one in reversed(splits["datasets"])
                if isinstance(one, dict)
                and "splits" in one
                and (one.get("dataset") == Path(name).name or len(splits["datasets"]) == 1)
            ),
            None,
        )
    if (
        isinstance(splits, dict)
        and splits
        and "train" not in splits
        and all(isinstance(s, dict) for s in splits.values())
    ):
        chosen = config.class_split or next(iter(splits))
        if chosen not in splits:
            raise UsageError(f"class_split={chosen} is not in {path}; it has {', '.join(splits)}")
        splits = splits[chosen]
    elif config.class_split is not None and alone:
        raise UsageError(
            f"class_split={config.class_split} does not fit: {path} holds one split only; leave --class_split"
            " out"
        )
    if (
        not isinstance(splits, dict)
        or not all(isinstance(m, list) for m in splits.values())
        or "train" not in splits
    ):
        raise UsageError(
            f'{setting}={path} holds no splits; write {{"train": [...], "valid": [...], "test": [...]}}'
        )
    return {split: [str(member) for member in members] for split, members in splits.items()}


def own_splits(strata: Mapping[str, str], least: int, notice: Callable[[str], None]) -> dict[str, list[str]]:
    """Without a split file: 60/20/20 by a hash of the names, at least `least` members each, or all for
    training.
    """
    members = sorted(strata, key=lambda member: hashlib.sha256(member.encode()).digest())
    held_out = max(least, len(members) // 5)
    if len(members) < 3 * least:
        notice(
            f"no split file, and {len(members)} are too few to hold out {least} twice: all are trained on,"
            " none tested"
        )
        return {"train": members}
    notice(
        f"no split file: {len(members) - 2 * held_out} train, {held_out} valid, {held_out} test, by a hash of"
        " their names"
    )
    return {
        "test": members[:held_out],
        "valid": members[held_out : 2 * held_out],
        "train": members[2 * held_out :],
    }


def check_splits(splits: Mapping[str, list[str]], strata: Mapping[str, str], noun: str) -> None:
    home: dict[str, str] = {}
    for split, members in splits.items():
        for member in members:
            if member not in strata:
                raise UsageError(
                    f"the {split} split names the {noun} {member!r}, which the data set does not have; "
                    "fix the split file"
                )
            if home.setdefault(member, split) != split:
                raise UsageError(
                    f"the {noun} {member!r} is in the {home[member]} and the {split} split; keep it in one"
                )
