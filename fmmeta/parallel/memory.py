"""The memory model: bytes of a rank by kind, for `--group_size auto`, `fmmeta plan` and the refusals.
`rank_sizes` turns settings and a counted model into sizes, `estimate` turns sizes into bytes.

P trained and F frozen parameters of the rank's part of the model, shared by M data ranks; w bytes per working
weight. A kind is divided by M from the stage in brackets on (docs/explanation/memory-and-time.md):

    weights (P + F) w [3]     master 4 P [1]     gradients 4 P [3]     theta, meta-gradient 4 P each [1]
    direction 4 P [1], if it cannot be accumulated into the meta-gradient directly (parallel/costs.py)
    moments 4 P per moment of the outer optimizer [1]
    kept 4 P per shard that the algorithm or the inner optimizer stores [1]

    gathered: whole parameters that ZeRO 3 holds at once, with a copy of one layer's experts, whose gradients
        it holds later; or the largest weight of a quantised base, dequantised

In addition, the larger of two: in the backward pass activations, logits and buffers; in the reduction after
it, DeepSpeed's copies to reduce and to step (`gradient_bytes`). Activations: Korthikanti et al. 2022 (arXiv
2205.05198), equation 2 and, with checkpointed layers, section 5; attention scores only where the kernel
stores them; for models with RMS norms, their fp32 copies and a gated feed-forward part
(tests/unit/test_plan.py counts what autograd saves). A new term needs a measurement in
benchmarks/plan.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import host_bytes
from fmmeta.common.text import any_of
from fmmeta.config.algorithms import find, find_outer
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.experts import experts_per_token, fused_experts
from fmmeta.learners.load import max_positions
from fmmeta.learners.stages import plan_stages
from fmmeta.parallel import costs
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import can_defer_backward, differentiates_twice, divisors
from fmmeta.parallel.param_map import chunk
from fmmeta.parallel.process_groups import World
from fmmeta.parallel.tensor_parallel import sharing_ranks

GIB = 2**30
HEADROOM = 0.9  # share of the free memory for a layout; allocators and the runtime need the rest
BACKWARD = (
    "activations",
    "logits",
    "buffers",
)  # kinds that are freed before DeepSpeed's staging is allocated
SECOND_ORDER = 3  # times the activations: a gradient's graph (docs/explanation/meta-gradients.md)
META = ("theta", "meta_gradient", "direction", "moments", "kept")
FLATTENED = 5 * 10**8  # parameters that ZeRO 0 flattens for one reduction (deepspeed/runtime/engine.py)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters of a rank's part of a model."""

    params: int  # that are trained
    frozen: int = 0
    packed: int = 0  # of the frozen ones, those that are quantised
    packed_bytes: int = 0  # with scales
    unpacked: int = 0  # the largest of them, which is dequantised in a pass
    experts: int = 0  # of the largest module of fused experts, which ZeRO 3 gathers together
    largest: int = 0  # of the largest parameter

    @property
    def all(self) -> int:
        """Trained and frozen ones."""
        return self.params + self.frozen


@dataclass(frozen=True, kw_only=True)
class Sizes(Counts):
    """Sizes of a rank's part of a model (of the largest stage) and of its batches."""

    layers: int
    hidden: int
    heads: int  # whose scores are stored for the backward pass: 0 with a fused kernel of attention
    vocab: int  # 0 without logits over the vocabulary
    rows: int  # of a micro-batch
    tokens: int  # of a row
    wide: int | None = None  # of the feed-forward part; None: 4 hidden
    gated: bool = False  # RMS norms in fp32 and a gated feed-forward part, as in Llama
    routed: int = 0  # experts that a token is sent to, each of which gets a copy of its hidden state
    checkpointing: bool = False  # layers store their inputs only
    offload_outer: bool = False  # from a device to host memory
    in_flight: int = 1  # micro-batches whose activations a rank stores
    moments: int = 2  # shards of the outer optimizer
    crossing: int = 4  # bytes of an element in the reduction across groups
    directions: int = 0  # of a task, beside the sum: 0 if it is accumulated directly
    kept: int = 0  # shards that algorithm and inner optimizer store while a task runs
    trajectory: int = 0  # shards that may be stored in host memory
    budget: int | None = None  # bytes of the trajectory on the device; None: all
    second_order: bool = False  # graphs of gradients, below ZeRO 3
    lazy: bool = True  # untouched parts of a buffer cost no memory (CPUs)
    tensor: int = 1  # tensor ranks
    engine: str = "auto"  # that of the settings


