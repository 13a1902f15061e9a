"""Searches on tasks that are not trained on: `fmmeta tune`, and the `tune` section of a run.

    inner loop            head_init x inner_optimizer x inner_lr (a grid, or Optuna's suggestions)
                          --> query loss after 1, 2, ... max_steps steps --> the lowest mean
    init_interpolation    0 keeps the initial weights --> accuracy on held-out classes or tasks

One inner loop of max_steps steps gives the scores of all its prefixes, so that choosing the number of steps
costs nothing. A model with learned rates (by layer, or of the head alone) keeps their proportions:
`inner_lr` scales them. Finished trials of the command are stored beside the output until all are done, so
that it continues after a signal, a failure, or --minutes. A run chooses its inner loop before training.

With validation classes (or tasks) the interpolation is chosen on them at the end of the run. Without them the
training classes are divided into folds before training; a trial for each fold trains on the others with half
of the outer steps, and is scored on the fold. The run's own `init_interpolation` is kept unless another
value, which may be 0, is significantly above it (`choose`).

Class means of features are scored at one and at five examples, in episodes that are drawn from the features
of the held-out classes: these are computed once. Other methods are scored in episodes of the run's shape.
"""

import gc
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmmeta.common.errors import Stopped, UsageError, usage_errors
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import any_of, as_stored, counted, nearest, shortened
from fmmeta.config.algorithms import find
from fmmeta.config.fields import check_values, default_of, refuse_first, rules, setting
from fmmeta.config.recipes import typed
from fmmeta.config.resume import FREE_ON_RESUME
from fmmeta.config.settings import Config
from fmmeta.evaluation.command import build_on, plan_evaluation, prepared
from fmmeta.evaluation.methods import embed, prototype, with_stored_rates
from fmmeta.evaluation.results import write_output
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.learners.files import remembered, weights_state
from fmmeta.learners.load import Description, empty_learner
from fmmeta.meta.inner_optimizers import inner_optimizer
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import EpisodeScore, mean_ci95, means_by_step
from fmmeta.parallel.layout import ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import watching
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.data.splits import label
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import ClassKey
from fmmeta.tasks.sources.load import Sources
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.loop import train
from fmmeta.training.run import Run, StopAgreement
from fmmeta.training.run_files import RunStart, make
from fmmeta.training.scoring import VALID, Scoring, score_of

DECIMALS = 4  # of a loss in the table; losses that are equal in them tie
CHOSEN = ("head_init", "inner_optimizer", "inner_lr", "inner_steps")
DIVERGED = 1e3  # nats; a mean query loss above this counts as infinite
SHOTS = (1, 5)  # examples of a class at which class means are scored
QUERIES, EPISODES = 5, 500  # queries of a class; episodes for each number of shots


@dataclass(frozen=True)
class Choice:
    """A head, a rate, an optimizer, and the number of steps with the lowest mean query loss.

    loss: nats, inf if it diverged. accuracy: after the same number of steps.
    """

    head_init: str
    inner_lr: float
    inner_steps: int
    loss: float
    accuracy: float
    inner_optimizer: str = "sgd"


def tune(
    settings: TuneConfig, signals: Signals | None = None, progress: Progress | None = None
) -> list[Choice]:
    """`fmmeta tune`: score all choices, store the best in the model's fmmeta.json or in `output`.

    Returns all choices, best first. progress: default prints on rank 0. After a signal or a failure, the best
    choice so far is shown and stored. Raises `UsageError`, and `Stopped` on all ranks after a signal.
    Collective: world.
    """
    target = output_file(settings)
    with prepared(settings, progress, target, "trials") as (settings, world, progress, trials):
        first = world.launch.global_rank == 0
        tuning = TuneRun(settings, world, progress, signals, trials=trials)
        try:
            tuning.run()
        except BaseException as error:  # perhaps on this rank alone: no collectives from here on
            stored = tuning.store_unfinished(target) if first else ""
            if isinstance(error, Stopped):
                raise Stopped(f"stopped by {error} after {stored}") from None
            progress.notice(Warn(f"failed after {stored}"))
            raise
        tried = tuning.result()
        with world.comm.raise_on_all("storing the choice"):
            if first:
                tuning.store(target, tried)
                if len(tried) == tuning.total:
                    tuning.scoring.clear()
        best = tried[0]
        causal = tuning.config.learner.generates
        start = f"method {settings.method[0]}" if causal else f"head_init {best.head_init}"
        progress.notice(
            f"best: {start}, inner_optimizer {best.inner_optimizer}, inner_lr {best.inner_lr:.4g},"
            f" {counted(best.inner_steps, 'inner step')}, loss {best.loss:.{DECIMALS}f}"
        )
        return tried


