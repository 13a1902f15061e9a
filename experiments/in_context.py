"""in_context.yaml: seconds of a loss whose rows share their prefix, and of complete rows."""

import time
from functools import partial
from statistics import mean
from typing import Any

from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import EvaluatedModel, with_local_models
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.learners.shared_prefix import common_prefix, rows_of
from fmmeta.meta.algorithms.baselines import support_before_query
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.full_model import FullModelWorker


def measure(study: Any, cell: Any) -> dict[str, Any]:
    world = World(Launch(), pick_device(Launch()))
    settings = with_local_models(EvaluateConfig(**cell.settings["evaluate"]), world, print)
    model = EvaluatedModel(settings, world, Progress(False), lambda text: None, [study.model])
    worker: Any = model.parts.worker
    (episodes,) = model.episodes.values()
    bos_token_id = model.inputs.tokenizer.bos_token_id
    prompts = partial(support_before_query, bos_token_id=bos_token_id, positions=None)
    load = model.parts.load(episodes.source, [prompts])
    ways = {"complete": partial(FullModelWorker.forward, worker), "shared": worker.forward}
    seconds, bounds, differences = {name: list[float]() for name in ways}, [], []
    for number, task in enumerate([episodes.tasks[0], *episodes.tasks]):  # the first one warms up
        batches, found = load.batches(task).query, dict[str, float]()
        for name in [*ways][:: 1 if number % 2 else -1]:
            began = time.process_time()
            found[name] = ways[name](batches).loss
            seconds[name] += [time.process_time() - began] if number else []
        rows = [row.ids for row in rows_of(batches)]
        complete = sum(map(len, rows))
        bounds.append(complete / (complete - common_prefix(rows) * (len(rows) - 1)))
        differences.append(abs(found["complete"] - found["shared"]))
    total = {name: sum(values) for name, values in seconds.items()}
    return {
        "episodes_per_second": {name: len(seconds[name]) / total[name] for name in ways},
        "ratio": {name: total[name] / total["shared"] for name in ways},
        "bound_in_tokens": mean(bounds[1:]),
        "largest_loss_difference": {"complete": max(differences[1:])},
        "seconds": seconds,
    }
