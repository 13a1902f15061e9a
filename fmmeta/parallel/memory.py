"""How much memory a rank needs, by estimate, and the smallest group that has it.

Bytes per rank for P parameters (of the largest stage, or of a tensor rank) shared by M data ranks,
w bytes per working weight (docs/memory.md):

    weights      P w        / M at ZeRO 3
    gathered     whole parameters that ZeRO 3 holds at once: at most stage3_max_live_parameters x w
    gradients    P 4        / M at ZeRO 2 and 3; twice at ZeRO 3, and at ZeRO 0 where M > 1: flattened for step or reduction
    master       P 4        / M at ZeRO 1 to 3; none in fp32 at ZeRO 0, where the weights are the masters
    meta         5 P 4      / M at ZeRO 1 to 3: theta, meta-gradient, one captured direction, two Adam moments
    activations  B T L (34 H + 5 A T) w / 2     Korthikanti et al. 2022 (arXiv 2205.05198), equation 2
    logits       3 B T V 4  (causal_lm)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fmmeta.config import UsageError
from fmmeta.parallel.communicator import World
from fmmeta.parallel.ds_config import Precision
from fmmeta.parallel.layout import any_of, divisors
from fmmeta.parallel.limits import host_bytes

GIB = 2**30
HEADROOM = 0.9  # allocators, buckets and the runtime need the rest


@dataclass(frozen=True)
class Sizes:
    """What the estimate needs of a rank's part of a model (of the largest stage), and its batches."""

    params: int
    layers: int
    hidden: int
    heads: int
    vocab: int  # 0 where no logits over the vocabulary are made
    rows: int  # of a micro-batch
    tokens: int  # of a row
    in_flight: int = 1  # micro-batches whose activations a rank keeps

    @classmethod
    def of(cls, hf_config: Any, params: int, rows: int, tokens: int, causal: bool) -> Sizes:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        layers, hidden = getattr(text, "num_hidden_layers", 12), getattr(text, "hidden_size", 768)
        heads, vocab = getattr(text, "num_attention_heads", 12), getattr(text, "vocab_size", 0)
        return cls(params, layers, hidden, heads, vocab if causal else 0, rows, tokens)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank by kind."""

    weights: int
    gathered: int
    gradients: int
    master: int
    meta: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        return (
            " + ".join(f"{kind} {size / GIB:.3g}" for kind, size in asdict(self).items() if size)
            + f" = {self.total / GIB:.3g} GiB"
        )


def estimate(sizes: Sizes, precision: Precision, sharers: int) -> Estimate:
    """Peak bytes of one rank. `sharers`: the ranks that ZeRO cuts over (of a stage or tensor rank, the data ranks)."""
    stage, width = precision.zero_stage, 2 if precision.bf16 else 4
    share = [1 if stage < least else sharers for least in (3, 2, 1)]
    fp32 = 4 * sizes.params
    per_token = 34 * sizes.hidden + 5 * sizes.heads * sizes.tokens
    return Estimate(
        weights=sizes.params * width // share[0],
        gathered=min(sizes.params, precision.live) * width if share[0] > 1 else 0,
        gradients=fp32 // share[1] * (2 if stage == 3 or (stage == 0 and sharers > 1) else 1),
        master=0 if stage == 0 and not precision.bf16 else fp32 // share[2],
        meta=5 * fp32 // share[2],
        activations=sizes.in_flight * sizes.rows * sizes.tokens * sizes.layers * per_token * width // 2,
        logits=12 * sizes.rows * sizes.tokens * sizes.vocab,
    )


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Memory that one rank may use: its GPU's, or its share of what the host has free, or what limits leave it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host_bytes(local_world_size)


def check_group_size(world: World, sizes: Sizes, precision: Precision, group_size: int, model_ranks: int = 1) -> None:
    """Refuse a group size that was asked for and cannot hold the model. `model_ranks`: stages x tensor ranks. Collective: world.

    With offload part of it lies elsewhere: nothing is refused.
    """
    free = least_free(world)
    needed = estimate(sizes, at_size(precision, group_size), group_size // model_ranks)
    if needed.total > free and not precision.offload:
        sizes_tried = [size for size in divisors(world.launch.world_size) if size % model_ranks == 0]
        enough = [s for s in sizes_tried if estimate(sizes, at_size(precision, s), s // model_ranks).total <= HEADROOM * free]
        instead = f"group_size {any_of([str(size) for size in enough])}" if enough else "ZeRO 3, --pipeline_stages or more ranks"
        stage = at_size(precision, group_size).zero_stage
        raise UsageError(f"group_size={group_size} needs {needed} per rank at ZeRO {stage}, and {free / GIB:.3g} GiB are free; "
                         f"use {instead}")  # fmt: skip


def at_size(precision: Precision, group_size: int) -> Precision:
    """A group of one runs plain PyTorch, which keeps what ZeRO 0 keeps."""
    return replace(precision, zero_stage=0) if group_size == 1 and not precision.offload else precision


def least_free(world: World) -> int:
    free = free_bytes(world.device, world.launch.local_world_size)
    return min(int(text) for text in world.comm.gather_bytes(str(free).encode()))


def choose_group_size(world: World, sizes: Sizes, precision: Precision, model_ranks: int = 1) -> tuple[int, str]:
    """Smallest divisor of the local ranks, and multiple of `model_ranks` (stages x tensor ranks), at which the estimate fits,
    and the arithmetic. Collective: world.

    Raises `UsageError` on every rank if none does.
    """
    local, free = world.launch.local_world_size, least_free(world)
    for size in divisors(local):
        if world.launch.world_size % size == 0 and size % model_ranks == 0:
            needed = estimate(sizes, at_size(precision, size), size // model_ranks)
            if needed.total <= HEADROOM * free:
                return size, f"group_size {size} (auto): {needed}, of {free / GIB:.3g} GiB free per rank"
    raise UsageError(f"group_size=auto finds no room: {local} ranks of a group need {needed} each at ZeRO "
                     f"{precision.zero_stage}, and {free / GIB:.3g} GiB are free; use a higher ZeRO stage, offload, more "
                     "GPUs or a smaller --micro_batch_size")  # fmt: skip