class TuneRun:
    """A model, its validation episodes, and the choices that were tried on them."""

    def __init__(
        self,
        settings: TuneConfig,
        world: World,
        progress: Progress,
        signals: Signals | None = None,
        ranks: ProcessGroups | None = None,
        trials: Path | None = None,
    ) -> None:
        """trials: file of the scores of finished trials, in which those of an earlier process are found."""
        self.settings, self.progress, self.signals = settings, progress, signals or Signals()
        self.began, self.most_s = time.monotonic(), 60 * (settings.minutes or math.inf)
        self.tried: list[Choice] = []
        self.new = 0  # of them, by this process
        if settings.run_config().learner.ordered:
            raise UsageError(
                f"model_name_or_path={settings.model_name_or_path} learns documents, each chunk once, and"
                " tune chooses steps; compare --inner_lr by fmmeta evaluate --eval_split valid"
            )
        config, inputs, chosen = plan_evaluation(
            settings, world, progress.notice, inner_steps=settings.max_steps
        )
        self.inputs = inputs
        with world.comm.raise_on_all("choosing heads"):
            self.heads = heads_of(settings, config, inputs.description)
            self.optimizers = {
                name: inner_optimizer(with_optimizer(config, name)) for name in settings.optimizers(config)
            }
        self.config = replace(config, head_init="learned") if "learned" in self.heads else config
        self.ranks, self.parts = build_on(self.config, inputs, world, progress.notice, ranks)
        self.scoring = Scoring(self.parts.worker, self.ranks, progress, trials, self.should_stop)
        (episodes,) = chosen.values()
        with world.comm.raise_on_all("choosing episodes"):
            fingerprint = episodes.fingerprint()
        load = self.parts.load(episodes.source, inputs.prompts(settings.method[0]))
        reader = EpisodeReader.of(load, self.ranks, self.config, progress.notice)
        self.tasks, self.episodes = episodes.tasks, reader.read_share(episodes.tasks)
        self.inner = with_stored_rates(settings, self.config, self.parts.setup.inner, self.parts.worker)
        grid = len(self.heads) * sum(len(settings.rates(name)) for name in self.optimizers)
        self.total = settings.trials if settings.tuner == "optuna" else grid
        self.identity = self._identity(world, fingerprint)
        self.finished = {  # keys of trials of an earlier process
            key
            for key, count in self.scoring.counts().items()
            if count == len(self.tasks) and key.endswith(self.identity)
        }
        if self.finished:
            progress.notice(f"{counted(len(self.finished), 'trial')} of {self.total} from {trials}")

    def _identity(self, world: World, fingerprint: str) -> str:
        """Digest of all that determines the scores of a trial. Collective: world."""
        settings, choices = self.settings, ("inner_lrs", "head_inits", "inner_optimizers", "tuner", "trials")
        free = {*FREE_ON_RESUME, *choices, "minutes", "output"}
        values = {name: value for name, value in vars(settings).items() if name not in free}
        weights = weights_state(settings.model_name_or_path)
        facts = [
            values,
            self.inputs.deepspeed.precision,
            self.inputs.sources.class_weights,
            fingerprint,
            weights,
        ]
        return world.comm.broadcast(digest(as_stored(facts)))

    def log_trial(self, choice: Choice) -> None:
        """Log a trial that this process has scored, with the time left."""
        done = len(self.tried) + 1
        self.new += 1
        spent = time.monotonic() - self.began
        left = max(0.0, min((self.total - done) * spent / self.new, self.most_s - spent))
        head = "" if self.config.learner.generates else f"{choice.head_init} head, "
        scores, after = "diverged", counted(choice.inner_steps, "step")
        if math.isfinite(choice.loss):
            share = "" if math.isnan(choice.accuracy) else f", {100 * choice.accuracy:.1f} %"
            scores = f"loss {choice.loss:.{DECIMALS}f}{share} after {after}"
        self.progress.notice(
            f"trial {done} of {self.total}: {head}{choice.inner_optimizer} {choice.inner_lr:.4g}: {scores};"
            f" about {left / 60:.1f} min left"
        )

    def result(self) -> list[Choice]:
        """The choices, best first, and shown. Raises `UsageError` if the loss diverged with every choice."""
        tried = self.ranked()
        if not math.isfinite(tried[0].loss):
            if len(tried) == self.total:
                self.scoring.clear()
            rates = " ".join(f"{rate:g}" for rate in sorted({one.inner_lr for one in tried}))
            raise UsageError(
                f"inner_lrs={rates}: the loss diverges with every one of"
                " them, and nothing is stored; try lower ones"
            )
        self.show(tried)
        return tried

    def ranked(self) -> list[Choice]:
        """The choices, lowest loss first.

        Of losses that tie in the table, the model's current rate comes first, then the smallest rate, then
        the head that was tried first.
        """
        return sorted(
            self.tried,
            key=lambda one: (
                round(one.loss, DECIMALS),
                (one.inner_optimizer, one.inner_lr) != (self.config.inner_optimizer, self.config.inner_lr),
                one.inner_lr,
            ),
        )

    def show(self, tried: Sequence[Choice]) -> None:
        """Print the table of choices."""
        rows = []
        for one in tried:
            scores = ["-", "diverged", "-"]
            if math.isfinite(one.loss):
                scores = [str(one.inner_steps), f"{one.loss:.{DECIMALS}f}", f"{100 * one.accuracy:.1f}"]
            rows.append([one.head_init, one.inner_optimizer, f"{one.inner_lr:.4g}", *scores])
        self.progress.table(
            f"{counted(self.settings.episodes, 'episode')} of the {self.settings.eval_split} split: the best"
            " number of steps for each rate",
            ["head", "optimizer", "inner_lr", "steps", "loss", "accuracy %"],
            rows,
        )

    def store_unfinished(self, target: Path) -> str:
        """Show the choices and store the best before an early end; returns what was done. Local."""
        done, tried = f"{len(self.tried)} of {self.total} trials", self.ranked()
        if tried:
            self.show(tried)
        if not tried or not math.isfinite(tried[0].loss):
            return f"{done}; nothing is stored"
        try:
            self.store(target, tried)
        except UsageError as error:
            return f"{done}; nothing is stored: {error}"
        return f"{done}; the best so far is stored in {target}"

    def store(self, target: Path, tried: Sequence[Choice]) -> None:
        """Write the model's fmmeta.json with the best choice, its settings, and what it was measured on.

        Other stored values stay as they are. Raises `UsageError`.
        """
        settings, best = self.settings, tried[0]
        stored, scale = remembered(settings.model_source), best.inner_lr / self.config.inner_lr
        used = with_optimizer(self.config, best.inner_optimizer)
        values = {
            **stored,
            **used.to_remember(),
            **{name: getattr(best, name) for name in CHOSEN},
            **(
                {"method": settings.method[0]}
                if self.config.learner.generates
                else {"pooling": self.inputs.description.pooling}
            ),
            **({"classes": self.config.most_classes} if best.head_init == "learned" else {}),
            "tuned": {
                "dataset": [*map(label, settings.dataset)],
                "eval_split": settings.eval_split,
                "n_way": settings.n_way,
                "k_shot": settings.k_shot[0],
                "num_query": settings.num_query,
                "episodes": settings.episodes,
                "seed": settings.seed,
                "loss": best.loss,
                "accuracy": best.accuracy,
                "trials": len(tried),
                "of": self.total,
                "head_inits": self.heads,
                "datasets": [  # with the classes or tasks that were chosen on
                    replace(
                        one, splits={settings.eval_split: one.splits.get(settings.eval_split, [])}
                    ).as_dict()
                    for one in self.inputs.sources.used
                    if one.splits
                ],
            },
        }
        rates = stored.get("inner_rates")
        if settings.sets_inner_lr:  # measured without the learned rates
            values = {name: one for name, one in values.items() if not name.startswith("inner_rates")}
        elif isinstance(rates, dict):
            values["inner_rates"] = {
                name: [rate * scale for rate in column] for name, column in rates.items()
            }
        elif rates is not None:
            values["inner_rates_scale"] = scale * stored.get("inner_rates_scale", 1.0)
        write_output(target, values)

    def run(self) -> None:
        """Try the candidates until none is left, or the time is over.

        Raises `Stopped` on all ranks after a signal. Collective: world.
        """
        self.signals.run()  # from here on a signal takes effect between two episodes
        for candidate in self.candidates():
            choice = self.score(*candidate)
            if choice is None:
                return
            self.tried.append(choice)

    def candidates(self) -> Iterator[tuple[str, float, str]]:
        """Head, rate and optimizer: of the grid, or as many suggestions of Optuna as `trials`.

        Suggestions depend on what was tried before them; they are the same on every rank.
        """
        if self.settings.tuner == "grid":
            for head in self.heads:
                for optimizer in self.optimizers:
                    yield from ((head, rate, optimizer) for rate in self.settings.rates(optimizer))
            return
        with usage_errors("tuner=optuna needs optuna", "pip install 'fmmeta[tune]', or use grid"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.settings.seed))
        for _ in range(self.settings.trials):
            trial = study.ask()
            head = trial.suggest_categorical("head_init", self.heads)
            optimizer = trial.suggest_categorical("inner_optimizer", [*self.optimizers])
            rates = self.settings.rates(optimizer)
            name = "inner_lr" if self.settings.inner_lrs else f"inner_lr of {optimizer}"
            yield head, trial.suggest_float(name, min(rates), max(rates), log=True), optimizer
            study.tell(trial, min(self.tried[-1].loss, 1e9))

    def should_stop(self) -> bool:
        """Whether this rank has received a signal, or its time is over and a choice is complete. Local."""
        time_is_over = self.new > 0 and time.monotonic() - self.began > self.most_s
        return bool(self.signals.asked) or time_is_over

    def score(self, head: str, rate: float, optimizer: str) -> Choice | None:
        """Mean loss over the episodes after each number of steps, and the best number: of finished scores, or
        of new ones.

        The model's rates are scaled so that `inner_lr` becomes `rate`. None if the time of one rank is over.
        Raises `Stopped` on all ranks if one received a signal. Collective: world.
        """
        rates, worker, theta = self.inner.rates, self.parts.worker, self.parts.meta_params.theta
        inner = replace(
            self.inner,
            rates=replace(rates, table=rates.table * (rate / self.config.inner_lr)),
            head=replace(self.inner.head, kind=head, reset_to_zero=head == "zero"),
            optimizer=self.optimizers[optimizer],
        )

        def score(slot: int, task: Task, episode: Episode) -> EpisodeScore:
            return score_of(slot, task, inner.scores_after_each_step(worker, theta, episode))

        lowest = min((one.loss for one in self.tried), default=math.inf)
        what = f"trial {len(self.tried) + 1} of {self.total} (lowest loss so far {lowest:.{DECIMALS}f})"
        key = f"{head} {optimizer} {rate!r} {self.identity}"
        scores = self.scoring.scores(
            self.tasks, lambda left: [one for one in self.episodes if one[0] in left], score, what, theta, key
        )
        if self.scoring.stopped:
            if StopAgreement(self.ranks, self.signals).agree():
                raise Stopped(self.signals.asked)
            self.progress.notice(
                f"minutes={self.settings.minutes:g} are over after {len(self.tried)} of {self.total} trials"
            )
            return None
        means = [(loss if loss <= DIVERGED else math.inf, reached) for loss, reached in means_by_step(scores)]
        steps = min(range(1, len(means)), key=lambda step: round(means[step][0], DECIMALS))
        choice = Choice(head, rate, steps, *means[steps], optimizer)
        if key not in self.finished:
            self.log_trial(choice)
        return choice


