"""The episodes of an evaluation, fixed by data, settings, seed and the training splits of the models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.models.stored_settings import trained_with
from fmmeta.parallel.process_groups import World
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import Draw, TaskSource
from fmmeta.tasks.sources.classification import ClassSource
from fmmeta.tasks.sources.load import Sources, load_sources
from fmmeta.tasks.sources.mixture import Mixture
from fmmeta.training.episodes import LEAST_SEEN

STREAM = 2  # of the schedule; training is 0, validation 1


@dataclass(frozen=True)
class Episodes:
    """The episodes of one k_shot. `most_classes`: of the largest of them; 0 for causal_lm."""

    source: TaskSource
    tasks: list[Task]
    most_classes: int

    def draws(self) -> list[Draw]:
        return [self.source.draw(task) for task in self.tasks]

    def fingerprint(self) -> str:
        """Of the texts of all episodes, so that two evaluations are paired only if they met the same ones."""
        return digest([[draw.classes, draw.support, draw.query, texts(draw)] for draw in self.draws()])

    def missing(self) -> dict[str, str]:
        """Errors of the episodes that failed to load on this rank, by index."""
        found = {}
        for place, task in enumerate(self.tasks):
            try:
                self.source.draw(task).store.check()
            except (OSError, UsageError) as error:
                found[str(place)] = f"task {task.name}: {one_line(error)}"
        return found

    def without(self, missing: Mapping[str, str]) -> Episodes:
        return replace(
            self, tasks=[task for place, task in enumerate(self.tasks) if str(place) not in missing]
        )


def skipped(
    k_shot: int, episodes: Episodes, config: Config, world: World, notice: Callable[[str], None]
) -> Episodes:
    """Those episodes that every rank can have; says how many are left out. Raises `UsageError` where they are
    too many.

    Collective: world.
    """
    with world.comm.raise_on_all("looking at episodes"):
        missing = episodes.missing()
    told = [json.loads(part) for part in world.comm.gather_bytes(json.dumps(missing).encode())]
    missing = {place: why for part in reversed(told) for place, why in part.items()}
    if not missing:
        return episodes
    bad, total = len(missing), len(episodes.tasks)
    said = (
        f"{bad} of {total} {k_shot}-shot episodes failed to load; the first: {missing[min(missing, key=int)]}"
    )
    if bad == total or bad > config.max_bad_fraction * max(total, LEAST_SEEN):
        raise UsageError(f"max_bad_fraction={config.max_bad_fraction}: {said}")
    notice(f"{said}; left out")
    return episodes.without(missing)


def texts(draw: Draw) -> list[list[str]]:
    """Input and target of the query rows."""
    return [[draw.store.text("input", row), draw.store.text("target", row)] for row, _ in draw.query]


def split_of(sources: Sources, eval_split: str, config: Config) -> TaskSource:
    source = {"train": sources.train, "valid": sources.valid, "test": sources.test}[eval_split]
    if source is None:
        raise UsageError(
            f"eval_split={eval_split} of dataset={' '.join(config.dataset)} is empty; give another"
            " --eval_split, or a file of splits"
        )
    return source


def episodes_of(
    settings: EvaluateConfig, k_shot: int, tokenizer: Any, models: Sequence[str] = ()
) -> Episodes:
    """Read (from the prepared store) and choose. `models`: see `build.read_inputs`. Raises `UsageError`."""
    config = run_config(settings, k_shot)
    trained = trained_with(models or [settings.model_name_or_path])
    source = split_of(
        load_sources(config, tokenizer, lambda text: None, trained), settings.eval_split, config
    )
    most = config.most_classes
    if settings.n_way == "all" and config.task_type == "classification":
        most = all_ways(source)
    schedule = Schedule(
        source.items, settings.episodes, config.seed, STREAM, shuffle=False, sizes=source.size
    )
    return Episodes(source, schedule.meta_batch(0), most)


def run_config(settings: EvaluateConfig, k_shot: int, **values: Any) -> Config:
    """Settings of a run over the episodes of one k_shot; n_way=all counts as the least there can be until
    data are read.
    """
    n_way = 2 if settings.n_way == "all" else int(settings.n_way)
    return settings.run_config(n_way=n_way, k_shot=k_shot, **values)


def all_ways(source: TaskSource) -> int:
    """Make a source draw episodes of every class; return the most classes of an episode."""
    if isinstance(source, Mixture):
        return max(all_ways(one) for one in source.sources)
    if not isinstance(source, ClassSource):
        raise UsageError(
            "n_way=all needs to know every class, which a folder of task files does not tell; give a number"
        )
    source.shape = replace(source.shape, all_classes=True)
    return max(len(pool) for pool, _ in source.draws)
