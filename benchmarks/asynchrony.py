"""What is gained where outer steps do not wait for a slow group? Three groups, one four times slower.

    python -m benchmarks.asynchrony --json benchmarks/results/asynchrony.json
    python -m benchmarks.asynchrony intents --data ../shared/data --model MINILM --json ...

Each mode is a real run of three ranks: tasks are assigned (static), claimed (dynamic), or claimed with
bounded staleness (--max_staleness 2), also with --drop_stale. Tasks are computed as they are and padded by
sleeps between their passes to --task_seconds on two groups and four times as long on the third (padded.py),
so that three ranks can share two cores. 12 tasks in an outer step. Held-out loss: the same episodes for every
mode and moment, learned from copies of theta after the run. Differences are paired by episode, with 95 % t
intervals:

    equal tasks   after the same number of outer steps
    equal time    when the run with bounded staleness has ended; the others as far as they are

The floor is the time of an outer step if all groups were busy without a pause. Finished runs are kept in the
JSON file and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.common import start_ranks, table, write_json
from fmmeta.config.settings import Config
from fmmeta.train import MetaTrainer
from fmmeta.training.callbacks import Callback
from fmmeta.training.validation import VALID

MODES: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"task_schedule": "dynamic"},
    "max_staleness 2": {"max_staleness": 2},
    "drop_stale": {"max_staleness": 2, "drop_stale": True},
}
TASKS, SLOWER = 12, 4


class Copies(Callback):
    """Copies of theta in equal intervals, each with its outer step and the time since the first step."""

    def __init__(self, every: int, episodes: int) -> None:
        self.every, self.episodes = every, episodes
        self.copies: list[tuple[int, float, Any]] = []
        self.by_group, self.ages, self.oldest = np.zeros(3), list[float](), 0
        self.dropped = dict[str, float]()

    def on_train_begin(self, run: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, run: Any, outcome: Any) -> None:
        step = run.state.outer_step
        self.by_group += run.metrics.tasks_by_group
        self.ages.append(run.metrics.values.get("staleness_mean", 0.0))
        self.oldest = max(self.oldest, run.metrics.values.get("staleness_max", 0))
        self.dropped = run.metrics.values.get("dropped_share_by_stratum", {})
        if step % self.every == 0:
            self.copies.append((step, time.monotonic() - self.began, run.theta.clone()))

    def on_train_end(self, run: Any) -> None:
        self.points = []
        for step, seconds, theta in self.copies:
            learning = run.parts.setup.evaluation_method()
            scores = run.held_out.scores(
                run.inputs.sources.test, VALID, "held out", theta, learning, count=self.episodes
            )
            self.points.append((step, seconds, [round(score.losses[-1], 4) for score in scores]))


def settings(given: argparse.Namespace, mode: str, folder: str) -> Config:
    data: dict[str, Any] = {"dataset": ["letters"], "k_shot": 5, "num_query": 5}
    if given.data_set == "intents":
        data = {
            "dataset": [f"{given.data}/banking77"],
            "class_split": "01",
            "model_name_or_path": given.model,
            "max_length": 64,
            "k_shot": 1,
            "num_query": 2,  # so that two cores compute the tasks of three ranks in less than --task_seconds
            "outer_lr": 5e-5,
        }
    return Config(
        algorithm="benchmarks.padded:FOMAML",
        n_way=5,
        inner_steps=3,
        meta_batch_size=TASKS,
        outer_steps=given.steps,
        lr_scheduler_type="linear",
        eval_episodes=0,
        test_episodes=0,
        save_steps=0,
        num_workers="0",
        group_size="1",
        output_dir=folder,
        **data,
        **MODES[mode],
    )


def rank_main(given: argparse.Namespace, mode: str, out: str) -> None:
    copies = Copies(max(1, given.steps // 10), given.episodes)
    MetaTrainer(settings(given, mode, f"{out}.run"), callbacks=[copies]).train()
    if os.environ["RANK"] == "0":
        facts = {
            "share of the slow group": copies.by_group[2] / copies.by_group.sum(),
            "staleness, mean": float(np.mean(copies.ages)),
            "staleness, most": copies.oldest,
            "dropped by family": copies.dropped,
            "points": copies.points,
        }
        Path(out).write_text(json.dumps(facts))


def difference(ours: list[float], others: list[float]) -> dict[str, float]:
    """Mean of the paired differences of losses, and half the width of its 95 % interval."""
    apart = np.subtract(ours, others)
    half = stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5
    return {"mean": float(apart.mean()), "half": float(half)}


def show(runs: dict[str, Any], task_seconds: float) -> dict[str, Any]:
    """Print the table; return what it holds."""
    ours = runs["max_staleness 2"]
    _, end_seconds, end_losses = ours["points"][-1]
    found, rows = {}, []
    for mode, run in runs.items():
        step, seconds, losses = run["points"][-1]
        until = [point for point in run["points"] if point[1] <= end_seconds] or [run["points"][0]]
        found[mode] = {
            "seconds of an outer step": seconds / step,
            "loss": float(np.mean(losses)),
            "equal tasks": difference(end_losses, losses),
            "equal time": {"outer_step": until[-1][0], **difference(end_losses, until[-1][2])},
        }
        apart = [found[mode][what] for what in ("equal tasks", "equal time")]
        rows.append(
            [
                mode,
                f"{seconds / step:.2f}",
                f"{100 * run['share of the slow group']:.1f} %",
                f"{run['staleness, mean']:.2f}, {run['staleness, most']}",
                f"{np.mean(losses):.4f}",
                *("" if run is ours else f"{one['mean']:+.4f} +- {one['half']:.4f}" for one in apart),
                f"{until[-1][0]}",
            ]
        )
    header = ["mode", "s per outer step", "tasks of the slow group", "staleness: mean, most", "loss"]
    print(table([*header, "at equal tasks", "at equal time", "its outer steps then"], rows))
    for mode, run in runs.items():
        if dropped := run.get("dropped by family"):
            shares = ", ".join(f"{name or 'all'} {100 * share:.1f} %" for name, share in dropped.items())
            print(f"{mode}, dropped gradients by task family: {shares}")
    floor = TASKS * task_seconds / (2 + 1 / SLOWER)
    print(
        f"floor: {floor:.2f} s per outer step; throughput of the slow group: {100 / (2 * SLOWER + 1):.1f} %"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_set", nargs="?", default="letters", choices=("letters", "intents"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--task_seconds", type=float, default=0.5)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--data", help="intents: a folder with the folder banking77")
    parser.add_argument("--model", help="intents: an encoder")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--json")
    given = parser.parse_args()
    if "ASYNCHRONY" in os.environ:
        mode, _, out = os.environ["ASYNCHRONY"].partition(":")
        return rank_main(given, mode, out)
    stored = json.loads(Path(given.json).read_text()) if given.json and Path(given.json).is_file() else {}
    asked = {"steps": given.steps, "task_seconds": given.task_seconds, "episodes": given.episodes}
    mine = stored.get(given.data_set, {})
    runs = mine.get("runs", {}) if mine.get("asked") == asked else {}
    seconds = [given.task_seconds, given.task_seconds, SLOWER * given.task_seconds]
    for number, mode in enumerate(given.modes):
        if mode in runs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "facts.json"
            ranks = start_ranks(
                "benchmarks.asynchrony",
                3,
                number,
                ASYNCHRONY=f"{mode}:{out}",
                PADDED_SECONDS=",".join(map(str, seconds)),
            )
            if any([rank.wait() for rank in ranks]):
                raise SystemExit("a rank failed")
            runs[mode] = json.loads(out.read_text())
        stored[given.data_set] = {"asked": asked, "runs": runs}
        write_json(given.json, stored)
    stored[given.data_set] = {"asked": asked, "runs": runs, "table": show(runs, given.task_seconds)}
    write_json(given.json, stored)
    return None


if __name__ == "__main__":
    main()