def heads_of(settings: TuneConfig, config: Config, description: Description) -> list[str]:
    """The heads to try: those of the settings, or zero, prototype if usable, and the model's learned one.

    The order, in which Optuna numbers them, and a learned head do not depend on the choice of an earlier
    process, which fmmeta.json stores. Raises `UsageError` for a head that the model cannot use.
    """
    if not config.learner.of_classes:
        if settings.head_inits:
            raise UsageError(
                f"head_inits={' '.join(settings.head_inits)} means nothing for task_type={config.task_type};"
                " leave it out"
            )
        return [config.head_init]
    heads, before = [], remembered(settings.model_source).get("tuned")
    tried = isinstance(before, dict) and "learned" in str(before.get("head_inits"))
    learned = config.head_init == "learned" or (tried and not settings.misfit_of_head(config))
    for head in dict.fromkeys(settings.head_inits or ["zero", "prototype", *["learned"] * learned]):
        try:
            empty_learner(replace(config, head_init=head), description)
            heads.append(head)
        except UsageError:
            if settings.head_inits or head != "prototype":
                raise
    return heads


def output_file(settings: TuneConfig) -> Path:
    """--output, or the fmmeta.json of a model folder. Raises `UsageError` if there is none to write."""
    if settings.output:
        return Path(settings.output)
    folder = Path(settings.model_name_or_path)
    refuse_first(
        [
            (
                not folder.is_dir(),
                f"model_name_or_path={settings.model_name_or_path} is no folder to store the choice in; give"
                " --output FILE",
            ),
            (
                not os.access(folder, os.W_OK),
                f"model_name_or_path={folder} cannot be written to; give --output FILE",
            ),
        ]
    )
    return folder / "fmmeta.json"


