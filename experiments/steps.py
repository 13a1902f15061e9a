"""symbols.yaml, one_step.yaml: scores after each inner step of a task, off one trajectory."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from experiments.run import Cell, Study, merged
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import EvaluatedModel, has_inner_loop, with_local_models, with_stored_rates
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.meta.inner_loop import InnerLoop, InnerSteps
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import Episode


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
        worker, theta = model.parts.worker, model.parts.meta_params.theta
        inner = with_stored_rates(settings, model.config, model.parts.setup.inner, worker)
        load = model.parts.load(episodes.source, model.inputs.prompts(method))
        scores = []
        for task in episodes.tasks:
            episode = load.batches(task)
            if has_inner_loop(method):
                scores.append(scores_at(cell.settings["at"], inner, worker, theta, episode))
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


def scores_at(
    at: Sequence[int], inner: InnerLoop, worker: Worker, theta: Tensor, episode: Episode
) -> list[PassStats]:
    """Statistics of the query set after each of these numbers of steps, the last of which is K.

    The worker holds theta before and phi_K afterwards. Collective: group.
    """
    steps = InnerSteps(inner, worker, inner.begin(worker, theta, episode.support), episode.support)
    found = []
    for k in range(at[-1] + 1):
        if k:
            steps.take()
        if k in at:
            found.append(worker.forward(episode.query))
    return found
