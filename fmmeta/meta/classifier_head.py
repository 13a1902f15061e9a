"""The classifier head: its initialisation by a task, the gradient through it, and training it alone.

    zero, learned   phi_0 = theta (a zeroed head stays zero in theta)
    reset_to_zero   zeros, since theta's head belongs to other classes (joint training)
    prototype       w_c = 2 mu_c, b_c = -|mu_c|^2, mu_c the mean feature of class c over the support set

The prototype head's logits are -|f - mu_c|^2 + |f|^2: a nearest-mean classifier (Snell et al. 2017, equation
8), as initialisation Triantafillou et al. 2020 (arXiv 1903.03096, section 3). With `backprop_through_means`,
gradients flow back through the means:

    dL/df_i = (2 dL/dw_c - 2 mu_c dL/db_c) / n_c    for a support row i of class c

One more pass computes the gradient of theta from dL/df.

With a frozen body, logits = W f + b: each row goes through the body once per task, and its features f are
gathered over the group. The rest is so small that every rank of a group solves all of it, in fp64 and with
autograd; only `all_gather_features`, `HeadInit.read` and `QueryLoss.reduce` communicate.

Shapes: N rows of a set, D features, C classes of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.config.learners import CLASSIFICATION
from fmmeta.learners.base import RowLoss, loss_of
from fmmeta.learners.classification import of_episode
from fmmeta.parallel.workers.base import PassStats, VjpInput, Worker
from fmmeta.tasks.batching import MicroBatch


@dataclass(frozen=True)
class ClassMeans:
    """Class means [C, D] and rows per class [C, 1] of a support set, over the whole group."""

    means: Tensor
    counts: Tensor


@dataclass(frozen=True)
class HeadInit:
    """`names`, `classes`: of the classifier head; neither for a language model.

    reset_to_zero: the task starts from a zero head, whatever theta's is. loss: of rows, for a head that is
    trained alone.
    """

    kind: str
    names: tuple[str, ...] = ()
    classes: int = 0
    backprop_through_means: bool = False
    reset_to_zero: bool = False
    loss: RowLoss = loss_of(CLASSIFICATION)

    @property
    def uses_support_features(self) -> bool:
        """Whether the initial head depends on the support set's features."""
        return self.kind == "prototype" and bool(self.names)

    def start(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        features: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ClassMeans | None]:
        """Take the worker from theta to phi_0; return it (theta itself if they are equal) and the means.

        `features`: of `support`, if they are known. Collective: group.
        """
        if not self.uses_support_features and not self.reset_to_zero:
            return theta, None
        phi, means = theta.clone(), None
        if self.uses_support_features:
            features = worker.features(support) if features is None else features
            means = class_means(worker, support, features, self.classes)
            for name, value in zip(self.names, nearest_mean_head(means.means), strict=False):
                worker.params.put(phi, name, value)
        else:
            for fragment in worker.params.named(self.names):
                phi[fragment.here] = 0
        worker.write(phi)
        return phi, means

    def backward(
        self,
        worker: Worker,
        v: Tensor,
        theta: Tensor,
        support: Sequence[MicroBatch],
        means: ClassMeans | None,
    ) -> list[PassStats]:
        """Turn v = dL/dphi_0 [S] into dL/dtheta in place; return the passes that it took.

        The worker's weights before are irrelevant; it holds theta afterwards if there was a pass. Collective:
        group.
        """
        if means is None or not self.backprop_through_means:
            return []
        shape = tuple(means.means.shape)
        of_weight, of_bias = (
            worker.gather_param(v, name, size).to(worker.device)
            for name, size in zip(self.names, (shape, shape[:1]), strict=True)
        )
        of_mean = (2 * of_weight - 2 * means.means * of_bias[:, None]) / means.counts
        cotangents = [
            of_mean[batch.targets["labels"].to(of_mean.device, non_blocking=True)] * row_mask(batch, of_mean)
            for batch in support
        ]
        worker.write(theta)
        return [worker.vjp([VjpInput(support, lambda: lambda number, _: cotangents[number])], v)]

    def read(self, worker: Worker, vector: Tensor, width: int) -> "Head":
        """The head in the group's vectors, for `width` features. Collective: group."""
        shapes = [(self.classes, width), (self.classes,)]
        return [
            worker.gather_param(vector, name, shape).double().to(worker.device)
            for name, shape in zip(self.names, shapes, strict=False)
        ]


