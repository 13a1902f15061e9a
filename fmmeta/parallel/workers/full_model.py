"""A worker whose ranks each run the complete model; engines differ in two primitives only.

batches --> _call (features, logits) --> loss --> backward --> ... --> apply --> PassStats, over the group
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.models.learner import objective
from fmmeta.parallel.workers.base import PassStats, SavedForward, Update, VjpInput, Worker
from fmmeta.tasks.batching import MicroBatch

Outputs = tuple[Tensor, Tensor]
"""Features and logits of a micro-batch, with their graph."""


class FullModelWorker(Worker):
    """A worker each of whose ranks runs the model from tokens to logits.

    It builds the operations from two primitives: `backward` of a micro-batch, and `apply` of an update to the
    shards.
    """

    model: nn.Module
    can_defer_backward = True  # whether a forward pass may be left without its backward pass

    @property
    def learner(self) -> Any:
        """The Learner, inside an engine or not."""
        return getattr(self.model, "module", self.model)

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch's loss; `last` of the pass. Collective: group."""

    @abstractmethod
    def apply(self, update: Update, skip_nonfinite_everywhere: bool) -> Tensor:
        """Pass each shard and its gradient, summed over the group, to `update`; refresh the weights.

        Returns whether this rank found a gradient that is not finite or skipped the step, as a 0-d tensor.
        skip_nonfinite_everywhere: see `step`. Collective: group.
        """

    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        skip_nonfinite_everywhere: bool = False,
        saved: SavedForward | None = None,
    ) -> PassStats:
        stats, outputs = self._stats(), self._take_outputs(saved, batches)
        for index, (batch, given) in enumerate(zip(batches, outputs, strict=True)):
            loss = self._loss(batch, stats, None if given is None else given[0])
            self.backward(nan_gradient_if_nonfinite(loss), last=index == len(batches) - 1)
        return self._finish(stats, update, skip_nonfinite_everywhere)

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

    def forward_features(self, batches: Sequence[MicroBatch]) -> SavedForward:
        with torch.set_grad_enabled(self.can_defer_backward):
            outputs = [self._call(batch.to(self.device), want="both") for batch in batches]
        features = [each.detach().float() for each, _ in outputs]
        return SavedForward(features, outputs if self.can_defer_backward else None)

    def vjp(self, parts: Sequence[VjpInput], into: Tensor) -> PassStats:
        def run(update: Update, everywhere: bool) -> PassStats:
            stats, left = self._stats(), sum(len(part.batches) for part in parts)
            for part in parts:
                cotangent, saved = part.begin(), self._take_outputs(part.saved, part.batches)
                for index, (batch, given) in enumerate(zip(part.batches, saved, strict=True)):
                    outputs = given or self._call(batch.to(self.device), want="both")
                    product = vjp_loss(*outputs, cotangent(index, outputs[0].detach().float()))
                    stats[0] += product.detach()
                    left -= 1
                    self.backward(nan_gradient_if_nonfinite(product), last=left == 0)
            return self._finish(stats, update, everywhere)

        return self.accumulate(run, into, buffered=not self.consensus_before_update)

    def _finish(self, stats: Tensor, update: Update, skip_nonfinite_everywhere: bool) -> PassStats:
        stats[3] = self.apply(update, skip_nonfinite_everywhere)
        return PassStats(self.group.sum_(stats))

    def _stats(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self.device)

    @staticmethod
    def _take_outputs(saved: SavedForward | None, batches: Sequence[MicroBatch]) -> Sequence[Outputs | None]:
        """The kept outputs of each micro-batch, removed from `saved`: they serve one backward pass."""
        if saved is None or saved.outputs is None:
            return [None] * len(batches)
        outputs, saved.outputs = saved.outputs, None
        return outputs

    def _call(self, batch: MicroBatch, want: str = "logits") -> Any:
        return self.model(**batch.inputs, want=want)

    def _loss(self, batch: MicroBatch, stats: Tensor, features: Tensor | None = None) -> Tensor:
        """This rank's share of the mean loss; adds to `stats`. features: of the rows, if already computed."""
        batch = batch.to(self.device)
        logits = self._call(batch) if features is None else self.learner.classify(features)
        loss, num_correct, num_rows = objective(logits, batch)
        if self.counts_rows:
            stats[:3] += torch.stack([loss.detach().double(), num_correct.double(), num_rows.double()])
        return loss


def nan_gradient_if_nonfinite(loss: Tensor) -> Tensor:
    """The loss, with a NaN gradient where it is not finite; log(0), for example, has a finite gradient."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def vjp_loss(features: Tensor, logits: Tensor, cotangent: Tensor) -> Tensor:
    """<features, cotangent> of a micro-batch.

    The logits take part with factor 0, since engines expect a gradient of every parameter.
    """
    product = features.float() * cotangent.to(features.device, torch.float32)
    return product.sum() + 0.0 * logits.float().sum()
