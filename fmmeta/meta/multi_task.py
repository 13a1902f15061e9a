"""The inner loop of several tasks at a time over `TaskBatch`, and FOMAML, Reptile and exact MAML with it.

    phi_t <- phi_t - alpha u(grad L_t(phi_t)),  t = 1 .. N in one pass
    then grad L_query,t(phi_t), taken back through the steps where the rule is exact, or theta - phi_t

The same numbers as task by task, up to rounding: a task's rows use its own adapters only. The inner
optimizer acts element by element, so that N tasks are one long vector to it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.task_axis import TaskAxis
from fmmeta.meta.classifier_head import class_means, nearest_mean_head
from fmmeta.meta.hessian import AutogradHessian
from fmmeta.meta.inner_loop import InnerLoop, Trajectory, no_poll
from fmmeta.meta.inner_optimizers import Layers, Rates, layer_of
from fmmeta.meta.task import MultiTaskRule, TaskResult, TaskRun
from fmmeta.parallel.costs import rows_of, second_order_by_autograd
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
        self,
        batch: TaskBatch,
        sets: Sets,
        steps: int,
        after_step: Callable[[], None] = no_poll,
        path: Trajectory | None = None,
    ) -> list[list[PassStats]]:
        """Take `steps` steps on the support sets; returns the statistics of every task, by step.

        path: receives phi_0 to phi_{K-1} of all tasks. Collective: group.
        """
        optimizer, rates, passes = self.inner.optimizer, self.rates(batch), list[list[PassStats]]()
        state = optimizer.zero_state(batch.phi.numel(), batch.phi.device)
        phi0 = batch.phi if path is None else batch.read()
        for k in range(steps):
            if path is not None:
                path.before_step(k, batch, phi0, state)
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

    def rates(self, batch: TaskBatch) -> Rates:
        """The rates in the order of `batch.phi`. Collective: group (rates of single elements only)."""
        rates, begin, segments = self.inner.rates, 0, list[tuple[int, int, int]]()
        for name, shape in batch.shapes.items():
            end = begin + batch.tasks * shape.numel()
            segments.append(
                (
                    begin,
                    end,
                    rates.layers.names.index(layer_of(name, self.inner.head.names, batch.worker.outer_only)),
                )
            )
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

    displacement: the meta-gradient of a task is theta - phi_K (Reptile), not its query gradient. order: of
    the meta-gradient.
    """

    inner: InnerLoop
    axis: TaskAxis
    displacement: bool = False
    order: int = 1

    def __call__(self, tasks: Sequence[TaskRun]) -> Iterator[TaskResult]:
        """Yields the result of each task when its gradient is added. Collective: group."""
        first = tasks[0]
        worker, into, theta, between_passes = first.worker, first.into, first.theta, first.between_passes
        assert isinstance(worker, FullModelWorker)
        loop, steps = MultiTaskInnerLoop(self.inner, self.axis), self.inner.steps
        support, query = [task.support for task in tasks], [task.query for task in tasks]
        order = 1 if first.outer_step < first.config.first_order_steps else self.order
        path = first.trajectory(order, steps)
        batch = loop.begin(worker, theta, support)
        if self.inner.head.uses_support_features:
            between_passes()
        passes = loop.run(batch, support, steps, between_passes, path)
        query_passes = batch.forward(query) if self.displacement else batch.gradient(query)
        flat = batch.phi if self.displacement else batch.grad
        if path is not None:
            flat = batch.grad.clone()
            hessian = AutogradHessian(first.setup.hvp, batch, support, between_passes)
            setup = replace(first.setup, inner=replace(self.inner, rates=loop.rates(batch)))
            replace(first, setup=setup).through_steps(hessian, path, flat, order, ())
            passes += hessian.passes
        passes.append(query_passes)
        for number in range(len(tasks)):
            own, vector = [each[number] for each in passes], batch.vector(flat, number)
            finite = all_finite(own) and (path is None or math.isfinite(worker.dot(vector, vector)))
            if finite:
                into.add(theta.to(worker.storage_device) - vector if self.displacement else vector)
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
    if spec.order > 1 and not second_order_by_autograd(config, worker.differentiates_twice):
        raise UsageError(
            f"tasks_per_pass={config.tasks_per_pass} with algorithm={config.algorithm} needs ranks that hold"
            " the whole model, for second derivatives by autograd, and ZeRO 3 splits it; use ZeRO 2, or"
            " --tasks_per_pass 1"
        )
    return AdapterMultiTaskRule(
        inner, TaskAxis(worker.learner), spec.multi_task == "displacement", spec.order
    )
