"""`fmmeta tune`: chooses the inner loop of a model on validation tasks and stores it with the model.

    head_init x inner_optimizer x inner_lr (a grid, or Optuna's suggestions)
        --> query loss after 1, 2, ... max_steps steps --> the lowest mean

One inner loop of max_steps steps gives the scores of all its prefixes, so that choosing the number of steps
costs nothing. A model with learned rates (by layer, or of the head alone) keeps their proportions:
`inner_lr` scales them.

Finished trials are stored beside the output until all are done, so that the same command continues after a
signal, a failure, or --minutes.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import any_of, as_stored, counted, nearest, shortened
from fmmeta.config.fields import default_of, refuse_first, rules
from fmmeta.config.recipes import typed
from fmmeta.config.resume import FREE_ON_RESUME
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.evaluation.command import plan_evaluation, with_local_models
from fmmeta.evaluation.methods import scores_by_step, with_stored_rates
from fmmeta.evaluation.results import check_output, write_output
from fmmeta.evaluation.settings import OF_TRAINING, TuneConfig, has_prompts
from fmmeta.meta.inner_optimizers import inner_optimizer
from fmmeta.models.files import remembered, weights_state
from fmmeta.models.load import Description, empty_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.reliability.signals import Signals
from fmmeta.tasks.data.splits import label
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader

DECIMALS = 4  # of a loss in the table; losses that are equal in them tie
CHOSEN = ("head_init", "inner_optimizer", "inner_lr", "inner_steps")
DIVERGED = 1e3  # nats; a mean query loss above this counts as infinite


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

    @property
    def key(self) -> tuple[str, float, str]:
        """What was tried."""
        return self.head_init, self.inner_lr, self.inner_optimizer


def tune(
    settings: TuneConfig, signals: Signals | None = None, progress: Progress | None = None
) -> list[Choice]:
    """`fmmeta tune`: score all choices, store the best in the model's fmmeta.json or in `output`.

    Returns all choices, best first. progress: default prints on rank 0. After a signal or a failure, the best
    choice so far is shown and stored. Raises `UsageError`, and `Stopped` on all ranks after a signal.
    Collective: world.
    """
    target = output_file(settings)
    trials = target.with_name(f"{target.stem}.trials.json")
    launch = Launch.from_env(os.environ)
    progress = progress or Progress(enabled=launch.global_rank == 0)
    with closing(World(launch, pick_device(launch))) as world:
        with world.comm.raise_on_all("reading settings"):
            if launch.global_rank == 0 and settings.output:
                if target.exists() and not (target.is_file() or target.is_dir()):
                    raise UsageError(
                        f"output={target} is no regular file, and tune continues from the trials beside it;"
                        " give a file"
                    )
                check_output(target)
                check_output(trials)
        settings = with_local_models(settings, world, progress.notice)
        with world.comm.raise_on_all("reading settings"):
            settings = settings.with_method()
        tuning = TuneRun(settings, world, progress, signals)
        tuning.read_trials(world, trials)
        try:
            for choice in tuning.choices():
                tuning.tried.append(choice)
        except BaseException as error:  # perhaps on this rank alone: no collectives from here on
            stored = tuning.store_unfinished(target) if launch.global_rank == 0 else ""
            if isinstance(error, Stopped):
                raise Stopped(f"stopped by {error} after {stored}") from None
            progress.notice(Warn(f"failed after {stored}"))
            raise
        tried = tuning.ranked()
        complete = len(tried) == tuning.total
        if launch.global_rank == 0 and complete and not math.isfinite(tried[0].loss):
            trials.unlink(missing_ok=True)
        refuse_divergence(tried)
        tuning.show(tried)
        with world.comm.raise_on_all("storing the choice"):
            if launch.global_rank == 0:
                tuning.store(target, tried)
                if complete:
                    trials.unlink(missing_ok=True)
        best = tried[0]
        causal = tuning.config.task_type == "causal_lm"
        start = f"method {settings.method[0]}" if causal else f"head_init {best.head_init}"
        progress.notice(
            f"best: {start}, inner_optimizer {best.inner_optimizer}, inner_lr {best.inner_lr:.4g},"
            f" {counted(best.inner_steps, 'inner step')}, loss {best.loss:.{DECIMALS}f}"
        )
        return tried


def tune_inner_loop(
    config: Config, world: World, ranks: ProcessGroups, progress: Progress, signals: Signals | None
) -> dict[str, Any]:
    """The inner loop that a run's `tune` section chooses, with its loss and the number of trials.

    Raises `UsageError`, and `Stopped`. Collective: world.
    """
    tuning = TuneRun(section_of(config), world, progress, signals, ranks)
    tuning.tried.extend(tuning.choices())
    tried = tuning.ranked()
    tuning.show(tried)
    refuse_divergence(tried)
    chosen = {name: getattr(tried[0], name) for name in CHOSEN}
    return {**chosen, "loss": tried[0].loss, "trials": len(tried), "of": tuning.total}


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


OF_SECTION = [name for name in vars(TuneConfig)["__annotations__"] if name not in ("method", "output")]


def read_section(config: Config, known: Sequence[str] = OF_SECTION) -> dict[str, Any]:
    """A run's `tune` section as it is written. known: settings that it may have. Raises `UsageError`."""
    try:
        section = json.loads(str(config.tune))
    except ValueError:
        section = None
    if not isinstance(section, dict):
        raise UsageError(
            f'tune={shortened(config.tune)} is no section of settings; write, say, {{"minutes": 5}}'
        )
    for name in section:
        if name not in known:
            raise UsageError(
                f"tune sets {name}, which is no setting of it{nearest(name, known)}; use {any_of(known)}"
            )
    return section


