"""A rank's vector: which slice of which parameter each element is, and where outer vectors are stored.

A rank's part of the model is one flat fp32 vector of S elements, laid out as

    [ shard 0 | shard 1 | ... ]        one shard per tensor that the engine's optimizer steps
      `decay` ... | `no_decay` ... | `head` ...      parameter groups, in this order, each contiguous

Snapshots, meta-gradients, outer moments and reductions are arithmetic on such vectors. Padding that ZeRO adds
belongs to no parameter.

The outer state of a rank (theta, summed meta-gradient, moments) is stored by `OuterMemory` in one of two
places:

    device (default)          next to the shards; vectors are processed in place
    host (--offload_outer)    in host memory, pinned if the device is a GPU; pieces are processed as copies

Copies between the two do not make the host wait: they happen in the order in which they were issued. So the
host itself reads or changes such a vector only after `OuterMemory.settle`.

Vectors are processed in pieces (`chunk`). Offloading idle state: Ren et al. 2021, ZeRO-Offload (arXiv
2101.06840). On CPUs both are the same memory; the copies are made all the same, so that one path is tested
everywhere.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

INNER_ONLY = "inner_only"  # the group of parameters that the outer step does not change
GROUPS = ("decay", "no_decay", INNER_ONLY)


class TensorSlice(NamedTuple):
    """The part of a parameter that a tensor-parallel rank holds: `length` indices of `dim` from `start`."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Fragment:
    """`length` elements of parameter `name`, from `offset` of the flattened parameter, stored at `begin` of
    the vector.

    shape: of the complete parameter. owned: whether these elements count in sums over the model; if not,
    another rank of the group owns them. cut: the part of the parameter that `offset` counts in (tensor
    parallelism); None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    offset: int
    length: int
    owned: bool = True
    cut: TensorSlice | None = None

    @property
    def here(self) -> slice:
        return slice(self.begin, self.begin + self.length)

    @property
    def there(self) -> slice:
        return slice(self.offset, self.offset + self.length)

    def take(self, whole: Tensor) -> Tensor:
        """These elements of the complete parameter."""
        shaped = whole.view(self.shape)
        return (shaped if self.cut is None else shaped.narrow(*self.cut)).reshape(-1)[self.there]

    def fill(self, whole: Tensor, values: Tensor) -> None:
        """Write these elements into the complete parameter (contiguous)."""
        if self.cut is None:
            whole.view(-1)[self.there] = values
            return
        view = whole.view(self.shape).narrow(*self.cut)
        flat = view.reshape(-1).clone()
        flat[self.there] = values
        view.copy_(flat.view_as(view))


def overlap(a: slice, b: slice) -> slice:
    """The intersection of two slices of a vector; it may be empty."""
    begin = max(a.start, b.start)
    return slice(begin, max(begin, min(a.stop, b.stop)))


def complement(slices: Iterable[slice], numel: int) -> list[slice]:
    """The slices of a vector of `numel` elements that are outside `slices` (disjoint)."""
    runs, begin = [], 0
    for each in sorted(slices, key=lambda each: each.start):
        runs.append(slice(begin, each.start))
        begin = each.stop
    return [run for run in [*runs, slice(begin, numel)] if run.start < run.stop]


@dataclass(frozen=True)
class ParamMap:
    """Names for the elements of a rank's flat vector.

    `replicated`: every rank of the group holds all of it (ZeRO 0), so sums over the model need no
    communication. Where ranks hold parts, each element of the model is owned by exactly one of them.
    """

    fragments: tuple[Fragment, ...]
    numel: int
    groups: Mapping[str, slice]
    replicated: bool

    @cached_property
    def by_name(self) -> Mapping[str, list[Fragment]]:
        """The fragments of each parameter that this rank holds a part of."""
        found = defaultdict[str, list[Fragment]](list)
        for fragment in self.fragments:
            found[fragment.name].append(fragment)
        return found

    def named(self, names: Iterable[str]) -> list[Fragment]:
        return [fragment for name in names for fragment in self.by_name.get(name, ())]

    def owned_slices(self) -> list[slice]:
        """The slices of the vector that count in sums over the model: all but copies of elements that another
        rank owns.
        """
        return complement([fragment.here for fragment in self.fragments if not fragment.owned], self.numel)

    def put(self, vector: Tensor, name: str, value: Tensor) -> None:
        """Write this rank's slice of a complete parameter into `vector`."""
        for fragment in self.named([name]):
            vector[fragment.here] = fragment.take(value).to(vector)

    def add(self, vector: Tensor, name: str, value: Tensor) -> None:
        """Add this rank's slice of a complete parameter to `vector`."""
        for fragment in self.named([name]):
            vector[fragment.here] += fragment.take(value).to(vector)

    def assemble(
        self, vector: Tensor, name: str, shape: tuple[int, ...], sum_over_group: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """One complete parameter from the vectors of the group. Collective: group (none if replicated)."""
        flat = vector.new_zeros(torch.Size(shape).numel())
        for fragment in self.named([name]):
            if fragment.owned:
                fragment.fill(flat, vector[fragment.here])
        return (flat if self.replicated else sum_over_group(flat)).view(shape)


Piece = tuple[nn.Parameter, int, int, int]
"""Parameter, offset in its shard, offset in the parameter, number of elements."""

ParamNames = Mapping[int, tuple[str, tuple[int, ...]]]
"""Id of a parameter -> its name and complete shape."""


def build_param_map(
    tensors: Iterable[Tensor],
    pieces: Iterable[Iterable[Piece]],
    group_names: Iterable[str],
    names: ParamNames,
    replicated: bool,
    not_owned: Collection[str] = (),
    cuts: Mapping[str, TensorSlice | None] | None = None,
) -> ParamMap:
    """The map of a vector made of `tensors` (shards), each with its pieces and its parameter group.

    not_owned: names of parameters that another rank owns. cuts: by name, the part of a parameter that this
    rank holds, where it does not hold all of it.
    """
    fragments, groups, begin = [], {}, 0
    for tensor, of_tensor, group in zip(tensors, pieces, group_names, strict=True):
        for param, at, offset, length in of_tensor:
            if id(param) not in names:  # the idle parameter of a pipeline stage: always zero, like padding
                continue
            name, shape = names[id(param)]
            cut = (cuts or {}).get(name)
            if cut and cut.dim == 0:  # rows are contiguous in the complete parameter too
                offset, cut = offset + cut.start * (torch.Size(shape).numel() // shape[0]), None
            fragments.append(Fragment(name, shape, begin + at, offset, length, name not in not_owned, cut))
        first = groups[group].start if group in groups else begin
        begin += tensor.numel()
        groups[group] = slice(first, begin)
    return ParamMap(tuple(fragments), begin, groups, replicated)


def param_groups(
    model: nn.Module, inner_only: Collection[str], weight_decay: bool, part: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Sort trainable parameters into GROUPS: no weight decay on vectors (norms, biases).

    inner_only: names of those that are no meta-parameters, such as a head that every task initialises.
    Without `weight_decay` all other parameters are one group. part: of the model, whose parameters are
    sorted.
    """
    sorted_into: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    wanted = {id(param) for param in (part or model).parameters()}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) in wanted:
            matrix = len(getattr(param, "ds_shape", param.shape)) > 1  # ZeRO 3 empties the shape
            sorted_into[
                INNER_ONLY if name in inner_only else "decay" if weight_decay and matrix else "no_decay"
            ].append(param)
    return [{"params": params, "name": name} for name, params in sorted_into.items() if params]


def chunk(device: torch.device) -> int:
    """Elements that are processed at a time.

    4 MiB of a vector on CPUs: malloc reuses blocks of that size, and returns those from 32 MiB on (fp64
    copies of larger pieces) to the system every time. 16 MiB on GPUs, for fewer kernels.
    """
    return 2**20 if device.type == "cpu" else 2**22


def pieces(device: torch.device, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length, cut into the same pieces of `chunk` elements."""
    return zip(*(vector.split(chunk(device)) for vector in vectors), strict=True)


@dataclass(frozen=True)
class OuterMemory:
    """`device`: where vectors are processed; `offload`: whether they are stored in host memory meanwhile."""

    device: torch.device
    offload: bool

    def store(self, vector: Tensor) -> Tensor:
        """The vector on the storage device: itself if it is there already, or a copy."""
        return self.zeros(vector).copy_(vector) if self.offload else vector.to(self.device)

    def zeros(self, like: Tensor) -> Tensor:
        """A vector of zeros on the storage device, as long as `like`."""
        if not self.offload:
            return torch.zeros_like(like)
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def joined(self, shards: Sequence[tuple[Tensor, slice]], numel: int) -> Tensor:
        """A copy of shards with `numel` elements: without another one on the device where it is offloaded, or
        beside the shards.
        """
        if not self.offload:
            return torch.cat([shard for shard, _ in shards])
        vector = self.zeros(torch.empty(()).expand(numel))
        for shard, where in shards:
            vector[where] = shard
        return vector

    def pieces(self, whole: slice) -> Iterator[slice]:
        """`whole` cut into slices of `chunk` elements: torch's AdamW allocates as much for its intermediate
        results.
        """
        size = chunk(self.device)
        for begin in range(whole.start, whole.stop, size):
            yield slice(begin, min(begin + size, whole.stop))

    def load(self, part: Tensor) -> Tensor:
        """Part of a vector to process: the part itself, or a copy on the device, for `write_back`."""
        return part.to(self.device, copy=True, non_blocking=True) if self.offload else part

    def write_back(self, part: Tensor, value: Tensor) -> None:
        """Copy a processed value to the part that it was loaded from."""
        if part.data_ptr() != value.data_ptr():
            part.copy_(value, non_blocking=True)

    def settle(self) -> None:
        """Wait until everything that was written back is in host memory."""
        if self.offload and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def add_to(part: Tensor, more: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha` times a tensor to part of a vector that may be in host memory, where the host does not wait
    (OuterMemory).
    """
    if part.device == more.device:
        part.add_(more, alpha=alpha)
    elif more.is_cuda:
        part.copy_(part.to(more.device, non_blocking=True).add_(more, alpha=alpha), non_blocking=True)
    else:
        part.add_(more.to(part.device), alpha=alpha)