def with_optimizer(config: Config, inner_optimizer: str, **changes: Any) -> Config:
    """`config` with an inner optimizer; settings that belong to other ones alone get their defaults."""
    known = rules(config)
    unused = {
        item.name: default_of(item)
        for item in fields(config)
        if known[item.name].needs[:1] == ("inner_optimizer",)
        and inner_optimizer not in known[item.name].needs[1:]
    }
    return replace(config, inner_optimizer=inner_optimizer, **unused, **changes)


@dataclass
class InterpolationConfig:
    """A `tune` section that chooses `init_interpolation`. Raises `UsageError`."""

    init_interpolations: list[float] = setting(
        [], "Values of --init_interpolation to choose from, beside the run's own; 0: the initial weights"
    )
    folds: int = setting(
        3, "Folds of the training classes or tasks, where there are none for validation", least=2
    )
    outer_steps_with_folds: int = setting(
        None,
        "--outer_steps where there are folds, which take as many steps again (default: the same)",
        least=1,
    )
    episodes: int = setting(
        40, "Episodes whose rows are scored, of the validation tasks or of each fold", least=1
    )

    def __post_init__(self) -> None:
        check_values(self)
        refuse_first(
            (
                not 0 <= alpha <= 1,
                f"init_interpolations={alpha} is not in [0, 1]; use some such as 0.6",
            )
            for alpha in self.init_interpolations
        )


