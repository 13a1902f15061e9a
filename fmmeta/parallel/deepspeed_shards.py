"""Where DeepSpeed's optimizer wrappers keep a rank's fp32 shards; the only place with its private names.

Each wrapper is mapped to its shards, the fragments of parameters in them (param_map.py), and the call that
refreshes the working weights after a shard was written.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmmeta.parallel.param_map import Piece, complement, whole_parameters

Consensus = Literal["engine", "optimizer", "none"]
"""Which part makes all ranks of a group skip a step as soon as one gradient is not finite.

engine: DeepSpeed. optimizer: ShardOptimizer, which is called once for the complete model. none: neither, so
ranks know only after the step.
"""


@dataclass(frozen=True)
class Shards:
    """The fp32 tensors that a DeepSpeed optimizer wrapper owns.

    pieces, group_names: the pieces of parameters in each tensor, and its parameter group. refresh: copies the
    tensors to the working weights. replicated: whether every rank of the group holds all of them.
    """

    tensors: list[Tensor]
    pieces: list[list[Piece]]
    group_names: list[str]
    refresh: Callable[[], None]
    replicated: bool
    nonfinite_consensus: Consensus = "engine"

    def zero_padding(self) -> None:
        """Set the elements that belong to no parameter to zero."""
        for tensor, pieces in zip(self.tensors, self.pieces, strict=True):
            for gap in complement([slice(at, at + length) for _, at, _, length in pieces], tensor.numel()):
                tensor[gap] = 0


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


def _whole(
    masters: Iterable[Tensor],
    params: list[nn.Parameter],
    groups: Iterable[dict[str, Any]],
    refresh: Callable[[], None],
) -> Shards:
    """ZeRO 0: every rank holds every parameter, in one shard each."""
    names = [group["name"] for group in groups for _ in group["params"]]
    tensors = [master.data.view(-1) for master in masters]
    return Shards(
        tensors, whole_parameters(params), names, refresh, replicated=True, nonfinite_consensus="optimizer"
    )


def _unsharded(optimizer: Any, group_rank: int) -> Shards:
    """ZeRO 0, fp32: the parameters are the shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return _whole(params, params, optimizer.param_groups, lambda: None)


def _unfused(wrapper: Any, group_rank: int) -> Shards:
    """ZeRO 0, bf16: FP16_UnfusedOptimizer keeps one fp32 copy per parameter."""
    masters = [master for group in wrapper.fp32_groups for master in group]
    params = [param for group in wrapper.fp16_groups for param in group]

    def refresh() -> None:
        torch._foreach_copy_([param.data for param in params], [master.data for master in masters])

    return _whole(masters, params, wrapper.param_groups, refresh)


def _linked(wrapper: Any, partitions: list[Tensor], groups: Any, consensus: Consensus) -> Shards:
    """DeepSpeed links each parameter to its slice of the flat partition of its group."""
    pieces = []
    for params in groups:
        links = [(param, param._hp_mapping) for param in params]
        pieces.append(
            [
                (
                    param,
                    link.hp_fragment_address.start,
                    link.lp_fragment_address.start,
                    link.hp_fragment_address.numel,
                )
                for param, link in links
                if link is not None
            ]
        )
    names = [group["name"] for group in wrapper.optimizer.param_groups]
    tensors = [partition.data for partition in partitions]
    return Shards(tensors, pieces, names, wrapper.update_lp_params, False, consensus)


def _zero_1_2(wrapper: Any, group_rank: int) -> Shards:
    consensus: Consensus = "engine" if wrapper.compute_grad_norm else "none"
    return _linked(wrapper, wrapper.single_partition_of_fp32_groups, wrapper.bit16_groups, consensus)


def _zero_1_bf16(wrapper: Any, group_rank: int) -> Shards:
    return _linked(wrapper, wrapper.fp32_groups_flat_partition, wrapper.bf16_groups, "engine")


def _zero_3(wrapper: Any, group_rank: int) -> Shards:
    """ZeRO 3: every parameter is cut into equal parts over the ranks, and the parts of a sub-group are
    consecutive.
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
