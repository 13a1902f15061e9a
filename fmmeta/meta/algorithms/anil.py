"""ANIL: the inner loop changes the head and leaves the body alone.

    W_{k+1} = W_k - alpha grad_W L(W_k f(support)),   g = d L_query(W_K) / dtheta
    f: features of the body at theta

Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse?", 2020 (arXiv 1909.09157), section 4. The
body does not move, so its features are computed once per task and the whole inner loop is a small problem
that every rank of the group solves for itself (meta/linear_probe.py), with autograd, which also
differentiates it exactly. The gradient of the features is propagated back through the body. Cost per task,
whatever K is: a forward and backward pass of the query set; for the exact gradient a forward and backward
pass of the support set too, and one forward more where the activations of both sets are more than a rank may
keep (costs.keeps_support); of first order (`--first_order_steps`) a forward of the support set alone. No
trajectory; the weights are never written. With `--tasks_per_pass` N tasks share these passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.costs import Passes, keeps_support
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_lrs import HEAD
from fmmeta.meta.linear_probe import FeatureRows, Head, QueryLoss, all_gather_features, head_of
from fmmeta.meta.task_gradient import Rule, TaskGradient
from fmmeta.parallel.workers.base import CotangentFn, PassStats, SavedForward, VjpInput, Worker
from fmmeta.tasks.batching import Episode, MicroBatch, Sets, merge_task_batches, pad_to_same_shape


@dataclass(frozen=True)
class Anil:
    inner: InnerLoop  # with rates of zero on the body; evaluation runs it as it is
    order: int
    config: Config

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        [found] = self._directions(worker, theta, [episode], total)
        return found

    def directions(
        self, worker: Worker, theta: Tensor, episodes: Sequence[Episode], total: Tensor | None = None
    ) -> list[TaskGradient]:
        """Of several tasks, whose rows go through the body together: what they say is pulled back as one sum,
        into `total`. If it is not finite, nothing was added, and they are taken one after the other; so they
        are without a `total`. Collective: group.
        """
        if total is not None:
            found = self._directions(worker, theta, episodes, total)
            if all(each.finite for each in found):
                return found
        return [self.direction(worker, theta, episode, total) for episode in episodes]

    def _directions(
        self, worker: Worker, theta: Tensor, episodes: Sequence[Episode], total: Tensor | None
    ) -> list[TaskGradient]:
        """Of one pass; of one task without a `total`."""
        support, supports = merge_tasks([episode.support for episode in episodes])
        query, queries = merge_tasks([episode.query for episode in episodes])
        exact = self.order > 1 or self._through
        keeps = exact and keeps_support(self.config, worker.data_ranks)
        ahead = worker.ahead(support) if keeps else SavedForward(worker.features(support))
        features = zip(*(rows.chunk(len(episodes)) for rows in ahead.features), strict=True)
        tasks = [self._task(worker, theta, *each) for each in zip(supports, queries, features, strict=True)]
        parts = [VjpInput(query, lambda: split_by_task([task.asked for task in tasks]))]
        if exact:
            parts.append(VjpInput(support, lambda: split_by_task([task.begin() for task in tasks]), ahead))
        gradient, pulled = worker.vjp(parts, total)
        for task in () if exact else tasks:
            task.begin()
        into = total if gradient is None else gradient
        if into is not None and (into is gradient or pulled.finite):
            for task in tasks:
                for name, value in zip(self.inner.head.names, task.of_start, strict=False):
                    worker.params.add(into, name, value)
        return [TaskGradient(gradient, 1.0, pulled.finite, task.first, task.query) for task in tasks]

    def _task(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        query: Sequence[MicroBatch],
        features: Sequence[Tensor],
    ) -> InnerSolution:
        """The inner loop of a task, up to where its query set is asked. Collective: group."""
        rows = all_gather_features(worker, support, features)
        rows.features.requires_grad_()
        start = self._start(worker, theta, rows)
        leaves = [] if self._through else [part.detach().requires_grad_() for part in start]
        adapted, first = self._learn(start if self._through else leaves, rows)
        asked = QueryLoss(worker, query, adapted, torch.where(first.nonfinite_ranks > 0, torch.nan, 1.0))
        return InnerSolution(asked, adapted, rows, leaves, first)

    @property
    def _through(self) -> bool:
        """Whether the gradient goes through class means."""
        return self.inner.head.kind == "prototype" and self.inner.head.through

    def _start(self, worker: Worker, theta: Tensor, rows: FeatureRows) -> Head:
        """What the task starts with. Collective: group."""
        head = self.inner.head
        if head.kind == "prototype":
            means = rows.means(head.classes)
            return [2 * means, -(means**2).sum(1)][: len(head.names)]
        return head_of(worker, theta, head.names, head.classes, rows.features.shape[1])

    def _learn(self, head: Head, rows: FeatureRows) -> tuple[Head, PassStats]:
        """The inner loop on the head; also loss and accuracy where it begins."""
        if self.inner.steps == 0:
            return head, PassStats(rows.losses(head)[1])
        momentum, table = self.inner.rule.momentum, self.inner.rates.table
        column = self.inner.rates.layers.names.index(HEAD)
        velocity = [torch.zeros_like(part) for part in head]
        seen = (
            rows
            if self.order > 1
            else FeatureRows(rows.features.detach(), rows.labels, rows.mine, rows.classes)
        )
        first = PassStats(torch.zeros(4, dtype=torch.float64))
        for k in range(self.inner.steps):
            own = head if self.order > 1 else [part.detach().requires_grad_() for part in head]
            loss, told = seen.losses(own)
            if k == 0:
                first = PassStats(told)
            found = torch.autograd.grad(loss, own, create_graph=self.order > 1)
            velocity = [momentum * v + g for v, g in zip(velocity, found, strict=True)]
            head = [part - float(table[k, column]) * v for part, v in zip(head, velocity, strict=True)]
        return head, first


class InnerSolution:
    """A task between its inner loop and the way back: from what the query set says of the adapted head to
    what it says of the support rows' features and of the first head.
    """

    def __init__(
        self, asked: QueryLoss, adapted: Head, rows: FeatureRows, leaves: Head, first: PassStats
    ) -> None:
        self.asked, self.adapted, self.rows, self.leaves, self.first = asked, adapted, rows, leaves, first

    def begin(self) -> CotangentFn:
        """After the query set. Collective: group."""
        told, self.query = self.asked.settle()
        features, *self.of_start = torch.autograd.grad(
            self.adapted, [self.rows.features, *self.leaves], told, materialize_grads=True
        )
        mine = self.rows.mine
        return lambda number, _: features[mine[number]] * (mine[number] >= 0)[:, None]


def merge_tasks(sets: Sets) -> tuple[Sequence[MicroBatch], Sequence[Sequence[MicroBatch]]]:
    """Micro-batches with the rows of all tasks, and each task's part of them."""
    if len(sets) == 1:
        return sets[0], sets
    return merge_task_batches(sets), pad_to_same_shape(sets)


def split_by_task(answers: Sequence[CotangentFn]) -> CotangentFn:
    """Every task's answer to its part of the rows."""
    return lambda number, features: torch.cat(
        [answer(number, own) for answer, own in zip(answers, features.chunk(len(answers)), strict=True)]
    )


def rule(setup: Setup, outer_step: int) -> Rule:
    return Anil(setup.inner, 1 if outer_step < setup.config.first_order_steps else 2, setup.config)


def passes(config: Config, forwards: int) -> Passes:
    return Passes(1, 1, forwards)


def adds_directly(config: Config) -> bool:
    return config.pipeline_stages == 1 and config.tensor_parallel_size == 1


spec = AlgorithmSpec(
    "anil",
    rule,
    reference.unrolled,
    order=2,
    adapts="head",
    frozen_body=True,
    task_type="classification",
    supports=frozenset({"first_order_steps", "prototype_gradient"}),
    passes=passes,
    adds_directly=adds_directly,
)
