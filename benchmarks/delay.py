"""What a delayed outer step, and bf16 on the wire, do to convergence: the built-in suite, the same seeds with and without.

    python -m benchmarks.delay --seeds 3 --outer_steps 100 --json benchmarks/results/delay.json

Per seed and way: training loss (query, mean of the last 20 outer steps), accuracy and loss of held-out episodes after adaptation.
Differences to the plain way at the same rate are paired by seed: same tasks, same episodes. A delay is the same function of the
data on any layout, so those runs take this process alone; bf16 on the wire needs a wire: two groups, started by torchrun.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.common import table, write_json
from fmmeta import MetaTrainer
from fmmeta.cli import parse

WAYS: dict[str, list[str]] = {
    "plain": [],
    "delayed": ["--outer_delay", "1"],
    "bf16 wire": ["--reduce_dtype", "bf16"],
    "plain, 3 x rate": ["--outer_lr", "6e-3"],
    "delayed, 3 x rate": ["--outer_delay", "1", "--outer_lr", "6e-3"],
}
LAST = 20


def measure(way: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One run: training loss at its end, held-out accuracy and loss."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--group_size", "1", "--seed", str(seed), "--outer_steps", str(args.outer_steps), "--eval_episodes",
                 str(args.episodes), "--logging_steps", "1", "--save_steps", "0", "--num_workers", "0", "--output_dir", folder,
                 *WAYS[way], *args.flags.split()]  # fmt: skip
        with redirect_stdout(io.StringIO()):
            if "wire" in way:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                subprocess.run([*command, "launch/train.py", *flags], check=True, stdout=subprocess.DEVNULL, env=env)
            else:
                MetaTrainer(parse(flags)).train()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        held = json.loads((Path(folder) / "run.json").read_text())["held_out"] if args.episodes else {}
    losses = [line["query_loss"] for line in lines if "query_loss" in line][-LAST:]
    scored = held.get("after adaptation, meta-trained", {"accuracy": [math.nan], "loss": [math.nan]})
    return {"train_loss": statistics.mean(losses), "accuracy": scored["accuracy"][0], "loss": scored["loss"][0],
            "comm_bytes": lines[0]["comm_bytes"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outer_steps", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--flags", default="", help="more flags for every run, in one string")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
    for seed in range(args.seeds):
        for way in args.ways:
            found[way].append(measure(way, seed, args))
            print(way, seed, found[way][-1], flush=True)
            write_json(args.json, {**vars(args), "runs": found, "summary": summary(found)})
    rows = []
    for way, one in summary(found).items():
        beside = f"{one['beside']:+.4f} ± {one['beside_sd']:.4f}" if "beside" in one else ""
        rows.append([way, f"{one['train_loss']:.4f}", f"{100 * one['accuracy']:.1f}", f"{one['loss']:.4f}", beside])
    print(table(["way", "train loss", "held-out %", "held-out loss", "train loss minus its plain way's"], rows))


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means over seeds, and training loss minus that of the plain way at the same rate, paired by seed."""
    told: dict[str, Any] = {}
    for way, runs in found.items():
        if not runs:
            continue
        told[way] = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        plain = found.get("plain, 3 x rate" if "3 x" in way else "plain", [])
        if not way.startswith("plain") and len(plain) == len(runs):
            off = [run["train_loss"] - other["train_loss"] for run, other in zip(runs, plain, strict=True)]
            told[way] |= {"beside": statistics.mean(off), "beside_sd": statistics.stdev(off) if len(off) > 1 else 0.0}
    return told


if __name__ == "__main__":
    main()
