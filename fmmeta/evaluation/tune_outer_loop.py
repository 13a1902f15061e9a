"""The `tune` section of a run: chooses settings on validation tasks before training, and stores the choice.

    the inner loop   inner_lrs, max_steps, ...           the weights at the start (evaluation/tune.py)
    the outer loop   outer_lrs, init_interpolations      a training, a trial, for each rate

A trial is scored at quarters of its outer steps, with each interpolation of the initial and the trained
weights, so that steps and interpolations cost no training. Where the rate decays, fewer steps are another
training, and the end alone is scored. The run's own settings are kept unless the 95 % interval of the gain of
others over them excludes zero. Without validation classes (or tasks) the training classes are divided
into folds; a trial of each fold trains on the others, and a choice is scored on all of them
(cross-validation).
"""

import gc
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import counted, shortened
from fmmeta.config.algorithms import find
from fmmeta.config.fields import check_values, refuse_first, setting
from fmmeta.config.recipes import typed
from fmmeta.config.resume import FREE_ON_RESUME
from fmmeta.config.settings import Config
from fmmeta.evaluation.results import write_output
from fmmeta.evaluation.tune import (
    CHOSEN,
    OF_SECTION,
    read_section,
    section_of,
    tune_inner_loop,
    with_optimizer,
)
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import mean_ci95
from fmmeta.parallel.layout import ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import watching
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.sources.base import GlobalLabelSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.training import build
from fmmeta.training.callbacks import Outcome, Validation
from fmmeta.training.loop import Run, StaticController
from fmmeta.training.run_folder import RunStart, make
from fmmeta.training.validation import VALID

POINTS = 4  # of a trial, at which it is scored if its rate is constant
CONSTANT = ("constant", "constant_with_warmup")
INTERPOLATIONS = (0.3, 0.6, 0.8, 1.0)
DECIMALS = 4  # of an accuracy or a loss; what is equal in them ties
OF_OUTER_LOOP = ("outer_lr", "outer_steps", "init_interpolation")


@dataclass
class OuterTuneConfig:
    """A `tune` section that chooses the outer loop. Raises `UsageError`."""

    outer_lrs: list[float] = setting([], "Outer rates to try (default: --outer_lr, and three times that)")
    init_interpolations: list[float] = setting(
        [], "Values of --init_interpolation to try (default: that of the run, and 0.3, 0.6, 0.8 and 1)"
    )
    folds: int = setting(
        3, "Folds of the training classes or tasks, where there are none for validation", least=2
    )
    episodes: int = setting(40, "Validation episodes; the same ones for every choice", least=1)
    minutes: float | None = setting(
        None,
        "Begin no trial that would end after this many minutes; the first is always completed (default: no"
        " limit)",
        positive="or leave it out",
    )

    def __post_init__(self) -> None:
        check_values(self)
        refuse_first(
            [
                *(
                    (
                        not 0 < rate < math.inf,
                        f"outer_lrs={rate} is no positive number; use some such as 1e-4",
                    )
                    for rate in self.outer_lrs
                ),
                *(
                    (
                        not 0 < alpha <= 1,
                        f"init_interpolations={alpha} is not in (0, 1]; use some such as 0.6",
                    )
                    for alpha in self.init_interpolations
                ),
            ]
        )

    def rates(self, config: Config) -> list[float]:
        """The outer rates to try. config: the run's."""
        return [*dict.fromkeys(self.outer_lrs or [config.outer_lr, 3 * config.outer_lr])]


OF_OUTER_SECTION = [*OuterTuneConfig.__dataclass_fields__]


def outer_section(config: Config) -> OuterTuneConfig | None:
    """The run's `tune` section, if it chooses the outer loop. Raises `UsageError`."""
    section = read_section(config, [*dict.fromkeys([*OF_SECTION, *OF_OUTER_SECTION])])
    outer = [name for name in OF_OUTER_SECTION if name in section and name not in OF_SECTION]
    if not outer:
        return None
    if inner := [name for name in section if name not in OF_OUTER_SECTION]:
        raise UsageError(
            f"tune sets {inner[0]} and {outer[0]}, of the inner and the outer loop; choose one loop, and set"
            " the other"
        )
    if find(config.algorithm).trains_nothing:
        raise UsageError(
            f"tune sets {outer[0]}, and algorithm={config.algorithm} trains nothing; leave the section out"
        )
    settings = OuterTuneConfig(
        **{name: typed(OuterTuneConfig, name, value, "tune") for name, value in section.items()}
    )
    for rate in settings.rates(config):
        try:
            replace(config, tune=None, outer_lr=rate)
        except UsageError as error:
            raise UsageError(f"tune={shortened(config.tune)}: {error}") from None
    return settings


