"""asynchrony.yaml: held-out losses of copies of theta, by the time at which they were made."""

import json
import os
import time
from pathlib import Path
from statistics import mean
from typing import Any

from fmmeta import Callback
from fmmeta.training.run import Run
from fmmeta.training.scoring import VALID


class Copies(Callback):
    """Copies of theta after every so many outer steps, and what they score at the end of the run."""

    def __init__(self, every: int, episodes: int) -> None:
        self.every, self.episodes, self.losses = every, episodes, dict[str, str]()

    def on_train_begin(self, run: Any) -> None:
        self.began, self.seconds, self.copies = time.monotonic(), dict[str, float](), dict[str, Any]()

    def on_step_end(self, run: Any, outcome: Any) -> None:
        if (step := run.state.outer_step) % self.every == 0:
            self.seconds[str(step)] = round(time.monotonic() - self.began, 3)
            self.copies[str(step)] = run.theta.clone()

    def score(self, run: Run) -> None:
        method, tasks = run.parts.setup.evaluation_method(), run.inputs.sources.test
        assert tasks is not None
        for step, theta in self.copies.items():
            scores = run.held_out.scores(tasks, VALID, "held out", theta, method, count=self.episodes)
            self.losses[step] = " ".join(f"{score.losses[-1]:.4f}" for score in scores)


def measure(study: Any, cell: Any) -> dict[str, Any]:
    os.environ["PADDED_SECONDS"] = cell.settings["padded"]
    copies = Copies(cell.settings["every"], cell.settings["episodes"])
    model, _ = study.trained(cell, copies.score, callbacks=[copies])
    lines = [json.loads(line) for line in Path(model).with_name("metrics.jsonl").read_text().splitlines()]
    ages = [(line.get("staleness_mean", 0.0), line.get("staleness_max", 0)) for line in lines]
    last, seconds = [*copies.seconds.items()][-1]
    of_slow, of_all = (sum(f(line["tasks_by_group"]) for line in lines) for f in (lambda one: one[2], sum))
    return {
        "step_seconds": seconds / int(last),
        "slow_share": of_slow / of_all,
        "staleness": {"mean": mean(age for age, _ in ages), "most": max(most for _, most in ages)},
        "seconds": copies.seconds,
        "losses": copies.losses,
    }


def at_equal_time(results: dict[str, Any], cell: Any) -> dict[str, float]:
    """Losses at the end of the run with bounded staleness, less those of this run at that time."""
    ours, this = results[f"{cell.axes['suite']}, max_staleness 2"], results[cell.name]
    if ours is this:
        return {}
    end, moments = [*ours["seconds"].values()][-1], this["seconds"]
    until = [step for step, seconds in moments.items() if seconds <= end] or [*moments][:1]
    last = str(cell.names["last"])
    pairs = zip(ours["losses"][last].split(), this["losses"][until[-1]].split(), strict=True)
    return {str(place): float(one) - float(other) for place, (one, other) in enumerate(pairs)}
