"""The inner loop of several tasks at a time over `TaskBatch`, and FOMAML and Reptile with it.

    phi_t <- phi_t - alpha u(grad L_t(phi_t)),  t = 1 .. N in one pass
    then grad L_query,t(phi_t), or theta - phi_t

The same numbers as task by task, up to rounding: a task's rows use its own adapters only. The inner
optimizer acts element by element, so that N tasks are one long vector to it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from torch import Tensor

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.task_axis import TaskAxis
from fmmeta.meta.classifier_head import class_means, nearest_mean_head
from fmmeta.meta.inner_loop import InnerLoop, no_poll
from fmmeta.meta.inner_optimizers import Layers, Rates, layer_of
from fmmeta.meta.task import MultiTaskRule, TaskResult, TaskRun
from fmmeta.parallel.costs import rows_of
from fmmeta.parallel.workers.base import PassStats, Worker, all_finite
from fmmeta.parallel.workers.full_model import FullModelWorker, TaskBatch
from fmmeta.tasks.batching import Episode, Sets, merge_task_batches


@dataclass(frozen=True)
class MultiTaskInnerLoop:
    """The steps of `inner` on several tasks at a time; the worker holds theta before, during and after."""

    inner: InnerLoop
    axis: TaskAxis

    def begin(self, worker: FullModelWorker, theta: Tensor, sets: Sets) -> TaskBatch:
        """Every task at phi_0 of its support set. Collective: group."""
        batch = TaskBatch(worker, self.axis, theta, len(sets))
        if self.inner.head.uses_support_features:
            self._set_heads(worker, batch, sets)
        return batch

    def run(
        self, batch: TaskBatch, sets: Sets, steps: int, after_step: Callable[[], None] = no_poll
    ) -> list[list[PassStats]]:
        """Take `steps` steps on the support sets; returns the statistics of every task, by step.

        Collective: group.
        """
        optimizer, rates, passes = self.inner.optimizer, self._rates(batch), list[list[PassStats]]()
        state = optimizer.zero_state(batch.phi.numel(), batch.phi.device)
        for k in range(steps):
            passes.append(batch.step(sets, optimizer.update(k, state, rates)))
            after_step()
        return passes

    def adapt(
        self,
        worker: FullModelWorker,
        theta: Tensor,
        sets: Sets,
        steps: Sequence[int],
    ) -> list[tuple[list[PassStats], dict[str, Tensor]]]:
        """Take task t to phi_K, K = steps[t]: statistics of its support set after 0 to K steps, and its
        weights by name. Collective: group.
        """
        batch = self.begin(worker, theta, sets)
        weights, done = dict[int, dict[str, Tensor]](), count()

        def keep() -> None:
            k = next(done)
            weights.update({task: batch.weights(task) for task, most in enumerate(steps) if most == k})

        keep()
        passes = self.run(batch, sets, max(steps), keep)
        passes.append(batch.forward(sets))
        return [([each[t] for each in passes[: steps[t] + 1]], weights[t]) for t in range(len(sets))]

    def scores_after_each_step(
        self,
        worker: FullModelWorker,
        theta: Tensor,
        episodes: Sequence[Episode],
    ) -> list[list[PassStats]]:
        """Statistics of every task's query set after 0 to K steps. Collective: group."""
        support, query = [one.support for one in episodes], [one.query for one in episodes]
        batch = self.begin(worker, theta, support)
        passes = [batch.forward(query)]
        self.run(batch, support, self.inner.steps, lambda: passes.append(batch.forward(query)))
        return [[each[task] for each in passes] for task in range(len(episodes))]

    def _rates(self, batch: TaskBatch) -> Rates:
        """The rates in the order of `batch.phi`. Collective: group (rates of single elements only)."""
        rates, begin, segments = self.inner.rates, 0, list[tuple[int, int, int]]()
        for name, shape in batch.shapes.items():
            end = begin + batch.tasks * shape.numel()
            segments.append((begin, end, rates.layers.names.index(layer_of(name, self.inner.head.names))))
            begin = end
        element = None if rates.element is None else batch.spread(rates.element)
        return replace(rates, layers=Layers(rates.layers.names, tuple(segments)), element=element)

    def _set_heads(self, worker: FullModelWorker, batch: TaskBatch, sets: Sets) -> None:
        """Initialise every task's head by its class means; one forward pass for all tasks."""
        head = self.inner.head
        features = worker.features(merge_task_batches(sets))
        for task, support in enumerate(sets):
            of_task = [rows.view(len(sets), -1, rows.shape[1])[task] for rows in features]
            own = [part[: len(each.weights)] for part, each in zip(of_task, support, strict=False)]
            means = class_means(worker, support, own, head.classes).means
            for name, value in zip(head.names, nearest_mean_head(means), strict=False):
                batch.set(name, task, value)


@dataclass(frozen=True)
class AdapterMultiTaskRule:
    """Several tasks at a time; the worker holds theta before, during and after.

    displacement: the meta-gradient of a task is theta - phi_K (Reptile), not its query gradient.
    """

    inner: InnerLoop
    axis: TaskAxis
    displacement: bool = False

    def __call__(self, tasks: Sequence[TaskRun]) -> Iterator[TaskResult]:
        """Yields the result of each task when its gradient is added. Collective: group."""
        worker, into, theta = tasks[0].worker, tasks[0].into, tasks[0].theta
        assert isinstance(worker, FullModelWorker)
        loop, between_passes = MultiTaskInnerLoop(self.inner, self.axis), tasks[0].between_passes
        support, query = [task.support for task in tasks], [task.query for task in tasks]
        batch = loop.begin(worker, theta, support)
        if self.inner.head.uses_support_features:
            between_passes()
        passes = loop.run(batch, support, self.inner.steps, between_passes)
        passes.append(batch.forward(query) if self.displacement else batch.gradient(query))
        for number in range(len(tasks)):
            own = [each[number] for each in passes]
            finite = all_finite(own)
            if finite and self.displacement:
                into.add(theta.to(worker.storage_device) - batch.vector(batch.phi, number))
            elif finite:
                into.add(batch.vector(batch.grad, number))
            yield TaskResult(1.0, finite, own[0], own[-1])


def tasks_per_pass(config: Config) -> int:
    """Tasks of a group whose rows share a pass (--tasks_per_pass); auto: as many as fit into micro_batch_size
    rows.
    """
    if config.tasks_per_pass != "auto":
        return int(config.tasks_per_pass)
    support, query = (min(config.micro_batch_size, each) for each in rows_of(config))
    frozen_body = find(config.algorithm).frozen_body
    return max(1, config.micro_batch_size // (support + query if frozen_body else support))


def multi_task_rule(config: Config, worker: Worker, inner: InnerLoop) -> MultiTaskRule | None:
    """The rule for several tasks in a pass, the algorithm's own or one over adapters; None for one task.

    Raises `UsageError` for a model without such adapters.
    """
    spec = find(config.algorithm)
    if tasks_per_pass(config) == 1:
        return None
    if spec.several is not None:
        return spec.several
    assert isinstance(worker, FullModelWorker)
    return AdapterMultiTaskRule(inner, TaskAxis(worker.learner), spec.multi_task == "displacement")
