"""A worker whose ranks each run the complete model; engines differ in two primitives only.

batches --> _call (features, logits) --> loss --> backward --> ... --> apply --> Pass, summed over the group
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.models.losses import objective
from fmmeta.parallel.workers.base import PassStats, SavedForward, Update, VjpInput, Worker
from fmmeta.tasks.batching import MicroBatch


class FullModelWorker(Worker):
    """A worker each of whose ranks runs the model from tokens to logits: the verbs over two primitives,
    `backward` of a micro-batch and `apply` of an update to the shards.
    """

    model: nn.Module
    can_defer_backward = True  # whether `ahead` may leave a forward pass without its backward pass

    @property
    def learner(self) -> Any:
        """The Learner, inside an engine or not."""
        return getattr(self.model, "module", self.model)

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a rank's part of the loss to what this pass has gathered. Collective: group."""

    @abstractmethod
    def apply(self, update: Update, agreed: bool) -> Tensor:
        """Hand each shard and its gradient, summed over the group, to `update`; refresh. `agreed`: see
        `step`.

        Returns whether this rank met a non-finite gradient or a refused step, as a 0-d tensor. Collective:
        group.
        """

    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        agreed: bool = False,
        ahead: SavedForward | None = None,
    ) -> PassStats:
        stats, given = self._stats(), self._taken(ahead)
        for index, batch in enumerate(batches):
            loss = self._loss(batch, stats, None if given is None else given[index][0])
            self.backward(nan_gradient_if_nonfinite(loss), last=index == len(batches) - 1)
        return self._end(stats, update, agreed)

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        stats = self._stats()
        for batch in batches:
            self._loss(batch, stats)
        return PassStats(self.group.sum_(stats))

    @torch.no_grad()
    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._call(batch.to(self.device), want="features").float() for batch in batches]

    @torch.no_grad()
    def logits(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Logits of the rows of each micro-batch of this rank, fp32 [B, C] or [B, T, V].

        Collective: group.
        """
        return [self._call(batch.to(self.device)).float() for batch in batches]

    def ahead(self, batches: Sequence[MicroBatch]) -> SavedForward:
        with torch.set_grad_enabled(self.can_defer_backward):
            outputs = [self._call(batch.to(self.device), want="both") for batch in batches]
        return SavedForward(
            [features.detach().float() for features, _ in outputs],
            outputs if self.can_defer_backward else None,
        )

    def vjp(self, parts: Sequence[VjpInput], total: Tensor | None = None) -> tuple[Tensor | None, PassStats]:
        if total is None:
            return self._capture(lambda update: self._pull(parts, update))
        return None, self._add(lambda update, agreed: self._pull(parts, update, agreed), total, 1.0)

    def _pull(self, parts: Sequence[VjpInput], update: Update, agreed: bool = False) -> PassStats:
        stats = self._stats()
        left = sum(len(part.batches) for part in parts)
        for part in parts:
            answer, given = part.begin(), self._taken(part.ahead)
            for index, batch in enumerate(part.batches):
                outputs = self._call(batch.to(self.device), want="both") if given is None else given[index]
                product = vjp_loss(*outputs, answer(index, outputs[0].detach().float()))
                stats[0] += product.detach()
                left -= 1
                self.backward(nan_gradient_if_nonfinite(product), last=left == 0)
        return self._end(stats, update, agreed)

    def _end(self, stats: Tensor, update: Update, agreed: bool) -> PassStats:
        stats[3] = self.apply(update, agreed)
        return PassStats(self.group.sum_(stats))

    def _stats(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self.device)

    @staticmethod
    def _taken(ahead: SavedForward | None) -> list[tuple[Tensor, Tensor]] | None:
        """What was kept; it serves once, and its activations go with it."""
        if ahead is None:
            return None
        outputs, ahead.outputs = ahead.outputs, None
        return outputs

    def _call(self, batch: MicroBatch, want: str = "logits") -> Any:
        return self.model(**batch.inputs, want=want)

    def _loss(self, batch: MicroBatch, stats: Tensor, features: Tensor | None = None) -> Tensor:
        """`features`: of the rows, where they are known already."""
        batch = batch.to(self.device)
        logits = self._call(batch) if features is None else self.learner.classify(features)
        loss, right, rows = objective(logits, batch)
        if self.counts_rows:
            stats[:3] += torch.stack([loss.detach().double(), right.double(), rows.double()])
        return loss


def nan_gradient_if_nonfinite(loss: Tensor) -> Tensor:
    """The loss, with a gradient that is not finite where the loss is not: log(0) has one that looks like any
    other.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def vjp_loss(features: Tensor, logits: Tensor, cotangent: Tensor) -> Tensor:
    """<features, cotangent> of a micro-batch; the head takes part with 0, as engines expect of every
    parameter.
    """
    return (
        features.float() * cotangent.to(features.device, torch.float32)
    ).sum() + 0.0 * logits.float().sum()
