"""From work and a machine to seconds of an outer step.

    step = tasks of the fullest group x task + outer step + cross
    task = sum over passes (flops / matmul + wire / link + offloaded weights / PCIe
                            + shard arithmetic / memory + allocated * page_in)

A ring all-reduce of n bytes over M ranks sends 2 (M - 1) / M n per rank, gather and scatter half of it.
In-group communication of ZeRO 3 is hidden behind computing as far as the profile says; nothing else is. What
is left out: Python, kernels of few flops, loading (in other processes), evaluation and saving.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.planning.compute import TaskCost, Wire, refresh
from fmmeta.planning.machines import Profile
from fmmeta.planning.memory import Sizes

# Bytes that are read and written per element of a shard, or of the gradients, in fp32:
UPDATE = 24  # theta -= rate g: 12; is g finite: 4; zeros: 4; a low-precision copy: 4
CAPTURED = 28  # a direction: zeros, copy, restore, into the sum
REDUCED = 24  # of all gradients: flattened, divided, copied back
PLACED = {0: 0, 1: 16, 2: 16, 3: 24}  # of the shard: into the partition, flattened, into the weights
WRITTEN = 8
OUTER = 140  # mean, norm in fp64, AdamW's dozen reads and writes, write, zeros
OUTER_ALLOCATED = 8  # of it, what AdamW allocates
# Times that the payload of a collective is allocated (counted as page faults, docs/scaling.md): what is
# gathered, by gloo for itself and by ZeRO 3 as the parameters; what is reduced, as the flattened copy and,
# but at ZeRO 0, as the bucket.
GATHERED_COPIES = {0: 0, 1: 1, 2: 1, 3: 2}
REDUCED_COPIES = {0: 1, 1: 2, 2: 2, 3: 2}


@dataclass(frozen=True)
class Topology:
    """Where a group lies: its data ranks, all ranks, whether all of it and all of the groups are inside one
    node.
    """

    data: int
    size: int
    groups: int
    group_in_node: bool
    all_in_node: bool


@dataclass(frozen=True)
class Seconds:
    """Of one outer step of the fullest group: computing, in-group communication, shard arithmetic, cross
    reduction.
    """

    compute: float
    group: float
    shards: float
    cross: float

    @property
    def total(self) -> float:
        return self.compute + self.group + self.shards + self.cross


def task_seconds(
    task: TaskCost, sizes: Sizes, precision: DeepSpeedSettings, topology: Topology, profile: Profile
) -> Seconds:
    """Of one task."""
    compute = group = 0.0
    for times, one in task.passes:
        took = one.flops / profile.matmul(precision.bf16)
        wire = wire_seconds(one.wire, precision.zero_stage, topology, profile)
        if not sizes.lazy:
            wire += one.fetched / profile.host_link
        if precision.zero_stage == 3:
            wire -= profile.hidden * min(wire, took)
        compute += times * (took + (profile.step_overhead if one.update else 0.0))
        group += times * wire
    group += task.writes * wire_seconds(task.refresh, precision.zero_stage, topology, profile)
    shard = shard_of(sizes, precision, topology)
    engine = topology.size > 1 or precision.offload
    moved = task.updates * UPDATE * shard + CAPTURED * shard + task.writes * WRITTEN * shard
    if engine:
        stage = precision.zero_stage
        moved += task.updates * ((REDUCED * sizes.params if topology.data > 1 else 0) + PLACED[stage] * shard)
    rate = profile.host_memory if precision.offload and not sizes.lazy else profile.memory
    away = offloaded(task, sizes, precision, shard) / profile.host_link
    allocated = (
        GATHERED_COPIES[precision.zero_stage] * task.wire.gather
        + REDUCED_COPIES[precision.zero_stage] * task.wire.reduce
    )
    return Seconds(compute, group, moved / rate + away + allocated * profile.page_in, 0.0)


def step_seconds(
    one: Seconds,
    tasks: float,
    sizes: Sizes,
    precision: DeepSpeedSettings,
    topology: Topology,
    profile: Profile,
) -> Seconds:
    """Of an outer step in which the fullest group runs `tasks` tasks."""
    shard = shard_of(sizes, precision, topology)
    link = profile.group_link if topology.all_in_node else profile.cross_link
    cross = 2 * ring(topology.groups) * sizes.crossing * shard / link + (
        profile.latency if topology.groups > 1 else 0.0
    )
    if (precision.offload or sizes.offload_outer) and not sizes.lazy:
        cross += 8 * shard / profile.host_link if topology.groups > 1 else 0.0
    outer = OUTER * shard / (profile.host_memory if precision.offload and not sizes.lazy else profile.memory)
    new = refresh(precision, sizes, topology.data)
    outer += (OUTER_ALLOCATED * shard + GATHERED_COPIES[precision.zero_stage] * new.gather) * profile.page_in
    group = tasks * one.group + wire_seconds(new, precision.zero_stage, topology, profile)
    if sizes.offload_outer:
        outer += 2 * 4 * (2 + sizes.moments) * shard / profile.host_link
    if sizes.sums > 1:  # --outer_delay: behind the inner loops of the next outer step
        cross = max(0.0, cross - tasks * one.compute)
    return Seconds(tasks * one.compute, group, tasks * one.shards + outer, cross)


def wire_seconds(wire: Wire, stage: int, topology: Topology, profile: Profile) -> float:
    """Of a rank, one collective after the other.

    DeepSpeed reduces by all-reduce, but at ZeRO 3 it scatters (gloo makes that out of an all-reduce); tensor
    ranks are neighbours inside a node.
    """
    link = profile.group_link if topology.group_in_node else profile.cross_link
    sums = 1 if stage == 3 and profile.device != "cpu" else 2
    across = ring(topology.data) * (wire.gather + sums * wire.reduce) + wire.send
    inside = 2 * ring(topology.size // topology.data) * wire.tensor
    return across / link + inside / profile.group_link + wire.collectives * profile.latency


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def shard_of(sizes: Sizes, precision: DeepSpeedSettings, topology: Topology) -> int:
    return sizes.params // (topology.data if precision.zero_stage > 0 else 1)


def offloaded(task: TaskCost, sizes: Sizes, precision: DeepSpeedSettings, shard: int) -> float:
    """Bytes of a task between device and host: with DeepSpeed's offload gradients and weights of each update,
    with --offload_outer the restore of theta and the direction.
    """
    if sizes.lazy:
        return 0.0
    if precision.offload:
        return task.updates * (4 + (2 if precision.bf16 else 4)) * shard
    return 8.0 * shard if sizes.offload_outer else 0.0
