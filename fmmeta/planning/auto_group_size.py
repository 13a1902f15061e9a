"""The smallest group that holds a model, by the formula of footprint.py and what memory the ranks have."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.host_memory import host_bytes
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import any_of, divisors
from fmmeta.parallel.process_groups import World
from fmmeta.planning.memory import GIB, Sizes, estimate

HEADROOM = 0.9  # allocators, buckets and the runtime need the rest


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Memory that one rank may use: its GPU's, or its share of what the host has free, or what limits leave
    it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host_bytes(local_world_size)


def check_group_size(
    world: World, sizes: Sizes, precision: DeepSpeedSettings, group_size: int, model_ranks: int = 1
) -> None:
    """Refuse a group size that was asked for and cannot hold the model. `model_ranks`: stages x tensor ranks.
    Collective: world.

    With offload part of it lies elsewhere: nothing is refused.
    """
    free, _ = least_free(world)
    needed = estimate(sizes, at_size(precision, group_size), group_size // model_ranks)
    if needed.total > free and not precision.offload:
        sizes_tried = [size for size in divisors(world.launch.world_size) if size % model_ranks == 0]
        enough = [
            s
            for s in sizes_tried
            if estimate(sizes, at_size(precision, s), s // model_ranks).total <= HEADROOM * free
        ]
        instead = (
            f"group_size {any_of([str(size) for size in enough])}"
            if enough
            else "ZeRO 3, --pipeline_stages or more ranks"
        )
        stage = at_size(precision, group_size).zero_stage
        raise UsageError(
            f"group_size={group_size} needs {needed} per rank at ZeRO {stage}, and {free / GIB:.3g} GiB are"
            f" free; use {instead}"
        )


def at_size(precision: DeepSpeedSettings, group_size: int) -> DeepSpeedSettings:
    """A group of one runs plain PyTorch, which keeps what ZeRO 0 keeps."""
    return replace(precision, zero_stage=0) if group_size == 1 and not precision.offload else precision


def least_free(world: World) -> tuple[int, int]:
    """Bytes of its device and of host memory that every rank has. Collective: world."""
    local = world.launch.local_world_size
    mine = (free_bytes(world.device, local), host_bytes(local))
    everywhere = [json.loads(text) for text in world.comm.gather_bytes(json.dumps(mine).encode())]
    free, host = (min(values) for values in zip(*everywhere, strict=True))
    return free, host


def choose_group_size(
    world: World, sizes: Sizes, precision: DeepSpeedSettings, model_ranks: int = 1
) -> tuple[int, str]:
    """Smallest number of ranks whose groups stay inside a node, and multiple of `model_ranks` (stages x
    tensor ranks), at which the estimate fits, and the arithmetic. Collective: world.

    Raises `UsageError` on every rank if none does.
    """
    local, (free, host) = min(world.nodes.sizes), least_free(world)
    for size in divisors(world.launch.world_size):
        if size <= local and world.nodes.can_defer_backward(size) and size % model_ranks == 0:
            needed = estimate(sizes, at_size(precision, size), size // model_ranks)
            if needed.total <= HEADROOM * free and needed.host <= HEADROOM * host:
                return size, f"group_size {size} (auto): {needed}, of {free / GIB:.3g} GiB free per rank"
    in_host = f" (and {host / GIB:.3g} in host memory)" if needed.host else ""
    raise UsageError(
        f"group_size=auto finds no room: {local} ranks of a group need {needed} each at ZeRO"
        f" {precision.zero_stage}, and {free / GIB:.3g} GiB are free{in_host}; use a higher ZeRO stage,"
        " offload, more GPUs or a smaller --micro_batch_size"
    )
