"""A linear head on the features of a frozen body: each row goes through the body once per task.

    logits = W f + b        f: features of a row, gathered over the group; W, b: adapted by the task

The problem is small, so every rank of a group solves all of it, in fp64 and with autograd. Only
`all_gather_features`, `head_of` and `QueryLoss.reduce` communicate.

Shapes: N rows of a set, D features, C classes of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import MicroBatch

Head = list[Tensor]
"""Weight [C, D] and, where there is one, bias [C], fp64."""


@dataclass(frozen=True)
class FeatureRows:
    """Features [N, D] and labels [N] of a set's rows over the whole group, fp64.

    local: per micro-batch of this rank, the number of each of its rows [B], -1 for rows that only fill it.
    classes: of the episode, if the head has more; else 0.
    """

    features: Tensor
    labels: Tensor
    local: list[Tensor]
    classes: int = 0

    def loss(self, head: Head) -> tuple[Tensor, PassStats]:
        """The mean loss, with its graph, and statistics without those of passes through the body."""
        logits = F.linear(self.features, *head)[:, : self.classes or None]
        loss = F.cross_entropy(logits, self.labels)
        value, num_correct = loss.detach(), (logits.argmax(1) == self.labels).sum()
        num_rows, nonfinite = loss.new_tensor(len(self.labels)), ~torch.isfinite(value)
        return loss, PassStats(torch.stack([value, num_correct.double(), num_rows, nonfinite.double()]))

    def means(self, classes: int) -> Tensor:
        """Mean feature of each class [C, D]; zeros for one without rows."""
        belongs = F.one_hot(self.labels, classes).to(self.features)
        return belongs.T @ self.features / belongs.sum(0).clamp(min=1)[:, None]


def all_gather_features(
    worker: Worker, batches: Sequence[MicroBatch], features: Sequence[Tensor]
) -> FeatureRows:
    """The rows of all ranks on every rank: one reduction of N x D numbers.

    `features`: of this rank's micro-batches, ignored where `counts_rows` is False. Collective: group.
    """
    group = worker.group
    masks = [
        (batch.weights > 0).to(found.device) & worker.counts_rows
        for batch, found in zip(batches, features, strict=True)
    ]
    lengths = torch.zeros(group.size, dtype=torch.float64)
    lengths[group.rank] = sum(int(mask.sum()) for mask in masks)
    group.sum_(lengths)
    at, width = int(lengths[: group.rank].sum()), features[0].shape[1] + 1
    table = torch.zeros(int(lengths.sum()), width, dtype=torch.float64, device=worker.device)
    local = []
    for batch, found, mask in zip(batches, features, masks, strict=True):
        numbers = torch.where(mask, at + torch.cumsum(mask, 0) - 1, -1)
        rows = torch.cat([found, batch.labels.to(found.device)[:, None]], 1).double()
        table[numbers[mask]] = rows[mask]
        local.append(numbers)
        at += int(mask.sum())
    group.sum_(table)
    return FeatureRows(table[:, :-1].contiguous(), table[:, -1].long(), local, batches[0].classes)


def head_of(worker: Worker, vector: Tensor, names: Sequence[str], classes: int, width: int) -> Head:
    """The head in the group's vectors. Collective: group."""
    shapes = [(classes, width), (classes,)]
    return [
        worker.gather_param(vector, name, shape).double().to(worker.device)
        for name, shape in zip(names, shapes, strict=False)
    ]


class QueryLoss:
    """The loss of a set at a head, computed micro-batch by micro-batch from features: a CotangentFn that also
    accumulates the gradient of the head.

    slope: 1, or NaN if an earlier pass was not finite. The cotangent of a loss that is not finite is NaN.
    """

    def __init__(self, worker: Worker, batches: Sequence[MicroBatch], head: Head, slope: Tensor) -> None:
        self.worker, self.batches, self.slope = worker, batches, slope
        self.head = [part.detach().requires_grad_() for part in head]
        self.gradient = [torch.zeros_like(part) for part in head]
        self.stats = torch.zeros(4, dtype=torch.float64, device=worker.device)

    def __call__(self, number: int, features: Tensor) -> Tensor:
        batch = self.batches[number].to(features.device)
        leaf, mask = features.double().requires_grad_(), batch.weights > 0
        with torch.enable_grad():
            logits = F.linear(leaf, *self.head)[:, : batch.classes or None]
            loss = (F.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum()
            cotangent, *of_head = torch.autograd.grad(loss, [leaf, *self.head])
        num_correct = ((logits.argmax(1) == batch.labels) & mask).sum()
        finite = torch.isfinite(loss.detach())
        if self.worker.counts_rows:
            stats = [loss.detach(), num_correct.double(), mask.sum().double(), (~finite).double()]
            self.stats += torch.stack(stats)
            self.gradient = [total + part for total, part in zip(self.gradient, of_head, strict=True)]
        return cotangent * torch.where(finite, self.slope, torch.nan)

    def reduce(self) -> tuple[Head, PassStats]:
        """The gradient of the head and the statistics over the whole group. Collective: group."""
        flat = torch.cat([self.stats, *(part.reshape(-1) for part in self.gradient)])
        stats, *parts = self.worker.group.sum_(flat).split([4, *(part.numel() for part in self.gradient)])
        return [part.view_as(like) for part, like in zip(parts, self.gradient, strict=True)], PassStats(stats)
