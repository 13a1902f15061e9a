"""A linear head on the features of a frozen body: each row goes through the body once per task.

    logits = W f + b        f: features of a row, gathered over the group; W, b: adapted by the task

Small enough for every rank of a group to do all of it for itself, in fp64 and with autograd. Nothing here
communicates but `gather` and `settle`.

Shapes: N rows of a set, D features, C classes of the head.
"""

from __future__ import annotations

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
    """Features [N, D] and labels [N] of a set's rows over the whole group, fp64; `mine`: the numbers of this
    rank's rows.
    """

    features: Tensor
    labels: Tensor
    mine: list[Tensor]  # per micro-batch [B], -1 for a row that only fills it
    classes: int = 0  # of the episode, where the head has more

    def losses(self, head: Head) -> tuple[Tensor, Tensor]:
        """Mean loss, and a pass's numbers [4] without its ranks."""
        logits = F.linear(self.features, *head)[:, : self.classes or None]
        loss = F.cross_entropy(logits, self.labels)
        right = (logits.argmax(1) == self.labels).sum()
        told = [
            loss.detach(),
            right.double(),
            loss.new_tensor(len(self.labels)),
            (~torch.isfinite(loss.detach())).double(),
        ]
        return loss, torch.stack(told)

    def means(self, classes: int) -> Tensor:
        """Mean feature of each class [C, D]; zeros for one without rows."""
        belongs = F.one_hot(self.labels, classes).to(self.features)
        return belongs.T @ self.features / belongs.sum(0).clamp(min=1)[:, None]


def all_gather_features(
    worker: Worker, batches: Sequence[MicroBatch], features: Sequence[Tensor]
) -> FeatureRows:
    """Every rank's rows on every rank: N x D numbers travel, once.

    `features`: of this rank's micro-batches, of no meaning on a rank without voice. Collective: group.
    """
    counts = [
        (batch.weights > 0).to(found.device) & worker.counts_rows
        for batch, found in zip(batches, features, strict=True)
    ]
    group = worker.group
    lengths = torch.zeros(group.size, dtype=torch.float64)
    lengths[group.rank] = sum(int(count.sum()) for count in counts)
    group.sum_(lengths)
    at = int(lengths[: group.rank].sum())
    table = torch.zeros(
        int(lengths.sum()), features[0].shape[1] + 1, dtype=torch.float64, device=worker.device
    )
    mine = []
    for batch, found, counted in zip(batches, features, counts, strict=True):
        numbers = torch.where(counted, at + torch.cumsum(counted, 0) - 1, -1)
        table[numbers[counted]] = torch.cat([found, batch.labels.to(found.device)[:, None]], 1).double()[
            counted
        ]
        mine.append(numbers)
        at += int(counted.sum())
    group.sum_(table)
    return FeatureRows(table[:, :-1].contiguous(), table[:, -1].long(), mine, batches[0].classes)


def head_of(worker: Worker, vector: Tensor, names: Sequence[str], classes: int, width: int) -> Head:
    """The head that the group's vectors hold. Collective: group."""
    shapes = [(classes, width), (classes,)]
    return [
        worker.whole(vector, name, shape).double().to(worker.device)
        for name, shape in zip(names, shapes, strict=False)
    ]


class QueryLoss:
    """The loss of a set at a head, taken micro-batch by micro-batch as its features come: an `Answer` that
    also learns what the head would hear. A loss that is not finite, here or before (`slope`), leaves no
    finite cotangent.
    """

    def __init__(self, worker: Worker, batches: Sequence[MicroBatch], head: Head, slope: Tensor) -> None:
        self.worker, self.batches, self.slope = worker, batches, slope
        self.head = [part.detach().requires_grad_() for part in head]
        self.gradient = [torch.zeros_like(part) for part in head]
        self.stats = torch.zeros(4, dtype=torch.float64, device=worker.device)

    def __call__(self, number: int, features: Tensor) -> Tensor:
        batch = self.batches[number].to(features.device)
        leaf = features.double().requires_grad_()
        with torch.enable_grad():
            logits = F.linear(leaf, *self.head)[:, : batch.classes or None]
            loss = (F.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum()
            cotangent, *of_head = torch.autograd.grad(loss, [leaf, *self.head])
        counted = batch.weights > 0
        right = ((logits.argmax(1) == batch.labels) & counted).sum()
        finite = torch.isfinite(loss.detach())
        if self.worker.counts_rows:
            self.stats += torch.stack(
                [loss.detach(), right.double(), counted.sum().double(), (~finite).double()]
            )
            self.gradient = [total + part for total, part in zip(self.gradient, of_head, strict=True)]
        return cotangent * torch.where(finite, self.slope, torch.nan)

    def settle(self) -> tuple[Head, PassStats]:
        """Over the whole group: the gradient of the head, and the pass. Collective: group."""
        flat = torch.cat([self.stats, *(part.reshape(-1) for part in self.gradient)])
        stats, *parts = self.worker.group.sum_(flat).split([4, *(part.numel() for part in self.gradient)])
        return [part.view_as(like) for part, like in zip(parts, self.gradient, strict=True)], PassStats(stats)
