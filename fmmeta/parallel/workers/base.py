"""A worker: one model, held by the ranks of a group, and the operations that meta-learners are written in.

    operation                                  what it does                               used for
    read() -> vector                           copies this rank's fp32 shards             theta, phi_k
    write(vector)                              sets them, refreshes working weights       restore, outer step
    step(batches, update) -> PassStats         forward, backward, update of the shards    inner step
    gradient(batches, restore) -> vector, ..   forward, backward, returns the gradient    query gradient
    add_gradient(total, w, batches, restore)   the same, accumulated into a vector        meta-gradient
    forward(batches) -> PassStats              loss and accuracy, no gradient             evaluation
    features(batches) -> [[B, D]]              input of the classifier head, no gradient  prototypes
    ahead(batches) -> SavedForward             the same, with the graph, for step or vjp  one forward less
    logits(batches) -> [[B, C]]                output of the model, no gradient           FullModelWorker only
    vjp(parts, total) -> vector, PassStats     gradient of sum <features, cotangents>     classifier head
    dot(a, b) -> float                         over the whole model, each element once
    dot_by_layer(a, b, ..., n) -> [n]          the same, by layer                         learned rates

A vector is the flat fp32 tensor of S elements described by `ParamMap` (deepspeed_shards.py). Every rank of a
group calls the same operations in the same order with the same number of micro-batches. No operation waits
for another group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.offload import pieces
from fmmeta.parallel.param_map import ParamMap, overlap
from fmmeta.tasks.batching import MicroBatch

Update = Callable[[Tensor, Tensor, slice], None]
"""Changes a shard in place, given its gradient and its slice of the vector.

Local: it must not communicate.
"""


@dataclass
class PassStats:
    """Statistics of one pass over a set of examples, summed over the ranks of the group.

    loss: mean over the set; accuracy: share of correct rows; finite: loss and gradient, on every rank.
    `stats`, float64 [4], packs the fields for one all-reduce and stays on the device until one is read.
    """

    stats: Tensor

    @property
    def loss(self) -> float:
        return float(self.stats[0])

    @property
    def num_correct(self) -> Tensor:
        return self.stats[1]

    @property
    def num_rows(self) -> Tensor:
        return self.stats[2]

    @property
    def nonfinite_ranks(self) -> Tensor:
        return self.stats[3]

    @property
    def accuracy(self) -> float:
        return float(self.num_correct / self.num_rows.clamp(min=1))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and float(self.nonfinite_ranks) == 0


@dataclass
class SavedForward:
    """A forward pass over a set that was done ahead: features [B, D] of each micro-batch of this rank, fp32.

    outputs: features and logits with their graph, valid for one pass, as long as the body
    stays as it is; None where a worker does not keep it, and a later pass recomputes the forward.
    """

    features: list[Tensor]
    outputs: list[tuple[Tensor, Tensor]] | None = None


CotangentFn = Callable[[int, Tensor], Tensor]
"""(number of a micro-batch, its features [B, D]) -> their cotangent [B, D], zero for rows that do not count.