def section_of(config: Config) -> TuneConfig:
    """Settings of `fmmeta tune` from a run's `tune` section, and the model and tasks of the run.

    Of a classifier the run's own head is tried, unless the section names head_inits. Raises `UsageError`,
    also for a head or an optimizer that the run cannot use.
    """
    section = read_section(config)
    unused = {*CHOSEN, *OF_TRAINING} - {"inner_optimizer"}
    shared = (Config.__dataclass_fields__.keys() & TuneConfig.__dataclass_fields__.keys()) - unused
    own = {name: getattr(config, name) for name in shared}
    own.update(n_way=str(config.n_way), k_shot=[config.k_shot], method=["finetune"])
    if config.task_type == "classification":
        own["head_inits"] = [config.head_init]
    given = {name: typed(TuneConfig, name, value, "tune") for name, value in section.items()}
    if config.inner_steps == 0:
        raise UsageError(
            f"inner_steps=0: algorithm={config.algorithm} has no inner loop to tune; leave the section out"
        )
    settings = TuneConfig(**{**own, **given})
    for head in settings.head_inits or [config.head_init]:
        for optimizer in settings.optimizers(config):
            try:
                with_optimizer(config, optimizer, tune=None, head_init=head)
            except UsageError as error:
                raise UsageError(f"tune={shortened(config.tune)}: {error}") from None
    return settings


def refuse_divergence(tried: Sequence[Choice]) -> None:
    """Raise `UsageError` if the loss diverged with every choice."""
    if not math.isfinite(tried[0].loss):
        rates = " ".join(f"{rate:g}" for rate in sorted({one.inner_lr for one in tried}))
        raise UsageError(
            f"inner_lrs={rates}: the loss diverges with every one of"
            " them, and nothing is stored; try lower ones"
        )


