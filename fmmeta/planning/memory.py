"""The memory model: bytes of a rank by kind, for `--group_size auto`, `fmmeta plan` and the refusals.
`rank_sizes` turns settings and a counted model into sizes, `estimate` turns sizes into bytes.

P trained and F frozen parameters of the rank's part of the model, shared by M data ranks; w bytes per working
weight. A kind is divided by M from the stage in brackets on (docs/memory.md has the table with the reasons):

    weights (P + F) w [3]     master 4 P [1]     gradients 4 P [3]     theta, meta-gradient 4 P each [1]
    direction 4 P [1], if it cannot be accumulated into the meta-gradient directly (meta/costs.py)
    moments 4 P per moment of the outer optimizer [1]
    kept 4 P per shard that the algorithm or the inner optimizer stores [1]

    gathered: whole parameters that ZeRO 3 holds at once

In addition, the larger of two: in the backward pass activations, logits and buffers; in the reduction after
it, DeepSpeed's copies to reduce and to step (`gradient_bytes`). Activations: Korthikanti et al. 2022 (arXiv
2205.05198), equation 2 and, with checkpointed layers, section 5. A new term needs a measurement in
benchmarks/plan.py.
"""

from dataclasses import asdict, dataclass
from typing import Any

from fmmeta.config.outer_optimizers import OUTER_OPTIMIZERS
from fmmeta.config.settings import Config
from fmmeta.meta import costs
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.planning.sizes import forward_rows

GIB = 2**30
HEADROOM = 0.9  # share of the free memory for a layout; allocators and the runtime need the rest
META = ("theta", "meta_gradient", "direction", "moments", "kept")
FLATTENED = 5 * 10**8  # parameters that ZeRO 0 flattens for one reduction (deepspeed/runtime/engine.py)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's part of a model (of the largest stage) and of its batches."""

    params: int  # trained
    layers: int
    hidden: int
    heads: int
    vocab: int  # 0 without logits over the vocabulary
    rows: int  # of a micro-batch
    tokens: int  # of a row
    frozen: int = 0  # parameters that are not trained
    checkpointing: bool = False  # layers store their inputs only
    offload_outer: bool = False  # from a device to host memory
    in_flight: int = 1  # micro-batches whose activations a rank stores
    moments: int = 2  # shards of the outer optimizer
    sums: int = 1  # meta-gradients: a second, pending one with --outer_delay
    crossing: int = 4  # bytes of an element in the reduction across groups
    directions: int = 0  # of a task, beside the sum: 0 if it is accumulated directly
    kept: int = 0  # shards that algorithm and inner optimizer store while a task runs
    trajectory: int = 0  # shards that may be stored in host memory
    budget: int | None = None  # bytes of the trajectory on the device; None: all
    lazy: bool = True  # untouched parts of a buffer cost no memory (CPUs)