OF_INNER_LOOP = [name for name in vars(TuneConfig)["__annotations__"] if name not in ("method", "output")]
OF_INTERPOLATION = [*InterpolationConfig.__dataclass_fields__]


def section_of(config: Config) -> TuneConfig | InterpolationConfig:
    """A run's `tune` section: of the search for its inner loop, or for its `init_interpolation`.

    Raises `UsageError` for one that cannot be used.
    """
    section, known = None, list(dict.fromkeys([*OF_INNER_LOOP, *OF_INTERPOLATION]))
    with suppress(ValueError):
        section = json.loads(str(config.tune))
    if not isinstance(section, dict):
        raise UsageError(
            f'tune={shortened(config.tune)} is no section of settings; write, say, {{"minutes": 5}}'
        )
    for name in section:
        if name not in known:
            raise UsageError(
                f"tune sets {name}, which is no setting of it{nearest(name, known)}; use {any_of(known)}"
            )
    inner = [name for name in section if name not in OF_INTERPOLATION]
    kind = TuneConfig if section.keys() <= {*OF_INNER_LOOP} else InterpolationConfig
    if kind is InterpolationConfig and inner:
        raise UsageError(
            f"tune sets {inner[0]} and init_interpolations, of the inner loop and of the whole run; choose"
            " one, and set the other"
        )
    if kind is InterpolationConfig and find(config.algorithm).trains_nothing:
        raise UsageError(
            f"tune sets init_interpolations, and algorithm={config.algorithm} trains nothing; leave the"
            " section out"
        )
    given = {name: typed(kind, name, value, "tune") for name, value in section.items()}
    return inner_loop_section(config, given) if kind is TuneConfig else InterpolationConfig(**given)


