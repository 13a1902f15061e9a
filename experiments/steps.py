"""symbols.yaml, one_step.yaml: scores after each inner step of a task, off one trajectory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.run import Cell, Study, merged
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import EvaluatedModel, has_inner_loop, with_local_models, with_stored_rates
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.learners.frozen_blocks import FrozenBlocks
from fmmeta.meta.inner_loop import InnerSteps
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.base import PassStats
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import MicroBatch


class KeptBlocks(FrozenBlocks):
    """Also in passes without gradients: query sets are small here, and scored up to five times."""

    def run(self, batch: MicroBatch, call: Callable[[], Any]) -> Any:
        if self.known and self.lists and self not in batch.kept:
            return self.keep(batch, call)
        return super().run(batch, call)


def measure(study: Study, cell: Cell) -> dict[str, Any]:
    """Loss and accuracy (percent) of the query set of each task, for each data set of `sets` and number of
    inner steps of `at`; strata of the tasks; CPU minutes. `start`: the training that `train` goes on from.
    """
    if "start" in cell.settings:
        start, _ = study.trained(replace(cell, settings={"train": cell.settings["start"]}))
        cell = replace(cell, settings=merged(cell.settings, {"train": {"model_name_or_path": start}}))
    folder, seconds = study.trained(cell)
    began, found = time.process_time(), dict[str, Any]()
    for name, of_set in cell.settings["sets"].items():
        if of_set is None:
            continue  # of the grid that the settings were chosen on
        world = World(Launch(), pick_device(Launch()))
        settings = EvaluateConfig(**{"model_name_or_path": folder, **cell.settings["evaluate"], **of_set})
        settings = with_local_models(settings, world, print)
        model = EvaluatedModel(settings, world, Progress(False), lambda text: None, [folder])
        ((episodes, (method,)),) = [(one, settings.method) for one in model.episodes.values()]
        worker: Any = model.parts.worker
        theta = model.parts.meta_params.theta
        inner = with_stored_rates(settings, model.config, model.parts.setup.inner, worker)
        load = model.parts.load(episodes.source, model.inputs.prompts(method))
        scores, score = [], worker.forward
        if method == "finetune":  # rows behind prompts share those, which saves more
            worker.frozen = KeptBlocks(worker.learner, worker.can_skip_blocks)
            score = partial(FullModelWorker.forward, worker)
        for task in episodes.tasks:
            episode = load.batches(task)
            if has_inner_loop(method):
                start = inner.begin(worker, theta, episode.support)
                steps = InnerSteps(inner, worker, start, episode.support)
                scores.append(scores_at(cell.settings["at"], steps, partial(score, episode.query)))
                worker.write(theta)
            else:
                scores.append([worker.forward(episode.query)])
        found[name] = {
            "strata": " ".join(task.stratum.replace(" ", "_") for task in episodes.tasks),
            **{
                value: {
                    str(k): " ".join(f"{scale * getattr(one[at], value):.4f}" for one in scores)
                    for at, k in enumerate(cell.settings["at"])
                }
                for value, scale in (("loss", 1), ("accuracy", 100))
            },
        }
    minutes = {"training": seconds / 60, "scoring": (time.process_time() - began) / 60}
    return {**found, "cpu_minutes": {name: round(value, 2) for name, value in minutes.items()}}


def scores_at(at: Sequence[int], steps: InnerSteps, score: Callable[[], PassStats]) -> list[PassStats]:
    """What `score` returns after each of these numbers of steps, the last of which is K.

    The worker holds phi_K afterwards. Collective: group.
    """
    found = []
    for k in range(at[-1] + 1):
        if k:
            steps.take()
        if k in at:
            found.append(score())
    return found
