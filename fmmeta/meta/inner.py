"""The inner loop: from theta to a task's phi, by a few steps on its support set.

Update rules are pure functions on a shard and its gradient (worker.Update); they never communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.parallel.worker import Pass, Update, Worker
from fmmeta.tasks.batch import MicroBatch


def sgd(lr: float) -> Update:
    """phi <- phi - lr * gradient."""

    def update(shard: Tensor, grad: Tensor, where: slice) -> None:
        shard.add_(grad, alpha=-lr)

    return update


@dataclass(frozen=True)
class InnerLoop:
    """`steps` steps of SGD at `lr`, the head starting as `head_init` says; `head_names`, `classes`: of the classifier."""

    steps: int
    lr: float
    head_init: str
    head_names: tuple[str, ...] = ()
    classes: int = 0

    def adapt(self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch]) -> list[Pass]:
        """Take the worker from theta to phi. Collective: group."""
        self.start(worker, theta, support)
        return self.run(worker, support)

    def start(self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch]) -> None:
        """Give the head the values that a task starts with; `theta` is what the worker holds. Collective: group."""
        if self.head_names and self.head_init == "prototype":
            worker.write(self.with_prototypes(worker, theta, support))

    def run(self, worker: Worker, support: Sequence[MicroBatch]) -> list[Pass]:
        """The steps on the support set. Collective: group."""
        return [worker.step(support, sgd(self.lr)) for _ in range(self.steps)]

    def with_prototypes(self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch]) -> Tensor:
        """theta with the head of a nearest-mean classifier: w_c = 2 mu_c, b_c = -|mu_c|^2, mu_c the mean feature of class c.

        Its logits are -|f - mu_c|^2 + |f|^2 (Snell et al. 2017, equation 8; as initialisation: Triantafillou et al. 2020,
        section 3). No gradient flows through the means. Collective: group.
        """
        features = worker.features(support)
        sums = torch.zeros(self.classes, features[0].shape[1] + 1, device=worker.device)
        for batch, rows in zip(support, features, strict=True):
            counted = (batch.weights > 0).to(rows)
            ones = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) * counted.to(rows.device)[:, None]
            sums.index_add_(0, batch.labels.to(rows.device), ones)
        worker.group.sum_(sums if worker.voice else sums.zero_())
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        phi = theta.clone()
        values = (2 * means, -(means**2).sum(1))
        for name, value in zip(self.head_names, values, strict=False):
            worker.params.put(phi, name, value)
        return phi
