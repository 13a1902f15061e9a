"""What a report shows: run.json and metrics.jsonl of a run, which may still be running."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError

BEFORE, FROM_START, AFTER = (  # rows of the table on held-out tasks
    "before adaptation, meta-trained",
    "after adaptation, weights at the start",
    "after adaptation, meta-trained",
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A run as its files describe it. steps: logged outer steps; valid: scores on validation tasks."""

    folder: Path
    run: dict[str, Any]
    steps: list[Line]
    valid: list[Line]

    @property
    def settings(self) -> dict[str, Any]:
        return self.run["settings"]

    @property
    def held_out(self) -> dict[str, Any]:
        """The table on held-out tasks, empty before the end of the run."""
        return self.run.get("held_out") or {}

    @property
    def outer_step(self) -> int:
        """The last one that was logged."""
        return max((line["step"] for line in (*self.steps, *self.valid)), default=0)


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a folder, with today's names of settings; None where there is none.

    Raises `UsageError` where it cannot be read.
    """
    file = folder / "run.json"
    if not file.is_file():
        return None
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(run["settings"], dict):
            return None
        return run
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{file} cannot be read; correct or remove it, or choose another output_dir"
        ) from None


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
    found: dict[tuple[int, bool], Line] = {}
    for line in read_lines(folder):
        found[line["step"], "valid_loss" in line] = line
    lines = [found[key] for key in sorted(found)]
    steps, valid = ([line for line in lines if key in line] for key in ("query_loss", "valid_loss"))
    return Facts(folder, run, steps, valid)


def number(value: Any) -> float | None:
    """A finite number, or None for all else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of the lines that have the key; None where the number was not finite."""
    return [(line["step"], number(line[key])) for line in lines if key in line]


def spikes(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """(step, query loss) of lines with `loss_spike`: the run marks them (reliability/checks.py), since it
    also has the steps that are not logged.
    """
    return [
        (step, value)
        for step, value in points([line for line in lines if "loss_spike" in line], "query_loss")
        if value is not None
    ]


def tasks_per_step(settings: dict[str, Any]) -> int:
    """Tasks of an outer step over all groups."""
    return settings.get("meta_batch_size", 1) * settings.get("meta_accumulation_steps", 1)


def noise_advice(tasks: float | None, used: int) -> str:
    """One sentence: the meta-batch size that a noise scale suggests (--gradient_noise_scale).

    tasks: the noise scale, None or NaN where there is none; used: tasks of an outer step.

    >>> noise_advice(12.0, 4).partition(": ")[2].partition(", ")[0]
    'an outer step of 4 tasks makes 25 % of the progress of one over all tasks'
    """
    scale = number(tasks)
    if scale is None:
        return (
            f"noise scale unknown: the noise of {used} tasks per outer step hides the mean gradient; use more"
            " tasks, or measure over more outer steps"
        )
    share = 100 * used / (used + scale)
    return (
        f"noise scale {scale:.3g} tasks, which is the suggested meta-batch: an outer step of {used} tasks"
        f" makes {share:.0f} % of the progress of one over all tasks, one of the noise scale 50 %"
    )
