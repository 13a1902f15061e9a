"""What a report shows: run.json and metrics.jsonl of a run, which may still be running."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors

BEFORE, FROM_START, AFTER = (  # rows of the table on held-out tasks
    "before adaptation, meta-trained",
    "after adaptation, weights at the start",
    "after adaptation, meta-trained",
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A run as its files describe it.

    settings, held_out: of `run`; the latter is the table on held-out tasks, empty before the end of the run.
    steps: logged outer steps; valid: scores on validation tasks.
    """

    folder: Path
    run: dict[str, Any]
    settings: dict[str, Any]
    held_out: dict[str, Any]
    steps: list[Line]
    valid: list[Line]

    @property
    def outer_step(self) -> int:
        """The last one that was logged."""
        return max((line["step"] for line in (*self.steps, *self.valid)), default=0)


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a folder; None where there is none.

    Raises `UsageError` where it cannot be read.
    """
    file = folder / "run.json"
    if not file.is_file():
        return None
    with usage_errors(f"{file} cannot be read", "correct or remove it, or choose another output_dir"):
        run = json.loads(file.read_text(encoding="utf-8"))
        return run if isinstance(run["settings"], dict) else None


def parse_line(text: str) -> Line | None:
    """A line of metrics.jsonl, or None if it is incomplete: a process died while it wrote it."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_lines(folder: Path) -> list[Line]:
    """The complete lines of metrics.jsonl; empty where there is none."""
    file = folder / "metrics.jsonl"
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ()
    return [line for text in texts if (line := parse_line(text))]


def read(folder: Path) -> Facts:
    """Read a run's folder; of two lines of one kind for a step the last counts.

    Raises `UsageError` where the folder holds no run.
    """
    run = read_run(folder)
    if run is None:
        raise UsageError(f"output_dir={folder} holds no run.json; give the folder of a run")
    found = {(line["step"], "valid_loss" in line): line for line in read_lines(folder)}
    lines = [found[key] for key in sorted(found)]
    steps, valid = ([line for line in lines if key in line] for key in ("query_loss", "valid_loss"))
    return Facts(folder, run, run["settings"], run.get("held_out") or {}, steps, valid)


def number(value: Any) -> float | None:
    """A finite number, or None for all else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def points(lines: Sequence[Line], key: str, factor: float = 1.0) -> list[tuple[int, float]]:
    """(step, factor * value) of the lines where the value is a finite number."""
    return [(line["step"], factor * line[key]) for line in lines if number(line.get(key)) is not None]
