"""Which slice of which parameter each element of a rank's vector is.

A rank's part of the model is one flat fp32 vector of S elements, laid out as

    [ shard 0 | shard 1 | ... ]        one shard per tensor that the engine's optimizer steps
      `decay` ... | `no_decay` ... | `head` ...      parameter groups, in this order, each contiguous

Snapshots, meta-gradients, outer moments and reductions are arithmetic on such vectors. Padding that ZeRO adds
belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = ("decay", "no_decay", "head")


@dataclass(frozen=True)
class Fragment:
    """`length` elements of parameter `name`, from `offset` of the flattened parameter, lying at `begin` of
    the vector.

    With a `cut` (dimension, first index, length: tensor parallelism) the offset counts in that part of the
    parameter.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    offset: int
    length: int
    owned: bool = True  # whether these elements count here; another rank of the group owns them if not
    cut: tuple[int, int, int] | None = None

    @property
    def here(self) -> slice:
        return slice(self.begin, self.begin + self.length)

    @property
    def there(self) -> slice:
        return slice(self.offset, self.offset + self.length)

    def take(self, whole: Tensor) -> Tensor:
        """These elements out of the whole parameter."""
        part = whole.view(self.shape)
        return (part if self.cut is None else part.narrow(*self.cut)).reshape(-1)[self.there]

    def fill(self, whole: Tensor, values: Tensor) -> None:
        """Write these elements into the whole parameter (contiguous)."""
        if self.cut is None:
            whole.view(-1)[self.there] = values
            return
        part = whole.view(self.shape).narrow(*self.cut)
        flat = part.reshape(-1).clone()
        flat[self.there] = values
        part.copy_(flat.view_as(part))


def overlap(a: slice, b: slice) -> slice:
    """What two stretches of a vector have in common; it may be empty."""
    begin = max(a.start, b.start)
    return slice(begin, max(begin, min(a.stop, b.stop)))


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

    def named(self, names: Iterable[str]) -> list[Fragment]:
        wanted = set(names)
        return [fragment for fragment in self.fragments if fragment.name in wanted]

    def counted(self) -> list[slice]:
        """The parts of the vector that count in sums over the model: all of it but copies of what another
        rank owns.
        """
        runs, begin = [], 0
        for fragment in sorted(self.fragments, key=lambda fragment: fragment.begin):
            if not fragment.owned:
                runs.append(slice(begin, fragment.begin))
                begin = fragment.begin + fragment.length
        return [run for run in [*runs, slice(begin, self.numel)] if run.start < run.stop]

    def put(self, vector: Tensor, name: str, value: Tensor) -> None:
        """Write this rank's slice of a whole parameter into `vector`."""
        for fragment in self.named([name]):
            vector[fragment.here] = fragment.take(value).to(vector)

    def add(self, vector: Tensor, name: str, value: Tensor) -> None:
        """Add this rank's slice of a whole parameter to `vector`."""
        for fragment in self.named([name]):
            vector[fragment.here] += fragment.take(value).to(vector)

    def whole(
        self, vector: Tensor, name: str, shape: tuple[int, ...], sum_over_group: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Assemble one parameter from the vectors of the group. Collective: group (none if replicated)."""
        flat = vector.new_zeros(torch.Size(shape).numel())
        for fragment in self.named([name]):
            if fragment.owned:
                fragment.fill(flat, vector[fragment.here])
        return (flat if self.replicated else sum_over_group(flat)).view(shape)


def param_groups(model: nn.Module, head: Iterable[str], weight_decay: bool) -> list[dict[str, Any]]:
    """Sort trainable parameters into GROUPS: no weight decay on vectors (norms, biases); `head` apart when it
    is per task.

    Without `weight_decay` all but the head are one group.
    """
    head = set(head)
    sorted_into: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, param in model.named_parameters():
        if param.requires_grad:
            matrix = len(getattr(param, "ds_shape", param.shape)) > 1  # ZeRO 3 empties the shape
            sorted_into[
                "head" if name in head else "decay" if weight_decay and matrix else "no_decay"
            ].append(param)
    return [{"params": params, "name": name} for name, params in sorted_into.items() if params]