class TuneRun:
    """A model, its validation episodes, and the choices that were tried on them."""

    def __init__(
        self,
        settings: TuneConfig,
        world: World,
        progress: Progress,
        signals: Signals | None = None,
        ranks: ProcessGroups | None = None,
    ) -> None:
        self.settings, self.progress, self.signals = settings, progress, signals or Signals()
        self.began = time.monotonic()
        self.tried: list[Choice] = []
        self.new = 0  # of them, by this process
        self.trials_file: Path | None = None
        self.weights: dict[str, list[int]] = {}  # see `weights_state`
        self.stored: dict[tuple[str, float, str], Choice] = {}  # trials of an earlier process
        config, inputs, chosen = plan_evaluation(
            settings, world, progress.notice, inner_steps=settings.max_steps
        )
        self.description, self.used = inputs.description, inputs.sources.used
        self.class_weights = inputs.sources.class_weights
        with world.comm.raise_on_all("choosing heads"):
            self.heads = heads_of(settings, config, inputs.description)
            self.optimizers = {
                name: inner_optimizer(with_optimizer(config, name)) for name in settings.optimizers(config)
            }
        self.config = replace(config, head_init="learned") if "learned" in self.heads else config
        if ranks is None:
            plan = build.plan_parallel(self.config, inputs, world, progress.notice)
            ranks = world.split(plan.group_size, plan.engine == "deepspeed")
        else:
            plan = inputs.parallel_plan(self.config, ranks.layout.group_size, world.device.type)
        self.ranks = ranks
        self.parts = build.build(self.config, inputs, plan, self.ranks)
        (episodes,) = chosen.values()
        with world.comm.raise_on_all("choosing episodes"):
            self.fingerprint = episodes.fingerprint()
        load = self.parts.load(episodes.source)
        if has_prompts(settings.method[0]):
            load.prompt_episode = build.episode_prompt_builder(inputs)
        reader = EpisodeReader.of(load, self.ranks, self.config, progress.notice)
        self.episodes = [episode for _, episode in reader.read_share(episodes.tasks)]
        planned = self.parts.setup.inner
        self.inner = with_stored_rates(settings, self.config, planned, self.parts.worker)
        # a schedule spreads the rates over all steps, so that fewer steps are another loop
        constant = self.config.inner_lr_schedule == "constant" or self.inner.rates is not planned.rates
        self.least_steps = 1 if constant else settings.max_steps
        if self.least_steps > 1:
            progress.notice(
                f"inner_lr_schedule={self.config.inner_lr_schedule}: {settings.max_steps} steps are tried"
                " (--max_steps), and no fewer"
            )
        grid = len(self.heads) * sum(len(settings.rates(name)) for name in self.optimizers)
        self.total = settings.trials if settings.tuner == "optuna" else grid

    def read_trials(self, world: World, file: Path) -> None:
        """Read the trials of an earlier process with the same settings, and store those of this one in
        `file`. Raises `UsageError` for trials with other settings. Collective: world.
        """
        text, self.trials_file = "", file
        with world.comm.raise_on_all("reading finished trials"):
            if world.comm.rank == 0:
                self.weights = weights_state(self.settings.model_name_or_path)
                text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        self.weights = json.loads(world.comm.broadcast_bytes(json.dumps(self.weights).encode()))
        if not (text := world.comm.broadcast_bytes(text.encode()).decode()):
            return
        try:
            found = json.loads(text)
            before = found["settings"]
            trials = [Choice(**{**one, "loss": float(one["loss"])}) for one in found["trials"]]
            now = self.identity
            changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UsageError(f"{file} holds no trials of fmmeta tune; remove it") from None
        if changed:
            name = changed[0]
            raise UsageError(
                f"{name}={shortened(now.get(name))}: {file} holds {counted(len(trials), 'trial')} with"
                f" {name}={shortened(before.get(name))}; remove it to begin again, or give another --output"
            )
        self.stored = {one.key: one for one in trials}
        self.progress.notice(f"{counted(len(trials), 'trial')} of {self.total} from {file}")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that trials depend on, as JSON."""
        free = {*FREE_ON_RESUME, "minutes", "trials", "output"}
        values = {name: value for name, value in vars(self.settings).items() if name not in free}
        values["class_weights"] = self.class_weights  # not the file's name
        return as_stored({**values, "episodes_fingerprint": self.fingerprint, "weights": self.weights})

    def finish_trial(self, choice: Choice) -> Choice:
        """Log a trial that this process has scored, with the time left, and store it. Returns it."""
        done = len(self.tried) + 1
        self.new += 1
        spent = time.monotonic() - self.began
        left = (self.total - done) * spent / self.new
        if self.settings.minutes:
            left = max(0.0, min(left, 60 * self.settings.minutes - spent))
        head = "" if self.config.task_type == "causal_lm" else f"{choice.head_init} head, "
        scores = "diverged"
        if math.isfinite(choice.loss):
            scores = f"loss {choice.loss:.{DECIMALS}f}, {100 * choice.accuracy:.1f} % after"
            scores += f" {counted(choice.inner_steps, 'step')}"
        self.progress.notice(
            f"trial {done} of {self.total}: {head}{choice.inner_optimizer} {choice.inner_lr:.4g}: {scores};"
            f" about {left / 60:.1f} min left"
        )
        if self.trials_file is not None and self.ranks.first:
            trials = [{**vars(one), "loss": str(one.loss)} for one in (*self.tried, choice)]
            write_output(self.trials_file, {"settings": self.identity, "trials": trials})
        return choice

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
            **{name: getattr(used, name) for name in REMEMBERED},
            **{name: getattr(best, name) for name in CHOSEN},
            **(
                {"method": settings.method[0]}
                if self.config.task_type == "causal_lm"
                else {"pooling": self.description.pooling}
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
                    for one in self.used
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

    def choices(self) -> Iterator[Choice]:
        """The best number of steps for each head and rate of the grid, or of Optuna. Collective: world."""
        self.signals.run()  # from here on a signal takes effect between two episodes
        if self.settings.tuner == "optuna":
            yield from self.choices_of_optuna()
            return
        for head in self.heads:
            for optimizer in self.optimizers:
                for rate in self.settings.rates(optimizer):
                    if (choice := self.trial(head, rate, optimizer)) is None:
                        return
                    yield choice

    def choices_of_optuna(self) -> Iterator[Choice]:
        """As many choices as `trials`; the suggestions are the same on every rank."""
        try:
            import optuna
        except ImportError as error:
            raise UsageError(
                f"tuner=optuna needs optuna ({error}); pip install 'fmmeta[tune]', or use grid"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.settings.seed))
        for _ in range(self.settings.trials):
            trial = study.ask()
            head = trial.suggest_categorical("head_init", self.heads)
            optimizer = trial.suggest_categorical("inner_optimizer", [*self.optimizers])
            rates = self.settings.rates(optimizer)
            name = "inner_lr" if self.settings.inner_lrs else f"inner_lr of {optimizer}"
            rate = trial.suggest_float(name, min(rates), max(rates), log=True)
            choice = self.trial(head, rate, optimizer)
            if choice is None:
                return
            study.tell(trial, min(choice.loss, 1e9))
            yield choice

    @property
    def time_is_over(self) -> bool:
        """Whether `minutes` have passed on this rank, and a choice is complete."""
        minutes = self.settings.minutes
        return bool(minutes and self.new and time.monotonic() - self.began > 60 * minutes)

    def trial(self, head: str, rate: float, optimizer: str) -> Choice | None:
        """The stored choice of an earlier process, or a new one; None if the time of one rank is over.

        Collective: world.
        """
        if found := self.stored.get((head, rate, optimizer)):
            return found
        choice = self.score(head, rate, optimizer)
        return choice and self.finish_trial(choice)

    def score(self, head: str, rate: float, optimizer: str) -> Choice | None:
        """Mean loss over the episodes after each number of steps, and the best number.

        The model's rates are scaled so that `inner_lr` becomes `rate`. None if the time of one rank is over.
        Raises `Stopped` on all ranks if one received a signal. Collective: world.
        """
        rates, count, tried = self.inner.rates, len(self.episodes), self.tried
        inner = replace(
            self.inner,
            rates=replace(rates, table=rates.table * (rate / self.config.inner_lr)),
            head=replace(self.inner.head, kind=head, reset_to_zero=head == "zero"),
            optimizer=self.optimizers[optimizer],
        )
        best = f"lowest loss so far {min(one.loss for one in tried):.{DECIMALS}f}" if tried else ""
        # by number of steps: loss, accuracy, episodes, groups that stopped
        sums = torch.zeros(4, self.settings.max_steps + 1, dtype=torch.float64)
        for done, episode in enumerate(self.episodes):
            self.progress.line("episodes", len(tried) * count + done, self.total * count, best)
            stops = float(bool(self.signals.asked) or self.time_is_over)
            if float(self.ranks.group.sum_(torch.tensor([stops]))):
                sums[3] = 1
                break
            sums[:2] += scores_by_step(inner, self.parts.worker, self.parts.meta_params.theta, episode)
            sums[2] += 1
        if self.ranks.layout.group_rank:
            sums.zero_()  # all ranks of a group have the same sums
        loss, accuracy, scored, stopped = self.ranks.world.sum_(sums)
        if stopped[0]:
            names = list(filter(None, self.ranks.world.gather_bytes(self.signals.asked.encode())))
            if names:
                raise Stopped(names[0].decode())
            self.progress.notice(
                f"minutes={self.settings.minutes:g} are over after {len(tried)} of {self.total} trials"
            )
            return None
        loss = torch.where(loss / scored <= DIVERGED, loss / scored, float("inf"))  # NaN too
        least = self.least_steps  # of those that tie, the fewest are chosen
        steps = least + int(loss[least:].round(decimals=DECIMALS).argmin())
        reached = float(accuracy[steps] / scored[steps])
        return Choice(head, rate, steps, float(loss[steps]), reached, optimizer)


def heads_of(settings: TuneConfig, config: Config, description: Description) -> list[str]:
    """The heads to try: those of the settings, or zero, prototype if usable, and the model's learned one.

    The order, in which Optuna numbers them, and a learned head do not depend on the choice of an earlier
    process, which fmmeta.json stores. Raises `UsageError` for a head that the model cannot use.
    """
    if config.task_type != "classification":
        if settings.head_inits:
            given = " ".join(settings.head_inits)
            raise UsageError(f"head_inits={given} means nothing for task_type=causal_lm; leave it out")
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
