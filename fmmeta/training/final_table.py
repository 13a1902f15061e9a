"""The table at the end of a run: scores of the same held-out episodes, from theta and from the initial
weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fmmeta.common.text import strict
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import Interval, format_interval, mean_ci95
from fmmeta.report.data import AFTER, BEFORE, FROM_START
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.training.confusion import confusion
from fmmeta.training.validation import TEST, HeldOut, HeldOutScore, per_stratum

SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # factors of the training's inner rates, tried for the baseline
CHOICE_EPISODES = 20  # validation episodes for each factor, at most

Table = Callable[[str, Sequence[str], Sequence[Sequence[str]]], None]
"""Shows a title, a header and rows (progress.Progress.table)."""


class Accuracies(NamedTuple):
    """Means over held-out episodes: before adaptation, after it, after it from the initial weights."""

    before: float
    after: float
    after_from_start: float


@dataclass(frozen=True)
class BaselineLoop:
    """The inner loop of the baseline row: `scale` times the training's inner rates, `steps` inner steps.

    episodes: validation episodes it was chosen on; 0: it is the training's.
    """

    scale: float
    steps: int
    episodes: int = 0


@dataclass(frozen=True)
class Compared:
    """Intervals of accuracy and loss by row; gains are paired, and positive where the loss falls."""

    rows: dict[str, tuple[Interval, Interval]]
    gain: tuple[Interval, Interval]
    strata: dict[str, tuple[float, float]]  # accuracy after adaptation: from the start, meta-trained
    episodes: int
    loop: BaselineLoop | None = None  # of the baseline

    @property
    def accuracies(self) -> Accuracies:
        return Accuracies(*(self.rows[name][0][0] for name in (BEFORE, AFTER, FROM_START)))

    def facts(self) -> dict[str, Any]:
        """The entries of run.json."""
        pairs = {**self.rows, "gain": self.gain}
        loop = {} if self.loop is None else {"baseline_inner_loop": asdict(self.loop)}
        return strict(
            {
                **{name: {"accuracy": accuracy, "loss": loss} for name, (accuracy, loss) in pairs.items()},
                "per_stratum": {name: trained for name, (_, trained) in self.strata.items()},
                "per_stratum_at_start": {name: started for name, (started, _) in self.strata.items()},
                "episodes": self.episodes,
                **loop,
            }
        )


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

    The baseline gets the inner loop that scores best on validation episodes: with the training's, the sign of
    the gain would depend on the inner rate of the training. between: called after each pass; it may raise.
    Returns the table, and the facts for run.json. Collective: world.
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
        what = "held-out tasks, weights at the start"
        started = held_out.scores(sources.test, TEST, what, initial.theta, learning)
        between()
    compared = compare(scores, started, loop)
    return compared, {**compared.facts(), "confusion": confused}


def choose_loop(
    held_out: HeldOut, source: TaskSource, initial: MetaParameters, setup: Setup, between: Callable[[], None]
) -> BaselineLoop:
    """Choose the inner rate and the number of steps (up to twice the training's) on validation episodes.

    By the highest mean accuracy, for language models by the lowest mean loss; of equals the lowest loss, then
    the lowest rate and the fewest steps. Collective: world.
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
            if math.isfinite(loss):  # rounded, so that the layout does not decide between equals
                first = -round(accuracy, 6) if config.task_type == "classification" else 0.0
                found.append((first, round(loss, 6), scale, step))
    if not found:
        return BaselineLoop(1.0, setup.inner.steps)
    *_, scale, step = min(found)
    return BaselineLoop(scale, step, len(scores))


def compare(
    trained: Sequence[HeldOutScore], started: Sequence[HeldOutScore], loop: BaselineLoop | None = None
) -> Compared:
    """Summarise scores from theta (`trained`) and from the initial weights (`started`).

    Episodes that have failed to load in one of the passes do not count.
    """
    by_slot = {score.slot: score for score in started}
    pairs = [(score, by_slot[score.slot]) for score in trained if score.slot in by_slot]
    values = {
        BEFORE: [(new.accuracy_before, new.loss_before) for new, _ in pairs],
        FROM_START: [(old.accuracy_after, old.loss_after) for _, old in pairs],
        AFTER: [(new.accuracy_after, new.loss_after) for new, _ in pairs],
        "gain": [
            (new.accuracy_after - old.accuracy_after, old.loss_after - new.loss_after) for new, old in pairs
        ],
    }
    intervals = {
        name: (mean_ci95([accuracy for accuracy, _ in row]), mean_ci95([loss for _, loss in row]))
        for name, row in values.items()
    }
    gain = intervals.pop("gain")
    at_start, after = per_stratum([old for _, old in pairs]), per_stratum([new for new, _ in pairs])
    strata = {name: (at_start[name], accuracy) for name, accuracy in after.items()}
    return Compared(intervals, gain, strata, len(pairs), loop)


def show(compared: Compared, config: Config, table: Table) -> None:
    """Show the table, and one by stratum where there are several."""
    rows = [[name, percent(accuracy), f"{loss[0]:.4f}"] for name, (accuracy, loss) in compared.rows.items()]
    if compared.loop is not None and compared.loop.steps:
        loop = compared.loop
        rows[1][0] += f" (inner_lr {config.inner_lr * loop.scale:.3g}, {loop.steps} steps)"
    gain, fall = compared.gain
    rows.append(["gain of meta-training (paired)", percent(gain), format_interval(fall)])
    ways, head = "", ""
    if config.task_type == "classification":
        ways = f"{config.n_way}-way "
        head = f" (head at the start of a task: {config.head_init})"
    title = (
        f"{compared.episodes} held-out {ways}{config.k_shot}-shot episodes, {config.inner_steps} inner steps"
    )
    table(f"{title}{head}", ["", "accuracy %", "loss"], rows)
    if len(compared.strata) > 1:
        by_stratum = [[name, *(f"{100 * one:.1f}" for one in pair)] for name, pair in compared.strata.items()]
        table("after adaptation, by stratum", ["", "start", "meta-trained"], by_stratum)


def percent(interval: Interval) -> str:
    return format_interval(interval, ".1f", 100)
