"""The classifier head at the start of a task, and the gradient through its initialisation.

    zero, learned   phi_0 = theta (a zeroed head stays zero in theta)
    anew            theta's head is that of other classes (joint training): zeros
    prototype       w_c = 2 mu_c, b_c = -|mu_c|^2, mu_c the mean feature of class c over the support set

The prototype head's logits are -|f - mu_c|^2 + |f|^2: a nearest-mean classifier (Snell et al. 2017, equation
8), as initialisation Triantafillou et al. 2020 (arXiv 1903.03096, section 3). With `through`, gradients flow
back through the means:

    dL/df_i = (2 dL/dw_c - 2 mu_c dL/db_c) / n_c    for a support row i of class c

One more pass computes the gradient of theta from dL/df.
"""

from __future__ import annotations

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

    `anew`: zeros in place of theta's head.
    """

    kind: str
    names: tuple[str, ...] = ()
    classes: int = 0
    through: bool = False
    anew: bool = False

    @property
    def uses_support_features(self) -> bool:
        """Whether the start depends on the support set's features."""
        return self.kind == "prototype" and bool(self.names)

    def start(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        features: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ClassMeans | None]:
        """Take the worker from theta to phi_0; return it (theta itself where nothing changes).

        `features`: of `support`, where they are known. Collective: group.
        """
        if not self.uses_support_features:
            return (self._without(worker, theta) if self.anew else theta), None
        means = class_means(
            worker, support, worker.features(support) if features is None else features, self.classes
        )
        phi = theta.clone()
        for name, value in zip(self.names, (2 * means.means, -(means.means**2).sum(1)), strict=False):
            worker.params.put(phi, name, value)
        worker.write(phi)
        return phi, means

    def _without(self, worker: Worker, theta: Tensor) -> Tensor:
        phi = theta.clone()
        for fragment in worker.params.named(self.names):
            phi[fragment.here] = 0
        worker.write(phi)
        return phi

    def back(
        self,
        worker: Worker,
        v: Tensor,
        theta: Tensor,
        support: Sequence[MicroBatch],
        means: ClassMeans | None,
    ) -> tuple[Tensor, list[PassStats]]:
        """dL/dtheta from v = dL/dphi_0, and the passes it took; the worker may hold anything, and holds theta
        afterwards if there were any. Collective: group.
        """
        if means is None or not self.through:
            return v, []
        shape = tuple(means.means.shape)
        of_weight, of_bias = worker.whole(v, self.names[0], shape), worker.whole(v, self.names[1], shape[:1])
        of_mean = (2 * of_weight - 2 * means.means * of_bias[:, None]) / means.counts
        cotangents = [of_mean[batch.labels.to(of_mean.device)] * counted(batch, of_mean) for batch in support]
        worker.write(theta)
        pulled, result = worker.vjp([VjpInput(support, lambda: lambda number, _: cotangents[number])])
        assert pulled is not None, "no sum was given to add it to"
        return pulled.add_(v), [result]


def counted(batch: MicroBatch, like: Tensor) -> Tensor:
    """1 for rows that count, 0 for rows that only fill a batch; [B, 1]."""
    return (batch.weights > 0).to(like.device, like.dtype)[:, None]


def class_means(
    worker: Worker, support: Sequence[MicroBatch], features: Sequence[Tensor], classes: int
) -> ClassMeans:
    """Means over the rows of the whole group; [B, D] features of each of this rank's micro-batches.

    Collective: group.
    """
    sums = torch.zeros(classes, features[0].shape[1] + 1, device=worker.device)
    for batch, rows in zip(support, features, strict=True):
        with_ones = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) * counted(batch, rows)
        sums.index_add_(0, batch.labels.to(rows.device), with_ones)
    worker.group.sum_(sums if worker.counts_rows else sums.zero_())
    counts = sums[:, -1:].clamp(min=1)
    return ClassMeans(sums[:, :-1] / counts, counts)
