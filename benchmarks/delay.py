"""What a delayed outer step, and bf16 on the wire, do to convergence: the built-in suite, the same seeds with
and without.

    python -m benchmarks.delay --seeds 3 --outer_steps 150 --json benchmarks/results/delay.json \
        --plot docs/delay.svg

Per seed and way: training loss (query, mean of the last 20 outer steps), accuracy and loss of held-out
episodes after adaptation. Differences to the plain way at the same rate are paired by seed (same tasks, same
episodes), with 95 % intervals. A delay is the same function of the data on any layout, so those runs take
this process alone; bf16 on the wire needs a wire: two groups, started by torchrun.

What the JSON file holds already, with the same settings, is not run again: `--only 1` runs one more and
stops.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.common import plot, table, write_json
from fmmeta import MetaTrainer
from fmmeta.cli import parse
from fmmeta.common.text import strict
from fmmeta.metrics.scores import format_interval, mean_ci95

WAYS: dict[str, list[str]] = {
    "plain": [],
    "delayed": ["--outer_delay", "1"],
    "bf16 wire": ["--reduce_dtype", "bf16"],
    "plain, 3 x rate": ["--outer_lr", "6e-3"],
    "delayed, 3 x rate": ["--outer_delay", "1", "--outer_lr", "6e-3"],
}
LAST = 20
SMOOTH = 15  # outer steps that a point of the plot is the mean of
SETTINGS = ("outer_steps", "episodes", "flags")


def measure(way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run: training loss at its end, held-out accuracy and loss."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--group_size",
            "1",
            "--seed",
            str(seed),
            "--outer_steps",
            str(args.outer_steps),
            "--eval_episodes",
            str(args.episodes),
            "--logging_steps",
            "1",
            "--save_steps",
            "0",
            "--num_workers",
            "0",
            "--output_dir",
            folder,
            *WAYS[way],
            *args.flags.split(),
        ]
        with redirect_stdout(io.StringIO()):
            if "wire" in way:
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc_per_node",
                    "2",
                ]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                subprocess.run(
                    [*command, "launch/train.py", *flags], check=True, stdout=subprocess.DEVNULL, env=env
                )
            else:
                MetaTrainer(parse(flags)).train()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        held = json.loads((Path(folder) / "run.json").read_text())["held_out"] if args.episodes else None
    losses = [line["query_loss"] for line in lines if "query_loss" in line][-LAST:]
    found = {
        "train_loss": statistics.mean(losses),
        "comm_bytes": lines[0]["comm_bytes"],
        "losses": [round(line["query_loss"], 4) for line in lines],
    }
    if held is None:
        return found
    scored = held["after adaptation, meta-trained"]
    return {**found, "accuracy": scored["accuracy"][0], "loss": scored["loss"][0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outer_steps", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--flags", default="", help="more flags for every run, in one string")
    parser.add_argument("--json", default=None)
    parser.add_argument("--plot", default=None)
    parser.add_argument(
        "--only", type=int, default=10**9, help="most runs of this call; what is in --json is kept"
    )
    args = parser.parse_args()
    found = known(args)
    lacking = [
        (seed, way)
        for seed in range(args.seeds)
        for way in args.ways
        if len(found.setdefault(way, [])) <= seed
    ]
    for seed, way in lacking[: args.only]:
        found[way].append(measure(way, seed, args))
        print(
            way, seed, {name: value for name, value in found[way][-1].items() if name != "losses"}, flush=True
        )
        settings = {name: getattr(args, name) for name in SETTINGS}
        write_json(args.json, {**settings, "summary": summary(found), "runs": found})
    rows = []
    for way, one in summary(found).items():
        beside = [
            format_interval((one[name], one[f"{name}_ci95"]), "+.4f") if name in one else ""
            for name in ("beside", "held_beside")
        ]
        held = [f"{100 * one['accuracy']:.1f}", f"{one['loss']:.4f}", beside[1]] if args.episodes else []
        rows.append([way, f"{one['train_loss']:.4f}", beside[0], *held])
    header = [
        "way",
        "train loss",
        "minus plain",
        *(["held-out %", "held-out loss", "minus plain"] if args.episodes else []),
    ]
    print(table(header, rows))
    plot(args.plot, lambda axes: draw(axes, found))


def known(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The runs that the JSON file holds, if they are of these settings; seeds begin with 0."""
    if not (args.json and Path(args.json).is_file()):
        return {}
    kept = json.loads(Path(args.json).read_text())
    return kept["runs"] if all(kept.get(name) == getattr(args, name) for name in SETTINGS) else {}


def draw(axes: Any, found: dict[str, list[dict[str, Any]]]) -> None:
    """Training loss by outer step: mean over the seeds, and over SMOOTH steps."""
    colours = {"plain": "#1f6f8b", "delayed": "#c0504d", "bf16 wire": "#6a8f3c"}
    for way, runs in found.items():
        each = [statistics.mean(losses) for losses in zip(*(run["losses"] for run in runs), strict=True)]
        means = [statistics.mean(each[end - SMOOTH : end]) for end in range(SMOOTH, len(each) + 1)]
        axes.plot(
            range(SMOOTH, len(each) + 1),
            means,
            label=f"{way} ({len(runs)} seeds)",
            linestyle="--" if "3 x" in way else "-",
            color=colours[way.partition(",")[0]],
        )
    axes.set_xlabel("outer step")
    axes.set_ylabel(f"query loss of training tasks (mean of {SMOOTH} steps)")
    axes.legend()


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and training and held-out loss minus those of the plain way at the same rate, paired
    by seed, with half the 95 % interval (None for one seed).
    """
    told: dict[str, Any] = {}
    for way, runs in found.items():
        if not runs:
            continue
        told[way] = {key: statistics.mean(run[key] for run in runs) for key in runs[0] if key != "losses"}
        plain = found.get("plain, 3 x rate" if "3 x" in way else "plain", [])
        if not way.startswith("plain") and len(plain) == len(runs):
            for name, key in (("beside", "train_loss"), ("held_beside", "loss"))[
                : 2 if "loss" in runs[0] else 1
            ]:
                off = [run[key] - other[key] for run, other in zip(runs, plain, strict=True)]
                told[way] |= strict(dict(zip((name, f"{name}_ci95"), mean_ci95(off), strict=True)))
    return told


if __name__ == "__main__":
    main()
