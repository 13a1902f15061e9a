"""Where DeepSpeed's optimizer wrappers keep a rank's fp32 shards; the only place with its private names.

Each wrapper is mapped to its shards, the fragments of parameters in them (param_map.py), and the call that
refreshes the working weights after a shard was written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmmeta.parallel.param_map import Fragment, ParamMap

Agreement = Literal["engine", "tap", "none"]
"""Who sees to it that a step is taken by every rank of a group or, as soon as one gradient is not finite, by
none: the engine; the tap, which is called once for the whole model; no rank.
"""

Piece = tuple[
    nn.Parameter, int, int, int
]  # parameter, offset in its shard, offset in the parameter, elements


@dataclass(frozen=True)
class Shards:
    """The fp32 tensors that a DeepSpeed optimizer wrapper owns, their contents, and how a change
    reaches the model.
    """

    tensors: list[Tensor]
    pieces: list[list[Piece]]
    group_names: list[str]  # of each tensor
    refresh: Callable[[], None]
    replicated: bool
    agreement: Agreement = "engine"

    def gaps(self) -> list[list[slice]]:
        """Padding of each tensor: elements of no parameter."""
        found = []
        for tensor, pieces in zip(self.tensors, self.pieces, strict=True):
            runs, begin = [], 0
            for _, at, _, length in sorted(pieces, key=lambda piece: piece[1]):
                runs.append(slice(begin, at))
                begin = at + length
            found.append([run for run in [*runs, slice(begin, tensor.numel())] if run.start < run.stop])
        return found

    def param_map(
        self,
        names: Mapping[int, tuple[str, tuple[int, ...]]],
        copies: Collection[str] = (),
        replicated: bool | None = None,
        cuts: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> ParamMap:
        """`names`: id of a parameter -> its name and whole shape; `copies`: names of those that another rank
        owns; `cuts`: the part of a parameter that this rank holds, where it does not hold all of it.
        """
        fragments, groups, begin = [], {}, 0
        for tensor, pieces, group in zip(self.tensors, self.pieces, self.group_names, strict=True):
            for param, at, offset, length in pieces:
                if id(param) not in names:  # a stage's idle parameter: always zero, like padding
                    continue
                name, shape = names[id(param)]
                cut = (cuts or {}).get(name)
                if cut and cut[0] == 0:  # rows follow each other in the whole parameter too
                    offset, cut = offset + cut[1] * (torch.Size(shape).numel() // shape[0]), None
                fragments.append(Fragment(name, shape, begin + at, offset, length, name not in copies, cut))
            first = groups[group].start if group in groups else begin
            begin += tensor.numel()
            groups[group] = slice(first, begin)
        return ParamMap(
            tuple(fragments), begin, groups, self.replicated if replicated is None else replicated
        )


def of_engine(engine: Any, group_rank: int) -> Shards:
    """Find the shards of a `deepspeed.initialize`d engine on its rank `group_rank`.

    Raises `TypeError` for an optimizer wrapper that is not known here.
    """
    wrapper = type(engine.optimizer).__name__
    if wrapper not in ADAPTERS:
        raise TypeError(
            f"DeepSpeed optimizer wrapper {wrapper} is not one of {', '.join(ADAPTERS)}; "
            "use a tested DeepSpeed version (setup.py)"
        )
    return ADAPTERS[wrapper](engine.optimizer, group_rank)


def _unsharded(tap: Any, group_rank: int) -> Shards:
    """ZeRO 0, fp32: the parameters are the shards."""
    params = [(p, group["name"]) for group in tap.param_groups for p in group["params"]]
    return Shards(
        [p.data.view(-1) for p, _ in params],
        [[(p, 0, 0, p.numel())] for p, _ in params],
        [name for _, name in params],
        lambda: None,
        replicated=True,
        agreement="tap",
    )


def _unfused(wrapper: Any, group_rank: int) -> Shards:
    """ZeRO 0, bf16: FP16_UnfusedOptimizer keeps one fp32 copy per parameter."""
    pairs = [
        (master, param, group["name"])
        for masters, params, group in zip(
            wrapper.fp32_groups, wrapper.fp16_groups, wrapper.param_groups, strict=True
        )
        for master, param in zip(masters, params, strict=True)
    ]

    def refresh() -> None:
        torch._foreach_copy_([param.data for _, param, _ in pairs], [master.data for master, _, _ in pairs])

    return Shards(
        [m.data.view(-1) for m, _, _ in pairs],
        [[(p, 0, 0, p.numel())] for _, p, _ in pairs],
        [name for _, _, name in pairs],
        refresh,
        replicated=True,
        agreement="tap",
    )


def _linked(params: Iterable[nn.Parameter]) -> list[Piece]:
    """ZeRO 1 and 2 and BF16_Optimizer: DeepSpeed links each parameter to its slice of the flat partition."""
    pieces = []
    for param in params:
        link = param._hp_mapping  # type: ignore[attr-defined]
        if link is not None:
            there, here = link.lp_fragment_address, link.hp_fragment_address
            pieces.append((param, here.start, there.start, here.numel))
    return pieces


def _zero_1_2(wrapper: Any, group_rank: int) -> Shards:
    names = [group["name"] for group in wrapper.optimizer.param_groups]
    return Shards(
        [t.data for t in wrapper.single_partition_of_fp32_groups],
        [_linked(g) for g in wrapper.bit16_groups],
        names,
        wrapper.update_lp_params,
        replicated=False,
        agreement="engine" if wrapper.compute_grad_norm else "none",
    )


def _zero_1_bf16(wrapper: Any, group_rank: int) -> Shards:
    names = [group["name"] for group in wrapper.optimizer.param_groups]
    return Shards(
        [t.data for t in wrapper.fp32_groups_flat_partition],
        [_linked(g) for g in wrapper.bf16_groups],
        names,
        wrapper.update_lp_params,
        replicated=False,
    )


def _zero_3(wrapper: Any, group_rank: int) -> Shards:
    """ZeRO 3: every parameter is cut into equal parts over the ranks; parts are consecutive in
    sub-groups.
    """
    pieces = []
    for sub_group in wrapper.fp16_groups:
        at, found = 0, []
        for param in sub_group:
            part = param.partition_numel()
            offset = group_rank * part
            length = max(0, min(part, param.ds_numel - offset))
            if length:
                found.append((param, at, offset, length))
            at += part
        pieces.append(found)
    names = [
        wrapper.optimizer.param_groups[wrapper.sub_group_to_group_id[i]]["name"] for i in range(len(pieces))
    ]

    def refresh() -> None:
        wrapper._partition_all_parameters()
        for i in range(len(wrapper.fp16_groups)):
            wrapper._reassign_or_swap_out_partitioned_parameters(i)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)

    tensors = [t.data for t in wrapper.fp32_partitioned_groups_flat]
    return Shards(tensors, pieces, names, refresh, replicated=False)


ADAPTERS: dict[str, Callable[[Any, int], Shards]] = {
    "ShardOptimizer": _unsharded,
    "FP16_UnfusedOptimizer": _unfused,
    "DeepSpeedZeroOptimizer": _zero_1_2,
    "BF16_Optimizer": _zero_1_bf16,
    "DeepSpeedZeroOptimizer_Stage3": _zero_3,
}
