"""`fmmeta evaluate`: models x methods x shots over the same episodes, divided among the ranks of a launch.

    settings --> episodes of each k_shot (by seed, never by model)
             --> one score per episode, method and shot --> results

The scores do not depend on the number of groups: an episode is scored by one group, and frozen features are
computed in batches that the rows alone determine. Ranks join groups as in training, so that a model is
evaluated wherever it could be trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config, InnerConfig
from fmmeta.evaluation.episodes import Episodes, episodes_of, run_config, skipped
from fmmeta.evaluation.feature_classifiers import METHODS as FROZEN
from fmmeta.evaluation.features import embed
from fmmeta.evaluation.generation import LanguageMetrics
from fmmeta.evaluation.methods import Finetune, InContextMethod, frozen_score
from fmmeta.evaluation.results import (
    EvalCell,
    check_comparable,
    check_output,
    differences,
    read_cells,
    results_of,
    show,
    write,
)
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.evaluation.stored_lrs import stored_rates
from fmmeta.meta.algorithms.in_context import prompted
from fmmeta.metrics.scores import EpisodeScore, gather
from fmmeta.models.load import describe, empty_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.reliability.signals import Signals
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader


def run(settings: EvaluateConfig, signals: Signals | None = None) -> None:
    """`fmmeta evaluate`: the results as a table. Collective: world."""
    progress = Progress(speaks=Launch.from_env(os.environ).global_rank == 0)

    def tell(results: dict[str, Any]) -> None:
        if signals:
            # a signal that comes now no longer ends the process: the results are shown and written
            signals.run()
        show(results, progress)

    evaluate(settings, progress, tell)


def evaluate(
    settings: EvaluateConfig,
    progress: Progress | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Evaluate as `settings` say; the results, as results.json has them. `tell` gets them before they are
    written.

    Raises `UsageError`. Collective: world.
    """
    settings = replace(
        settings, method=list(dict.fromkeys(settings.method)), k_shot=list(dict.fromkeys(settings.k_shot))
    )
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    progress = progress or Progress(speaks=launch.global_rank == 0)
    try:
        file = settings.compare is not None and settings.compare.endswith(".json")
        models = [settings.model_name_or_path, *([settings.compare] if settings.compare and not file else [])]
        bench, others = EvaluationRun(world, progress, models), None
        with world.comm.raise_on_all("reading settings"):
            if launch.global_rank == 0 and settings.output:
                check_output(Path(settings.output))
            if settings.compare is not None and file:
                others = read_cells(settings.compare)
            elif settings.compare is not None and launch.global_rank == 0:
                check_other(settings)
        cells = bench.cells(settings, others)
        results = results_of(settings, cells, bench.task_type)
        if settings.compare is not None:
            others = others or bench.cells(
                replace(settings, model_name_or_path=settings.compare, compare=None), cells
            )
            results["compare"] = {"with": settings.compare, "cells": differences(cells, others)}
        tell(results)
        with world.comm.raise_on_all("writing the results"):
            if launch.global_rank == 0 and settings.output:
                write(Path(settings.output), results)
        return results
    finally:
        world.close()


class EvaluationRun:
    """Scores models one after another; the groups that the first one forms serve the others too. `task_type`:
    of the last one.

    models: all of them, since one whose training classes must not be tested decides for the others.
    """

    def __init__(self, world: World, progress: Progress, models: Sequence[str]) -> None:
        self.world, self.progress, self.models = world, progress, models
        self.ranks: ProcessGroups | None = None
        self.task_type = ""

    def cells(self, settings: EvaluateConfig, others: Sequence[EvalCell] | None = None) -> list[EvalCell]:
        """One per method and k_shot. `others`: what they will be compared with, checked before anything is
        computed.

        Collective: world.
        """
        notice, shots = self.progress.notice, settings.k_shot
        with self.world.comm.raise_on_all("reading settings"):
            config = run_config(settings, max(shots))
            refuse(settings, config)
        self.task_type = config.task_type
        plan = build.plan(config, self.world, notice, self.models)
        with self.world.comm.raise_on_all("choosing episodes"):
            chosen = {k: episodes_of(settings, k, plan.tokenizer, self.models) for k in shots}
        if config.on_bad_task == "skip":
            chosen = {k: skipped(k, episodes, config, self.world, notice) for k, episodes in chosen.items()}
        with self.world.comm.raise_on_all("choosing episodes"):
            prints = {k: episodes.fingerprint() for k, episodes in chosen.items()}
            check_comparable(settings, prints, others)
        most = max(episodes.most_classes for episodes in chosen.values())
        if most > config.most_classes:
            config = run_config(settings, max(shots), n_way_max=most)
        if lost := settings.lost_head(config):
            notice(lost)
        self.ranks = self.ranks or build.form_groups(config, plan, self.world, notice)
        if settings.metrics and self.ranks.layout.group_size > 1:
            raise UsageError(
                f"metrics={' '.join(settings.metrics)} need the whole model on one rank, and group_size="
                f"{self.ranks.layout.group_size}; use --group_size 1, or leave them out"
            )
        parts = build.build(config, plan, self.ranks)
        model = Model(settings, config, plan, parts, self.ranks, self.progress)
        frozen = [method for method in settings.method if method in FROZEN]
        features = None
        if frozen:
            draws = [draw for episodes in chosen.values() for draw in episodes.draws()]
            features = embed(
                parts.worker, draws, parts.dealer, self.ranks, partial(self.progress.line, "rows embedded")
            )
        found = []
        for k in shots:
            for method in settings.method:
                scores = (
                    model.frozen(method, chosen[k], features)
                    if method in FROZEN
                    else model.learned(method, k, chosen[k])
                )
                found.append(EvalCell(method, k, prints[k], scores))
        return found