def nearest_mean_head(means: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [C, D] and bias [C] of the linear classifier by the nearest of `means` [C, D]."""
    return 2 * means, -(means**2).sum(1)


def row_mask(batch: MicroBatch, like: Tensor) -> Tensor:
    """1 for rows of the set, 0 for rows that only fill a batch; [B, 1]."""
    return (batch.weights.to(like.device, non_blocking=True) > 0).to(like.dtype)[:, None]


def class_means(
    worker: Worker, support: Sequence[MicroBatch], features: Sequence[Tensor], classes: int
) -> ClassMeans:
    """Means over the rows of the whole group; [B, D] features of each of this rank's micro-batches.

    Collective: group.
    """
    sums = torch.zeros(classes, features[0].shape[1] + 1, device=worker.device)
    for batch, rows in zip(support, features, strict=True):
        with_ones = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) * row_mask(batch, rows)
        # a product: on GPUs index_add_ adds in an order that varies
        labels = batch.targets["labels"].to(rows.device, non_blocking=True)
        sums += F.one_hot(labels, classes).double().T @ with_ones.double()  # not in TF32
    worker.group.sum_(sums if worker.counts_rows else sums.zero_())
    counts = sums[:, -1:].clamp(min=1)
    return ClassMeans(sums[:, :-1] / counts, counts)


Head = list[Tensor]
"""Weight [C, D] and, where there is one, bias [C], fp64."""


@dataclass(frozen=True)
class FeatureRows:
    """Features [N, D], labels [N] and weights in the loss [N] of a set's rows over the whole group, fp64.

    loss_of_rows: from logits and labels, [N]. local: per micro-batch of this rank, the number of each of its
    rows [B], -1 for rows that only fill it. classes: of the episode; None: all of the head.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor
    loss_of_rows: RowLoss
    local: list[Tensor]
    classes: int | None = None

    def loss(self, head: Head) -> tuple[Tensor, PassStats]:
        """The weighted mean loss, with its graph, and statistics without those of passes through the body."""
        logits = F.linear(self.features, *head)[:, : self.classes]
        loss = self.loss_of_rows(logits, self.labels) @ self.weights
        correct, nonfinite = logits.argmax(1) == self.labels, ~torch.isfinite(loss.detach())
        numbers = [loss.detach(), correct.sum(), loss.new_tensor(len(self.labels)), nonfinite]
        return loss, PassStats(torch.stack([number.double() for number in numbers]))

    def means(self, classes: int) -> Tensor:
        """Mean feature of each class [C, D]; zeros for one without rows."""
        belongs = F.one_hot(self.labels, classes).to(self.features)
        return belongs.T @ self.features / belongs.sum(0).clamp(min=1)[:, None]


def all_gather_features(
    worker: Worker, batches: Sequence[MicroBatch], features: Sequence[Tensor], loss: RowLoss
) -> FeatureRows:
    """The rows of all ranks on every rank: one reduction of N x (D + 2) numbers.

    `features`: of this rank's micro-batches, ignored where `counts_rows` is False. Collective: group.
    """
    masks = [(batch.weights > 0).to(found.device) for batch, found in zip(batches, features, strict=True)]
    lengths = torch.zeros(worker.group.size, dtype=torch.float64)
    if worker.counts_rows:
        lengths[worker.group.rank] = sum(int(mask.sum()) for mask in masks)
    worker.group.sum_(lengths)
    at, width = int(lengths[: worker.group.rank - worker.tensor_rank].sum()), features[0].shape[1] + 2
    table = torch.zeros(int(lengths.sum()), width, dtype=torch.float64, device=worker.device)
    local = []
    for batch, found, mask in zip(batches, features, masks, strict=True):
        numbers = torch.where(mask, at + torch.cumsum(mask, 0) - 1, -1)
        if worker.counts_rows:
            more = torch.stack([batch.targets["labels"], batch.weights], 1).to(found.device)
            table[numbers[mask]] = torch.cat([found, more], 1).double()[mask]
        local.append(numbers)
        at += int(mask.sum())
    worker.group.sum_(table)
    labels, weights = table[:, -2].long(), table[:, -1]
    classes = batches[0].targets.get("classes")
    known = None if classes is None else int(classes[0])
    return FeatureRows(table[:, :-2].contiguous(), labels, weights, loss, local, known)


class QueryLoss:
    """The loss of a set at a head, computed micro-batch by micro-batch from features: a CotangentFn that also
    accumulates the gradient of the head.

    slope: 1, or NaN if an earlier pass was not finite. The cotangent of a loss that is not finite is NaN.
    """

    def __init__(
        self, worker: Worker, batches: Sequence[MicroBatch], head: Head, slope: Tensor, loss: RowLoss
    ) -> None:
        self.worker, self.batches, self.slope, self.loss_of_rows = worker, batches, slope, loss
        self.head = [part.detach().requires_grad_() for part in head]
        self.gradient = [torch.zeros_like(part) for part in head]
        self.stats = torch.zeros(4, dtype=torch.float64, device=worker.device)

    def __call__(self, number: int, features: Tensor) -> Tensor:
        batch = self.batches[number].to(features.device)
        leaf, mask, labels = features.double().requires_grad_(), batch.weights > 0, batch.targets["labels"]
        with torch.enable_grad():
            logits = of_episode(F.linear(leaf, *self.head), batch)
            loss = (self.loss_of_rows(logits, labels) * batch.weights).sum()
            cotangent, *of_head = torch.autograd.grad(loss, [leaf, *self.head])
        correct, finite = (logits.argmax(1) == labels) & mask, torch.isfinite(loss.detach())
        if self.worker.counts_rows:
            numbers = [loss.detach(), correct.sum(), mask.sum(), ~finite]
            self.stats += torch.stack([number.double() for number in numbers])
            self.gradient = [total + part for total, part in zip(self.gradient, of_head, strict=True)]
        return cotangent * torch.where(finite, self.slope, torch.nan)

    def reduce(self) -> tuple[Head, PassStats]:
        """The gradient of the head and the statistics over the whole group. Collective: group."""
        flat = torch.cat([self.stats, *(part.reshape(-1) for part in self.gradient)])
        stats, *parts = self.worker.group.sum_(flat).split([4, *(part.numel() for part in self.gradient)])
        return [part.view_as(like) for part, like in zip(parts, self.gradient, strict=True)], PassStats(stats)
