"""Counts the work of one task on one rank (flops, bytes on the wire, bytes of vector arithmetic), and turns
it into seconds of an outer step on a machine.

Passes are those of parallel/costs.py, micro-batches those of tasks/batching.py. Bytes on the wire are the
payload that a rank passes to a collective or sends, as `comm_bytes` in metrics.jsonl:

    gather     ZeRO 3: parameters, for each forward pass and each backward pass after they were released;
               ZeRO 1 and 2: updated parameters
    reduce     gradients, fp32: once a pass (ZeRO 0, 1), once a micro-batch (ZeRO 2, 3)
    tensor     activations between tensor ranks: after attention and MLP (Shoeybi et al. 2019, section 3), and
               backward for each product split by columns (Megatron has one sum for a shared input)
    send       hidden states to the next stage with ids and mask, their gradients to the one before
    cross      one reduction of the shard per outer step

tests/distributed/test_plan.py counts the same in real engines.

    step = tasks of the fullest group x task + outer step + cross
    task = sum over passes (flops / matmul + wire / link + offloaded weights / PCIe
                            + shard arithmetic / memory)

A ring all-reduce of n bytes over M ranks sends 2 (M - 1) / M n per rank; gather and scatter send half of it.
Computing hides the profile's share of ZeRO 3's communication, and nothing else. Not counted: Python, kernels
of few flops, loading (in other processes), evaluation and saving.
"""

import re
from collections import Counter
from dataclasses import astuple, dataclass

from torch import nn

from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner
from fmmeta.learners.experts import experts_per_token, fused_experts, router_names
from fmmeta.learners.stages import plan_stages
from fmmeta.parallel.costs import Passes, passes, query_tokens, rows_of
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import can_defer_backward, differentiates_twice
from fmmeta.parallel.memory import Sizes, micro_batch_rows, micro_batches
from fmmeta.parallel.tensor_parallel import sharing_ranks
from fmmeta.planning.machines import Profile

COLUMNS = 2  # inputs of column-split products in a layer: of attention and of the MLP (tensor_parallel.py)


@dataclass(frozen=True)
class MatmulCounts:
    """Weights of a model that each token is multiplied by, on one tensor rank; of experts, those that it is
    sent to.
    """

    whole: int
    trained: int  # weights of `whole` that have gradients
    inside: int = 0  # weights of `whole` in the layers: checkpointing does not compute a head again
    fullest: float = 1.0  # share of the fullest stage
    width: int = 0  # layers x attention width: 4 T flops per token for each
    matrices: int = 1  # ZeRO 3 gathers them one by one

    def flops(self, tokens: int, backward: bool, again: bool) -> float:
        """Flops of one token in a row of `tokens`. again: the backward pass computes the layers again."""
        attention = 4 * self.width * tokens
        forward = 2 * self.whole + attention
        if not backward:
            return forward
        return 2 * forward + 2 * self.trained + attention + (2 * self.inside + attention if again else 0)