@dataclass
class Model:
    """A model that is held, and the scores that it reaches."""

    settings: EvaluateConfig
    config: Config
    plan: build.Plan
    parts: build.Parts
    ranks: ProcessGroups
    progress: Progress

    def frozen(self, method: str, episodes: Episodes, features: Any) -> list[EpisodeScore]:
        """Collective: world."""
        group, groups = self.ranks.layout.group_index, self.ranks.layout.num_groups
        mine = [(slot, task) for slot, task in enumerate(episodes.tasks) if slot % groups == group]
        scores = [
            frozen_score(method, slot, task, episodes.source.draw(task), features) for slot, task in mine
        ]
        return gather(self.ranks, scores, EpisodeScore)

    def learned(self, method: str, k_shot: int, episodes: Episodes) -> list[EpisodeScore]:
        """By the inner loop or in context. Collective: world."""
        worker, theta, ranks = self.parts.worker, self.parts.meta_params.theta, self.ranks
        slots = {task.seed: slot for slot, task in enumerate(episodes.tasks)}
        what = f"{k_shot}-shot {method}"
        self.progress.start(what)
        found = EpisodeReader.of(
            self._load(method, episodes), ranks, self.config, self.progress.notice
        ).read_share(episodes.tasks)
        inner = self.parts.setup.inner
        if not self.settings.own_rates():
            inner = replace(inner, rates=stored_rates(self.config, inner.rates, worker))
        learner = InContextMethod(worker) if method == "in_context" else Finetune(worker, theta, inner)
        scores = []
        for done, (task, episode) in enumerate(found):
            self.progress.line(what, done, len(found))
            scores.append(learner.score(slots[task.seed], task, episode, self._extra(episodes, task)))
        return gather(ranks, scores, EpisodeScore)

    def _load(self, method: str, episodes: Episodes) -> LoadEpisode:
        positions = getattr(self.plan.description.hf_config, "max_position_embeddings", None)
        prompt = partial(prompted, bos_token_id=self.plan.tokenizer.bos_token_id, positions=positions)
        return LoadEpisode(
            episodes.source,
            self.parts.dealer,
            None,
            self.parts.setup.inner.head.classes,
            prompt if method == "in_context" else None,
        )

    def _extra(self, episodes: Episodes, task: Task) -> Callable[[], dict[str, float]]:
        if not self.settings.metrics:
            return dict
        worker = self.parts.worker
        assert isinstance(worker, FullModelWorker), "a group of one holds a whole model"
        metrics = LanguageMetrics(
            self.settings.metrics,
            worker,
            self.plan.tokenizer,
            self.config,
            self.parts.dealer,
            self.settings.max_new_tokens,
        )
        return lambda: metrics.of(episodes.source.draw(task))


def check_other(settings: EvaluateConfig) -> None:
    """Raise `UsageError` for a model to compare with that is not there, or that does other tasks."""
    first, other = (
        run_config(settings, 1),
        replace(settings, model_name_or_path=str(settings.compare), compare=None),
    )
    try:
        second = run_config(other, 1)
        if second.task_type != first.task_type:
            raise UsageError(
                f"compare={settings.compare} is a model for task_type={second.task_type}, and"
                f" model_name_or_path={settings.model_name_or_path} one for task_type={first.task_type}; give"
                " another model, or --task_type"
            )
        empty_learner(second, describe(second))
    except UsageError as error:
        raise UsageError(
            str(error).replace("model_name_or_path=", "compare=", not str(error).startswith("compare="))
        ) from None


def refuse(settings: EvaluateConfig, config: Config) -> None:
    """Raise `UsageError` for methods and metrics that the kind of task does not have, and for what no method
    looks at.
    """
    causal = config.task_type == "causal_lm"
    if "finetune" not in settings.method:
        for name in ("head_init", *(item.name for item in fields(InnerConfig))):
            if (value := getattr(settings, name)) not in (None, []):
                raise UsageError(
                    f"{name}={value} is of the inner loop, and method={' '.join(settings.method)} has none;"
                    " leave it out, or use finetune"
                )
    for method in settings.method:
        if causal and method in FROZEN:
            raise UsageError(
                f"method={method} classifies features, and task_type=causal_lm has no classes; use finetune"
                " or in_context"
            )
        if not causal and method == "in_context":
            raise UsageError(
                "method=in_context puts the support set into the prompt, and task_type=classification has"
                " none; use finetune"
            )
    spread = settings.pipeline_stages * settings.tensor_parallel_size > 1
    if "in_context" in settings.method and spread:
        raise UsageError(
            "method=in_context is not tested with pipeline_stages and tensor_parallel_size: whole support"
            " sets travel as prompts; use ZeRO 3"
        )
    if settings.metrics and not causal:
        raise UsageError(
            f"metrics={' '.join(settings.metrics)} look at answers, and task_type=classification has none;"
            " leave them out"
        )
    if settings.metrics and "in_context" in settings.method:
        raise UsageError(
            f"metrics={' '.join(settings.metrics)} with method=in_context are not implemented; use finetune"
        )
    if causal and settings.n_way not in ("5", "all"):
        raise UsageError(f"n_way={settings.n_way} means nothing for task_type=causal_lm; leave it out")
