"""`fmmeta tune`: chooses the inner loop of a model on validation tasks and stores it with the model.

    head_init x inner_lr (a grid, or Optuna's suggestions)
        --> query loss after 1, 2, ... max_steps steps --> the lowest mean

One inner loop of max_steps steps gives the scores of all its prefixes, so that choosing the number of steps
costs nothing. A model with learned rates (by layer, or of the head alone) keeps their proportions:
`inner_lr` scales them.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.evaluation.episodes import episodes_of, run_config
from fmmeta.evaluation.results import check_output, write
from fmmeta.evaluation.settings import EvaluateConfig, TuneConfig
from fmmeta.evaluation.stored_lrs import stored_rates
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.models.load import Description, empty_learner
from fmmeta.models.stored_settings import remembered
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.reliability.signals import Signals
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader

DECIMALS = 4  # of a loss that is shown; losses that agree in them tie
# nats: a mean query loss above this counts as infinite, since no step size that is of use comes near it
DIVERGED = 1e3


@dataclass(frozen=True)
class Choice:
    """A head, a rate, and after how many steps the mean query loss was lowest (nats, inf if it diverged);
    accuracy there.
    """

    head_init: str
    inner_lr: float
    inner_steps: int
    loss: float
    accuracy: float


def run(settings: TuneConfig, signals: Signals | None = None) -> None:
    """`fmmeta tune`: choose, tell, store. Raises `Stopped` after a signal. Collective: world."""
    progress = Progress(speaks=Launch.from_env(os.environ).global_rank == 0)
    best = tune(settings, progress, signals)[0]
    progress.notice(
        f"best: head_init {best.head_init}, inner_lr {best.inner_lr:.4g}, {best.inner_steps} inner steps"
    )


def tune(settings: TuneConfig, progress: Progress, signals: Signals | None = None) -> list[Choice]:
    """Every choice that was tried, the best first; it is stored in the model's fmmeta.json, or in `output`.

    Where a signal or a failure ends it early, the best so far is stored and shown first. Raises `UsageError`,
    and `Stopped` on all ranks after a signal. Collective: world.
    """
    target = place_of(settings)
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    try:
        with world.comm.raise_on_all("reading settings"):
            if launch.global_rank == 0 and settings.output:
                check_output(target)
        bench = TuneRun(settings, world, progress, signals)
        try:
            for choice in bench.choices():
                bench.tried.append(choice)
        except BaseException as error:  # perhaps of this rank alone: no collectives from here on
            kept = bench.keep(target) if launch.global_rank == 0 else ""
            if isinstance(error, Stopped):
                raise Stopped(f"stopped by {error} after {kept}") from None
            progress.notice(f"failed after {kept}")
            raise
        tried = bench.ranked()
        if not math.isfinite(tried[0].loss):
            raise UsageError(
                f"inner_lrs={' '.join(f'{rate:g}' for rate in settings.inner_lrs)}: the loss diverges with"
                " every one of them, and nothing is stored; try lower ones"
            )
        bench.show(tried)
        with world.comm.raise_on_all("storing the choice"):
            if launch.global_rank == 0:
                store(settings, target, tried, bench)
        return tried
    finally:
        world.close()


class TuneRun:
    """A model, its validation episodes, and the choices that were tried on them."""

    def __init__(
        self, settings: TuneConfig, world: World, progress: Progress, signals: Signals | None = None
    ) -> None:
        self.settings, self.progress, self.signals = settings, progress, signals
        self.tried: list[Choice] = []
        asked = EvaluateConfig(
            **{
                name: value
                for name, value in vars(settings).items()
                if name in EvaluateConfig.__dataclass_fields__
            }
        )
        with world.comm.raise_on_all("reading settings"):
            self.base = run_config(asked, settings.k_shot[0], inner_steps=settings.max_steps)
        plan = build.plan(self.base, world, progress.notice)
        with world.comm.raise_on_all("choosing episodes"):
            episodes = episodes_of(asked, settings.k_shot[0], plan.tokenizer)
        if episodes.most_classes > self.base.most_classes:
            self.base = run_config(
                asked, settings.k_shot[0], inner_steps=settings.max_steps, n_way_max=episodes.most_classes
            )
        if lost := settings.lost_head(self.base):
            progress.notice(lost)
        with world.comm.raise_on_all("choosing heads"):
            self.heads = heads_of(settings, self.base, plan.description)
        if "learned" in self.heads:
            self.base = replace(self.base, head_init="learned")
        self.ranks: ProcessGroups = build.form_groups(self.base, plan, world, progress.notice)
        self.parts = build.build(self.base, plan, self.ranks)
        load = LoadEpisode(episodes.source, self.parts.dealer, None, self.parts.setup.inner.head.classes)
        found = EpisodeReader.of(load, self.ranks, self.base, progress.notice).read_share(episodes.tasks)
        self.episodes: list[Episode] = [batches for _, batches in found]
        inner = self.parts.setup.inner
        self.rates = stored_rates(self.base, inner.rates, self.parts.worker)
        self.total = (
            settings.trials if settings.tuner == "optuna" else len(self.heads) * len(settings.inner_lrs)
        )

    def ranked(self) -> list[Choice]:
        """The choices, lowest loss first.

        Of losses that agree in the four decimals of the table the model's own rate comes first, then the
        smallest, then the head that was tried first.
        """
        own = self.base.inner_lr
        return sorted(
            self.tried, key=lambda one: (round(one.loss, DECIMALS), one.inner_lr != own, one.inner_lr)
        )

    def show(self, tried: Sequence[Choice]) -> None:
        rows = [
            [
                one.head_init,
                f"{one.inner_lr:.4g}",
                *(
                    [str(one.inner_steps), f"{one.loss:.{DECIMALS}f}", f"{100 * one.accuracy:.1f}"]
                    if math.isfinite(one.loss)
                    else ["-", "diverged", "-"]
                ),
            ]
            for one in tried
        ]
        settings = self.settings
        self.progress.table(
            f"{settings.episodes} episodes of the {settings.eval_split} split: the best number of steps for"
            " each rate",
            ["head", "inner_lr", "steps", "loss", "accuracy %"],
            rows,
        )

    def keep(self, target: Path) -> str:
        """Show and store what was found before an early end; says what was kept. Collective: none."""
        done, tried = f"{len(self.tried)} of {self.total} trials", self.ranked()
        if tried:
            self.show(tried)
        if not tried or not math.isfinite(tried[0].loss):
            return f"{done}; nothing is stored"
        try:
            store(self.settings, target, tried, self)
        except UsageError as error:
            return f"{done}; nothing is stored: {error}"
        return f"{done}; the best so far is stored in {target}"

    def choices(self) -> Iterator[Choice]:
        """The best number of steps for every head and rate that is tried. Collective: world."""
        if self.signals:
            self.signals.run()  # a signal stops between two episodes from here on
        if self.settings.tuner == "optuna":
            yield from self._by_optuna(self.heads)
            return
        for head in self.heads:
            for rate in self.settings.inner_lrs:
                yield self.score(head, rate)

    def _by_optuna(self, heads: list[str]) -> Iterator[Choice]:
        optuna = import_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=self.settings.seed)
        )  # alike on every rank
        low, high = min(self.settings.inner_lrs), max(self.settings.inner_lrs)
        for _ in range(self.settings.trials):
            trial = study.ask()
            head, rate = (
                trial.suggest_categorical("head_init", heads),
                trial.suggest_float("inner_lr", low, high, log=True),
            )
            choice = self.score(head, rate)
            study.tell(trial, min(choice.loss, 1e9))
            yield choice

    def score(self, head: str, rate: float) -> Choice:
        """Mean loss after each number of steps.

        Raises `Stopped` on all ranks if one got a stop signal. Collective: world.
        """
        worker, theta = self.parts.worker, self.parts.theta
        inner, count = self._inner(head, rate), len(self.episodes)
        best = f"lowest loss so far {min(one.loss for one in self.tried):.{DECIMALS}f}" if self.tried else ""
        sums = torch.zeros(
            4, self.settings.max_steps + 1, dtype=torch.float64
        )  # loss, accuracy, episodes, groups that stopped
        for done, episode in enumerate(self.episodes):
            self.progress.line("episodes", len(self.tried) * count + done, self.total * count, best)
            asked = torch.tensor([float(bool(self.signals and self.signals.asked))])
            if float(self.ranks.group.sum_(asked)):
                sums[3] = 1
                break
            for step, one in enumerate(
                inner.scores_after_each_step(worker, theta, episode.support, episode.query)
            ):
                sums[:3, step] += torch.tensor([one.loss if one.finite else float("inf"), one.accuracy, 1.0])
            worker.write(theta)
        if self.ranks.layout.group_rank:
            sums.zero_()  # one voice per group
        loss, accuracy, scored, stopped = self.ranks.world.sum_(sums)
        if stopped[0]:
            told = self.ranks.world.gather_bytes((self.signals.asked if self.signals else "").encode())
            raise Stopped(next(name.decode() for name in told if name))
        loss = torch.where(loss / scored <= DIVERGED, loss / scored, float("inf"))  # NaN too
        steps = 1 + int(loss[1:].round(decimals=DECIMALS).argmin())  # the fewest of those that tie
        return Choice(head, rate, steps, float(loss[steps]), float(accuracy[steps] / scored[steps]))

    def _inner(self, head: str, rate: float) -> InnerLoop:
        inner = self.parts.setup.inner
        table: Tensor = self.rates.table * (rate / self.base.inner_lr)
        return replace(
            inner,
            rates=replace(self.rates, table=table),
            head=replace(inner.head, kind=head, reset_to_zero=head == "zero"),
        )


def heads_of(settings: TuneConfig, base: Config, description: Description) -> list[str]:
    """The heads that are tried: those given, or the model's learned one, and those of zero and prototype that
    it can use.

    Raises `UsageError` as `evaluate` does for a given one that it cannot use, or for zeros.
    """
    if base.task_type != "classification":
        return [base.head_init]
    found = []
    for head in dict.fromkeys(settings.head_inits or [base.head_init, "zero", "prototype"]):
        try:
            empty_learner(replace(base, head_init=head), description)
            found.append(head)
        except UsageError:
            if settings.head_inits or head != "prototype":
                raise
    return found


def place_of(settings: TuneConfig) -> Path:
    """Where the choice goes: --output, or the memory of a model that is a folder."""
    if settings.output:
        return Path(settings.output)
    folder = Path(settings.model_name_or_path)
    if not folder.is_dir():
        raise UsageError(
            f"model_name_or_path={settings.model_name_or_path} is no folder to store the choice in; give"
            " --output FILE"
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(f"model_name_or_path={folder} cannot be written to; give --output FILE")
    return folder / "fmmeta.json"


def store(settings: TuneConfig, target: Path, tried: Sequence[Choice], bench: TuneRun) -> None:
    """The model's memory with the best choice in it, the settings that it was made with, and what it was
    measured on; everything else in it stays. Raises `UsageError`.
    """
    best, base = tried[0], bench.base
    memory, scale = remembered(settings.model_name_or_path), best.inner_lr / base.inner_lr
    facts = {**memory, **{name: getattr(base, name) for name in REMEMBERED}}
    facts |= {"head_init": best.head_init, "inner_lr": best.inner_lr, "inner_steps": best.inner_steps}
    facts["tuned"] = {
        "dataset": settings.dataset,
        "eval_split": settings.eval_split,
        "n_way": settings.n_way,
        "k_shot": settings.k_shot[0],
        "num_query": settings.num_query,
        "episodes": settings.episodes,
        "seed": settings.seed,
        "loss": best.loss,
        "accuracy": best.accuracy,
        "trials": len(tried),
        "of": bench.total,
    }
    rates = memory.get("inner_rates")
    if isinstance(rates, dict):
        facts["inner_rates"] = {layer: [rate * scale for rate in column] for layer, column in rates.items()}
    elif rates is not None:
        facts["inner_rates_scale"] = scale * memory.get("inner_rates_scale", 1.0)
    write(target, facts)


def import_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise UsageError(
            f"tuner=optuna needs optuna ({error}); pip install 'fmmeta[tune]', or use grid"
        ) from None
