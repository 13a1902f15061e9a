"""FOMAML and Reptile on several tasks at a time: the rules of first order over parallel/task_batch.py.

    phi_t <- phi_t - alpha u(grad L_t(phi_t)),  t = 1 .. N in one pass        then grad L_query,t(phi_t), or theta - phi_t

The same numbers as task by task, up to rounding: a task's rows see its own adapters only. The inner optimizer acts element by
element, so that N tasks are one long vector to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config import Config
from fmmeta.meta.direction import Direction
from fmmeta.meta.head import class_means
from fmmeta.meta.inner import InnerLoop
from fmmeta.models.learner import Learner
from fmmeta.models.task_axis import TaskAxis
from fmmeta.parallel.task_batch import TaskBatch, joined
from fmmeta.parallel.whole_worker import WholeWorker
from fmmeta.parallel.worker import Pass
from fmmeta.tasks.batch import Batches


@dataclass(frozen=True)
class Together:
    """`most` tasks at a time; the worker holds theta before, meanwhile and afterwards."""

    inner: InnerLoop
    axis: TaskAxis
    most: int
    reptile: bool = False

    def directions(self, worker: WholeWorker, theta: Tensor, episodes: Sequence[Batches]) -> list[Direction]:
        """Meta-gradients of at most `most` tasks. Collective: group."""
        batch = TaskBatch(worker, self.axis, theta, len(episodes))
        support, query = [episode.support for episode in episodes], [episode.query for episode in episodes]
        if self.inner.head.kind == "prototype" and self.inner.head.names:
            self._set_heads(worker, batch, episodes)
        state = self.inner.rule.fresh(batch.numel, worker.device)
        passes: list[list[Pass]] = []
        for k in range(self.inner.steps):
            passes.append(batch.step(support, self.inner.rule.update(k, state, self.inner.rates)))
        asked = batch.forward(query) if self.reptile else batch.gradient(query)
        found = []
        for task in range(len(episodes)):
            shards = theta.to(worker.home) - batch.vector(batch.phi, task) if self.reptile else batch.vector(batch.grad, task)
            own = [each[task] for each in passes]
            finite = all(step.finite for step in [*own, asked[task]])
            found.append(Direction(shards, 1.0, finite, own[0], asked[task]))
        return found

    def _set_heads(self, worker: WholeWorker, batch: TaskBatch, episodes: Sequence[Batches]) -> None:
        """Every task's class means, all tasks' features from the same passes."""
        head, sets = self.inner.head, [episode.support for episode in episodes]
        features = worker.features(joined(sets))
        for task, support in enumerate(sets):
            mine = [rows.view(len(sets), -1, rows.shape[1])[task] for rows in features]
            own = [part[: len(each.input_ids)] for part, each in zip(mine, support, strict=False)]
            means = class_means(worker, support, own, head.classes)
            for name, value in zip(head.names, (2 * means.means, -(means.means**2).sum(1)), strict=False):
                batch.set(name, task, value)


def together(config: Config, worker: object, inner: InnerLoop, rows: int) -> Together | None:
    """What --task_batch asks for; None for one task at a time. rows: of a task's micro-batch, for `auto`. Raises `UsageError`."""
    most = max(1, config.micro_batch_size // rows) if config.task_batch == "auto" else int(config.task_batch)
    if most == 1 or not isinstance(worker, WholeWorker):
        return None
    learner = getattr(worker.model, "module", worker.model)
    assert isinstance(learner, Learner)
    return Together(inner, TaskAxis(learner), most, config.algorithm == "reptile")