Local.
"""


@dataclass(frozen=True)
class VjpInput:
    """A set whose features are pulled at. begin: called once when the sets before are done; it may
    communicate in the group.
    """

    batches: Sequence[MicroBatch]
    begin: Callable[[], CotangentFn]
    ahead: SavedForward | None = None


class Worker(ABC):
    """One model, held by the ranks of a group; the operations of the table above."""

    params: ParamMap
    group: Communicator
    device: torch.device  # of the working weights
    home: torch.device  # of the fp32 shards and of vectors: the host's where DeepSpeed offloads them
    data_ranks = 1  # ranks of the group that share the rows of a set
    counts_rows = (
        True  # False where other ranks of the group run the same rows: what they give is counted there
    )

    @abstractmethod
    def read(self) -> Tensor:
        """Return a copy of this rank's shards, fp32 [S]."""

    @abstractmethod
    def write(self, vector: Tensor) -> None:
        """Replace the shards and refresh the working weights. Collective: group."""

    @abstractmethod
    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        agreed: bool = False,
        ahead: SavedForward | None = None,
    ) -> PassStats:
        """One optimisation step on the mean loss over `batches`. Collective: group.

        Without `agreed`, `update` may or may not see a non-finite gradient. With `agreed`, every rank skips
        `update` or gets zeros as soon as one rank finds the gradient non-finite. `ahead`: features of
        `batches` from the same body; the head may have moved.
        """

    @abstractmethod
    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        """Loss and accuracy over `batches`. Collective: group."""

    @abstractmethod
    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Input of the classifier head for the rows of each micro-batch of this rank, fp32 [B, D];
        undefined where `counts_rows` is False. Collective: group.
        """

    def ahead(self, batches: Sequence[MicroBatch]) -> SavedForward:
        """Features of `batches`, from which a later pass may continue.

        Activations of all of them are kept. Collective: group.
        """
        return SavedForward(self.features(batches))

    @abstractmethod
    def vjp(self, parts: Sequence[VjpInput], total: Tensor | None = None) -> tuple[Tensor | None, PassStats]:
        """Gradient of sum <features, cotangent> over the rows of the group, fp32 [S]; the weights stay.

        With a `total` it is added there instead, unless it is not finite on some rank of the group.
        Collective: group.
        """

    def gradient(
        self, batches: Sequence[MicroBatch], restore: Tensor | None = None
    ) -> tuple[Tensor, PassStats]:
        """Return the gradient of the mean loss, fp32 [S]; leave the weights alone, or put `restore` in.

        Collective: group.
        """
        return self._capture(lambda update: self.step(batches, update), restore)

    def add_gradient(
        self, total: Tensor, weight: float, batches: Sequence[MicroBatch], restore: Tensor
    ) -> PassStats:
        """Add `weight` times the gradient of the mean loss to `total` [S] (any device); write `restore`.

        `total` stays as it is where the loss or the gradient is not finite on any rank of the group. No
        vector is made for it. Collective: group.
        """

        return self._add(lambda update, agreed: self.step(batches, update, agreed), total, weight, restore)

    def _add(
        self,
        step: Callable[[Update, bool], PassStats],
        total: Tensor,
        weight: float,
        restore: Tensor | None = None,
    ) -> PassStats:
        """See add_gradient: of what `step` shows to an update, agreed or not."""

        def add(shard: Tensor, grad: Tensor, where: slice) -> None:
            for part, more in pieces(self.device, total[where], grad):
                part.add_(more.to(part.device), alpha=weight)
            if restore is not None:
                shard.copy_(restore[where])

        result = step(add, True)
        if restore is not None and not result.finite:
            self.write(restore)  # a skipped step restores nothing
        return result

    def add_displacement(self, total: Tensor, weight: float, theta: Tensor) -> None:
        """Add `weight` times (theta minus what the worker holds) to `total` [S], piece by piece."""
        for tensor, place in self.held():
            for part, there, here in pieces(self.device, total[place], theta[place], tensor):
                part.add_(there.to(here.device).sub(here).to(part.device), alpha=weight)

    @abstractmethod
    def held(self) -> list[tuple[Tensor, slice]]:
        """This rank's shards themselves, and their slices of a vector."""

    def _capture(
        self, step: Callable[[Update], PassStats], restore: Tensor | None = None
    ) -> tuple[Tensor, PassStats]:
        captured = torch.zeros(self.params.numel, device=self.home)

        def capture(shard: Tensor, grad: Tensor, where: slice) -> None:
            captured[where] = grad
            if restore is not None:
                shard.copy_(restore[where])

        result = step(capture)
        if restore is not None and not result.finite:
            self.write(restore)  # a skipped step restores nothing
        return captured, result

    def displacement(self, theta: Tensor) -> Tensor:
        """theta minus what the worker holds, fp32 [S] on the device of the shards."""
        way = self.read().neg_()
        for part, there in pieces(self.device, way, theta):
            part.add_(there.to(part.device))
        return way

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Inner product over the whole model, the same bits on every rank of the group. Collective: group."""
        product = torch.zeros((), dtype=torch.float64, device=self.device)
        add_local_dot(self, product, a, b, slice(0, len(a)))
        return float(over_group(self, product))

    def dot_by_layer(
        self, a: Tensor, b: Tensor, segments: Sequence[tuple[int, int, int]], count: int
    ) -> Tensor:
        """Inner products by layer, float64 [count] in host memory, over the whole model.

        segments: begin, end, layer of stretches of this rank's vectors. Collective: group.
        """
        sums = torch.zeros(count, dtype=torch.float64, device=a.device)
        for run in self.params.counted():
            for begin, end, layer in segments:
                here = overlap(slice(begin, end), run)
                sums[layer] += torch.dot(a[here].double(), b[here].double())
        return over_group(self, sums.cpu())

    def whole(self, vector: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        """One whole parameter out of the group's vectors. Collective: group."""
        return self.params.whole(vector, name, shape, self.group.sum_)

    def writer(self, name: str) -> int:
        """The rank of the group that writes a parameter to the exported folder."""
        return 0


def add_local_dot(worker: Worker, product: Tensor, a: Tensor, b: Tensor, where: slice) -> None:
    """Add the inner product of a slice of two vectors to `product` (fp64, on the device of the worker).

    Elements that another rank of the group owns do not count. Local.
    """
    for run in worker.params.counted():
        here = overlap(where, run)
        for x, y in pieces(worker.device, a[here], b[here]):  # fp64 copies are twice the size
            product += torch.dot(x.to(worker.device).double(), y.to(worker.device).double())


def over_group(worker: Worker, partial: Tensor) -> Tensor:
    """A sum over the whole model from this rank's part of it: rank 0's where every rank holds all, since
    rounding may differ between them and the sum may decide how many collectives follow. Collective: group.
    """
    return worker.group.broadcast_(partial) if worker.params.replicated else worker.group.sum_(partial)
