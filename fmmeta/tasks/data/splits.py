"""Classes or tasks of the train, validation and test splits, from a JSON file or by a hash of their names.

A unit is what a split lists: a class, or a named task.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import inside
from fmmeta.config.settings import Config

SPLITS = ("train", "valid", "test")
SPLIT_SETTINGS = ("class_splits", "task_splits", "class_split")
Splits = dict[str, list[str]]


def read_splits(name: str, config: Config, named_tasks: bool, notice: Callable[[str], None]) -> Splits | None:
    """Splits from the file that a setting names, else from the file in the data folder, else None.

    With several data sets --class_split applies to those that have named splits.
    """
    alone = len(config.dataset) == 1
    setting, other = ("task_splits", "class_splits") if named_tasks else ("class_splits", "task_splits")
    if getattr(config, other) is not None:
        kind = "names its tasks" if named_tasks else "has no task column"
        raise UsageError(
            f"{other}={getattr(config, other)} does not fit: dataset={name} {kind}; use --{setting}"
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
        path = inside(Path(name), beside)
        notice(f"{setting}: {path}")
    if not Path(path).is_file():
        raise UsageError(f"{setting}={path} is not a file; give a JSON file of splits")
    try:
        splits: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{setting}={path} is not JSON ({error}); fix the file") from None
    if isinstance(splits, dict) and isinstance(splits.get("datasets"), list):  # fmmeta.json of a model
        stored = [one for one in splits["datasets"] if isinstance(one, dict) and "splits" in one]
        if len(splits["datasets"]) > 1:
            stored = [one for one in stored if one.get("dataset") == Path(name).name]
        splits = stored[-1]["splits"] if stored else None
    if isinstance(splits, dict) and splits and all(isinstance(part, dict) for part in splits.values()):
        chosen = config.class_split or next(iter(splits))
        if chosen not in splits:
            raise UsageError(f"class_split={chosen} is not in {path}; it has {', '.join(splits)}")
        splits = splits[chosen]
    elif config.class_split is not None and alone:
        raise UsageError(
            f"class_split={config.class_split} does not fit: {path} holds one split only; leave --class_split"
            " out"
        )
    if not lists_by_name(splits) or "train" not in splits:
        raise UsageError(
            f'{setting}={path} holds no splits; write {{"train": [...], "valid": [...], "test": [...]}}'
        )
    return {split: [str(unit) for unit in units] for split, units in splits.items()}


def lists_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(units, list) for units in value.values())


def own_splits(strata: Mapping[str, str], least: int, notice: Callable[[str], None]) -> Splits:
    """60/20/20 by a hash of the names, at least `least` units held out each; all for training if too few."""
    units = sorted(strata, key=lambda unit: hashlib.sha256(unit.encode()).digest())
    held_out = max(least, len(units) // 5)
    if len(units) < 3 * least:
        notice(
            f"no split file, and {len(units)} are too few to hold out {least} twice: all are trained on,"
            " none tested"
        )
        return {"train": units}
    notice(
        f"no split file: {len(units) - 2 * held_out} train, {held_out} valid, {held_out} test, by a hash of"
        " their names"
    )
    test, valid, train = units[:held_out], units[held_out : 2 * held_out], units[2 * held_out :]
    return {"test": test, "valid": valid, "train": train}


def check_splits(splits: Splits, strata: Mapping[str, str], noun: str) -> None:
    """Raise `UsageError` for a unit that the data set does not have, or that is in two splits."""
    split_of: dict[str, str] = {}
    for split, units in splits.items():
        for unit in units:
            if unit not in strata:
                raise UsageError(
                    f"the {split} split names the {noun} {unit!r}, which the data set does not have; "
                    "fix the split file"
                )
            if split_of.setdefault(unit, split) != split:
                raise UsageError(
                    f"the {noun} {unit!r} is in the {split_of[unit]} and the {split} split; keep it in one"
                )
