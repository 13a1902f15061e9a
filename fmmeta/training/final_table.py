"""The table at the end of a run: the same held-out episodes before and after, from theta and from the weights
at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fmmeta.common.text import strict
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import Interval, mean_ci95, shown
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.training.confusion import confusion
from fmmeta.training.validation import TEST, HeldOut, HeldOutScore, per_stratum

SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the training's inner rates, tried for the baseline
CHOICE_EPISODES = 20  # validation episodes for each of them, at most

Table = Callable[[str, Sequence[str], Sequence[Sequence[str]]], None]
"""Shows a title, a header and rows (progress.Progress.table)."""


class Accuracies(NamedTuple):
    """Means over held-out episodes: before adaptation, after it, after it from the initial weights."""

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
    loop: BaselineLoop | None = None  # of the row of the weights at the start

    @property
    def accuracies(self) -> Accuracies:
        before, from_start, after = (accuracy[0] for accuracy, _ in self.rows.values())
        return Accuracies(before, after, from_start)

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        rows = {name: {"accuracy": accuracy, "loss": loss} for name, (accuracy, loss) in self.rows.items()}
        gain = {"accuracy": self.gain[0], "loss": self.gain[1]}
        started, trained = ({name: pair[i] for name, pair in self.strata.items()} for i in (0, 1))
        facts = {
            **rows,
            "gain": gain,
            "per_stratum": trained,
            "per_stratum_at_start": started,
            "episodes": self.episodes,
        }
        return strict(facts | ({} if self.loop is None else {"baseline_inner_loop": asdict(self.loop)}))


@dataclass(frozen=True)
class BaselineLoop:
    """The inner loop of the baseline row: `scale` times the training's inner rates, `steps` inner steps.

    episodes: validation episodes it was chosen on; 0: it is the training's own.
    """

    scale: float
    steps: int
    episodes: int = 0

    def text(self, config: Config) -> str:
        return f"inner_lr {config.inner_lr * self.scale:.3g}, {self.steps} steps"


def against_start(
    held_out: HeldOut,
    sources: Sources,
    trained: MetaParameters,
    initial: MetaParameters | None,
    setup: Setup,
    between: Callable[[], None],
) -> tuple[Compared, dict[str, Any]]:
    """Score the held-out episodes from the `trained` weights, then from the `initial` ones (None: nothing was
    trained).

    The baseline gets the inner loop that serves the initial weights best on validation episodes: with the
    training's own, the sign of the gain would depend on the inner rate that was trained with. `between` is
    called after each pass; it may raise. Returns the table, and the facts for run.json. Collective: world.
    """
    assert sources.test is not None
    learning = setup.evaluation_method(trained.rates)
    scores = held_out.scores(sources.test, TEST, "held-out tasks", trained.theta, learning)
    between()
    confused = confusion(held_out, sources.test, trained.theta, learning)
    started, loop = scores, BaselineLoop(1.0, setup.inner.steps)
    if initial is not None:
        if sources.valid is not None and isinstance(learning, InnerLoop) and learning.steps:
            loop = choose_loop(held_out, sources.valid, initial, setup, between)
        learning = setup.evaluation_method(initial.rates)
        if isinstance(learning, InnerLoop):
            learning = learning.variant(scale=loop.scale, steps=loop.steps)
        started = held_out.scores(
            sources.test, TEST, "held-out tasks, weights at the start", initial.theta, learning
        )
        between()
    compared = replace(compare(scores, started), loop=loop)
    return compared, {**compared.facts(), "confusion": confused}


def choose_loop(
    held_out: HeldOut, source: TaskSource, initial: MetaParameters, setup: Setup, between: Callable[[], None]
) -> BaselineLoop:
    """The inner rate and number of steps (up to twice the training's) with the highest mean accuracy on
    validation episodes, for language models the lowest mean loss; of equals the lowest loss, then the lowest
    rate and the fewest steps. Collective: world.
    """
    config, most = setup.config, 2 * setup.inner.steps
    count = min(CHOICE_EPISODES, config.test_episodes)
    found: list[tuple[float, float, float, int]] = []
    for number, scale in enumerate(SCALES, 1):
        what = f"inner loop of the baseline, rate {number} of {len(SCALES)}, validation tasks"
        inner = setup.inner.variant(initial.rates, scale, most)
        scores = held_out.step_scores(source, count, what, initial.theta, inner)
        between()
        for step in range(1, most + 1):
            loss = sum(score.losses[step] for score in scores) / len(scores)
            accuracy = sum(score.accuracies[step] for score in scores) / len(scores)
            if math.isfinite(loss):  # rounded: the layout must not decide between equals
                first = -round(accuracy, 6) if config.task_type == "classification" else 0.0
                found.append((first, round(loss, 6), scale, step))
    if not found:
        return BaselineLoop(1.0, setup.inner.steps)
    *_, scale, step = min(found)
    return BaselineLoop(scale, step, len(scores))


def compare(trained: Sequence[HeldOutScore], started: Sequence[HeldOutScore]) -> Compared:
    """Summarise scores of the same episodes from theta (`trained`) and from the weights at the start
    (`started`).
    """
    by_slot = {
        score.slot: score for score in started
    }  # a task that could not be had in one of the passes is in no pair
    pairs = [(score, by_slot[score.slot]) for score in trained if score.slot in by_slot]
    trained, started = [score for score, _ in pairs], [score for _, score in pairs]
    rows = {
        "before adaptation, meta-trained": (
            [s.accuracy_before for s in trained],
            [s.loss_before for s in trained],
        ),
        "after adaptation, weights at the start": (
            [s.accuracy_after for s in started],
            [s.loss_after for s in started],
        ),
        "after adaptation, meta-trained": (
            [s.accuracy_after for s in trained],
            [s.loss_after for s in trained],
        ),
    }
    gain = mean_ci95([t.accuracy_after - s.accuracy_after for t, s in pairs])
    fall = mean_ci95([s.loss_after - t.loss_after for t, s in pairs])
    at_start = per_stratum(started)
    strata = {name: (at_start[name], accuracy) for name, accuracy in per_stratum(trained).items()}
    return Compared(
        {name: (mean_ci95(a), mean_ci95(b)) for name, (a, b) in rows.items()},
        (gain, fall),
        strata,
        len(trained),
    )


def show(compared: Compared, config: Config, table: Table) -> None:
    """Show the table, and one by stratum where there are several."""
    rows = [[name, percent(accuracy), f"{loss[0]:.4f}"] for name, (accuracy, loss) in compared.rows.items()]
    if compared.loop is not None and compared.loop.steps:
        rows[1][0] += f" ({compared.loop.text(config)})"
    gain, fall = compared.gain
    rows.append(["gain of meta-training (paired)", percent(gain), shown(fall)])
    way = f"{config.n_way}-way " if config.task_type == "classification" else ""
    title = (
        f"{compared.episodes} held-out {way}{config.k_shot}-shot episodes, {config.inner_steps} inner steps"
    )
    if config.task_type == "classification":
        title += f" (head at the start of a task: {config.head_init})"
    table(title, ["", "accuracy %", "loss"], rows)
    if len(compared.strata) > 1:
        by_stratum = [
            [name, *(f"{100 * value:.1f}" for value in values)] for name, values in compared.strata.items()
        ]
        table("after adaptation, by stratum", ["", "start", "meta-trained"], by_stratum)


def percent(interval: Interval) -> str:
    return shown(interval, ".1f", 100)
