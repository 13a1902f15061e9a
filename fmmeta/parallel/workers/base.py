"""A worker: one model, held by the ranks of a group, and the operations that meta-learners are written in.

    operation                                   what it does                             used for
    read() -> vector                            copies this rank's fp32 shards           theta, phi_k
    write(vector)                               sets them, refreshes working weights     restore, outer step
    step(batches, update) -> PassStats          forward, backward, update of shards      inner step
    gradient(batches, into, weight, restore)    forward, backward, adds the gradient     query gradient
    displacement(theta, into)                   adds theta - phi                         Reptile
    forward(batches) -> PassStats               loss and accuracy, no gradient           evaluation
    features(batches) -> [[B, D]]               input of the classifier head             prototypes
    forward_features(batches) -> SavedForward   the same, for a later step or vjp        one forward less
    logits(batches) -> [[B, C]]                 output of the model                      FullModelWorker
    vjp(parts, into) -> PassStats               adds the gradient of                     classifier head
                                                sum <features, cotangents>
    gradient_vjp(batches, cotangent, into)      adds (dg/dphi)^T w, by autograd          FullModelWorker
    dot(a, b) -> float                          over the model, each element once        norms
    dot_by_layer(a, b, segments, n) -> [n]      the same, by layer                       learned rates
    gather_param(vector, name, shape)           one complete parameter                   export, heads

A vector is the flat fp32 tensor of S elements described by `ParamMap` (param_map.py). `gradient`,
`displacement`, `vjp` and `gradient_vjp` accumulate into a vector of the caller, which may be on another
device (host memory); pass `zeros()` to get the value itself. Every rank of a group calls the same operations
in the same order with the same number of micro-batches. No operation waits for another group.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import ParamMap, add_to, overlap, pieces
from fmmeta.tasks.batching import MicroBatch

Update = Callable[[Tensor, Tensor, slice], None]
"""Changes a shard in place, given its gradient and its slice of the vector.

Local: it must not communicate.
"""


@dataclass
class PassStats:
    """Statistics of one pass over a set of examples, summed over the ranks of the group.

    loss: mean over the set; accuracy: share of correct answers, NaN where none are right or wrong; finite:
    loss and gradient, on every rank.
    `stats`, float64 [4], packs loss, correct rows, rows and ranks with a gradient that is not finite for one
    all-reduce. It stays on the device until one is read, which makes the host wait for it once.
    """

    stats: Tensor

    @classmethod
    def mean(cls, passes: "Sequence[PassStats]") -> "PassStats":
        """Of passes over sets of the same size: the mean of their losses, and the sums of their counts."""
        stats = torch.stack([one.stats for one in passes]).sum(0)
        stats[0] /= len(passes)
        return cls(stats)

    @cached_property
    def numbers(self) -> list[float]:
        return self.stats.tolist()

    @property
    def loss(self) -> float:
        return self.numbers[0]

    @property
    def accuracy(self) -> float:
        return self.numbers[1] / self.numbers[2] if self.numbers[2] else math.nan

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and self.numbers[3] == 0


def all_finite(passes: Sequence[PassStats]) -> bool:
    """Whether all passes are finite; those that were not read yet are read together."""
    if unread := [one for one in passes if "numbers" not in vars(one)]:
        for one, numbers in zip(unread, torch.stack([one.stats for one in unread]).tolist(), strict=True):
            one.numbers = numbers
    return all([one.finite for one in passes])


@dataclass
class SavedForward:
    """The forward pass over a set, for a later `step` or `vjp` of the same body.

    features: [B, D] of each micro-batch of this rank, fp32. outputs: features and logits with their graph,
    valid for one later pass; None where the worker does not keep them and the later pass recomputes the
    forward.
    """

    features: list[Tensor]
    outputs: list[tuple[Tensor, Tensor]] | None = None


CotangentFn = Callable[[int, Tensor], Tensor]
"""(number of a micro-batch, its features [B, D]) -> their cotangent [B, D], zero for filler rows.

