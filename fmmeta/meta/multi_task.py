"""FOMAML and Reptile on several tasks at a time: the rules of first order over parallel/task_batch.py.

    phi_t <- phi_t - alpha u(grad L_t(phi_t)),  t = 1 .. N in one pass        then grad L_query,t(phi_t), or theta - phi_t

The same numbers as task by task, up to rounding: a task's rows see its own adapters only. The inner optimizer acts element by
element, so that N tasks are one long vector to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.classifier_head import class_means
from fmmeta.meta.costs import PULLED, rows_of
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.task_gradient import Direction
from fmmeta.models.learner import Learner
from fmmeta.models.multi_task_layers import TaskAxis
from fmmeta.parallel.workers.base import Pass, Worker
from fmmeta.parallel.workers.full_model import WholeWorker
from fmmeta.parallel.workers.multi_task import TaskBatch
from fmmeta.tasks.batching import Batches, joined


@dataclass(frozen=True)
class Together:
    """Several tasks at a time; the worker holds theta before, meanwhile and afterwards."""

    inner: InnerLoop
    axis: TaskAxis
    reptile: bool = False

    def directions(
        self, worker: Worker, theta: Tensor, episodes: Sequence[Batches], total: Tensor | None = None
    ) -> list[Direction]:
        """Meta-gradients of some tasks, each a vector of its own. Collective: group."""
        assert isinstance(worker, WholeWorker)
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


def most_at_once(config: Config) -> int:
    """Tasks of a group whose rows share a pass, as --task_batch asks; auto: as many as fit into micro_batch_size rows."""
    if config.task_batch != "auto":
        return int(config.task_batch)
    support, query = (min(config.micro_batch_size, each) for each in rows_of(config))
    return max(1, config.micro_batch_size // (support + query if config.algorithm in PULLED else support))


def together(config: Config, worker: Worker, inner: InnerLoop) -> Together | None:
    """The rules over adapters; None for one task at a time, and where the rule itself takes several. Raises `UsageError`."""
    if most_at_once(config) == 1 or config.algorithm in PULLED or not isinstance(worker, WholeWorker):
        return None
    assert isinstance(worker.learner, Learner)
    return Together(inner, TaskAxis(worker.learner), config.algorithm == "reptile")
