"""From work and a machine to seconds of an outer step.

    step = tasks of the fullest group x task + outer step + cross
    task = sum over passes (flops / matmul + wire / link + offloaded weights / PCIe
                            + shard arithmetic / memory + allocated * page_in)

A ring all-reduce of n bytes over M ranks sends 2 (M - 1) / M n per rank; gather and scatter send half of it.
Computing hides the profile's share of ZeRO 3's communication, and nothing else. Not counted: Python, kernels
of few flops, loading (in other processes), evaluation and saving.
"""

from dataclasses import dataclass

from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.planning.compute import TaskCost, Wire, refresh
from fmmeta.planning.machines import Profile
from fmmeta.planning.memory import Sizes

# Bytes that are read and written per element of a shard, or of the gradients, in fp32:
UPDATE = 24  # theta -= lr g: 12; is g finite: 4; zeros: 4; a low-precision copy: 4
CAPTURED = 28  # a direction: zeros, copy, restore, added to the sum
REDUCED = 24  # of all gradients: flattened, divided, copied back
PLACED = {0: 0, 1: 16, 2: 16, 3: 24}  # of the shard: into the partition, flattened, into the weights
WRITTEN = 8
OUTER = 140  # mean, norm in fp64, AdamW's dozen reads and writes, write, zeros
OUTER_ALLOCATED = 8  # the part of it that AdamW allocates
# How often the payload of a collective is allocated (counted as page faults, docs/scaling.md). A gather: by
# gloo, and by ZeRO 3 as the parameters. A reduction: as the flattened copy, and from ZeRO 1 on as the bucket.
GATHERED_COPIES = {0: 0, 1: 1, 2: 1, 3: 2}
REDUCED_COPIES = {0: 1, 1: 2, 2: 2, 3: 2}


@dataclass(frozen=True)
class Topology:
    """The ranks of a group, and which of them share a node."""

    data: int
    size: int
    groups: int
    group_in_node: bool  # each group is inside one node
    all_in_node: bool  # all groups are inside the same node


@dataclass(frozen=True)
class Seconds:
    """Seconds of a task, or of an outer step of the fullest group."""

    compute: float
    group: float  # communication inside the group
    shards: float  # arithmetic on shards
    cross: float  # reduction across groups

    @property
    def total(self) -> float:
        return self.compute + self.group + self.shards + self.cross


def task_seconds(
    task: TaskCost, sizes: Sizes, precision: DeepSpeedSettings, topology: Topology, profile: Profile
) -> Seconds:
    """Seconds of one task."""
    stage, on_host = precision.zero_stage, precision.offload and not sizes.lazy
    compute = 0.0
    group = task.writes * wire_seconds(task.refresh, stage, topology, profile)
    for times, one in task.passes:
        took = one.flops / profile.matmul(precision.bf16)
        wire = wire_seconds(one.wire, stage, topology, profile)
        if not sizes.lazy:
            wire += one.fetched / profile.host_link
        if stage == 3:
            wire -= profile.hidden * min(wire, took)
        compute += times * (took + (profile.step_overhead if one.update else 0.0))
        group += times * wire
    shard = shard_of(sizes, precision, topology)
    moved = (task.updates * UPDATE + CAPTURED + task.writes * WRITTEN) * shard
    if topology.size > 1 or precision.offload:
        moved += task.updates * ((REDUCED * sizes.params if topology.data > 1 else 0) + PLACED[stage] * shard)
    offloaded = 0.0  # bytes between device and host
    if on_host:  # gradients and weights of each update
        offloaded = task.updates * (4 + (2 if precision.bf16 else 4)) * shard
    elif sizes.offload_outer and not sizes.lazy:  # theta, to restore it, and the direction
        offloaded = 8.0 * shard
    allocated = GATHERED_COPIES[stage] * task.wire.gather + REDUCED_COPIES[stage] * task.wire.reduce
    shards = moved / (profile.host_memory if on_host else profile.memory)
    shards += offloaded / profile.host_link + allocated * profile.page_in
    return Seconds(compute, group, shards, 0.0)


def step_seconds(
    one: Seconds,
    tasks: float,
    sizes: Sizes,
    precision: DeepSpeedSettings,
    topology: Topology,
    profile: Profile,
) -> Seconds:
    """Seconds of an outer step in which the fullest group runs `tasks` tasks."""
    shard, new = shard_of(sizes, precision, topology), refresh(precision, sizes, topology.data)
    on_host, outer_on_host = precision.offload and not sizes.lazy, sizes.offload_outer and not sizes.lazy
    cross = 0.0
    if topology.groups > 1:
        link = profile.group_link if topology.all_in_node else profile.cross_link
        cross = 2 * ring(topology.groups) * sizes.crossing * shard / link + profile.latency
        if on_host or outer_on_host:
            cross += 8 * shard / profile.host_link
    if sizes.sums > 1:  # --outer_delay: behind the inner loops of the next outer step
        cross = max(0.0, cross - tasks * one.compute)
    outer = OUTER * shard / (profile.host_memory if on_host else profile.memory)
    outer += (OUTER_ALLOCATED * shard + GATHERED_COPIES[precision.zero_stage] * new.gather) * profile.page_in
    if sizes.offload_outer:
        outer += 2 * 4 * (2 + sizes.moments) * shard / profile.host_link
    group = tasks * one.group + wire_seconds(new, precision.zero_stage, topology, profile)
    return Seconds(tasks * one.compute, group, tasks * one.shards + outer, cross)


def wire_seconds(wire: Wire, stage: int, topology: Topology, profile: Profile) -> float:
    """Seconds of one rank's collectives, one after the other.

    DeepSpeed reduces by all-reduce, except ZeRO 3, which scatters (gloo implements it as an all-reduce).
    Tensor ranks are neighbours inside a node.
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
