"""ANIL: the inner loop changes the head and leaves the body alone.

    W_{k+1} = W_k - alpha grad_W L(W_k f(support)),   g = d L_query(W_K) / dtheta,   f: features of the body at theta

Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse?", 2020 (arXiv 1909.09157), section 4. The body does not move, so
its features are computed once per task and the whole inner loop is a small problem that every rank of the group solves for
itself (meta/head_only.py), with autograd, which also differentiates it exactly. What it says of the features is pulled back
through the body.
Cost per task, whatever K is: a forward and backward pass of the query set; for the exact gradient a forward and backward pass of
the support set too, and one forward more where the activations of both sets are more than a rank may keep (costs.keeps_support);
of first order (`--first_order_steps`) a forward of the support set alone. No trajectory; the weights are never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.config import Config
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.costs import keeps_support
from fmmeta.meta.direction import Direction, Rule
from fmmeta.meta.head_only import Asked, Head, Rows, gather, head_of
from fmmeta.meta.inner import InnerLoop
from fmmeta.meta.rates import HEAD
from fmmeta.parallel.worker import Ahead, Answer, Part, Pass, Worker
from fmmeta.tasks.batch import Batches


@dataclass(frozen=True)
class Anil:
    inner: InnerLoop  # with rates of zero on the body; evaluation runs it as it is
    order: int
    config: Config

    def direction(self, worker: Worker, theta: Tensor, episode: Batches, total: Tensor | None = None) -> Direction:
        head, support = self.inner.head, episode.support
        through = head.kind == "prototype" and head.through
        exact = self.order > 1 or through
        keeps = exact and keeps_support(self.config, worker.data_ranks)
        ahead = worker.ahead(support) if keeps else Ahead(worker.features(support))
        rows = gather(worker, support, ahead.features)
        rows.features.requires_grad_()
        start = self._start(worker, theta, rows)
        leaves = [part.detach().requires_grad_() for part in start]
        adapted, first = self._learn(start if through else leaves, rows)
        asked = Asked(worker, episode.query, adapted, torch.where(first.stats[3] > 0, torch.nan, 1.0))
        back = Back(asked, adapted, rows, [] if through else leaves)
        parts = [Part(episode.query, lambda: asked), *([Part(support, back.begin, ahead)] if exact else [])]
        gradient, pulled = worker.pull(parts, total)
        if not exact:
            back.begin()
        into = total if gradient is None else gradient
        if into is not None and (into is gradient or pulled.finite):
            for name, value in zip(head.names, back.of_start, strict=False):
                worker.params.add(into, name, value)
        return Direction(gradient, 1.0, pulled.finite, first, back.query)

    def _start(self, worker: Worker, theta: Tensor, rows: Rows) -> Head:
        """What the task starts with. Collective: group."""
        head = self.inner.head
        if head.kind == "prototype":
            means = rows.means(head.classes)
            return [2 * means, -(means**2).sum(1)][: len(head.names)]
        return head_of(worker, theta, head.names, head.classes, rows.features.shape[1])

    def _learn(self, head: Head, rows: Rows) -> tuple[Head, Pass]:
        """The inner loop on the head; also loss and accuracy where it begins."""
        if self.inner.steps == 0:
            return head, Pass(rows.losses(head)[1])
        momentum, table = self.inner.rule.momentum, self.inner.rates.table
        column = self.inner.rates.layers.names.index(HEAD)
        velocity = [torch.zeros_like(part) for part in head]
        seen = rows if self.order > 1 else Rows(rows.features.detach(), rows.labels, rows.mine, rows.classes)
        first = Pass(torch.zeros(4, dtype=torch.float64))
        for k in range(self.inner.steps):
            own = head if self.order > 1 else [part.detach().requires_grad_() for part in head]
            loss, told = seen.losses(own)
            if k == 0:
                first = Pass(told)
            found = torch.autograd.grad(loss, own, create_graph=self.order > 1)
            velocity = [momentum * v + g for v, g in zip(velocity, found, strict=True)]
            head = [part - float(table[k, column]) * v for part, v in zip(head, velocity, strict=True)]
        return head, first


class Back:
    """From what the query set says of the adapted head to what it says of the support rows' features and of the first head."""

    def __init__(self, asked: Asked, adapted: Head, rows: Rows, leaves: Head) -> None:
        self.asked, self.adapted, self.rows, self.leaves = asked, adapted, rows, leaves

    def begin(self) -> Answer:
        """After the query set. Collective: group."""
        told, self.query = self.asked.settle()
        features, *self.of_start = torch.autograd.grad(
            self.adapted, [self.rows.features, *self.leaves], told, materialize_grads=True
        )
        mine = self.rows.mine
        return lambda number, _: features[mine[number]] * (mine[number] >= 0)[:, None]


def rule(setup: Setup, outer_step: int) -> Rule:
    return Anil(setup.inner, 1 if outer_step < setup.config.first_order_steps else 2, setup.config)
