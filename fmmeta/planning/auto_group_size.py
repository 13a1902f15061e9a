"""Chooses `--group_size auto` by the memory model, and refuses a group size that cannot hold the model."""

import json
from collections.abc import Callable
from dataclasses import replace

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import host_bytes
from fmmeta.common.text import any_of
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import divisors
from fmmeta.parallel.process_groups import World
from fmmeta.planning.memory import GIB, HEADROOM, Estimate, Sizes, estimate

SizesAt = Callable[[int], Sizes]
"""Sizes of the largest rank's part of the model, by the number of data ranks of a group."""


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Free memory of one rank's device: of its GPU, or its share of the host's within its limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host_bytes(local_world_size)


def at_size(settings: DeepSpeedSettings, group_size: int) -> DeepSpeedSettings:
    """The settings of a group of this size: a group of one runs plain PyTorch and needs what ZeRO 0 needs."""
    return replace(settings, zero_stage=0) if group_size == 1 and not settings.offload else settings


def needed_at(sizes_at: SizesAt, settings: DeepSpeedSettings, group_size: int, model_ranks: int) -> Estimate:
    """Peak bytes of one rank. model_ranks: pipeline stages x tensor ranks."""
    data = group_size // model_ranks
    return estimate(sizes_at(data), at_size(settings, group_size), data)


def least_free(world: World) -> tuple[int, int]:
    """Free bytes of device and host memory, the least of all ranks. Collective: world."""
    local = world.launch.local_world_size
    mine = (free_bytes(world.device, local), host_bytes(local))
    gathered = [json.loads(text) for text in world.comm.gather_bytes(json.dumps(mine).encode())]
    free, host = (min(values) for values in zip(*gathered, strict=True))
    return free, host


def check_group_size(
    world: World, sizes_at: SizesAt, settings: DeepSpeedSettings, group_size: int, model_ranks: int = 1
) -> None:
    """Raise `UsageError` on every rank if groups of `group_size` cannot hold the model. Collective: world.

    model_ranks: pipeline stages x tensor ranks. With offload no size is refused.
    """
    free, _ = least_free(world)
    needed = needed_at(sizes_at, settings, group_size, model_ranks)
    if needed.total <= free or settings.offload:
        return
    enough = [
        str(size)
        for size in divisors(world.launch.world_size)
        if size % model_ranks == 0
        and needed_at(sizes_at, settings, size, model_ranks).total <= HEADROOM * free
    ]
    instead = f"group_size {any_of(enough)}" if enough else "ZeRO 3, --pipeline_stages or more ranks"
    raise UsageError(
        f"group_size={group_size} needs {needed} per rank at ZeRO {at_size(settings, group_size).zero_stage},"
        f" and {free / GIB:.3g} GiB are free; use {instead}"
    )


def choose_group_size(
    world: World, sizes_at: SizesAt, settings: DeepSpeedSettings, model_ranks: int = 1
) -> tuple[int, str]:
    """The smallest group size that fits, stays inside a node and is a multiple of `model_ranks` (pipeline
    stages x tensor ranks), and the arithmetic. Collective: world.

    Raises `UsageError` on every rank if none does.
    """
    local, (free, host) = min(world.nodes.sizes), least_free(world)
    candidates = [
        size
        for size in divisors(world.launch.world_size)
        if size <= local and world.nodes.are_groups_on_nodes(size) and size % model_ranks == 0
    ]
    if not candidates:
        raise UsageError(
            f"group_size=auto finds no group: pipeline_stages x tensor_parallel_size={model_ranks} divides no"
            f" group size for world_size={world.launch.world_size} inside a node of {local} ranks; give"
            " --group_size, or use other stages or tensor ranks"
        )
    for size in candidates:
        needed = needed_at(sizes_at, settings, size, model_ranks)
        if needed.total <= HEADROOM * free and needed.host <= HEADROOM * host:
            return size, f"group_size {size} (auto): {needed}, of {free / GIB:.3g} GiB free per rank"
    in_host = f" (and {host / GIB:.3g} in host memory)" if needed.host else ""
    raise UsageError(
        f"group_size=auto finds no room: {local} ranks of a group need {needed} each at ZeRO"
        f" {settings.zero_stage}, and {free / GIB:.3g} GiB are free{in_host}; use a higher ZeRO stage,"
        " offload, more GPUs or a smaller --micro_batch_size"
    )