def inner_loop_section(config: Config, given: dict[str, Any]) -> TuneConfig:
    """Settings of `fmmeta tune` from those of a section, and the model and tasks of the run.

    Of a classifier the run's own head is tried, unless the section names head_inits. Raises `UsageError`,
    also for a head or an optimizer that the run cannot use.
    """
    unused = {*CHOSEN, "lora_merge"} - {"inner_optimizer"}
    shared = (Config.__dataclass_fields__.keys() & TuneConfig.__dataclass_fields__.keys()) - unused
    own = {name: getattr(config, name) for name in shared}
    own.update(n_way=str(config.n_way), k_shot=[config.k_shot], method=["finetune"])
    if config.learner.of_classes:
        own["head_inits"] = [config.head_init]
    if config.inner_steps == 0:
        raise UsageError(
            f"inner_steps=0: algorithm={config.algorithm} has no inner loop to tune; leave the section out"
        )
    settings = TuneConfig(**{**own, **given})
    for head, optimizer in product(settings.head_inits or [config.head_init], settings.optimizers(config)):
        try:
            with_optimizer(config, optimizer, tune=None, head_init=head)
        except UsageError as error:
            raise UsageError(f"tune={shortened(config.tune)}: {error}") from None
    return settings


def tune_before_training(
    config: Config,
    inputs: build.RunInputs,
    plan: ParallelPlan,
    world: World,
    ranks: ProcessGroups,
    progress: Progress,
    signals: Signals,
) -> Config:
    """The settings of a run with what its `tune` section chooses, and without the section; with it, where the
    choice is made at the end of the run.

    The choice is stored in output_dir (without one, in runs/) under a name that the settings and the data
    determine; the same command finds it and resumes the same run. Raises `UsageError`, and `Stopped` with
    nothing stored. Collective: world.
    """
    section, of_section, names = section_of(config.but(bf16=inputs.deepspeed.bf16)), config.tune, CHOSEN
    if isinstance(section, InterpolationConfig):
        if inputs.sources.valid is not None:
            return config
        steps = min(config.outer_steps, section.outer_steps_with_folds or config.outer_steps)
        config, of_section, names = replace(config, outer_steps=steps), vars(section), ("init_interpolation",)
    free = {*FREE_ON_RESUME, "deepspeed_layout"}
    fixed = {**config.as_dict(), **inputs.settings(config), "tune": of_section}
    fixed = {name: value for name, value in fixed.items() if name not in free}
    file = Path(config.output_dir or "runs") / f"tuned-{digest(fixed)[:8]}.json"
    found = world.comm.on_first(
        "reading the tuned settings", lambda: file.read_text("utf-8", "replace") if file.is_file() else ""
    )
    if not found:
        with world.comm.raise_on_all("making the output folder"):
            if world.comm.rank == 0:
                make(file.parent)
        try:
            if isinstance(section, TuneConfig):
                tuning = TuneRun(section, world, progress, signals, ranks)
                tuning.run()
                tried = tuning.result()
                values: dict[str, Any] = {name: getattr(tried[0], name) for name in CHOSEN}
                values |= {"loss": tried[0].loss, "trials": len(tried), "of": tuning.total}
            else:
                values = choose_by_folds(config, section, inputs, plan, world, ranks, progress, signals)
        except Stopped as error:
            raise Stopped(
                f"stopped by {error} while settings were tuned; nothing is stored, and the same command"
                " begins again"
            ) from None
        world.comm.on_first("storing the tuned settings", lambda: write_output(file, values))
        found = json.dumps(values)
    tuned = with_stored_choice(config, found, file, names)
    text = ", ".join(f"{name} {getattr(tuned, name)}" for name in names)
    progress.notice(f"tuned: {text} ({file}; remove it to tune again)")
    return tuned