def check_section(config: Config) -> None:
    """Raise `UsageError` for a `tune` section that cannot be used."""
    if outer_section(config) is None:
        section_of(config)


def tune_before_training(
    config: Config,
    inputs: build.RunInputs,
    plan: ParallelPlan,
    world: World,
    ranks: ProcessGroups,
    progress: Progress,
    signals: Signals,
) -> Config:
    """The settings of a run with what its `tune` section chooses, and without the section.

    The choice is stored in output_dir (without one, in runs/) under a name that the settings and the data
    determine; the same command finds it and resumes the same run. Raises `UsageError`, and `Stopped` with the
    finished trials of the outer loop stored, of the inner loop nothing. Collective: world.
    """
    outer = outer_section(config)
    section = config.tune if outer is None else {**vars(outer), "minutes": None}
    fixed = {**config.as_dict(), **inputs.settings(config), "tune": section}
    free = {*FREE_ON_RESUME, "deepspeed_layout"}
    fixed = {name: value for name, value in fixed.items() if name not in free}
    file = Path(config.output_dir or "runs") / f"tuned-{digest(fixed)[:8]}.json"
    found = b""
    with world.comm.raise_on_all("reading the tuned settings"):
        if world.comm.rank == 0 and file.is_file():
            found = file.read_bytes()
    found = world.comm.broadcast_bytes(found)
    if outer is not None:
        tuning = OuterTuning(config, outer, inputs, plan, world, ranks, progress, file)
        chosen = tuning.choose(found, signals)
        tuned = replace(config, tune=None, **chosen)
    else:
        values = stored_choice(found, file)
        if not values:
            try:
                values = tune_inner_loop(config, world, ranks, progress, signals)
            except Stopped as error:
                raise Stopped(
                    f"stopped by {error} while the inner loop was tuned; nothing is stored, and the same"
                    " command begins again"
                ) from None
            store(file, values, world)
        chosen = {name: values[name] for name in CHOSEN if name in values}  # older files have no optimizer
        try:
            tuned = with_optimizer(config, **{"inner_optimizer": config.inner_optimizer, **chosen}, tune=None)
        except UsageError:
            raise no_choice(file) from None
    text = ", ".join(f"{name} {value}" for name, value in chosen.items())
    progress.notice(f"tuned: {text} ({file}; remove it to tune again)")
    return tuned


def stored_choice(text: bytes, file: Path) -> dict[str, Any]:
    """The inner loop in a file; empty without one. Raises `UsageError` for another file."""
    try:
        values = json.loads(text) if text else {}
        if not text or {*CHOSEN} - {"inner_optimizer"} <= {*values}:
            return values
    except (ValueError, TypeError, RecursionError):
        pass
    raise no_choice(file)


def no_choice(file: Path) -> UsageError:
    return UsageError(f"{file} holds no choice of this tune section; remove it to tune again")


def store(file: Path, values: dict[str, Any], world: World) -> None:
    """Raises `UsageError` where output_dir cannot be written. Collective: world."""
    with world.comm.raise_on_all("storing the tuned settings"):
        if world.comm.rank == 0:
            write_output(file, values)


@dataclass(frozen=True)
class Trial:
    """A training that was scored. scores: lists of outer step, init_interpolation, accuracies by episode,
    mean loss (None if it is not finite).
    """

    fold: int
    outer_lr: float
    seconds: float
    scores: list[list[Any]]

    @staticmethod
    def of(values: dict[str, Any]) -> "Trial":
        """From its fields. Raises `ValueError`, `TypeError` or `KeyError`."""
        scores = [
            [int(step), float(alpha), list(map(float, accuracies)), None if loss is None else float(loss)]
            for step, alpha, accuracies, loss in values["scores"]
        ]
        return Trial(int(values["fold"]), float(values["outer_lr"]), float(values["seconds"]), scores)


