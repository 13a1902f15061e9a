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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.meta import reference
from fmmeta.meta.classifier_head import (
    FeatureRows,
    Head,
    QueryLoss,
    all_gather_features,
    nearest_mean_head,
)
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel.costs import Passes, keeps_support
from fmmeta.parallel.workers.base import CotangentFn, PassStats, SavedForward, VjpInput
from fmmeta.tasks.batching import MicroBatch, Sets, merge_task_batches, pad_to_same_shape


def anil(task: TaskRun, order: int = 2) -> TaskResult:
    return one_pass([task], order)[0]


def anil_of_several(tasks: Sequence[TaskRun], order: int = 2) -> list[TaskResult]:
    """Meta-gradients of several tasks whose rows go through the body together, as one sum.

    If the sum is not finite, nothing was added, and the tasks are taken one after the other. Collective:
    group.
    """
    results = one_pass(tasks, order)
    if all(result.finite for result in results):
        return results
    return [anil(task, order) for task in tasks]


def one_pass(tasks: Sequence[TaskRun], order: int) -> list[TaskResult]:
    """See `anil_of_several`. The tasks share worker, sum and setup. Collective: group."""
    one = tasks[0]
    worker, into, head = one.worker, one.into, one.inner.head
    support, supports = merge_tasks([task.support for task in tasks])
    query, queries = merge_tasks([task.query for task in tasks])
    second_order = order > 1 and one.outer_step >= one.config.first_order_steps
    exact = second_order or head.backprop_through_means
    keeps = exact and keeps_support(one.config, worker.data_ranks)
    saved = worker.forward_features(support) if keeps else SavedForward(worker.features(support))
    one.between_passes()
    features = zip(*(rows.chunk(len(tasks)) for rows in saved.features), strict=True)
    solved = [
        solve_head(task, own_support, own_query, own_features, second_order)
        for task, own_support, own_query, own_features in zip(tasks, supports, queries, features, strict=True)
    ]
    parts = [VjpInput(query, lambda: split_by_task([each.query_loss for each in solved]))]
    if exact:
        parts.append(VjpInput(support, lambda: split_by_task([each.backward() for each in solved]), saved))
    finite = worker.vjp(parts, into.sum).finite
    for each in solved:
        if not exact:
            each.backward()
        if finite:
            for name, value in zip(head.names, each.of_start, strict=False):
                worker.params.add(into.sum, name, value)
            into.count()
    return [TaskResult(1.0, finite, each.first, each.query) for each in solved]


def solve_head(
    task: TaskRun,
    support: Sequence[MicroBatch],
    query: Sequence[MicroBatch],
    features: Sequence[Tensor],
    second_order: bool,
) -> "HeadSolution":
    """The inner loop of a task. Collective: group."""
    head = task.inner.head
    rows = all_gather_features(task.worker, support, features, head.loss)
    rows.features.requires_grad_()
    if head.uses_support_features:
        start = [*nearest_mean_head(rows.means(head.classes))][: len(head.names)]
    else:
        start = head.read(task.worker, task.theta, rows.features.shape[1])
    leaves = [] if head.backprop_through_means else [part.detach().requires_grad_() for part in start]
    adapted, passes = task.inner.learn_head(leaves or start, rows, exact=second_order)
    first = passes[0] if passes else rows.loss(adapted)[1]
    slope = torch.where(first.stats[3] > 0, torch.nan, 1.0)
    return HeadSolution(
        QueryLoss(task.worker, query, adapted, slope, head.loss), adapted, rows, leaves, first
    )


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


def protonet(task: TaskRun) -> TaskResult:
    return anil(without_steps(task), order=1)


def protonet_of_several(tasks: Sequence[TaskRun]) -> list[TaskResult]:
    return anil_of_several([without_steps(task) for task in tasks], order=1)


def without_steps(task: TaskRun) -> TaskRun:
    """The task with the class means as its head, and a gradient through them."""
    head = replace(task.inner.head, backprop_through_means=task.inner.head.uses_support_features)
    return replace(task, setup=replace(task.setup, inner=replace(task.inner, steps=0, head=head)))


ANIL = AlgorithmSpec(
    "anil",
    anil,
    reference.unrolled,
    order=2,
    adapts="head",
    frozen_body=True,
    needs="of_classes",
    several=anil_of_several,
    supports=frozenset({"first_order_steps", "outer_parameters", "prototype_gradient"}),
    passes=lambda config, forwards: Passes(1, 1, forwards),
    adds_directly=lambda config: config.pipeline_stages == 1,
)
PROTONET = replace(
    ANIL,
    name="protonet",
    rule=protonet,
    several=protonet_of_several,
    reference=partial(reference.unrolled, order=1, steps=0, through_means=True),
    order=1,
    adapts="all",
    defaults={"head_init": "prototype", "inner_steps": 0},
    supports=frozenset({"outer_parameters"}),
)
