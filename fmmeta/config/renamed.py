"""Settings that were renamed: refused if a user writes the old name, translated if fmmeta 0.1.0 stored it.

flags, --config files, keyword arguments       refuse: one line with the new name
run.json, state.json, fmmeta.json              translated: old folders are read as before
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import nearest, shortened

RENAMED = {
    "split": "class_split",
    "part": "eval_split",
    "profile": "machine",  # of `fmmeta plan`; a run has a setting profile
    "task_batch": "tasks_per_pass",
    "start_share": "init_interpolation",
    "group_layout": "show_layout",
    "max_bad_share": "max_bad_fraction",
    "rates_lr": "inner_lr_outer_lr",
    "inner_state": "inner_optimizer_state",
    "trajectory_gib": "trajectory_memory_gib",
}
"""Old name -> new name, for settings that have the new name and not the old one."""


def refuse(names: Iterable[Any], known: Container[str], where: str = "", dashes: str = "") -> None:
    """Raise `UsageError` for an old name. known: names of the settings; where: start of the message."""
    for name in names:
        if name in RENAMED and name not in known and (new := RENAMED[name]) in known:
            note = " 0.6 for start_share 0.4: it is 1 - start_share" if name == "start_share" else ""
            raise UsageError(f"{where}{dashes}{name} was renamed; use {dashes}{new}{note}")


def translated(stored: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Stored settings under their new names. known: names of the settings; other names stay as they are."""
    found = dict(stored)
    for old, new in RENAMED.items():
        if old in found and old not in known and new in known:
            value = found.pop(old)
            if old == "start_share" and isinstance(value, (int, float)):
                value = round(1 - value, 12)  # 0.1, not 0.09999999999999998, for 0.9
            found.setdefault(new, value)
    return found


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], every: Container[str]) -> None:
    """Raise `UsageError` for an old name and for one that is no setting.

    known: names of the settings that a call reads; every: of all of its kind.
    """
    from fmmeta.config.migration import answer

    refuse(given, known)
    for name, value in given.items():
        if name not in known:
            there = answer(name)
            close = f": {there}" if there else "" if name in every else nearest(name, known)
            raise UsageError(f"{name}={shortened(value)} is no setting{close or '; leave it out'}")


class RefusesUnknownNames:
    """Base of dataclasses of settings."""

    def __new__(cls, *_: Any, **given: Any):
        """Raises `UsageError` for a keyword that is no setting, which would be a `TypeError`."""
        names = getattr(cls, "__dataclass_fields__", {})
        refuse_unknown(given, names, names)
        return super().__new__(cls)