@dataclass(frozen=True)
class OuterChoice:
    """Settings of the outer loop with their accuracy in each episode of all folds, and their mean loss
    (nats).
    """

    outer_lr: float
    outer_steps: int
    init_interpolation: float
    accuracies: tuple[float, ...]
    loss: float

    @property
    def accuracy(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    def is_above(self, other: "OuterChoice") -> bool:
        """Whether the 95 % interval of the paired difference over the episodes is above 0."""
        mean, half = mean_ci95(np.subtract(self.accuracies, other.accuracies).tolist())
        return mean > half


class OuterTuning:
    """The trials of a run: each rate, on the first fold, then each on the next one."""

    def __init__(
        self,
        config: Config,
        section: OuterTuneConfig,
        inputs: build.RunInputs,
        plan: ParallelPlan,
        world: World,
        ranks: ProcessGroups,
        progress: Progress,
        file: Path,
    ) -> None:
        self.config, self.section, self.inputs, self.plan = config, section, inputs, plan
        self.world, self.ranks, self.progress, self.file = world, ranks, progress, file
        self.rates = section.rates(config)
        default = (*INTERPOLATIONS, config.init_interpolation)
        self.interpolations = sorted({*(section.init_interpolations or default)})
        self.folds = folds_of(inputs.sources, section.folds, config)
        self.planned = [(fold, rate) for fold in range(len(self.folds)) for rate in self.rates]
        self.done: list[Trial] = []
        # of runs whose first steps depend on the last one, the end alone is scored
        constant = config.lr_scheduler_type in CONSTANT and config.warmup_steps in (0, config.warmup)
        quarters = constant and not config.max_staleness
        points = POINTS if quarters else 1
        self.steps = sorted({math.ceil(config.outer_steps * one / points) for one in range(1, points + 1)})

    def points(self, rate: float) -> list[tuple[int, float]]:
        """What is scored of a trial: outer steps and interpolations; of the first trial of a fold also the
        initial weights, as (0, 0).
        """
        trained = [(step, alpha) for step in self.steps for alpha in self.interpolations]
        return [(0, 0.0), *trained] if rate == self.rates[0] else trained

    def choose(self, stored: bytes, signals: Signals) -> dict[str, Any]:
        """The chosen settings by name, after the trials that are not in the stored file.

        Where output_dir holds a run already there are no further trials: the choice would be that of another
        run. Raises `UsageError`, and `Stopped`. Collective: world.
        """
        self.done = self.read(stored)
        begun = len(self.done)
        has_run = torch.tensor(float((self.file.parent / "run.json").is_file()))
        if not self.world.comm.broadcast_(has_run, 0):
            with self.world.comm.raise_on_all("making the output folder"):
                if self.world.comm.rank == 0:
                    make(self.file.parent)
            if self.done:
                self.progress.notice(f"{counted(begun, 'trial')} of {len(self.planned)} from {self.file}")
            signals.run()
            while len(self.done) < len(self.planned) and not self.time_is_over:
                self.done.append(self.trial(*self.planned[len(self.done)], signals))
                self.store()
                self.log_trial()
        if not self.done:
            raise UsageError(
                f"output_dir={self.file.parent} holds a run, and no trials of this tune section; choose"
                " another"
            )
        ranked = self.ranked()
        initial = next(one for one in ranked if not one.outer_steps)
        best = next(one for one in ranked if one.outer_steps)
        if not math.isfinite(best.loss):
            rates = " ".join(f"{rate:g}" for rate in self.rates)
            raise UsageError(f"outer_lrs={rates}: the loss diverges with every one of them; try lower ones")
        if len(self.done) > begun:
            self.show(ranked)
        own = [getattr(self.config, name) for name in OF_OUTER_LOOP]
        for one in ranked:
            is_own = one is not best and [getattr(one, name) for name in OF_OUTER_LOOP] == own
            if is_own and not best.is_above(one):
                self.progress.notice(
                    f"none is significantly above the run's own settings, {100 * one.accuracy:.1f} %:"
                    " these are kept"
                )
                best = one
        if best.accuracy <= initial.accuracy:
            self.progress.notice(
                Warn(
                    f"the choice is not above the initial weights, {100 * initial.accuracy:.1f} % on these"
                    " tasks: evaluate them before you use the trained ones"
                )
            )
        return {name: getattr(best, name) for name in OF_OUTER_LOOP}

    def read(self, text: bytes) -> list[Trial]:
        """The finished trials in a file. Raises `UsageError` for other content."""
        try:
            done = [Trial.of(one) for one in json.loads(text)["trials"]] if text else []
            count = self.section.episodes
            found = [
                (one.fold, one.outer_lr, [(step, alpha, len(each)) for step, alpha, each, _ in one.scores])
                for one in done
            ]
            wanted = [
                (fold, rate, [(*point, count) for point in self.points(rate)])
                for fold, rate in self.planned[: len(done)]
            ]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise no_choice(self.file) from None
        if found != wanted:
            raise no_choice(self.file)
        return done

    def store(self) -> None:
        """Write the finished trials. Collective: world."""
        store(self.file, {"trials": [vars(one) for one in self.done], "of": len(self.planned)}, self.world)

    @property
    def seconds_left(self) -> float:
        """Of the trials that are left, within `minutes`."""
        spent = sum(one.seconds for one in self.done)
        left = spent / len(self.done) * (len(self.planned) - len(self.done))
        return min(left, max(0.0, 60 * (self.section.minutes or math.inf) - spent))

    @property
    def time_is_over(self) -> bool:
        """Whether the next trial would end after `minutes`; the same on all ranks."""
        spent, minutes = sum(one.seconds for one in self.done), self.section.minutes
        return bool(minutes and self.done and spent * (1 + 1 / len(self.done)) > 60 * minutes)

    def trial(self, fold: int, rate: float, signals: Signals) -> Trial:
        """Train on a fold with a rate, and score it. Raises `Stopped` on all ranks. Collective: world."""
        began, number = time.monotonic(), len(self.done) + 1
        config = replace(
            self.config,
            tune=None,
            outer_lr=rate,
            max_bad_steps=self.config.outer_steps + 1,
            load_best_model_at_end=False,
            init_interpolation=1.0,
            check_meta_gradient=False,
            profile=False,
            test_episodes=0,
            save_steps=0,
        )
        inputs = replace(self.inputs, sources=self.folds[fold])
        ranks = self.ranks.with_keys_under(f"trial-{number}")  # the counters of tasks that groups claim
        parts = build.build(config, inputs, self.plan, ranks)
        initial, title = parts.meta_params.snapshot(), f"trial {number} of {len(self.planned)}"
        scoring = TrialValidation(self, self.points(rate), initial, title)
        nowhere, silent = RunStart(self.file.parent, None, False), Progress(enabled=False)
        run = Run(config, inputs, ranks, parts, nowhere, silent, signals, Unwritten(), validation=scoring)
        try:
            with watching(run.stage, self.world.shared_store(), ranks, signals):
                run.loop()
        except Stopped:
            raise Stopped(
                f"stopped by {signals.asked} while the outer loop was tuned, after {len(self.done)} of"
                f" {counted(len(self.planned), 'trial')}; the same command continues"
            ) from None
        finally:
            run.callbacks.close(run)
            del run, parts
            gc.collect()  # the weights, before others are read
        seconds = torch.tensor(time.monotonic() - began, dtype=torch.float64)
        return Trial(fold, rate, round(float(self.world.comm.broadcast_(seconds, 0)), 1), scoring.scores)

    def log_trial(self) -> None:
        """Log the last trial, with the time left."""
        last = self.done[-1]
        sums = [(sum(each) / len(each), step) for step, _, each, _ in last.scores if step]
        accuracy, step = max(sums)
        fold = f"fold {last.fold + 1}, " if len(self.folds) > 1 else ""
        left = 0.0 if self.time_is_over else self.seconds_left
        self.progress.notice(
            f"trial {len(self.done)} of {len(self.planned)}: {fold}outer_lr {last.outer_lr:.4g}: at best"
            f" {100 * accuracy:.1f} % after {counted(step, 'outer step')}; about {left / 60:.1f} min left"
        )

    def ranked(self) -> list[OuterChoice]:
        """All choices and the initial weights (0 outer steps), the best first and those that diverged last;
        scored on the complete folds, or on what there is of the first.

        Of equals fewer steps come first, then the run's own rate, then more of the initial weights.
        """
        whole = max(1, len(self.done) // len(self.rates))
        accuracies = defaultdict[tuple[float, int, float], list[float]](list)
        losses = defaultdict[tuple[float, int, float], list[float]](list)
        for trial in self.done:
            for step, alpha, of_episodes, loss in trial.scores if trial.fold < whole else ():
                accuracies[trial.outer_lr, step, alpha] += of_episodes
                losses[trial.outer_lr, step, alpha].append(math.inf if loss is None else loss)
        found = [
            OuterChoice(*key, tuple(each), sum(losses[key]) / len(losses[key]))
            for key, each in accuracies.items()
        ]
        own = self.config.outer_lr
        return sorted(
            found,
            key=lambda one: (
                one.loss == math.inf,
                -round(one.accuracy, DECIMALS),
                round(one.loss, DECIMALS),
                one.outer_steps,
                one.outer_lr != own,
                one.init_interpolation,
            ),
        )

    def show(self, ranked: Sequence[OuterChoice]) -> None:
        """Print the best interpolation for each rate and number of steps."""
        first = {(one.outer_lr, one.outer_steps): one for one in reversed(ranked)}
        rows = [
            [
                f"{one.outer_lr:.4g}" if one.outer_steps else "-",
                *([str(one.outer_steps), f"{one.init_interpolation:g}"] if one.outer_steps else ["0", "-"]),
                f"{100 * one.accuracy:.1f}",
                f"{one.loss:.{DECIMALS}f}",
            ]
            for one in ranked
            if first[one.outer_lr, one.outer_steps] is one
        ]
        what = "training" if len(self.folds) > 1 else "validation"
        folds = f" in each of {len(self.folds)} folds" if len(self.folds) > 1 else ""
        self.progress.table(
            f"{counted(self.section.episodes, 'episode')} of {what} tasks{folds}: the best interpolations",
            ["outer_lr", "outer_steps", "init_interpolation", "accuracy %", "loss"],
            rows,
        )


class Unwritten(StaticController):
    """Of a trial, which writes no files."""

    writes = False


class TrialValidation(Validation):
    """Scores a trial. points: outer steps and interpolations. initial: theta_0."""

    def __init__(
        self, tuning: OuterTuning, points: Sequence[tuple[int, float]], initial: MetaParameters, title: str
    ) -> None:
        self.tuning, self.points, self.initial, self.title = tuning, points, initial, title
        self.scores: list[list[Any]] = []

    def on_step_end(self, run: Run, outcome: Outcome) -> None:
        self.tuning.progress.line(self.title, run.state.outer_step, run.config.outer_steps)
        self.run_if_due(run)

    def run_if_due(self, run: Run) -> None:
        """Score what is due at this outer step. Collective: world."""
        source = run.inputs.sources.valid
        due = [alpha for step, alpha in self.points if step == run.state.outer_step]
        assert source is not None
        for alpha in due:
            meta = run.state.meta_params.interpolated(self.initial, 1 - alpha)
            scores = run.held_out.scores(
                source,
                VALID,
                f"{self.title}, validation",
                meta.theta,
                run.parts.setup.evaluation_method(meta.rates),
                count=self.tuning.section.episodes,
            )
            if run.stop.agree():
                break  # the scores are incomplete
            accuracies = [one.accuracies[-1] for one in scores]
            loss = sum(one.losses[-1] for one in scores) / len(scores)
            self.scores.append(
                [run.state.outer_step, alpha, accuracies, loss if math.isfinite(loss) else None]
            )
        if due:
            run.worker.write(run.theta)


def folds_of(sources: Sources, most: int, config: Config) -> list[Sources]:
    """The data's own parts, or up to `most` divisions of the training classes or tasks into two.

    Held-out parts are equal in size, by a hash of the names in each stratum. Raises `UsageError` for fewer
    than four classes or tasks.
    """
    if sources.valid is not None:
        return [sources]
    train = sources.train
    codes, names = train.items.stratum, train.items.names
    if len(names) < 4:
        raise UsageError(
            f"tune needs validation tasks, or four classes or tasks to train on, and dataset="
            f"{' '.join(config.dataset)} has {len(names)}; leave the section out"
        )
    order = sorted(range(len(names)), key=lambda one: (codes[one], sha256(names[one].encode()).digest()))
    plain = train.source if isinstance(train, GlobalLabelSource) else train
    number, found = train.folds(most), list[Sources]()
    for fold in range(number):
        held_out = np.zeros(len(names), dtype=bool)
        held_out[order[fold::number]] = True
        parts = {"train": train.part(~held_out), "valid": plain.part(held_out)}
        found.append(replace(sources, of_split=parts))
    return found
