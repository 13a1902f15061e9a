"""Options of the forward pass: attention implementation, gradient checkpointing, packed rows, torch.compile.

Options that a model does not support are refused before its weights are read. `--compile` compiles the
transformer once for rows of any number and length; names, weights and (up to rounding) numbers of the model
do not change. The first passes compile for seconds to minutes; torch caches the compiled code for the next
run (Ansel et al., "PyTorch 2", ASPLOS 2024).
"""

import functools
import os
import shutil
import timeit
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner


def check_attention(config: Config, bf16: bool, device: str) -> None:
    """Refuse an attention implementation that cannot train in this precision or on this device.

    Whether the model has it is checked when it is built (load.empty_hf).
    """
    name = config.attn_implementation or ""
    reasons = (
        (name.startswith("paged|"), "needs the cache of a generation server; use sdpa or eager"),
        ("flash" in name and device == "cpu", "needs a GPU; use sdpa or eager"),
        (
            "flash" in name and not bf16,
            "computes in bf16 only, and this run is in fp32; add --bf16, or use sdpa or eager",
        ),
        (
            name == "flex_attention" and device == "cpu",
            "has no backward pass on CPUs; use sdpa or eager",
        ),
    )
    refuse_first((holds, f"attn_implementation={name} {why}") for holds, why in reasons)


@functools.cache
def bf16_slowdown() -> float:
    """How many times as long a matrix product takes in bf16 as in fp32 on this CPU, in seconds of this
    process, whatever else runs: the fastest of five each, about 0.1 s in all.

    CPUs without bf16 instructions convert every number, and have no fast kernels.
    """

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(64, 512, dtype=dtype), torch.ones(2048, 512, dtype=dtype)
        return min(timeit.repeat(lambda: F.linear(rows, weights), timer=process_time, number=1, repeat=5))

    return seconds(torch.bfloat16) / seconds(torch.float32)


def checkpoint_layers(hf: Any) -> None:
    """Keep only the input of each layer for the backward pass, and recompute the rest there: equal numbers,
    less memory.

    Chen et al. 2016 (arXiv 1604.06174). Not reentrant, so that frozen layers need no inputs with gradients.
    """
    if not hf.supports_gradient_checkpointing:
        raise UsageError(
            f"gradient_checkpointing=True: {type(hf).__name__} has none in transformers; leave it out, or"
            " lower --micro_batch_size"
        )
    # the second name is that of transformers before 5.23
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    hf.disable_input_require_grads()  # transformers turns it on for reentrant checkpointing


@torch.no_grad()
def check_packing(hf: Any, forward: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Refuse a model whose output changes when rows share a sequence: recurrent and convolutional layers
    ignore positions.

    Two short rows go through the model by themselves and packed, in both orders. Runs in fp32, with eager
    attention: flash attention needs a GPU and bf16.

    forward: inputs by name to the output [B, T, D] of the whole model, or of the part of it on this rank.
    """
    draw = torch.Generator().manual_seed(0)
    most = getattr(hf.config, "vocab_size", 16)  # ids of any embedding where the configuration says nothing
    rows = [torch.randint(most, (1, length), generator=draw) for length in (9, 6)]
    chosen = hf.config._attn_implementation
    hf.config._attn_implementation = "eager"
    try:
        alone = [forward({"input_ids": row, "attention_mask": torch.ones_like(row)}) for row in rows]
        scale = max(float(output.std()) for output in alone)
        off = []
        for order in ((0, 1), (1, 0)):
            ids = torch.cat([rows[i] for i in order], 1)
            position_ids = torch.cat([torch.arange(rows[i].shape[1]) for i in order])[None]
            packed = forward({"input_ids": ids, "position_ids": position_ids})
            off.append(float((packed - torch.cat([alone[i] for i in order], 1)).abs().max()) / scale)
    finally:
        hf.config._attn_implementation = chosen
    if wrong := [each for each in off if not each < 1e-3]:
        raise UsageError(
            f"packing=True: rows that share a sequence see each other in {type(hf).__name__}"
            f" (outputs move by {wrong[0]:.1e} of their spread); leave it out"
        )


BACKEND = "inductor"


def check_compiler(device: str) -> None:
    """Raise `UsageError` if there is no C++ compiler, which code compiled for a CPU needs."""
    wanted = os.environ.get("CXX")
    if device == "cpu" and not any(map(shutil.which, [wanted] if wanted else ["g++", "clang++"])):
        where = f"CXX={wanted} is not there" if wanted else "neither g++ nor clang++ is there"
        raise UsageError(f"compile=True needs a C++ compiler, and {where}; install one, or leave it out")


def compile_model(learner: HFLearner, device: torch.device) -> None:
    """Compile the HF model of a worker's `learner` in place.

    It computes with padding, because the number of real tokens would be one more size that changes, and with
    dense gradients of embeddings.
    """
    check_compiler(device.type)
    learner.unpadded.works = False
    for module in learner.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    learner.hf.compile(dynamic=True, backend=BACKEND)
