"""`fmmeta evaluate`: models x methods x shots over the same episodes, divided among the ranks of a launch.

    settings --> episodes of each k_shot (by seed, never by model)
             --> one score per episode, method and shot --> results

Methods that are finished are stored beside the output until all are, so that the same command continues after
a stop.

The scores do not depend on the number of groups: an episode is scored by one group, and frozen features are
computed in batches that the rows alone determine. Ranks join groups as in training, so that a model is
evaluated wherever it could be trained.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

from fmmeta.common.errors import UsageError, one_line
from fmmeta.common.progress import Progress, Warn
from fmmeta.config.learners import stored_kind
from fmmeta.config.resume import HIDDEN_ON_RESUME
from fmmeta.config.settings import REMEMBERED, Config, InnerConfig
from fmmeta.evaluation.methods import (
    CLASSIFIERS,
    Features,
    classifier_score,
    embed,
    query_score,
    with_stored_rates,
)
from fmmeta.evaluation.results import (
    EvalCell,
    EvaluationResults,
    check_comparable,
    check_output,
    differences,
    file_beside,
    read_cells,
    results_of,
    score_text,
    show,
    write_output,
)
from fmmeta.evaluation.settings import EvaluateConfig, has_inner_loop
from fmmeta.evaluation.streams import stream_score
from fmmeta.learners.files import base_model_name, remembered, trained_with, weights_state
from fmmeta.learners.load import describe, empty_learner, suggest_chat
from fmmeta.meta.algorithms.setup import refuse_still_head
from fmmeta.meta.algorithms.ttt import OnlineLoop
from fmmeta.meta.inner_loop import InnerResult
from fmmeta.metrics.own import find_metrics
from fmmeta.metrics.scores import EpisodeScore, summary
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.reliability.checks import SupportLosses
from fmmeta.reliability.signals import Signals
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.data.splits import UsedSplits, few, read_used_splits
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import ClassSource, Draw, Mixture, TaskSource, transformed
from fmmeta.tasks.sources.load import load_sources
from fmmeta.tasks.sources.own import refuse_drawn
from fmmeta.training import build
from fmmeta.training.episodes import LEAST_SEEN, EpisodeReader
from fmmeta.training.scoring import TEST, Scoring, metrics_of, tasks_of

S = TypeVar("S", bound=EvaluateConfig)
IN_MEMORY = 16  # episodes of a group: one of images may take 30 MiB


def evaluate(
    settings: EvaluateConfig, signals: Signals | None = None, progress: Progress | None = None
) -> EvaluationResults:
    """`fmmeta evaluate`: show the results, and write them to `settings.output`. Raises `UsageError`.

    signals: from the moment at which the results are complete, a signal no longer ends the process. progress:
    default prints on rank 0.
    Collective: world.
    """
    given, others, output = settings, None, Path(settings.output) if settings.output else None
    with prepared(settings, progress, output, "finished") as (settings, world, progress, finished):
        with world.comm.raise_on_all("reading settings"):
            if settings.compare is not None and settings.compare_model is None:
                others = read_cells(settings.compare)
            elif settings.compare_model is not None and world.launch.global_rank == 0:
                check_compare_model(settings, settings.compare_model)
        models = list(filter(None, [settings.model_name_or_path, settings.compare_model]))
        notice = cache(progress.notice)  # two models that read the same data: each line about it once
        model = EvaluatedModel(settings, world, progress, notice, models, others)
        suggest_chat(model.config, model.inputs.tokenizer, progress.notice)
        cells, ranks = model.cells(finished), model.ranks
        learner = model.config.learner
        results = results_of(given, cells, model.config, model.inputs.sources.first.kind)
        del model  # frees the weights before another model is loaded
        if settings.compare is not None:
            if others is None:
                with_other = with_model(settings, settings.compare)
                if with_other.lora_r != settings.lora_r or with_other.task_type != settings.task_type:
                    progress.notice(
                        f"compare={settings.compare} stores no settings; it learns with those of"
                        f" {settings.model_name_or_path}"
                    )
                other = EvaluatedModel(with_other, world, progress, notice, models, cells, ranks)
                others = other.cells(finished)
            results["compare"] = {"with": given.compare, "cells": differences(cells, others, learner)}
        if signals:
            signals.run()
        show(results, progress)
        with world.comm.raise_on_all("writing the results"):
            if world.launch.global_rank == 0 and output:
                write_output(output, results)
                if finished:
                    finished.unlink(missing_ok=True)
        return results


@contextmanager
def prepared(
    settings: S, progress: Progress | None, output: Path | None, what: str
) -> Iterator[tuple[S, World, Progress, Path | None]]:
    """The settings of a command with local models and a method, the ranks of its launch, where it logs, and
    the file beside `output` of what is finished.

    Raises `UsageError`, also for an output that cannot be written. Collective: world.
    """
    launch = Launch.from_env(os.environ)
    progress = progress or Progress(enabled=launch.global_rank == 0)
    with closing(World(launch, pick_device(launch))) as world:
        settings = with_local_models(settings, world, progress.notice)
        with world.comm.raise_on_all("reading settings"):
            settings = cast(S, settings.with_method())
            if launch.global_rank == 0 and settings.output:
                check_output(Path(settings.output))
        yield settings, world, progress, file_beside(output, what) if output else None


def with_local_models(settings: S, world: World, notice: Callable[..., None]) -> S:
    """The settings with the converted folders of models that are GGUF files. Collective: world."""
    names = {"model_name_or_path": settings.model_name_or_path, "compare": settings.compare_model}
    found = {
        setting: build.local_model(name, world, notice, settings.prepare_timeout)
        for setting, name in names.items()
        if name
    }
    return replace(settings, **found) if any(names[name] != one for name, one in found.items()) else settings


def with_model(settings: EvaluateConfig, model: str) -> EvaluateConfig:
    """The same evaluation of another model, compared with nothing.

    A language model that stores no settings, such as the base, learns with those of the first model.
    """
    values: dict[str, Any] = {}
    kind = stored_kind(remembered(settings.model_source))
    if not remembered(model) and kind.generates and settings.task_type in (None, kind.name):
        names = ["task_type", "prompt_template", "max_length", "peft_config", "lora_r", "lora_alpha"]
        names += ["lora_target_modules", "answers"]
        names += InnerConfig.__dataclass_fields__ if settings.finetunes else ()
        first = settings.run_config()
        values = {name: getattr(first, name) for name in names if name in REMEMBERED}
    return replace(settings, **values, model_name_or_path=model, model_revision=None, compare=None)


def check_compare_model(settings: EvaluateConfig, model: str) -> None:
    """Raise `UsageError` for a model to compare with that does not exist, or that is for other tasks."""
    first = settings.run_config()
    try:
        second = with_model(settings, model).run_config()
        if second.task_type == first.task_type and second.answers != first.answers:
            ours, theirs = (one.answers or "none" for one in (first, second))
            raise UsageError(
                f"compare={model} learns with answers={theirs}, and"
                f" model_name_or_path={settings.model_name_or_path} with answers={ours}; give --answers"
            )
        if second.task_type == first.task_type:
            empty_learner(second, describe(second))
            return
    except UsageError as error:
        raise UsageError(str(error).replace("model_name_or_path=", "compare=")) from None
    raise UsageError(
        f"compare={model} is a model for task_type={second.task_type}, and"
        f" model_name_or_path={settings.model_name_or_path} one for task_type={first.task_type}; give"
        " another model, or --task_type"
    )


@dataclass(frozen=True)
class Episodes:
    """The episodes of one k_shot. `most_classes`: of the largest of them; 0 for causal_lm."""

    source: TaskSource
    tasks: list[Task]
    most_classes: int

    def draws(self) -> list[Draw]:
        return [self.source.draw(task) for task in self.tasks]

    def fingerprint(self) -> str:
        """Digest of the rows of all episodes. Two evaluations are paired only if it is the same."""
        return digest([draw.identity() for draw in self.draws()])


def plan_evaluation(
    settings: EvaluateConfig,
    world: World,
    notice: Callable[..., None],
    models: Sequence[str] = (),
    **values: Any,
) -> tuple[Config, build.RunInputs, dict[int, Episodes]]:
    """Read and check everything but the weights; returns the run's settings, its inputs, episodes by k_shot.

    models: see `build.read_inputs`. values: settings of the run in place of those of the command. Raises
    `UsageError`. Collective: world.
    """
    with world.comm.raise_on_all("reading settings"):
        config = settings.run_config(**values)
        settings.check_run(config)
    inputs = build.read_inputs(config, world, notice, models, splits=[settings.eval_split])
    with world.comm.raise_on_all("choosing episodes"):
        chosen = {k: episodes_of(settings, k, inputs.tokenizer, models) for k in settings.k_shot}
    if config.on_bad_task == "skip":
        chosen = {k: drop_unreadable(k, one, config, world, notice) for k, one in chosen.items()}
    most = max(episodes.most_classes for episodes in chosen.values())
    if most > config.most_classes:
        config = settings.run_config(n_way_max=most, **values)
    tuned = [] if settings.eval_split != "test" else tuned_on(models, inputs.sources.used)
    for message in filter(None, [settings.unusable_head(config), *tuned]):
        notice(Warn(message))
    return config, inputs, chosen


def tuned_on(models: Sequence[str], used: Sequence[UsedSplits]) -> Iterator[str]:
    """Warnings about test classes or tasks that `fmmeta tune` chose the inner loop of a model on."""
    for model in models:
        for before, now in product(read_used_splits(remembered(model).get("tuned", {})), used):
            names = {name for units in (before.splits or {}).values() for name in units}
            tested = (now.splits or {}).get("test", ()) if now.has_data_of(before) else ()
            if shared := sorted(names.intersection(tested)):
                yield (
                    f"dataset={now.dataset}: {len(shared)} of {len(tested)} test {now.nouns} ({few(shared)})"
                    f" were those on which fmmeta tune chose the inner loop of {model}; give both commands"
                    f" the same --n_way, or one --{now.setting} file"
                )


def episodes_of(
    settings: EvaluateConfig, k_shot: int, tokenizer: Any, models: Sequence[str] = ()
) -> Episodes:
    """Read the data from the prepared store and choose the episodes. Raises `UsageError`."""
    config = settings.run_config(k_shot=k_shot)
    trained = trained_with(models or [settings.model_source])
    source = load_sources(config, tokenizer, lambda text: None, trained, wanted=[settings.eval_split]).first
    most = config.most_classes
    if settings.n_way == "all" and config.learner.of_classes:
        most = use_every_class(source)
    return Episodes(source, tasks_of(source, settings.episodes, config.seed, TEST), most)


def use_every_class(source: TaskSource) -> int:
    """Change a source to draw episodes of every class; return the classes of its largest episode."""
    if isinstance(source, Mixture):
        return max(use_every_class(one) for one in source.sources)
    if not isinstance(source, ClassSource):
        raise UsageError(
            "n_way=all needs every class, which a folder of task files does not list; give a number"
        )
    source.shape = replace(source.shape, all_classes=True)
    return max(len(pool) for pool, _ in source.draws)


def drop_unreadable(
    k_shot: int, episodes: Episodes, config: Config, world: World, notice: Callable[[str], None]
) -> Episodes:
    """The episodes that every rank can load; logs how many are left out. Raises `UsageError` for too many.

    Collective: world.
    """
    here: dict[int, str] = {}
    with world.comm.raise_on_all("looking at episodes"):
        for index, task in enumerate(episodes.tasks):
            try:
                episodes.source.draw(task).episode()
            except (OSError, UsageError) as error:
                here[index] = f"task {task.name}: {one_line(error)}"
    parts = reversed(world.comm.gather(here))
    errors = {int(index): text for part in parts for index, text in part.items()}
    if not errors:
        return episodes
    bad, total = len(errors), len(episodes.tasks)
    message = f"{bad} of {total} {k_shot}-shot episodes failed to load; the first: {errors[min(errors)]}"
    if bad == total or bad > config.max_bad_fraction * max(total, LEAST_SEEN):
        raise UsageError(f"max_bad_fraction={config.max_bad_fraction}: {message}")
    notice(Warn(f"{message}; left out"))
    return replace(episodes, tasks=[one for index, one in enumerate(episodes.tasks) if index not in errors])


def build_on(
    config: Config, inputs: build.RunInputs, world: World, notice: build.Notice, ranks: ProcessGroups | None
) -> tuple[ProcessGroups, build.Runtime]:
    """Build the runtime on given groups, or on those that the settings ask for. Collective: world."""
    if ranks is None:
        plan = build.plan_parallel(config, inputs, world, notice)
        ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    else:
        plan = inputs.parallel_plan(config, ranks.layout.group_size, world.device.type)
    return ranks, build.build(config, inputs, plan, ranks)


class EvaluatedModel:
    """A model on the ranks of a launch, with the episodes that it is scored on.

    notice: logs what is read. models: all models of the comparison; the episodes avoid the training classes
    of each. others: cells of the other model, which must be of the same episodes. ranks: groups of an earlier
    model. Raises `UsageError`. Collective: world.
    """

    def __init__(
        self,
        settings: EvaluateConfig,
        world: World,
        progress: Progress,
        notice: build.Notice,
        models: Sequence[str],
        others: Sequence[EvalCell] | None = None,
        ranks: ProcessGroups | None = None,
    ) -> None:
        self.settings, self.progress = settings, progress
        with world.comm.raise_on_all("looking for metrics"):
            self.metrics = find_metrics(settings.run_config(), settings.metrics)
        self.config, self.inputs, self.episodes = plan_evaluation(settings, world, notice, models)
        with world.comm.raise_on_all("comparing episodes"):
            self.prints = {k: episodes.fingerprint() for k, episodes in self.episodes.items()}
            check_comparable(settings, self.prints, others)
        self.ranks, self.parts = build_on(self.config, self.inputs, world, notice, ranks)

    def cells(self, finished: Path | None) -> list[EvalCell]:
        """The scores of every method and k_shot. finished: file of those that are finished.

        Collective: world.
        """
        scoring = Scoring(self.parts.worker, self.ranks, self.progress, finished, in_memory=IN_MEMORY)
        facts, stored, cells = self.facts(), scoring.counts(), list[EvalCell]()
        keys = {
            (k, method): f"{self.what(k, method)} {facts}"
            for k in self.episodes
            for method in self.settings.method
        }
        known = [
            where for where, key in keys.items() if stored.get(key) == len(self.episodes[where[0]].tasks)
        ]
        if known:
            self.progress.notice(f"{len(known)} of {len(keys)} methods and k_shot are in {finished}")
        for (k, method), key in keys.items():
            cell = EvalCell(method, k, self.prints[k], self.scores(scoring, method, k, key))
            cells.append(cell)
            if len(keys) > 1 and (k, method) not in known:
                mean = summary(cell.scores)
                where = f" (kept in {finished})" if finished else ""
                self.progress.notice(f"{self.what(k, method)}: {score_text(mean)}{where}")
        return cells

    def what(self, k_shot: int, method: str) -> str:
        """Shots, or chunks of documents, and the method."""
        return f"{self.config.shape if self.config.learner.ordered else f'{k_shot}-shot'} {method}"

    def facts(self) -> str:
        """Digest of all that determines the scores beside method and k_shot. Collective: world."""
        settings, model = self.settings, self.settings.model_source
        config = {name: one for name, one in self.config.as_dict().items() if name not in HIDDEN_ON_RESUME}
        facts = [
            settings.metrics,
            settings.max_new_tokens,
            settings.k_shot,
            config,
            remembered(model),
            self.inputs.deepspeed.precision,
            self.inputs.sources.class_weights,
            list(self.prints.values()),
            *(weights_state(folder) for folder in (model, base_model_name(model))),
        ]
        return self.ranks.world.broadcast(digest(facts))

    def scores(self, scoring: Scoring, method: str, k_shot: int, key: str) -> list[EpisodeScore]:
        """The scores of a method: by the inner loop, with the support set in the prompt, without it, or by
        frozen features. key: of finished scores. Collective: world.
        """
        settings, worker, episodes = self.settings, self.parts.worker, self.episodes[k_shot]
        what, theta = self.what(k_shot, method), self.parts.meta_params.theta
        learns, prompts = has_inner_loop(method), self.inputs.prompts(method)
        metrics = metrics_of(
            self.metrics, self.config, self.inputs, self.parts, prompts, settings.max_new_tokens
        )
        if method in CLASSIFIERS:
            refuse_drawn(episodes.source, f"method={method}", "use finetune")
            read, classify = (
                partial(self.draws_of_share, episodes.source),
                partial(classifier_score, method, metrics),
            )
            return scoring.scores(episodes.tasks, read, classify, what, key=key)
        load = self.parts.load(episodes.source, prompts)
        reader = EpisodeReader.of(load, self.ranks, self.config, self.progress.notice)
        inner = with_stored_rates(settings, self.config, self.parts.setup.inner, worker)
        refuse_still_head(self.config, inner, worker)
        has_classes, losses = self.config.learner.of_classes, SupportLosses(self.config)

        def score(slot: int, task: Task, episode: Episode) -> EpisodeScore:
            if isinstance(inner, OnlineLoop):
                began = time.perf_counter()
                passes = inner.scores_by_chunk(worker, theta, episode, learns)
                changed = worker.read().ne(theta).float()
                # of the weights, and what the optimizer stores of each; the host waits for the device
                vectors = 1 + len(inner.optimizer.state_names)
                size = worker.dot(changed, changed) * theta.element_size() * vectors
                seconds = time.perf_counter() - began
                if learns:
                    losses.add(worker, InnerResult(None, passes), episode.support)
                stretch: Any = episodes.source.draw(task)
                return stream_score(slot, task, stretch, passes, self.inputs.tokenizer, seconds, size)
            if learns:
                losses.add(worker, inner.adapt(worker, theta, episode.support), episode.support)
            found, draw = query_score(worker, slot, task, episode.query, has_classes), episodes.source.draw
            return replace(found, metrics=metrics.of(worker, episode.query, partial(draw, task)))

        scores = scoring.scores(
            episodes.tasks, reader.read_share, score, what, theta if learns else None, key
        )
        if warning := losses.warning():
            self.progress.notice(Warn(f"{what} of {settings.model_name_or_path}: {warning}"))
        return scores

    def draws_of_share(
        self, source: TaskSource, tasks: Sequence[Task]
    ) -> list[tuple[Task, tuple[Draw, Features]]]:
        """This group's share of tasks, and the features of all rows. Collective: world."""
        features, layout = self.features, self.ranks.layout
        share = tasks[layout.group_index :: layout.num_groups]
        return [(task, (transformed(source.draw(task), self.parts.drawn), features)) for task in share]

    @cached_property
    def features(self) -> Features:
        """Features of the rows of all episodes. Collective: world."""
        draws = [
            transformed(draw, self.parts.drawn)
            for episodes in self.episodes.values()
            for draw in episodes.draws()
        ]
        return embed(self.parts.worker, draws, self.parts.batcher, self.ranks, self.progress)