def rank_sizes(config: Config, hf_config: Any, counted: Counts, lazy: bool, data: int = 1) -> Sizes:
    """Sizes of the largest rank's part of the model and of its micro-batches.

    counted: parameters of that part (`largest_part`). lazy: whether the device
    is a CPU. data: ranks that share the rows of a set.
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    depth, gib = config.pipeline_stages, config.trajectory_memory_gib
    shards = costs.shards(config)
    second_order = costs.second_order_by_autograd(
        config, differentiates_twice(0, depth, config.tensor_parallel_size)
    )
    scores = second_order or getattr(text, "_attn_implementation", None) == "eager"
    routed, wide = experts_per_token(text), getattr(text, "intermediate_size", None)
    if routed and wide:  # experts that each token is sent to, and those that all are
        each = routed + (getattr(text, "n_shared_experts", None) or 0)
        wide = each * (getattr(text, "moe_intermediate_size", None) or wide)
    return Sizes(
        **vars(counted),
        routed=routed,
        layers=-(-getattr(text, "num_hidden_layers", 12) // depth),
        hidden=getattr(text, "hidden_size", 768),
        heads=getattr(text, "num_attention_heads", 12) if scores else 0,
        wide=wide,
        gated=hasattr(text, "rms_norm_eps"),
        vocab=getattr(text, "vocab_size", 0) if config.learner.writes else 0,
        rows=forward_rows(config, data),
        tokens=costs.query_tokens(
            config, config.max_length, max_positions(text) or config.max_length * (1 + config.most_shots)
        ),
        checkpointing=config.gradient_checkpointing,
        offload_outer=config.offload_outer and not lazy,
        in_flight=depth,
        moments=len(find_outer(config.outer_optimizer).moments),
        crossing=2 if config.reduce_dtype == "bf16" else 4,
        directions=costs.task_vectors(config),
        kept=shards.work,
        trajectory=shards.trajectory,
        budget=None if gib is None or lazy else int(gib * GIB),
        second_order=second_order,
        lazy=lazy,
        tensor=config.tensor_parallel_size,
        engine=config.engine,
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device by kind (those of `estimate`), and in host memory.

    `peak` has the kinds of one moment.
    """

    kinds: dict[str, int]
    host: int

    @property
    def meta(self) -> int:
        """Bytes of meta-training, beside weights, gradients and masters."""
        return sum(self.kinds[kind] for kind in META)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of the device by kind, in the backward pass or in the reduction after it."""
        backward = sum(self.kinds[kind] for kind in BACKWARD)
        absent = ("staging",) if backward >= self.kinds["staging"] else BACKWARD
        return {kind: size for kind, size in self.kinds.items() if kind not in absent}

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        sizes = {"meta" if kind in META else kind: size for kind, size in self.peak.items()}
        summed = " + ".join(
            f"{kind} {size / GIB:.3g}" for kind, size in {**sizes, "meta": self.meta}.items() if size
        )
        return f"{summed} = {self.total / GIB:.3g} GiB" + (
            f" (and {self.host / GIB:.3g} in host memory)" if self.host else ""
        )


def gradient_bytes(sizes: Sizes, settings: DeepSpeedSettings, sharers: int) -> tuple[int, int, int]:
    """Bytes of gradients: stored from pass to pass, buffers in the backward pass, staging after it.

    In each of DeepSpeed 0.19.8's optimizer wrappers, and in a plain worker (stage 0, one sharer). ZeRO fills
    a bucket with gradients, flattens it into a copy and reduces that. A bucket for all gradients is reduced
    after the backward pass only. On GPUs a bucket is allocated at the first gradient.
    """
    params, stage, bf16 = sizes.params, settings.zero_stage, settings.bf16
    part, grad = params // sharers, 2 if bf16 else 4  # bytes of a gradient of autograd
    most = settings.bucket or sizes.hidden**2  # "auto", as DeepSpeedSettings.complete fills it
    # early: reductions begin in the backward pass; a parameter that is larger than a bucket is reduced alone
    used, early = min(params, max(most, sizes.largest)), params > most
    made = min(params, most) if sizes.lazy else most
    flat = min(params, FLATTENED)
    if stage == 0 and sharers == 1:  # bf16 gradients are accumulated in fp32
        return 4 * params, 2 * params if bf16 else 0, 2 * params if bf16 else 0
    if stage == 0:
        return 4 * params, 0, 4 * flat
    if stage == 1 and bf16:  # BF16_Optimizer stores all fp32 gradients on every rank
        return 6 * params, 0, 4 * flat
    if stage == 1:
        return 4 * params, 0 if sizes.lazy else 4 * made, 4 * made + 4 * part
    copied = (4 if stage == 3 or not bf16 else 6) * used  # flattened; in fp32 too for ZeRO 2 in bf16
    if stage == 3 and sizes.lazy and sharers > 1:
        copied += 4 * used  # gloo's reduce-scatter works on one more copy
    bucket = (4 if stage == 3 else grad) * made
    return (
        4 * part,
        bucket + (copied if early else 0),
        max(bucket + copied, 4 * (min(part, settings.sub_group) if stage == 3 else part)),
    )


def estimate(sizes: Sizes, settings: DeepSpeedSettings, sharers: int) -> Estimate:
    """Peak bytes of one rank. sharers: the ranks that ZeRO shards over (the data ranks of a group)."""
    stage, width = settings.zero_stage, 2 if settings.bf16 else 4
    weight_ranks, shard_ranks = sharers if stage == 3 else 1, sharers if stage > 0 else 1
    held, shard = sizes.params + sizes.frozen, 4 * sizes.params // shard_ranks
    wide = 4 * sizes.hidden if sizes.wide is None else sizes.wide
    # hidden states after each expert, and before it where its weights are trained
    copies = (2 if sizes.frozen else 4) * sizes.routed * sizes.hidden
    split = 8 * sizes.hidden + (8 if sizes.gated else 4) * wide + 6 * sizes.heads * sizes.tokens
    # bytes of a token in bf16
    layer = (16 if sizes.gated else 10) * sizes.hidden + copies + split // sizes.tensor
    per_token = 2 * sizes.layers * sizes.hidden + layer if sizes.checkpointing else sizes.layers * layer
    if sizes.second_order and can_defer_backward(stage):
        per_token = SECOND_ORDER * sizes.layers * layer
    gradients, buffers, staging = gradient_bytes(sizes, settings, sharers)
    if not sizes.lazy:  # a piece in fp64, for a norm, or pieces that the outer step loads; smaller on CPUs
        of_element = 16 if sizes.offload_outer else 8
        staging = max(staging, of_element * min(shard // 4, chunk(torch.device("cuda"))))
    near = sizes.trajectory if sizes.budget is None else min(sizes.trajectory, sizes.budget // max(1, shard))
    away = settings.offload and not sizes.lazy  # shards and all work on them are in host memory
    outer = away or sizes.offload_outer
    gathers = weight_ranks > 1 or settings.offload_param
    largest = sizes.largest if weight_ranks > 1 and sizes.lazy else 0  # gloo gathers into a copy
    most = min(held, max(settings.live, sizes.experts))  # DeepSpeed copies experts when it gathers them
    # ranks of a pipeline at ZeRO 1 in fp32 do not agree on what is finite (parallel/workers/zero.py)
    agreeing = not (sizes.in_flight > 1 and stage == 1 and not settings.bf16)
    # torch allocates pinned memory in powers of two
    pinned = shard if away or not outer else 1 << (shard - 1).bit_length()
    kinds = {  # (bytes, whether in host memory)
        "weights": (
            ((held - sizes.packed) * width + sizes.packed_bytes) // weight_ranks,
            away and settings.offload_param,
        ),
        "gathered": (
            # bitsandbytes dequantises to fp32
            (most + sizes.experts + largest) * width
            if gathers
            else sizes.unpacked * (6 if width == 2 else 4),
            False,
        ),
        "gradients": (gradients, away),
        "master": (0 if stage == 0 and not settings.bf16 else shard, away),
        "theta": (pinned, outer),
        "meta_gradient": (pinned, outer),
        "direction": ((sizes.directions if agreeing else 1) * shard, away),
        "moments": (sizes.moments * pinned, outer),
        "kept": ((sizes.kept + near) * shard, away),
        "activations": (sizes.in_flight * sizes.rows * sizes.tokens * per_token * width // 2, False),
        "logits": (12 * sizes.rows * sizes.tokens * sizes.vocab, False),
        "buffers": (buffers, False),  # DeepSpeed's, for reductions in the backward pass
        "staging": (staging, False),  # after the backward pass: to reduce and to step, and of norms
    }
    host = sum(size for size, moved in kinds.values() if moved) + (sizes.trajectory - near) * shard
    # while ZeRO 3 loads: the experts of a layer as transformers has converted them, and in fp32
    loading = 8 * sizes.largest if gathers and sizes.experts and not sizes.lazy else 0
    return Estimate({kind: 0 if moved else size for kind, (size, moved) in kinds.items()}, max(host, loading))


def largest_part(
    config: Config, learner: Any, hf_config: Any, layer_costs: Sequence[float] | None = None
) -> Counts:
    """Parameters of the largest rank's part.

    layer_costs: seconds of each layer, if stages are balanced by time. Raises `UsageError` for a model that
    cannot be split.
    """
    shared_by = sharing_ranks(hf_config, config.tensor_parallel_size)
    if config.pipeline_stages > 1:  # the most trained parameters of a stage, and the most frozen ones
        cut = plan_stages(learner, config.pipeline_stages, layer_costs, shared_by)
        frozen = max(size - trained for size, trained in zip(cut.sizes, cut.trained, strict=True))
        return Counts(params=max(cut.trained), frozen=frozen)
    return count_params(learner, shared_by)


def count_params(learner: Learner, shared_by: Callable[[str], int] = lambda name: 1) -> Counts:
    """Parameters on the meta device; shared_by: number of ranks that each is split over, by its name."""
    sizes = [
        (param.numel() // shared_by(name), param.requires_grad, getattr(param, "packed_bytes", 0))
        for name, param in learner.named_parameters()
    ]
    trained = sum(size for size, is_trained, _ in sizes if is_trained)
    packed = [(size, bytes_) for size, _, bytes_ in sizes if bytes_]
    experts = (sum(param.numel() for param in one.parameters()) for one in fused_experts(learner).values())
    return Counts(
        params=trained,
        frozen=sum(size for size, *_ in sizes) - trained,
        packed=sum(size for size, _ in packed),
        packed_bytes=sum(bytes_ for _, bytes_ in packed),
        unpacked=max((size for size, _ in packed), default=0),
        experts=max(experts, default=0),
        largest=max(size for size, *_ in sizes),
    )


def micro_batch_rows(config: Config, data: int = 1) -> int:
    """Most rows of a micro-batch; in a pipeline so few that there is one for every stage.

    data: ranks that share the rows of a set.
    """
    if config.pipeline_stages == 1:
        return config.micro_batch_size
    return max(
        1, min(config.micro_batch_size, -(-costs.trained_rows(config)[0] // (data * config.pipeline_stages)))
    )


def forward_rows(config: Config, data: int = 1) -> int:
    """Most rows of a forward pass on one of `data` ranks: a micro-batch of each task that shares it."""
    most = micro_batch_rows(config, data)
    tasks = 1 if config.tasks_per_pass == "auto" else int(config.tasks_per_pass)
    largest = [micro_batches(rows, data, most)[1] for rows in costs.trained_rows(config)]
    if find(config.algorithm).frozen_body and costs.keeps_support(config, data):
        return tasks * sum(largest)  # the support set's activations wait for the query set
    return tasks * max(largest)


def micro_batches(rows: int, data: int, most: int) -> tuple[int, int]:
    """Micro-batches that a rank gets of a set that `data` ranks share, and the rows of the largest
    (tasks/batching.py).
    """
    rounds = -(-rows // (data * most))
    return rounds, max(1, -(-rows // (data * rounds)))


SizesAt = Callable[[int], Sizes]
"""Sizes of the largest rank's part of the model, by the number of data ranks of a group."""


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Free memory of one rank's device: of its GPU, or its share of the host's within its limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_bytes(local_world_size)


