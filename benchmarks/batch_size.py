"""The gradient noise scale of `letters` measured with 4 to 64 tasks per outer step, and the training loss
after equally many tasks with each rule of the outer rate.

    python -m benchmarks.batch_size --tasks 384 --json benchmarks/results/batch_size.json

A run of B tasks per outer step has `tasks` / B outer steps. The noise scale is a property of the tasks and of
theta, so that all sizes should find the same one as long as theta is similar; small meta-batches have more
outer steps to average over. Loss: query loss over the last quarter of the tasks. What the JSON file holds
already, with the same settings, is not run again.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.common import table, write_json
from fmmeta import MetaTrainer
from fmmeta.cli import parse

SIZES, BASE = (4, 8, 16, 32, 64), 4
RULES = ("none", "sqrt")  # sqrt is the rule for AdamW, the outer optimizer here


def measure(size: int, rule: str, tasks: int) -> dict[str, Any]:
    """One run: the smoothed noise scale at its end, the loss over the last quarter of its tasks."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"""--group_size 1 --meta_batch_size {size} --outer_steps {tasks // size} --k_shot 1
            --gradient_noise_scale --warmup_steps 0.1 --eval_episodes 0 --logging_steps 1 --save_steps 0
            --num_workers 0 --log_level error --output_dir {folder}""".split()
        scaling = [] if rule == "none" else ["--scale_outer_lr", rule, "--base_meta_batch_size", str(BASE)]
        began = time.process_time()
        with redirect_stdout(io.StringIO()):
            MetaTrainer(parse([*flags, *scaling])).train()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    last = lines[-max(1, len(lines) // 4) :]
    return {
        "outer_steps": len(lines),
        "noise_scale": lines[-1]["noise_scale"],
        "signal": statistics.mean(line["gradient_square"] for line in lines),
        "variance": statistics.mean(line["gradient_variance"] for line in lines),
        "loss": statistics.mean(line["query_loss"] for line in last),
        "accuracy": statistics.mean(line["accuracy"] for line in last),
        "peak_lr": max(line["lr"] for line in lines),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=384)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.json and Path(args.json).is_file():
        stored = json.loads(Path(args.json).read_text())
        found = stored["runs"] if stored["tasks"] == args.tasks else {}
    for rule in RULES:
        for size in SIZES:
            key = f"{size} {rule}"
            if key not in found and not (size == BASE and rule != "none"):  # the same run as without scaling
                found[key] = measure(size, rule, args.tasks)
                print(key, found[key], flush=True)
                write_json(args.json, {"tasks": args.tasks, "runs": found})
    rows = []
    for size in SIZES:
        runs = [found[f"{size} {'none' if size == BASE else rule}"] for rule in RULES]
        rows.append(
            [
                str(size),
                str(runs[0]["outer_steps"]),
                *("hidden" if one["noise_scale"] is None else f"{one['noise_scale']:.0f}" for one in runs),
                *(f"{one['loss']:.4f}" for one in runs),
            ]
        )
    columns = [f"{what}, {rule}" for what in ("noise scale", "loss") for rule in RULES]
    print(table(["tasks per step", "outer steps", *columns], rows))


if __name__ == "__main__":
    main()
