"""How much memory a rank needs, by estimate, and the smallest group that has it.

Bytes per rank for P trained and F frozen parameters (of the largest stage, or of a tensor rank) shared by M data ranks,
w bytes per working weight (docs/memory.md):

    weights      (P + F) w  / M at ZeRO 3
    gathered     whole parameters that ZeRO 3 holds at once: at most stage3_max_live_parameters x w
    gradients    P 4        / M at ZeRO 2 and 3; twice at ZeRO 3, and at ZeRO 0 where M > 1: flattened for step or reduction
    master       P 4        / M at ZeRO 1 to 3; none in fp32 at ZeRO 0, where the weights are the masters
    meta         5 P 4      / M at ZeRO 1 to 3: theta, meta-gradient, one captured direction, two Adam moments; with
                            --offload_outer the direction stays and 4 P 4 lie in host memory; with --outer_delay 1 a
                            second meta-gradient
    activations  B T L (34 H + 5 A T) w / 2     Korthikanti et al. 2022 (arXiv 2205.05198), equation 2; with checkpointed layers
                 B T (L H + 17 H + 5/2 A T) w   the inputs of all layers and one layer at work (section 5)
    logits       3 B T V 4  (causal_lm)
"""

from __future__ import annotations

import json
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

    params: int  # trained
    layers: int
    hidden: int
    heads: int
    vocab: int  # 0 where no logits over the vocabulary are made
    rows: int  # of a micro-batch
    tokens: int  # of a row
    frozen: int = 0  # parameters that are not trained
    checkpointing: bool = False  # layers keep their inputs only
    offload_outer: bool = False  # to another memory than the device's
    outer_delay: int = 0  # meta-gradients on their way across groups
    in_flight: int = 1  # micro-batches whose activations a rank keeps

    @classmethod
    def of(cls, hf_config: Any, params: int, frozen: int, rows: int, tokens: int, causal: bool, checkpointing: bool,
           offload_outer: bool) -> Sizes:  # fmt: skip
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        layers, hidden = getattr(text, "num_hidden_layers", 12), getattr(text, "hidden_size", 768)
        heads, vocab = getattr(text, "num_attention_heads", 12), getattr(text, "vocab_size", 0)
        return cls(params, layers, hidden, heads, vocab if causal else 0, rows, tokens, frozen, checkpointing,
                   offload_outer)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device by kind, and in host memory."""

    weights: int
    gathered: int
    gradients: int
    master: int
    meta: int
    activations: int
    logits: int
    host: int = 0

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(asdict(self).values()) - self.host

    def __str__(self) -> str:
        kinds = {kind: size for kind, size in asdict(self).items() if size and kind != "host"}
        summed = " + ".join(f"{kind} {size / GIB:.3g}" for kind, size in kinds.items())
        beside = f" (and {self.host / GIB:.3g} in host memory)" if self.host else ""
        return f"{summed} = {self.total / GIB:.3g} GiB{beside}"


def estimate(sizes: Sizes, precision: Precision, sharers: int) -> Estimate:
    """Peak bytes of one rank. `sharers`: the ranks that ZeRO cuts over (of a stage or tensor rank, the data ranks)."""
    stage, width = precision.zero_stage, 2 if precision.bf16 else 4
    share = [1 if stage < least else sharers for least in (3, 2, 1)]
    fp32 = 4 * sizes.params
    layer = 34 * sizes.hidden + 5 * sizes.heads * sizes.tokens  # bytes of a token in bf16
    per_token = 2 * sizes.layers * sizes.hidden + layer if sizes.checkpointing else sizes.layers * layer
    return Estimate(
        weights=(sizes.params + sizes.frozen) * width // share[0],
        gathered=min(sizes.params + sizes.frozen, precision.live) * width if share[0] > 1 else 0,
        gradients=fp32 // share[1] * (2 if stage == 3 or (stage == 0 and sharers > 1) else 1),
        master=0 if stage == 0 and not precision.bf16 else fp32 // share[2],
        meta=(1 if sizes.offload_outer else 5 + sizes.outer_delay) * fp32 // share[2],
        activations=sizes.in_flight * sizes.rows * sizes.tokens * per_token * width // 2,
        logits=12 * sizes.rows * sizes.tokens * sizes.vocab,
        host=4 * fp32 // share[2] if sizes.offload_outer else 0,
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
    free, _ = least_free(world)
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


def least_free(world: World) -> tuple[int, int]:
    """Bytes of its device and of host memory that every rank has. Collective: world."""
    local = world.launch.local_world_size
    mine = (free_bytes(world.device, local), host_bytes(local))
    everywhere = [json.loads(text) for text in world.comm.gather_bytes(json.dumps(mine).encode())]
    free, host = (min(values) for values in zip(*everywhere, strict=True))
    return free, host


def choose_group_size(world: World, sizes: Sizes, precision: Precision, model_ranks: int = 1) -> tuple[int, str]:
    """Smallest number of ranks whose groups stay inside a node, and multiple of `model_ranks` (stages x tensor ranks), at which
    the estimate fits, and the arithmetic. Collective: world.

    Raises `UsageError` on every rank if none does.
    """
    local, (free, host) = min(world.nodes.sizes), least_free(world)
    for size in divisors(world.launch.world_size):
        if size <= local and world.nodes.keeps(size) and size % model_ranks == 0:
            needed = estimate(sizes, at_size(precision, size), size // model_ranks)
            if needed.total <= HEADROOM * free and needed.host <= HEADROOM * host:
                return size, f"group_size {size} (auto): {needed}, of {free / GIB:.3g} GiB free per rank"
    in_host = f" (and {host / GIB:.3g} in host memory)" if needed.host else ""
    raise UsageError(f"group_size=auto finds no room: {local} ranks of a group need {needed} each at ZeRO "
                     f"{precision.zero_stage}, and {free / GIB:.3g} GiB are free{in_host}; use a higher ZeRO stage, offload, "
                     "more GPUs or a smaller --micro_batch_size")  # fmt: skip
