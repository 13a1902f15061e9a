"""What a report shows, read from run.json and metrics.jsonl alone, also during the run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.renamed import translated
from fmmeta.config.settings import Config

BEFORE, FROM_START, AFTER = (
    "before adaptation, meta-trained",
    "after adaptation, weights at the start",
    "after adaptation, meta-trained",
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A run as its folder tells it. `steps`: logged outer steps; `valid`: evaluations on validation tasks."""

    folder: Path
    run: dict[str, Any]
    steps: list[Line]
    valid: list[Line]

    @property
    def settings(self) -> dict[str, Any]:
        return self.run["settings"]

    @property
    def held_out(self) -> dict[str, Any]:
        """What the table at the end says, empty before the end."""
        return self.run.get("held_out") or {}

    @property
    def has_table(self) -> bool:
        return AFTER in self.held_out

    @property
    def finished(self) -> bool:
        return bool(self.run.get("finished"))

    @property
    def outer_step(self) -> int:
        """The last one that was logged."""
        return max((line["step"] for line in (*self.steps, *self.valid)), default=0)


def read(folder: Path) -> Facts:
    """Read a run's folder. Raises `UsageError` where there is none."""
    file = folder / "run.json"
    if not file.is_file():
        raise UsageError(f"output_dir={folder} holds no run.json; give the folder of a run")
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(run["settings"], dict):
            raise TypeError
        run["settings"] = translated(run["settings"], Config.__dataclass_fields__)
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{file} cannot be read; fix it, or give another output_dir") from None
    lines = read_lines(folder / "metrics.jsonl")
    return Facts(
        folder,
        run,
        [line for line in lines if "query_loss" in line],
        [line for line in lines if "valid_loss" in line],
    )


def read_lines(file: Path) -> list[Line]:
    """The complete lines of metrics.jsonl, by step; the last may be half written, and one may be repeated."""
    found: dict[tuple[int, bool], Line] = {}
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
            step = line["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(step, int):
            found[step, "valid_loss" in line] = line
    return [found[key] for key in sorted(found)]


def number(value: Any) -> float | None:
    """A finite number, or None for all else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of the lines that have the key; None where the number was not finite."""
    return [(line["step"], number(line[key])) for line in lines if key in line]


def spikes(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """(step, query loss) where the run marked it as one: `loss_spike`, the rule of guard.py, which saw the
    unlogged steps too.
    """
    return [
        (line["step"], value)
        for line in lines
        if "loss_spike" in line and (value := number(line["query_loss"])) is not None
    ]


@dataclass(frozen=True)
class Times:
    """Mean seconds of an outer step over `steps` logged ones: the whole, waiting for data, and for other
    groups by group.
    """

    steps: int
    first_left_out: bool
    whole: float
    data: float
    waiting: list[float]

    def computing(self, group: int) -> float:
        """What is left of the step: passes, reduction, the outer step."""
        return max(0.0, self.whole - self.data - self.waiting[group])


def times(steps: Sequence[Line]) -> Times | None:
    """Of the logged steps on the last layout, without the first one, which warms up, where there are four or
    more.
    """
    usable = [line for line in steps if number(line.get("seconds")) is not None]
    if not usable:
        return None
    groups = len(waits(usable[-1]))
    usable = [line for line in usable if len(waits(line)) == groups]
    kept = usable[1:] if len(usable) > 3 else usable
    mean = [sum(column) / len(kept) for column in zip(*(waits(line) for line in kept), strict=True)]
    whole, data = (
        sum(number(line.get(key)) or 0.0 for line in kept) / len(kept) for key in ("seconds", "data_seconds")
    )
    return Times(len(kept), len(kept) < len(usable), whole, data, mean)


def waits(line: Line) -> list[float]:
    return [float(one) for one in line.get("wait_seconds_by_group") or [line.get("wait_seconds") or 0.0]]
