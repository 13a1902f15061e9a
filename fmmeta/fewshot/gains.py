"""The table at the end of a run: the same held-out episodes before and after, from theta and from the weights at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fmmeta.config import Config
from fmmeta.fewshot.confusion import confusion
from fmmeta.fewshot.heldout import TEST, HeldOut, Score, per_stratum
from fmmeta.fewshot.scores import Interval, mean_ci95, shown, strict
from fmmeta.tasks.source import TaskSource

Table = Callable[[str, Sequence[str], Sequence[Sequence[str]]], None]
"""Shows a title, a header and rows (progress.Progress.table)."""


class Accuracies(NamedTuple):
    """Means over the held-out episodes: before adaptation, after it, after it from the weights at the start."""

    before: float
    after: float
    after_from_start: float


@dataclass(frozen=True)
class Compared:
    """Accuracy and loss by row of the table; gains are paired, loss gains positive when the loss fell."""

    rows: dict[str, tuple[Interval, Interval]]
    gain: tuple[Interval, Interval]
    strata: dict[str, tuple[float, float]]  # accuracy after adaptation: from the start, meta-trained
    episodes: int

    @property
    def accuracies(self) -> Accuracies:
        before, from_start, after = (accuracy[0] for accuracy, _ in self.rows.values())
        return Accuracies(before, after, from_start)

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        rows = {name: {"accuracy": accuracy, "loss": loss} for name, (accuracy, loss) in self.rows.items()}
        gain = {"accuracy": self.gain[0], "loss": self.gain[1]}
        started, trained = ({name: pair[i] for name, pair in self.strata.items()} for i in (0, 1))
        return strict({**rows, "gain": gain, "per_stratum": trained, "per_stratum_at_start": started, "episodes": self.episodes})


def against_start(held_out: HeldOut, source: TaskSource, begin_anew: Callable[[], None] | None,
                  between: Callable[[], None]) -> tuple[Compared, dict[str, Any]]:  # fmt: skip
    """Score the held-out episodes from theta, then from what `begin_anew` puts in its place (None: nothing was trained).

    `between` is called after each pass; it may raise. Returns the table, and the facts for run.json. Collective: world.
    """
    trained = held_out.scores(source, TEST, "held-out tasks")
    between()
    confused = confusion(held_out, source)
    started = trained
    if begin_anew is not None:
        begin_anew()
        started = held_out.scores(source, TEST, "held-out tasks, weights at the start")
        between()
    compared = compare(trained, started)
    return compared, {**compared.facts(), "confusion": confused}


def compare(trained: Sequence[Score], started: Sequence[Score]) -> Compared:
    """Summarise scores of the same episodes from theta (`trained`) and from the weights at the start (`started`)."""
    by_slot = {score.slot: score for score in started}  # a task that could not be had in one of the passes is in no pair
    pairs = [(score, by_slot[score.slot]) for score in trained if score.slot in by_slot]
    trained, started = [score for score, _ in pairs], [score for _, score in pairs]
    rows = {
        "before adaptation, meta-trained": ([s.accuracy_before for s in trained], [s.loss_before for s in trained]),
        "after adaptation, weights at the start": ([s.accuracy_after for s in started], [s.loss_after for s in started]),
        "after adaptation, meta-trained": ([s.accuracy_after for s in trained], [s.loss_after for s in trained]),
    }
    gain = mean_ci95([t.accuracy_after - s.accuracy_after for t, s in pairs])
    fall = mean_ci95([s.loss_after - t.loss_after for t, s in pairs])
    at_start = per_stratum(started)
    strata = {name: (at_start[name], accuracy) for name, accuracy in per_stratum(trained).items()}
    return Compared({name: (mean_ci95(a), mean_ci95(b)) for name, (a, b) in rows.items()}, (gain, fall), strata, len(trained))


def show(compared: Compared, config: Config, table: Table) -> None:
    """Show the table, and one by stratum where there are several."""
    rows = [[name, percent(accuracy), f"{loss[0]:.4f}"] for name, (accuracy, loss) in compared.rows.items()]
    gain, fall = compared.gain
    rows.append(["gain of meta-training (paired)", percent(gain), shown(fall)])
    way = f"{config.n_way}-way " if config.task_type == "classification" else ""
    title = f"{compared.episodes} held-out {way}{config.k_shot}-shot episodes, {config.inner_steps} inner steps"
    if config.task_type == "classification":
        title += f" (head at the start of a task: {config.head_init})"
    table(title, ["", "accuracy %", "loss"], rows)
    if len(compared.strata) > 1:
        by_stratum = [[name, *(f"{100 * value:.1f}" for value in values)] for name, values in compared.strata.items()]
        table("after adaptation, by stratum", ["", "start", "meta-trained"], by_stratum)


def percent(interval: Interval) -> str:
    return shown(interval, ".1f", 100)
