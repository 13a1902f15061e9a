"""FOMAML against exact MAML: the same tasks and number of outer steps, five seeds, on a built-in suite.

    python -m benchmarks.first_order --dataset letters --json benchmarks/results/first_order.json \
        --plot docs/first_order.svg
    python -m benchmarks.first_order --dataset marks --json benchmarks/results/marks.json \
        --plot docs/marks.svg --rates 0.1 0.3 3

`letters`: one long inner step has to do it all. `marks`: what helps is learned only through the support set's
gradient. `--rates`: inner rates that are tried besides, on the first seed. Prints a line per run; writes JSON
and a plot of the query loss over the outer steps (mean over seeds of a running mean, and its range). Runs
that the JSON file holds are not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import plot
from fmmeta import Config, MetaTrainer
from fmmeta.common.text import to_json

SHARED = {"inner_steps": 1, "inner_lr": 1.0, "eval_episodes": 60, "save_steps": 0, "logging_steps": 1}
SUITES: dict[str, dict[str, Any]] = {
    "letters": {"outer_steps": 100},
    "marks": {
        "n_way": 3,
        "k_shot": 6,
        "outer_steps": 150,
        "adam_epsilon": 1e-5,
    },  # gradients are small at first
}
COLORS = {"fomaml": "#c0504d", "maml": "#1f6f8b"}
WINDOW = 10
KEY = ("algorithm", "seed", "inner_lr")


def run(dataset: str, algorithm: str, seed: int, inner_lr: float) -> dict[str, Any]:
    """Held-out loss and accuracy before and after meta-training, and the query loss of every outer step."""
    settings = {
        **SHARED,
        **SUITES[dataset],
        "dataset": [dataset],
        "algorithm": algorithm,
        "seed": seed,
        "inner_lr": inner_lr,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        MetaTrainer(Config(**settings, output_dir=folder)).train()
        held_out = json.loads((Path(folder) / "run.json").read_text())["held_out"]
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    start, after = (held_out[f"after adaptation, {row}"] for row in ("weights at the start", "meta-trained"))
    return {
        "algorithm": algorithm,
        "seed": seed,
        "inner_lr": inner_lr,
        "start_loss": start["loss"][0],
        "loss": after["loss"][0],
        "accuracy": after["accuracy"][0],
        "curve": [json.loads(line)["query_loss"] for line in lines],
    }


def smooth(curve: list[float]) -> list[float]:
    return [
        sum(curve[max(0, i - WINDOW + 1) : i + 1]) / (i + 1 - max(0, i - WINDOW + 1))
        for i in range(len(curve))
    ]


def draw(axes: Any, results: list[dict[str, Any]], dataset: str) -> None:
    """A line per algorithm, the range over seeds behind it."""
    for algorithm, color in COLORS.items():
        mine = [
            smooth(r["curve"])
            for r in results
            if r["algorithm"] == algorithm and r["inner_lr"] == SHARED["inner_lr"]
        ]
        columns = list(zip(*mine, strict=True))
        steps = range(1, len(columns) + 1)
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2)
        axes.plot(steps, [sum(c) / len(c) for c in columns], color=color, label=algorithm)
    ways = SUITES[dataset].get("n_way", 5)
    axes.axhline(math.log(ways), color="#777", linestyle="--", label=f"chance, {ways}-way")
    axes.set(xlabel="outer step", ylabel="query loss after adaptation", title=dataset)
    axes.set_ylim(bottom=0)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=list(SUITES), default="letters")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rates", type=float, nargs="*", default=[])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot")
    asked = parser.parse_args()
    results = json.loads(asked.json.read_text()) if asked.json.is_file() else []
    done = {tuple(r[name] for name in KEY): r for r in results}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    wanted = [(seed, SHARED["inner_lr"]) for seed in asked.seeds] + [
        (asked.seeds[0], rate) for rate in asked.rates
    ]
    for seed, rate in wanted:
        for algorithm in COLORS:
            key = (algorithm, seed, rate)
            if key not in done:
                done[key] = run(asked.dataset, *key)
                asked.json.write_text(to_json(list(done.values()), indent=1) + "\n")
            found = done[key]
            print(
                f"{asked.dataset} seed {seed} inner_lr {rate:g} {algorithm:7} start {found['start_loss']:.3f}"
                f" -> {found['loss']:.3f} accuracy {100 * found['accuracy']:.1f} %",
                flush=True,
            )
    plot(asked.plot, lambda axes: draw(axes, list(done.values()), asked.dataset))


if __name__ == "__main__":
    main()