Local.
"""


@dataclass(frozen=True)
class VjpInput:
    """A set in a vector-Jacobian product.

    begin: called once, after the backward passes of the earlier sets; it may communicate in the group.
    saved: the forward pass of `batches`, if it was done already.
    """

    batches: Sequence[MicroBatch]
    begin: Callable[[], CotangentFn]
    saved: SavedForward | None = None


class Worker(ABC):
    """One model, held by the ranks of a group; the operations of the table above.

    local_shards: this rank's fp32 shards, and their slices of a vector. consensus_before_update: whether all
    ranks know that a gradient is not finite before one of them updates its shards; where they do not, an
    accumulated gradient needs a temporary vector.
    """

    local_shards: list[tuple[Tensor, slice]]

    params: ParamMap
    group: Communicator
    device: torch.device  # of the working weights
    storage_device: (
        torch.device
    )  # of the fp32 shards and of vectors: the host's where DeepSpeed offloads them
    data_ranks = 1  # ranks of the group that share the rows of a set
    counts_rows = True  # False where another rank of the group runs the same rows and counts them
    tensor_rank = 0  # this rank runs the same rows as the rank so many places before it
    consensus_before_update = True
    differentiates_twice = False  # whether `gradient_vjp` works
    routers: Sequence[str] = ()  # names of the parameters of routers, of a mixture of experts
    outer_only: Collection[str] = ()  # names of trained parameters that the inner loop does not change

    @abstractmethod
    def refresh(self) -> None:
        """Copy the shards to the working weights. Collective: group."""

    def read(self) -> Tensor:
        """Return a copy of this rank's shards, fp32 [S]."""
        return torch.cat([shard for shard, _ in self.local_shards])

    def write(self, vector: Tensor) -> None:
        """Replace the shards by `vector` [S] and refresh the working weights.

        A pipeline with tied weights first makes their copies in `vector` equal. Collective: group.
        """
        shards = [shard for shard, _ in self.local_shards]
        torch._foreach_copy_(shards, [vector[where] for _, where in self.local_shards], non_blocking=True)
        self.refresh()

    @abstractmethod
    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        skip_nonfinite_everywhere: bool = False,
        saved: SavedForward | None = None,
    ) -> PassStats:
        """One optimisation step on the mean loss over `batches`. Collective: group.

        By default a rank may or may not call `update` with a gradient that is not finite. With
        `skip_nonfinite_everywhere`, every rank skips `update` or passes zeros to it as soon as one rank finds
        its gradient not finite. saved: forward pass of `batches` with the same body; the head may have
        changed.
        """

    @abstractmethod
    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        """Loss and accuracy over `batches`. Collective: group."""

    @abstractmethod
    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Input of the classifier head for the rows of each micro-batch of this rank, fp32 [B, D];
        undefined where `counts_rows` is False. Collective: group.
        """

    def forward_features(self, batches: Sequence[MicroBatch]) -> SavedForward:
        """`features`, with the activations of all micro-batches where the worker can keep them.

        Collective: group.
        """
        return SavedForward(self.features(batches))

    @abstractmethod
    def vjp(self, parts: Sequence[VjpInput], into: Tensor) -> PassStats:
        """Add the gradient of sum <features, cotangent> over the rows of the group to `into`, fp32 [S].

        The weights stay. `into` is unchanged if the product is not finite on a rank of the group. The loss of
        the result is the sum itself. Collective: group.
        """

    def zeros(self) -> Tensor:
        """A vector of zeros, fp32 [S], to accumulate into."""
        return torch.zeros(self.params.numel, device=self.storage_device)

    def gradient(
        self,
        batches: Sequence[MicroBatch],
        into: Tensor,
        weight: float = 1.0,
        restore: Tensor | None = None,
    ) -> PassStats:
        """Add `weight` times the gradient of the mean loss over `batches` to `into`, fp32 [S] on any device.

        `into` is unchanged if the loss or the gradient is not finite on a rank of the group. The weights
        stay, or become `restore` [S] at no extra cost. Collective: group.
        """
        return self.accumulate(partial(self.step, batches), into, weight, restore)

    def accumulate(
        self,
        run: Callable[[Update, bool], PassStats],
        into: Tensor,
        weight: float = 1.0,
        restore: Tensor | None = None,
        buffered: bool = False,
    ) -> PassStats:
        """Add `weight` times the gradients that `run` passes to an update to `into` [S]; see `gradient`.

        run: (update, skip_nonfinite_everywhere) -> PassStats. buffered: collect them in a temporary vector,
        and add it once all ranks know that it is finite, as without `consensus_before_update`.
        """
        buffered = buffered or not self.consensus_before_update
        total, scale = (self.zeros(), 1.0) if buffered else (into, weight)

        def add(shard: Tensor, grad: Tensor, where: slice) -> None:
            for part, more in pieces(self.device, total[where], grad):
                add_to(part, more, scale)
            if restore is not None:
                shard.copy_(restore[where], non_blocking=True)

        result = run(add, not buffered)
        if restore is not None and not result.finite:
            self.write(restore)  # a skipped step restores nothing
        if buffered and result.finite:
            for part, more in pieces(self.device, into, total):
                add_to(part, more, weight)
        return result

    def displacement(self, theta: Tensor, into: Tensor) -> None:
        """Add theta minus the shards to `into`, fp32 [S] on any device, piece by piece."""
        for tensor, where in self.local_shards:
            for part, there, here in pieces(self.device, into[where], theta[where], tensor):
                add_to(part, there.to(here.device, non_blocking=True).sub(here))

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
        for run in self.params.owned_slices():
            for begin, end, layer in segments:
                here = overlap(slice(begin, end), run)
                sums[layer] += torch.dot(a[here].double(), b[here].double())
        return over_group(self, sums.cpu())

    def gather_param(self, vector: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        """One complete parameter, of `shape`, from the group's vectors. Collective: group."""
        return self.params.assemble(vector, name, shape, self.group.sum_)

    def writer_rank(self, name: str) -> int:
        """The rank of the group that writes a parameter to the exported folder."""
        return 0


def add_local_dot(worker: Worker, product: Tensor, a: Tensor, b: Tensor, where: slice) -> None:
    """Add the inner product of a slice of two vectors to `product` (fp64, on the device of the worker).

    Elements that another rank of the group owns do not count. Local.
    """

    def exact(part: Tensor) -> Tensor:  # twice the size, so in pieces
        return part.to(worker.device, non_blocking=True).double()

    def add(x: Tensor, y: Tensor) -> None:
        product.add_(torch.dot(x := exact(x), x if a is b else exact(y)))

    for run in worker.params.owned_slices():
        here = overlap(where, run)
        for x, y in pieces(worker.device, a[here], b[here]):
            add(x, y)


def over_group(worker: Worker, product: Tensor) -> Tensor:
    """The sum over the whole model of each rank's partial sum. Collective: group.

    Where every rank holds the whole model it is rank 0's value: rounding may differ between ranks, and the
    result may decide how many collectives follow.
    """
    return worker.group.broadcast_(product) if worker.params.replicated else worker.group.sum_(product)
