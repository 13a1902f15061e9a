"""FOMAML and Reptile on several tasks at a time: first-order rules over workers/multi_task.py.

    phi_t <- phi_t - alpha u(grad L_t(phi_t)),  t = 1 .. N in one pass
    then grad L_query,t(phi_t), or theta - phi_t

The same numbers as task by task, up to rounding: a task's rows see its own adapters only. The inner optimizer
acts element by element, so that N tasks are one long vector to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.classifier_head import class_means
from fmmeta.meta.costs import rows_of
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.models.learner import Learner
from fmmeta.models.multi_task_layers import TaskAxis
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.parallel.workers.multi_task import TaskBatch
from fmmeta.tasks.batching import Episode, merge_task_batches


@dataclass(frozen=True)
class AdapterMultiTaskRule:
    """Several tasks at a time; the worker holds theta before, meanwhile and afterwards."""

    inner: InnerLoop
    axis: TaskAxis
    displacement: bool = False  # theta - phi is what a task says, not its query gradient

    def directions(
        self, worker: Worker, theta: Tensor, episodes: Sequence[Episode], total: Tensor | None = None
    ) -> list[TaskGradient]:
        """Meta-gradients of some tasks, each a separate vector. Collective: group."""
        assert isinstance(worker, FullModelWorker)
        batch = TaskBatch(worker, self.axis, theta, len(episodes))
        support, query = [episode.support for episode in episodes], [episode.query for episode in episodes]
        if self.inner.head.kind == "prototype" and self.inner.head.names:
            self._set_heads(worker, batch, episodes)
        state = self.inner.rule.fresh(batch.numel, worker.device)
        passes: list[list[PassStats]] = []
        for k in range(self.inner.steps):
            passes.append(batch.step(support, self.inner.rule.update(k, state, self.inner.rates)))
        asked = batch.forward(query) if self.displacement else batch.gradient(query)
        found = []
        for task in range(len(episodes)):
            shards = (
                theta.to(worker.home) - batch.vector(batch.phi, task)
                if self.displacement
                else batch.vector(batch.grad, task)
            )
            own = [each[task] for each in passes]
            finite = all(step.finite for step in [*own, asked[task]])
            found.append(TaskGradient(shards, 1.0, finite, own[0], asked[task]))
        return found

    def _set_heads(self, worker: FullModelWorker, batch: TaskBatch, episodes: Sequence[Episode]) -> None:
        """Every task's class means, all tasks' features from the same passes."""
        head, sets = self.inner.head, [episode.support for episode in episodes]
        features = worker.features(merge_task_batches(sets))
        for task, support in enumerate(sets):
            mine = [rows.view(len(sets), -1, rows.shape[1])[task] for rows in features]
            own = [part[: len(each.weights)] for part, each in zip(mine, support, strict=False)]
            means = class_means(worker, support, own, head.classes)
            for name, value in zip(head.names, (2 * means.means, -(means.means**2).sum(1)), strict=False):
                batch.set(name, task, value)


def tasks_per_pass(config: Config) -> int:
    """Tasks of a group whose rows share a pass, as --tasks_per_pass asks; auto: as many as fit into
    micro_batch_size rows.
    """
    if config.tasks_per_pass != "auto":
        return int(config.tasks_per_pass)
    support, query = (min(config.micro_batch_size, each) for each in rows_of(config))
    frozen_body = find(config.algorithm).frozen_body
    return max(1, config.micro_batch_size // (support + query if frozen_body else support))


def adapter_multi_task_rule(config: Config, worker: Worker, inner: InnerLoop) -> AdapterMultiTaskRule | None:
    """The rules over adapters; None for one task at a time, and where the rule itself takes several.

    Raises `UsageError`.
    """
    spec = find(config.algorithm)
    if tasks_per_pass(config) == 1 or spec.frozen_body or not isinstance(worker, FullModelWorker):
        return None
    assert isinstance(worker.learner, Learner)
    return AdapterMultiTaskRule(inner, TaskAxis(worker.learner), spec.multi_task == "displacement")
