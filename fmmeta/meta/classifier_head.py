"""The classifier head at the start of a task, and the gradient through its initialisation.

    zero, learned   phi_0 = theta (a zeroed head stays zero in theta)
    reset_to_zero   zeros, since theta's head belongs to other classes (joint training)
    prototype       w_c = 2 mu_c, b_c = -|mu_c|^2, mu_c the mean feature of class c over the support set

The prototype head's logits are -|f - mu_c|^2 + |f|^2: a nearest-mean classifier (Snell et al. 2017, equation
8), as initialisation Triantafillou et al. 2020 (arXiv 1903.03096, section 3). With `backprop_through_means`,
gradients flow back through the means:

    dL/df_i = (2 dL/dw_c - 2 mu_c dL/db_c) / n_c    for a support row i of class c

One more pass computes the gradient of theta from dL/df.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    reset_to_zero: the task starts from a zero head, whatever theta's is.
    """

    kind: str
    names: tuple[str, ...] = ()
    classes: int = 0
    backprop_through_means: bool = False
    reset_to_zero: bool = False

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
        means = None
        if not self.uses_support_features and not self.reset_to_zero:
            return theta, None
        phi = theta.clone()
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
        of_weight = worker.gather_param(v, self.names[0], shape)
        of_bias = worker.gather_param(v, self.names[1], shape[:1])
        of_mean = (2 * of_weight - 2 * means.means * of_bias[:, None]) / means.counts
        cotangents = [
            of_mean[batch.labels.to(of_mean.device)] * row_mask(batch, of_mean) for batch in support
        ]
        worker.write(theta)
        return [worker.vjp([VjpInput(support, lambda: lambda number, _: cotangents[number])], v)]


def nearest_mean_head(means: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [C, D] and bias [C] of the linear classifier by the nearest of `means` [C, D]."""
    return 2 * means, -(means**2).sum(1)


def row_mask(batch: MicroBatch, like: Tensor) -> Tensor:
    """1 for rows of the set, 0 for rows that only fill a batch; [B, 1]."""
    return (batch.weights > 0).to(like.device, like.dtype)[:, None]


def class_means(
    worker: Worker, support: Sequence[MicroBatch], features: Sequence[Tensor], classes: int
) -> ClassMeans:
    """Means over the rows of the whole group; [B, D] features of each of this rank's micro-batches.

    Collective: group.
    """
    sums = torch.zeros(classes, features[0].shape[1] + 1, device=worker.device)
    for batch, rows in zip(support, features, strict=True):
        with_ones = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) * row_mask(batch, rows)
        sums.index_add_(0, batch.labels.to(rows.device), with_ones)
    worker.group.sum_(sums if worker.counts_rows else sums.zero_())
    counts = sums[:, -1:].clamp(min=1)
    return ClassMeans(sums[:, :-1] / counts, counts)
