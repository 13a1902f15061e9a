"""The confusion matrix of the first held-out episode, for the report."""

from typing import Any

import torch
from torch import Tensor

from fmmeta.meta.inner_loop import EvaluationMethod
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.training.validation import TEST, HeldOut


def confusion(
    held_out: HeldOut, source: TaskSource, theta: Tensor, learning: EvaluationMethod
) -> dict[str, Any]:
    """Facts for run.json: names of the classes and counts [classes, classes], a row per right class, a column
    per answer; or `left_out`, the reason why there are none.

    Every group adapts to the same episode, so that the layout does not matter. Collective: world.
    """
    worker, config = held_out.worker, held_out.config
    if config.task_type != "classification":
        return {"left_out": f"task_type={config.task_type} has answers, not classes"}
    if not isinstance(worker, FullModelWorker):
        reason = f"pipeline_stages={config.pipeline_stages}: only the last stage has the model's answers"
        return {"left_out": reason}
    task = held_out.tasks(source, TEST)[0]
    found = held_out.reader(source).read_same_task(task)
    if not found:
        return {"left_out": f"task {task.name} failed to load"}
    ((_, episode),) = found
    with held_out.ranks.world.raise_on_all("naming the classes of an episode"):
        classes = source.draw(task).classes
    worker.write(theta)
    learning.score(worker, theta, episode)  # leaves the worker at phi
    counts = torch.zeros(len(classes), len(classes), dtype=torch.float64, device=worker.device)
    for batch, logits in zip(episode.query, worker.logits(episode.query), strict=True):
        if worker.counts_rows:
            rows, answers = batch.to(worker.device), logits[:, : len(classes)].argmax(-1)
            counts.index_put_((rows.labels, answers), (rows.weights > 0).double(), accumulate=True)
    worker.group.sum_(counts)
    worker.write(theta)
    return {
        "task": task.name,
        "stratum": task.stratum,
        "classes": list(classes),
        "counts": counts.long().tolist(),
    }