def at_size(
    settings: DeepSpeedSettings, group_size: int, on_cpu: bool, engine: str = "auto"
) -> DeepSpeedSettings:
    """The settings of a group of this size: a group of one runs plain PyTorch and needs what ZeRO 0 needs,
    unless the engine is DeepSpeed or it offloads from a GPU (ParallelPlan.of).
    """
    if group_size > 1 or engine == "deepspeed" or (settings.offload and not on_cpu):
        return settings.of_engine()
    return replace(settings, zero_stage=0, offload=False, offload_param=False)


def needed_at(sizes_at: SizesAt, settings: DeepSpeedSettings, group_size: int, model_ranks: int) -> Estimate:
    """Peak bytes of one rank. model_ranks: pipeline stages x tensor ranks."""
    data = group_size // model_ranks
    sizes = sizes_at(data)
    return estimate(sizes, at_size(settings, group_size, sizes.lazy, sizes.engine), data)


def least_free(world: World) -> tuple[int, int]:
    """Free bytes of device and host memory, the least of all ranks. Collective: world."""
    local = world.launch.local_world_size
    free, host = zip(*world.comm.gather([free_bytes(world.device, local), host_bytes(local)]), strict=True)
    return min(free), min(host)


def check_group_size(
    world: World, sizes_at: SizesAt, settings: DeepSpeedSettings, group_size: int, model_ranks: int = 1
) -> None:
    """Raise `UsageError` on every rank if groups of `group_size` cannot hold the model. Collective: world.

    model_ranks: pipeline stages x tensor ranks. With DeepSpeed's offload only host memory is checked.
    """
    free, host = least_free(world)

    def fits(needed: Estimate, share: float) -> bool:
        return (settings.offload or needed.total <= share * free) and needed.host <= share * host

    needed = needed_at(sizes_at, settings, group_size, model_ranks)
    if fits(needed, 1.0):
        return
    enough = [
        str(size)
        for size in divisors(world.launch.world_size)
        if size % model_ranks == 0 and fits(needed_at(sizes_at, settings, size, model_ranks), HEADROOM)
    ]
    sizes = sizes_at(group_size // model_ranks)
    others = {
        "ZeRO 3": settings.zero_stage < 3 and model_ranks == 1,
        f"{'more ' if model_ranks > 1 else ''}--pipeline_stages": settings.zero_stage < 2,
        "--gradient_checkpointing": not sizes.checkpointing and needed.host <= host,
        "no --offload_outer": sizes.offload_outer and needed.host > host,
        "no offload in the DeepSpeed file": settings.offload,
        "--lora_r": not sizes.frozen,
        "more ranks": needed.host <= host,
        "nodes with more memory": needed.host > host,
    }
    stage = at_size(settings, group_size, world.device.type == "cpu", sizes.engine).zero_stage
    helpful = f"group_size {any_of(enough)}" if enough else any_of(filter(others.get, others))
    in_host = f" (and {host / GIB:.3g} in host memory)" if needed.host else ""
    raise UsageError(
        f"group_size={group_size} needs {needed} per rank at ZeRO {stage},"
        f" and {free / GIB:.3g} GiB are free{in_host}; use {helpful}"
    )


def unsharded(size: int, candidates: Sequence[int], settings: DeepSpeedSettings) -> str:
    """How to shard, where a DeepSpeed file asks for it and the model fits on one rank."""
    larger = [one for one in candidates if one > size]
    if size > 1 or settings.zero_stage == 0 or not larger:
        return ""
    return (
        f". ZeRO {settings.zero_stage} shards inside a group, and groups of one rank have nothing to shard:"
        " each rank trains other tasks on a whole model. To shard, give --group_size"
        f" {any_of(map(str, larger))}"
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
            reason = f"group_size {size} (auto): {needed}, of {free / GIB:.3g} GiB free per rank"
            return size, reason + unsharded(size, candidates, settings)
    in_host = f" (and {host / GIB:.3g} in host memory)" if needed.host else ""
    higher = "a higher ZeRO stage, " if settings.zero_stage < 3 else ""
    raise UsageError(
        f"group_size=auto finds no room: {local} ranks of a group need {needed} each at ZeRO"
        f" {settings.zero_stage}, and {free / GIB:.3g} GiB are free{in_host}; use {higher}"
        "offload, more GPUs or a smaller --micro_batch_size"
    )