def rank_sizes(config: Config, hf_config: Any, counted: tuple[int, int], lazy: bool, data: int = 1) -> Sizes:
    """Sizes of the largest rank's part of the model and of its micro-batches.

    counted: trained and frozen parameters of that part (sizes.py: `largest_part`). lazy: whether the device
    is a CPU. data: ranks that share the rows of a set.
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    depth, shards, gib = config.pipeline_stages, costs.shards(config), config.trajectory_memory_gib
    return Sizes(
        params=counted[0],
        frozen=counted[1],
        layers=-(-getattr(text, "num_hidden_layers", 12) // depth),
        hidden=getattr(text, "hidden_size", 768),
        heads=getattr(text, "num_attention_heads", 12),
        vocab=getattr(text, "vocab_size", 0) if config.task_type == "causal_lm" else 0,
        rows=forward_rows(config, data),
        tokens=config.max_length,
        checkpointing=config.gradient_checkpointing,
        offload_outer=config.offload_outer and not lazy,
        in_flight=depth,
        moments=len(OUTER_OPTIMIZERS[config.outer_optimizer].moments),
        sums=1 + config.outer_delay,
        crossing=2 if config.reduce_dtype == "bf16" else 4,
        directions=costs.task_vectors(config),
        kept=shards.work,
        trajectory=shards.trajectory,
        budget=None if gib is None or lazy else int(gib * GIB),
        lazy=lazy,
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device by kind, and in host memory. `peak` has those of one moment."""

    weights: int
    gathered: int
    gradients: int
    master: int
    theta: int
    meta_gradient: int
    direction: int
    moments: int
    kept: int
    activations: int
    logits: int
    buffers: int  # DeepSpeed's, for reductions in the backward pass
    staging: int  # DeepSpeed's, after the backward pass, to reduce and to step
    host: int = 0

    @property
    def meta(self) -> int:
        """Bytes of meta-training, beside weights, gradients and masters."""
        return sum(getattr(self, kind) for kind in META)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of the device by kind, in the backward pass or in the reduction after it."""
        in_backward = self.activations + self.logits + self.buffers >= self.staging
        absent = ("host", "staging") if in_backward else ("host", "activations", "logits", "buffers")
        return {kind: size for kind, size in asdict(self).items() if kind not in absent}

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        kinds = {kind: size for kind, size in self.peak.items() if kind not in META}
        front = {kind: kinds.pop(kind) for kind in ("weights", "gathered", "gradients", "master")}
        summed = " + ".join(
            f"{kind} {size / GIB:.3g}" for kind, size in {**front, "meta": self.meta, **kinds}.items() if size
        )
        beside = f" (and {self.host / GIB:.3g} in host memory)" if self.host else ""
        return f"{summed} = {self.total / GIB:.3g} GiB{beside}"


def gradient_bytes(sizes: Sizes, settings: DeepSpeedSettings, sharers: int) -> tuple[int, int, int]:
    """Bytes of gradients: stored from pass to pass, buffers in the backward pass, staging after it.

    In each of DeepSpeed 0.19.8's optimizer wrappers, and in a plain worker (stage 0, one sharer). ZeRO fills
    a bucket with gradients, flattens it into a copy and reduces that. A bucket for all gradients is reduced
    after the backward pass only. On GPUs a bucket is allocated at the first gradient.
    """
    params, stage, bf16 = sizes.params, settings.zero_stage, settings.bf16
    part, grad = params // sharers, 2 if bf16 else 4  # bytes of a gradient of autograd
    most = settings.bucket or sizes.hidden**2  # "auto", as DeepSpeedSettings.complete fills it
    used, early = min(params, most), params > most  # early: reductions begin in the backward pass
    made = used if sizes.lazy else most
    flat = min(params, FLATTENED)
    if stage == 0 and sharers == 1:  # bf16 gradients are accumulated in fp32
        return 4 * params, 2 * params if bf16 else 0, 6 * params if bf16 else 0
    if stage == 0:
        return grad * params, 0, max(6 * flat, 4 * params) if bf16 else 4 * flat
    if stage == 1 and bf16:  # BF16_Optimizer stores all fp32 gradients on every rank
        return 6 * params, 0, 4 * flat
    if stage == 1:
        return 4 * params, 0 if sizes.lazy else 4 * made, 4 * made + 4 * part
    copied = (4 if stage == 3 or not bf16 else 6) * used  # flattened; in fp32 too for ZeRO 2 in bf16
    bucket = (4 if stage == 3 else grad) * made
    step = 4 * (min(part, settings.sub_group) if stage == 3 else part)
    return 4 * part, bucket + (copied if early else 0), max(bucket + copied, step)


def estimate(sizes: Sizes, settings: DeepSpeedSettings, sharers: int) -> Estimate:
    """Peak bytes of one rank. sharers: the ranks that ZeRO shards over (the data ranks of a group)."""
    stage, width = settings.zero_stage, 2 if settings.bf16 else 4
    weight_ranks, shard_ranks = sharers if stage == 3 else 1, sharers if stage > 0 else 1
    held, shard = sizes.params + sizes.frozen, 4 * sizes.params // shard_ranks
    layer = 34 * sizes.hidden + 5 * sizes.heads * sizes.tokens  # bytes of a token in bf16
    per_token = 2 * sizes.layers * sizes.hidden + layer if sizes.checkpointing else sizes.layers * layer
    gradients, buffers, staging = gradient_bytes(sizes, settings, sharers)
    near = sizes.trajectory if sizes.budget is None else min(sizes.trajectory, sizes.budget // max(1, shard))
    away = settings.offload and not sizes.lazy  # shards and all work on them are in host memory
    outer = away or sizes.offload_outer
    gathers = weight_ranks > 1 or settings.offload_param
    # ranks of a pipeline at ZeRO 1 in fp32 do not agree on what is finite (parallel/workers/zero.py)
    agreeing = not (sizes.in_flight > 1 and stage == 1 and not settings.bf16)
    kinds = {  # (bytes, whether in host memory)
        "weights": (held * width // weight_ranks, away and settings.offload_param),
        "gathered": (min(held, settings.live) * width if gathers else 0, False),
        "gradients": (gradients, away),
        "master": (0 if stage == 0 and not settings.bf16 else shard, away),
        "theta": (shard, outer),
        "meta_gradient": (sizes.sums * shard, outer),
        "direction": ((sizes.directions if agreeing else 1) * shard, away),
        "moments": (sizes.moments * shard, outer),
        "kept": ((sizes.kept + near) * shard, away),
        "activations": (sizes.in_flight * sizes.rows * sizes.tokens * per_token * width // 2, False),
        "logits": (12 * sizes.rows * sizes.tokens * sizes.vocab, False),
        "buffers": (buffers, False),
        "staging": (staging, False),
    }
    host = sum(size for size, moved in kinds.values() if moved) + (sizes.trajectory - near) * shard
    return Estimate(**{kind: 0 if moved else size for kind, (size, moved) in kinds.items()}, host=host)