def with_stored_choice(config: Config, text: str, file: Path, names: Sequence[str]) -> Config:
    """The settings with those that a file chooses, and without the section. Raises `UsageError` for another
    file.
    """
    try:
        values = json.loads(text)
        chosen = {"inner_optimizer": config.inner_optimizer, **{name: values[name] for name in names}}
        return with_optimizer(config, **chosen, tune=None)
    except (UsageError, ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{file} holds no choice of this tune section; remove it to tune again") from None


Scores = dict[float, list[float]]
"""Accuracies by interpolation, 0 among them: of each held-out class, or (with an inner loop) of each episode;
the same ones for every interpolation."""


def choose(scores: Scores, own: float, section: InterpolationConfig, where: str, progress: Progress) -> float:
    """The interpolation to export: the run's own, unless the best of the section's is above it by more than
    the 95 % interval of the paired difference.

    where: what was scored, for the log. Local; every rank chooses alike.
    """
    means = {alpha: round(float(np.mean(each)), 6) for alpha, each in scores.items()}
    best = max(sorted({own, *section.init_interpolations}), key=lambda alpha: (means[alpha], alpha == own))
    gain, half = mean_ci95(np.subtract(scores[best], scores[own]).tolist())
    chosen, why = (best, "significantly above") if gain > half else (own, "none is significantly above")
    why += f" the run's own {own:g}" if chosen != own else " it"
    progress.notice(f"init_interpolation {chosen:g}, {why}; {shown(scores, where)}")
    if means[0.0] > means[chosen]:
        progress.notice(
            Warn("the weights at the start are above that; compare both before you use the trained ones")
        )
    return chosen


def shown(scores: Scores, where: str) -> str:
    """Mean accuracy of each interpolation, or mean loss (`EpisodeScore.merit`).

    >>> shown({0.0: [0.5, 0.7], 0.3: [0.8, 0.6]}, "validation tasks")
    'accuracy on validation tasks: 60.0 % at 0, 70.0 % at 0.3'
    """
    means = {alpha: float(np.mean(each)) for alpha, each in scores.items()}
    if min(means.values()) < 0:
        return f"loss on {where}: " + ", ".join(f"{-mean:.4f} at {alpha:g}" for alpha, mean in means.items())
    return f"accuracy on {where}: " + ", ".join(
        f"{100 * mean:.1f} % at {alpha:g}" for alpha, mean in means.items()
    )


def choose_at_the_end(run: Run) -> float:
    """The interpolation to export of a trained run: of a section on its validation tasks, or the settings'.

    Raises `Stopped` after a signal. Collective: world.
    """
    config, initial, source = run.config, run.state.initial, run.inputs.sources.valid
    section = section_of(config) if config.tune is not None else None
    if not isinstance(section, InterpolationConfig) or source is None or initial is None:
        return config.init_interpolation
    scores = interpolation_scores(run, initial, config, section, "validation")
    return choose(scores, config.init_interpolation, section, "validation tasks", run.progress)


def choose_by_folds(
    config: Config,
    section: InterpolationConfig,
    inputs: build.RunInputs,
    plan: ParallelPlan,
    world: World,
    ranks: ProcessGroups,
    progress: Progress,
    signals: Signals,
) -> dict[str, Any]:
    """The choice, and the scores of all folds. Raises `UsageError`, and `Stopped`. Collective: world."""
    folds, scores = folds_of(inputs.sources, section.folds, config), defaultdict[float, list[float]](list)
    noun = "classes" if config.learner.of_classes else "tasks"
    nowhere, silent = RunStart(Path(config.output_dir or "runs"), None, False), Progress(enabled=False)
    signals.run()
    for number, sources in enumerate(folds, 1):
        title = f"fold {number} of {len(folds)}"
        trial = build.with_outer_epochs(config, sources.train, silent.notice)
        trial = replace(
            trial,
            outer_steps=math.ceil(trial.outer_steps / 2),
            tune=None,
            max_bad_steps=config.outer_steps + 1,
            load_best_model_at_end=False,
            check_meta_gradient=False,
            profile=False,
            test_episodes=0,
            eval_steps=0,
            save_steps=0,
        )
        of_fold = replace(inputs, sources=sources)
        keys = ranks.with_keys_under(f"trial-{number}")  # the counters of tasks that groups claim
        parts = build.build(trial, of_fold, plan, keys)
        initial = parts.meta_params.snapshot()
        run = Run(trial, of_fold, keys, parts, nowhere, silent, signals, writes=False)
        progress.line(title, 0, trial.outer_steps)
        try:
            with watching(run.stage, world.shared_store(), keys, signals):
                train(run)
                found = interpolation_scores(run, initial, config, section, title)
        except Stopped:
            raise Stopped(signals.asked) from None  # what stopped it, as the inner loop's choice says
        finally:
            run.callbacks.close(run.view)
            del run, parts
            gc.collect()  # the weights, before others are read
        for alpha, each in found.items():
            scores[alpha] += each
        held_out, steps = len(sources.of_split["valid"].items), counted(trial.outer_steps, "outer step")
        progress.notice(f"{title}: {steps} without {held_out} {noun}; {shown(found, 'them')}")
    chosen = choose(scores, config.init_interpolation, section, f"{len(folds)} folds", progress)
    return {"init_interpolation": chosen, "scores": [[alpha, each] for alpha, each in scores.items()]}


def interpolation_scores(
    run: Run, initial: MetaParameters, config: Config, section: InterpolationConfig, what: str
) -> Scores:
    """Scores of the run's weights, and of each interpolation of them with `initial`, on its validation tasks.

    Raises `Stopped` after a signal. Collective: world.
    """
    source, found, live = run.inputs.sources.valid, Scores(), run.state.trained
    assert source is not None
    tasks = run.held_out.tasks(source, VALID, section.episodes)
    by_means = not config.inner_steps and config.head_init == "prototype" and config.feature_norm > 0
    for alpha in sorted({0.0, config.init_interpolation, *section.init_interpolations}):
        run.stage.begin(f"{what}, scoring init_interpolation {alpha:g}")
        meta = live.interpolated(initial, 1 - alpha)
        if by_means:
            run.worker.write(meta.theta)
            draws = [source.draw(task) for task in tasks]
            features = embed(run.worker, draws, run.parts.batcher, run.ranks, run.progress)
            groups = defaultdict[ClassKey, defaultdict[ClassKey, dict[Any, Tensor]]](
                lambda: defaultdict(dict)
            )
            for draw in draws:
                for row, label in (*draw.support, *draw.query):
                    key = draw.keys[label]
                    groups[key[:-1]][key][row] = features[draw.store.path, row]
            found[alpha] = []
            for classes in groups.values():
                rows = [torch.stack([*each.values()]) for each in classes.values() if len(each) > 1]
                if len(rows) > 1:
                    of_shots = [class_accuracies(rows, config.n_way, shots) for shots in SHOTS]
                    found[alpha] += [one for one in np.mean(of_shots, axis=0).tolist() if one == one]
        else:
            learning = run.parts.setup.evaluation_method(meta.rates)
            scores = run.held_out.scores(source, VALID, what, meta.theta, learning, count=section.episodes)
            found[alpha] = [one.merit for one in scores]
        run.raise_if_stopped()
    run.worker.write(run.theta)
    return found


def class_accuracies(
    features: Sequence[Tensor], n_way: int, shots: int, episodes: int = EPISODES
) -> np.ndarray:
    """Accuracy of each class [C] in episodes with class means as classifier; NaN of a class in none. Local.

    features: [rows, D] of each class, two rows or more. Every row is in the support or in the query set; a
    class with few rows has fewer examples.
    """
    rng, ways = np.random.default_rng(0), min(n_way, len(features))
    hits, seen = np.zeros((2, len(features)))
    for _ in range(episodes):
        chosen = rng.choice(len(features), ways, replace=False)
        drawn = [features[one][rng.permutation(len(features[one]))[: shots + QUERIES]] for one in chosen]
        supports = [each[: min(shots, len(each) - 1)] for each in drawn]
        queries = [each[len(one) :] for one, each in zip(supports, drawn, strict=True)]
        labels, truth = (
            torch.arange(ways).repeat_interleave(torch.tensor(list(map(len, part))))
            for part in (supports, queries)
        )
        guessed = prototype(torch.cat(supports), labels, torch.cat(queries), ways).argmax(1)
        np.add.at(hits, chosen[truth], (guessed == truth).numpy())
        np.add.at(seen, chosen[truth], 1)
    return hits / np.where(seen, seen, np.nan)


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
    number, found = train.folds(most), list[Sources]()
    for fold in range(number):
        held_out = np.zeros(len(names), dtype=bool)
        held_out[order[fold::number]] = True
        found.append(
            replace(sources, of_split={"train": train.part(~held_out), "valid": train.part(held_out)})
        )
    return found
