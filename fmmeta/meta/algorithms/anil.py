"""ANIL: the inner loop changes the head and leaves the body alone.

    W_{k+1} = W_k - alpha grad_W L(W_k f(support)),   g = d L_query(W_K) / dtheta,   f: features of the body at theta

Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse?", 2020 (arXiv 1909.09157), section 4. The body does not move, so
its
features are computed once per task and the whole inner loop is a small problem that every rank of the group solves for itself, in
fp64 and with autograd, which also differentiates it exactly. What it says of the features is pulled back through the body in one
pass.
Cost per task: a forward of the support set, a forward and backward of the query set, and a forward and backward of the support
set
for the exact gradient; without it (`--first_order_steps`) 2 passes in all, whatever K is. No trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.direction import Direction, Rule
from fmmeta.meta.inner import InnerLoop
from fmmeta.meta.rates import HEAD
from fmmeta.parallel.worker import Pass, Worker
from fmmeta.tasks.batch import Batches, MicroBatch


@dataclass(frozen=True)
class Rows:
    """Features [N, D] and labels [N] of a set's rows over the whole group, fp64; `mine`: the numbers of this rank's rows."""

    features: Tensor
    labels: Tensor
    mine: list[Tensor]  # per micro-batch [B], -1 for a row that only fills it


@dataclass(frozen=True)
class Anil:
    inner: InnerLoop  # with rates of zero on the body; evaluation runs it as it is
    order: int

    def direction(self, worker: Worker, theta: Tensor, episode: Batches, total: Tensor | None = None) -> Direction:
        head = self.inner.head
        rows = gather(worker, episode.support)
        rows.features.requires_grad_()
        start = self._start(worker, theta, rows)
        leaves = [part.detach().requires_grad_() for part in start]
        through = head.kind == "prototype" and head.through
        adapted, support = self._learn(start if through else leaves, rows)
        phi = theta.clone()
        for name, value in zip(head.names, adapted, strict=True):
            worker.params.put(phi, name, value.detach().float())
        worker.write(phi)
        gradient, query = worker.gradient(episode.query, restore=theta)
        told = [worker.whole(gradient, name, tuple(part.shape)).double() for name, part in zip(head.names, adapted, strict=True)]
        told = [value.to(rows.features.device) for value in told]
        asked = [rows.features, *([] if through else leaves)]
        of_features, *of_head = torch.autograd.grad(adapted, asked, told, materialize_grads=True)
        for name, value in zip(head.names, of_head, strict=False):
            worker.params.put(gradient, name, value.float())
        passes = [query]
        if self.order > 1 or through:
            pulled, result = worker.pull(episode.support, [of_features[row] * (row >= 0)[:, None] for row in rows.mine])
            gradient += pulled
            worker.write(theta)
            passes.append(result)
        return Direction(gradient, 1.0, support.finite and all(p.finite for p in passes), support, query)

    def _start(self, worker: Worker, theta: Tensor, rows: Rows) -> list[Tensor]:
        """Weight [C, D] and bias [C] (if there is one) that the task starts with. Collective: group."""
        head, width = self.inner.head, rows.features.shape[1]
        if head.kind == "prototype":
            means = torch.stack([rows.features[rows.labels == c].mean(0) for c in range(head.classes)])
            return [2 * means, -(means**2).sum(1)][: len(head.names)]
        shapes = [(head.classes, width), (head.classes,)]
        return [worker.whole(theta, name, shape).double().to(rows.features.device)
                for name, shape in zip(head.names, shapes, strict=False)]  # fmt: skip

    def _learn(self, head: list[Tensor], rows: Rows) -> tuple[list[Tensor], Pass]:
        """The inner loop on the head; also loss and accuracy of its first step."""
        momentum, table = self.inner.rule.momentum, self.inner.rates.table
        column = self.inner.rates.layers.names.index(HEAD)
        velocity = [torch.zeros_like(part) for part in head]
        first = torch.zeros(4, dtype=torch.float64)
        for k in range(self.inner.steps):
            logits = F.linear(rows.features, *head)
            loss = F.cross_entropy(logits, rows.labels)
            if k == 0:
                right = (logits.argmax(1) == rows.labels).sum()
                first = torch.stack([loss.detach(), right.double(), loss.new_tensor(len(rows.labels)), ~torch.isfinite(loss)])
            own = head if self.order > 1 else [part.detach().requires_grad_() for part in head]
            if self.order == 1:
                loss = F.cross_entropy(F.linear(rows.features.detach(), *own), rows.labels)
            found = torch.autograd.grad(loss, own, create_graph=self.order > 1)
            velocity = [momentum * v + g for v, g in zip(velocity, found, strict=True)]
            head = [part - float(table[k, column]) * v for part, v in zip(head, velocity, strict=True)]
        return head, Pass(first)


def gather(worker: Worker, batches: Sequence[MicroBatch]) -> Rows:
    """Features of every row of a set on every rank of the group: N x D numbers travel, once. A rank without voice has no rows
    of its own. Collective: group."""
    features = worker.features(batches)
    counts = [(batch.weights > 0).to(features[0].device) & worker.voice for batch in batches]
    group = worker.group
    lengths = torch.zeros(group.size, dtype=torch.float64)
    lengths[group.rank] = sum(int(count.sum()) for count in counts)
    group.sum_(lengths)
    at = int(lengths[: group.rank].sum())
    table = torch.zeros(int(lengths.sum()), features[0].shape[1] + 1, dtype=torch.float64, device=worker.device)
    mine = []
    for batch, found, counted in zip(batches, features, counts, strict=True):
        numbers = torch.where(counted, at + torch.cumsum(counted, 0) - 1, -1)
        table[numbers[counted]] = torch.cat([found, batch.labels.to(found.device)[:, None]], 1).double()[counted]
        mine.append(numbers)
        at += int(counted.sum())
    group.sum_(table)
    return Rows(table[:, :-1].contiguous(), table[:, -1].long(), mine)


def rule(setup: Setup, outer_step: int) -> Rule:
    return Anil(setup.inner, 1 if outer_step < setup.config.first_order_steps else 2)
