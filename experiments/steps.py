"""symbols.yaml, one_step.yaml: scores after each inner step of a task, off one trajectory."""

import time
from dataclasses import replace
from typing import Any

from experiments.run import Cell, Study, merged
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import EvaluatedModel, has_inner_loop, with_local_models, with_stored_rates
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device


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
            learns = has_inner_loop(method)
            passes = (
                inner.scores_after_each_step(worker, theta, episode)
                if learns
                else [worker.forward(episode.query)]
            )
            worker.write(theta)
            scores.append([passes[k] for k in cell.settings["at"]])
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
