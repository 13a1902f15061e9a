"""Folders of runs as `train` leaves them, with numbers that a test chose: what a report is made from."""

import json
import math
import random
from pathlib import Path
from typing import Any

from fmmeta.config.settings import Config
from fmmeta.training.run_files import RunStart, find_start, known_folder, new_folder

SPIKE, SKIPPED, BAD, NOT_FINITE = 60, 30, 45, 31


def held_out() -> dict[str, Any]:
    """The final table of a run; every number is different."""
    rng = random.Random(1)

    def interval() -> list[float]:
        return [rng.random(), rng.random() / 9]

    rows = (
        "before adaptation, meta-trained",
        "after adaptation, weights at the start",
        "after adaptation, meta-trained",
        "gain",
    )
    strata = ("contains", "first & last", "pair")
    return {
        **{name: {"accuracy": interval(), "loss": interval()} for name in rows},
        "per_stratum": {name: rng.random() for name in strata},
        "per_stratum_at_start": {name: rng.random() for name in strata},
        "episodes": 37,
        "confusion": {
            "task": "t",
            "stratum": "pair",
            "classes": ["x", "y", "z"],
            "counts": [[4, 1, 0], [0, 5, 0], [2, 2, 1]],
        },
    }


def metrics(steps: int = 100, groups: int = 2) -> list[dict[str, Any]]:
    """A line per outer step, and one of a validation every 25."""
    rng, lines = random.Random(2), []
    for step in range(1, steps + 1):
        loss = 1.6 - 0.004 * step + 0.02 * rng.random()
        waits = [0.05 * (group + 1) for group in range(groups)]
        line = {
            "step": step,
            "epoch": 0,
            "seconds": 2.0 if step > 1 else 9.0,
            "tokens": 100,
            "support_loss": 1.61,
            "query_loss": 7.5 if step == SPIKE else loss,
            "accuracy": rng.random(),
            "skipped_tasks": int(step in (SKIPPED, BAD)),
            "data_seconds": 0.3,
            "wait_seconds": sum(waits) / groups,
            "wait_seconds_by_group": waits,
            "imbalance": 0.1,
            "grad_norm": 1 + rng.random(),
            "lr": 2e-5 * (1 - step / steps),
            "comm_bytes": 8,
        }
        if step == SPIKE:
            line["loss_spike"] = 200.0
        if step == BAD:
            line["bad_tasks"] = [{"task": "t9", "error": "gone"}]
        if step == NOT_FINITE:
            line |= {"support_loss": None, "query_loss": None, "accuracy": None, "grad_norm": None}
        lines.append(line)
        if step % 25 == 0:
            lines.append({"step": step, "valid_accuracy": rng.random(), "valid_loss": loss + 0.1})
    return lines


def write_run(
    folder: Path,
    lines: list[dict[str, Any]] | None = None,
    finished: bool = True,
    scored: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """`settings` change those of run.json, `scored` its table, which a run that is not finished lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "settings": {**Config(outer_steps=100).as_dict(), "dataset_fingerprint": "f00", **settings},
        "layout": "2 groups of 1 rank",
        "shape": "5-way 5-shot",
        "versions": {"fmmeta": "0.2.0", "torch": "2.13.0"},
        "git_commit": "c0ffee",
        "finished": finished,
        **({"held_out": {**held_out(), **(scored or {})}} if finished else {}),
    }
    (folder / "run.json").write_text(json.dumps(run))
    lines = metrics() if lines is None else lines
    assert not any(isinstance(v, float) and not math.isfinite(v) for line in lines for v in line.values())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def start_of(config: Config, settings: dict[str, Any]) -> RunStart:
    """Where a run with these settings begins; its folder is not made."""
    return find_start(config, settings, known_folder(config, settings) or new_folder(config))
