"""The episodes of an evaluation, fixed by data, settings, seed and the training splits of the models."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.models.files import trained_with
from fmmeta.parallel.process_groups import World
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import ClassSource, Draw, Mixture, TaskSource
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training import build
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
        """Digest of the texts of all episodes; two evaluations are paired only if it is the same."""
        return digest(
            [
                [
                    draw.classes,
                    draw.support,
                    draw.query,
                    [[draw.store.text(side, row) for side in ("input", "target")] for row, _ in draw.query],
                ]
                for draw in self.draws()
            ]
        )


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
    inputs = build.read_inputs(config, world, notice, models)
    with world.comm.raise_on_all("choosing episodes"):
        chosen = {k: episodes_of(settings, k, inputs.tokenizer, models) for k in settings.k_shot}
    if config.on_bad_task == "skip":
        chosen = {k: drop_unreadable(k, one, config, world, notice) for k, one in chosen.items()}
    most = max(episodes.most_classes for episodes in chosen.values())
    if most > config.most_classes:
        config = settings.run_config(n_way_max=most, **values)
    if message := settings.unusable_head(config):
        notice(message)
    return config, inputs, chosen


def episodes_of(
    settings: EvaluateConfig, k_shot: int, tokenizer: Any, models: Sequence[str] = ()
) -> Episodes:
    """Read the data from the prepared store and choose the episodes. Raises `UsageError`."""
    config = settings.run_config(k_shot=k_shot)
    trained = trained_with(models or [settings.model_name_or_path])
    sources = load_sources(config, tokenizer, lambda text: None, trained)
    source = {"train": sources.train, "valid": sources.valid, "test": sources.test}[settings.eval_split]
    if source is None:
        raise UsageError(
            f"eval_split={settings.eval_split} of dataset={' '.join(config.dataset)} is empty; give another"
            " --eval_split, or a file of splits"
        )
    most = config.most_classes
    if settings.n_way == "all" and config.task_type == "classification":
        most = use_every_class(source)
    schedule = Schedule(
        source.items, settings.episodes, config.seed, STREAM, shuffle=False, sizes=source.size
    )
    return Episodes(source, schedule.meta_batch(0), most)


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
                episodes.source.draw(task).store.check()
            except (OSError, UsageError) as error:
                here[index] = f"task {task.name}: {one_line(error)}"
    gathered = world.comm.gather_bytes(json.dumps(here).encode())
    errors = {int(index): text for part in reversed(gathered) for index, text in json.loads(part).items()}
    if not errors:
        return episodes
    bad, total = len(errors), len(episodes.tasks)
    message = f"{bad} of {total} {k_shot}-shot episodes failed to load; the first: {errors[min(errors)]}"
    if bad == total or bad > config.max_bad_fraction * max(total, LEAST_SEEN):
        raise UsageError(f"max_bad_fraction={config.max_bad_fraction}: {message}")
    notice(f"{message}; left out")
    return replace(episodes, tasks=[one for index, one in enumerate(episodes.tasks) if index not in errors])