def count_matmuls(learner: HFLearner, config: Config) -> MatmulCounts:
    """Count a learner without storage. A tied output layer counts; embeddings are looked up and do not."""
    text = learner.hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 12)
    width = (
        getattr(text, "num_hidden_layers", 12)
        * heads
        * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    )
    ranks, fullest = config.tensor_parallel_size, 1.0
    shared_by = sharing_ranks(learner.hf.config, ranks)
    linear = {
        f"{name}.weight": module.get_parameter("weight")
        for name, module in learner.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # Conv1D: GPT-2's
    } | {name: learner.get_parameter(name) for name in router_names(learner)}
    weights = {name: (w.numel() // shared_by(name), w.requires_grad) for name, w in linear.items()}
    for name, experts in fused_experts(learner).items():
        for key, w in experts.named_parameters(recurse=False):
            weights[f"{name}.{key}"] = experts_per_token(text) * w[0].numel(), w.requires_grad
    if config.pipeline_stages > 1:
        owner = plan_stages(learner, config.pipeline_stages, shared_by=shared_by).owner
        stages = Counter[int]()
        for name, (size, _) in weights.items():
            stages[owner.get(name, config.pipeline_stages - 1)] += size
        fullest = max(stages.values()) / stages.total()
    return MatmulCounts(
        sum(size for size, _ in weights.values()),
        sum(size for size, is_trained in weights.values() if is_trained),
        sum(size for name, (size, _) in weights.items() if re.search(r"\.\d+\.", name)),
        fullest,
        width // ranks,
        len(weights),
    )


@dataclass(frozen=True)
class Wire:
    """Payload bytes of one rank, by kind, and in how many collectives."""

    gather: int = 0
    reduce: int = 0
    tensor: int = 0
    send: int = 0
    collectives: int = 0

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Wire":
        return Wire(*(times * a for a in astuple(self)))

    @property
    def total(self) -> int:
        """Bytes."""
        return self.gather + self.reduce + self.tensor + self.send


def task_passes(config: Config, precision: DeepSpeedSettings, data: int) -> Passes:
    """How often the sets of a task go through the model. data: data-parallel ranks of the group."""
    stage, stages = precision.zero_stage, config.pipeline_stages
    return passes(
        config,
        data,
        keeps=can_defer_backward(stage, stages),
        twice=differentiates_twice(stage, stages, config.tensor_parallel_size),
    )


def needed_flops(config: Config, matmuls: MatmulCounts, tokens: int, most: int) -> float:
    """Flops of one task on one rank that keeps all activations: the least of all layouts. most: tokens of
    the longest row.
    """
    return sum(
        times * rows * length * matmuls.flops(length, backward, False)
        for times, rows, length, backward in passes_by_set(config, passes(config), tokens, most)
    )


def passes_by_set(config: Config, many: Passes, tokens: int, most: int) -> list[tuple[int, int, int, bool]]:
    """How often a set goes through the model in a task, its rows, their tokens, and whether backward too.

    most: tokens of the longest row.
    """
    support, query = rows_of(config)
    of_query = query_tokens(config, tokens, most)
    kinds = (
        (many.support + 2 * many.second_order, support, tokens, True),
        (many.query, query, of_query, True),
        (many.support_forwards, support, tokens, False),
        (many.query_forwards, query, of_query, False),
    )
    return [one for one in kinds if one[0]]


def one_pass(
    config: Config,
    precision: DeepSpeedSettings,
    sizes: Sizes,
    matmuls: MatmulCounts,
    data: int,
    rows: int,
    tokens: int,
    backward: bool,
) -> tuple[float, Wire, int]:
    """A pass over `rows` rows of `tokens` tokens that `data` ranks share: flops of the rank with the most
    work, its payload, and the bytes of weights that it fetches from host memory (offload_param).
    """
    stages, width = config.pipeline_stages, 2 if precision.bf16 else 4
    rounds, each = micro_batches(rows, data, micro_batch_rows(config, data))
    one = each * tokens * matmuls.flops(tokens, backward, config.gradient_checkpointing) * matmuls.fullest
    hidden = each * tokens * sizes.hidden * width
    wire = Wire()
    if stages > 1:
        wire += Wire(  # ids and mask have 16 bytes a token
            send=rounds * (hidden + each * tokens * 16 + (hidden if backward else 0)),
            collectives=rounds * (2 if backward else 1),
        )
    if config.tensor_parallel_size > 1:
        forwards = 2 if config.gradient_checkpointing and backward else 1
        sums = sizes.layers * (2 * forwards + (COLUMNS if backward else 0))
        wire += Wire(tensor=rounds * sums * hidden, collectives=rounds * sums)
    held, stage = sizes.params + sizes.frozen, precision.zero_stage if data > 1 else 0
    # the backward pass gathers again, unless so many parameters stay gathered
    gathers = rounds * (1 if held <= precision.live or not backward else 2)
    if stage == 3:
        wire += Wire(gather=gathers * held * width, collectives=gathers * matmuls.matrices)
    if backward and data > 1:
        each_time = rounds if stage > 1 else 1
        wire += refresh(precision, sizes, data) + Wire(
            reduce=each_time * 4 * sizes.params,
            collectives=each_time * max(1, -(-sizes.params // (precision.bucket or sizes.hidden**2))),
        )
    fetched = gathers * held * width // data if precision.offload_param else 0
    return (rounds + stages - 1) * one, wire, fetched  # a pipeline fills and empties


def refresh(precision: DeepSpeedSettings, sizes: Sizes, data: int) -> Wire:
    """New weights from new shards: ZeRO 1 and 2 gather them at once, ZeRO 3 when they are needed."""
    if data == 1 or precision.zero_stage not in (1, 2):
        return Wire()
    return Wire(gather=sizes.params * (2 if precision.bf16 else 4), collectives=1)


# Bytes that are read and written per element of a shard, or of the gradients, in fp32.
# UPDATE: theta -= lr g 12, is g finite 4, zeros 4, a low-precision copy 4. CAPTURED, a direction: zeros,
# copy, restore, added to the sum. REDUCED, all gradients: flattened, divided, copied back.
UPDATE, CAPTURED, REDUCED, WRITTEN = 24, 28, 24, 8
PLACED = {0: 0, 1: 16, 2: 16, 3: 24}  # of the shard: into the partition, flattened, into the weights
# OUTER: mean, norm in fp64, AdamW's dozen reads and writes, write, zeros
OUTER = 140


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


def task_cost(
    config: Config,
    precision: DeepSpeedSettings,
    sizes: Sizes,
    matmuls: MatmulCounts,
    row_tokens: int,
    topology: Topology,
    profile: Profile,
) -> tuple[Wire, Seconds]:
    """The payload and the seconds of one task on the rank with the most work."""
    stage, on_host = precision.zero_stage, precision.offload and not sizes.lazy
    many = task_passes(config, precision, topology.data)
    updates, writes = many.training, many.writes
    written = refresh(precision, sizes, topology.data)  # of a complete vector that is written to the worker
    payload, compute = written * writes, 0.0
    group = writes * wire_seconds(written, stage, topology, profile)
    for times, rows, tokens, backward in passes_by_set(config, many, row_tokens, sizes.tokens):
        flops, sent, fetched = one_pass(
            config, precision, sizes, matmuls, topology.data, rows, tokens, backward
        )
        payload += sent * times
        took = flops / profile.matmul(precision.bf16)
        wire = wire_seconds(sent, stage, topology, profile)
        if not sizes.lazy:
            wire += fetched / profile.host_link
        if stage == 3:
            wire -= profile.hidden * min(wire, took)
        compute += times * (took + (profile.step_overhead if backward else 0.0))
        group += times * wire
    shard = shard_of(sizes, precision, topology)
    moved = (updates * UPDATE + CAPTURED + writes * WRITTEN) * shard
    if topology.size > 1 or precision.offload:
        moved += updates * ((REDUCED * sizes.params if topology.data > 1 else 0) + PLACED[stage] * shard)
    offloaded = 0.0  # bytes between device and host
    if on_host:  # gradients and weights of each update
        offloaded = updates * (4 + (2 if precision.bf16 else 4)) * shard
    elif sizes.offload_outer and not sizes.lazy:  # theta, to restore it, and the direction
        offloaded = 8.0 * shard
    shards = moved / (profile.host_memory if on_host else profile.memory) + offloaded / profile.host_link
    return payload, Seconds(compute, group, shards, 0.0)


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
        cross = profile.latency + 2 * ring(topology.groups) * sizes.crossing * shard / (
            profile.group_link if topology.all_in_node else profile.cross_link
        )
        if on_host or outer_on_host:
            cross += 8 * shard / profile.host_link
    outer = OUTER * shard / (profile.host_memory if on_host else profile.memory)
    if sizes.offload_outer:
        outer += 2 * 4 * (2 + sizes.moments) * shard / profile.host_link
    return Seconds(
        tasks * one.compute,
        tasks * one.group + wire_seconds(new, precision.zero_stage, topology, profile),
        tasks * one.shards + outer,
        cross,
    )


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
