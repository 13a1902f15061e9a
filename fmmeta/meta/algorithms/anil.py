"""ANIL: the inner loop changes the head and leaves the body alone. Prototypical networks: ANIL without steps.

    W_{k+1} = W_k - alpha grad_W L(W_k f(support)),   g = d L_query(W_K) / dtheta
    f: features of the body at theta

Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse?", 2020 (arXiv 1909.09157), section 4. The
body does not move, so its features are computed once per task and the whole inner loop is a small problem
that every rank of the group solves for itself (meta/classifier_head.py), with autograd, which also
differentiates it exactly. The gradient of the features is propagated back through the body. Cost per task,
whatever K is: a forward and backward pass of the query set; for the exact gradient a forward and backward
pass of the support set too, and one forward more where the activations of both sets are more than a rank may
keep (costs.keeps_support); of first order (`--first_order_steps`) a forward of the support set alone. No
trajectory; the weights are never written. With `--tasks_per_pass` N tasks share these passes.

Prototypical networks, a baseline: the query loss of a nearest-mean classifier over the support set, no inner
steps.

    g = d/dtheta L_query,  logits -|f(x) - mu_c|^2,  mu_c the mean feature of class c of the support set

Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", 2017 (arXiv 1703.05175), equations 1 and
2. It is Proto-MAML with K = 0 and the gradient through the means. Evaluation classifies by the means, after
`--inner_steps` of fine-tuning if set. Cost per task: a forward and backward pass of either set, and a forward
of the support set more where a rank may not keep the activations of both; no shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.classifier_head import (
    FeatureRows,
    Head,
    QueryLoss,
    all_gather_features,
    nearest_mean_head,
)
from fmmeta.meta.costs import Passes, keeps_support
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.rule import InnerLoop, Rule, TaskResult, no_poll
from fmmeta.parallel.workers.base import CotangentFn, PassStats, SavedForward, VjpInput, Worker
from fmmeta.tasks.batching import Episode, MicroBatch, Sets, merge_task_batches, pad_to_same_shape


@dataclass(frozen=True)
class Anil:
    inner: InnerLoop  # with rates of zero on the body; evaluation runs it as it is
    order: int
    config: Config

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        return self._one_pass(worker, meta, [episode], into, between_passes)[0]

    def task_gradients(
        self,
        worker: Worker,
        meta: MetaParameters,
        episodes: Sequence[Episode],
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> list[TaskResult]:
        """Meta-gradients of several tasks whose rows go through the body together, as one sum.

        If the sum is not finite, nothing was added, and the tasks are taken one after the other. Collective:
        group.
        """
        results = self._one_pass(worker, meta, episodes, into, between_passes)
        if all(result.finite for result in results):
            return results
        return [self.task_gradient(worker, meta, episode, into, between_passes) for episode in episodes]

    def _one_pass(
        self,
        worker: Worker,
        meta: MetaParameters,
        episodes: Sequence[Episode],
        into: MetaGradient,
        between_passes: Callable[[], None],
    ) -> list[TaskResult]:
        support, supports = merge_tasks([episode.support for episode in episodes])
        query, queries = merge_tasks([episode.query for episode in episodes])
        exact = self.order > 1 or self.inner.head.backprop_through_means
        keeps = exact and keeps_support(self.config, worker.data_ranks)
        saved = worker.forward_features(support) if keeps else SavedForward(worker.features(support))
        between_passes()
        features = zip(*(rows.chunk(len(episodes)) for rows in saved.features), strict=True)
        tasks = [
            self._solve_head(worker, meta.theta, *task)
            for task in zip(supports, queries, features, strict=True)
        ]
        parts = [VjpInput(query, lambda: split_by_task([task.query_loss for task in tasks]))]
        if exact:
            parts.append(VjpInput(support, lambda: split_by_task([task.backward() for task in tasks]), saved))
        finite = worker.vjp(parts, into.sum).finite
        for task in tasks:
            if not exact:
                task.backward()
            if finite:
                for name, value in zip(self.inner.head.names, task.of_start, strict=False):
                    worker.params.add(into.sum, name, value)
                into.count()
        return [TaskResult(1.0, finite, task.first, task.query) for task in tasks]

    def _solve_head(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        query: Sequence[MicroBatch],
        features: Sequence[Tensor],
    ) -> "HeadSolution":
        """The inner loop of a task. Collective: group."""
        rows = all_gather_features(worker, support, features)
        rows.features.requires_grad_()
        head = self.inner.head
        if head.uses_support_features:
            start = [*nearest_mean_head(rows.means(head.classes))][: len(head.names)]
        else:
            start = head.read(worker, theta, rows.features.shape[1])
        leaves = [] if head.backprop_through_means else [part.detach().requires_grad_() for part in start]
        adapted, passes = self.inner.learn_head(leaves or start, rows, exact=self.order > 1)
        first = passes[0] if passes else rows.loss(adapted)[1]
        slope = torch.where(first.nonfinite_ranks > 0, torch.nan, 1.0)
        return HeadSolution(QueryLoss(worker, query, adapted, slope), adapted, rows, leaves, first)


@dataclass
class HeadSolution:
    """A task between its inner loop and the backward pass from the query loss at the adapted head.

    leaves: the initial head, if its gradient is needed. first: statistics of the support set at the start.
    query, of_start: of the query set, and the gradient of the initial head; set by `backward`.
    """

    query_loss: QueryLoss
    adapted: Head
    rows: FeatureRows
    leaves: Head
    first: PassStats

    def backward(self) -> CotangentFn:
        """The cotangents of the support set's features, after the query set's pass. Collective: group."""
        of_adapted, self.query = self.query_loss.reduce()
        of_features, *self.of_start = torch.autograd.grad(
            self.adapted, [self.rows.features, *self.leaves], of_adapted, materialize_grads=True
        )
        local = self.rows.local
        return lambda number, _: of_features[local[number]] * (local[number] >= 0)[:, None]


def merge_tasks(sets: Sets) -> tuple[Sequence[MicroBatch], Sequence[Sequence[MicroBatch]]]:
    """Micro-batches with the rows of all tasks, and each task's part of them."""
    if len(sets) == 1:
        return sets[0], sets
    return merge_task_batches(sets), pad_to_same_shape(sets)


def split_by_task(functions: Sequence[CotangentFn]) -> CotangentFn:
    """The cotangents of merged micro-batches, from a function for each task's part of the rows."""
    return lambda number, features: torch.cat(
        [of_task(number, own) for of_task, own in zip(functions, features.chunk(len(functions)), strict=True)]
    )


def anil(setup: Setup, outer_step: int) -> Rule:
    return Anil(setup.inner, 1 if outer_step < setup.config.first_order_steps else 2, setup.config)


def protonet(setup: Setup, outer_step: int) -> Rule:
    head = setup.inner.head
    head = replace(head, backprop_through_means=head.uses_support_features)
    return Anil(replace(setup.inner, steps=0, head=head), 1, setup.config)


ANIL = AlgorithmSpec(
    "anil",
    anil,
    reference.unrolled,
    order=2,
    adapts="head",
    frozen_body=True,
    task_type="classification",
    supports=frozenset({"first_order_steps", "prototype_gradient"}),
    passes=lambda config, forwards: Passes(1, 1, forwards),
    adds_directly=lambda config: config.pipeline_stages == 1,
)
PROTONET = replace(
    ANIL,
    name="protonet",
    rule=protonet,
    reference=partial(reference.unrolled, order=1, steps=0, through_means=True),
    order=1,
    adapts="all",
    defaults={"head_init": "prototype", "inner_steps": 0},
    supports=frozenset(),
)
