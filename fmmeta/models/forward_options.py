"""Options of the forward pass: attention implementation and gradient checkpointing.

What a model cannot do is refused before its weights are read.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.models.learner import Learner


def check_attention(config: Config, bf16: bool, device: str) -> None:
    """Refuse an attention that this precision or device cannot train with. Whether the model has it,
    `unsupported` says.

    Flash attention computes in bf16 on GPUs, torch's flex attention has no backward pass on CPUs, paged ones
    serve generation.
    """
    name = config.attn_implementation or ""
    wrong = None
    if name.startswith("paged|"):
        wrong = "needs the cache of a generation server"
    elif "flash" in name and device == "cpu":
        wrong = "needs a GPU"
    elif "flash" in name and not bf16:
        wrong = "computes in bf16 only, and this run is in fp32"
    elif name == "flex_attention" and device == "cpu":
        wrong = "has no backward pass on CPUs"
    if wrong:
        instead = "add --bf16, or use sdpa or eager" if wrong.startswith("computes") else "use sdpa or eager"
        raise UsageError(f"attn_implementation={name} {wrong}; {instead}")


def unsupported(config: Config, error: BaseException) -> UsageError:
    """What to say when transformers does not build a model with the settings given."""
    why = one_line(error).split(". ")[0]
    if config.attn_implementation:
        return UsageError(
            f"attn_implementation={config.attn_implementation} does not work with "
            f"model_name_or_path={config.model_name_or_path} here ({why}); use eager, or leave it out"
        )
    return UsageError(
        f"model_name_or_path={config.model_name_or_path} cannot be built ({why}); use another model"
    )


def checkpoint_layers(hf: Any) -> None:
    """Keep only the input of each layer for the backward pass, and compute the rest again there: equal
    numbers, less memory.

    Chen et al. 2016 (arXiv 1604.06174). Not reentrant, so that frozen layers need no inputs with gradients.
    """
    if not hf.supports_gradient_checkpointing:
        raise UsageError(
            f"gradient_checkpointing=True: {type(hf).__name__} has none in transformers; leave it out, or"
            " lower --micro_batch_size"
        )
    enable = (
        getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    )  # its name before 5.23
    enable({"use_reentrant": False})
    hf.disable_input_require_grads()  # transformers turns it on for the reentrant kind


def check_positions(hf: Any) -> None:
    """Packed rows are kept apart by position_ids; refuse a model that takes none."""
    if "position_ids" not in inspect.signature(hf.forward).parameters:
        raise UsageError(
            f"packing=True: {type(hf).__name__} takes no position_ids, which keep packed rows apart; leave"
            " it out"
        )


@torch.no_grad()
def check_packing(learner: Learner) -> None:
    """Refuse a model whose logits change when rows share a sequence: recurrent and convolutional layers look
    past positions.

    Two short rows go through the model by themselves and packed, in both orders. Runs on the whole model in
    fp32, with eager attention: flash attention needs a GPU and bf16.
    """
    vocabulary = learner.hf.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (1, length), generator=draw) for length in (9, 6)]
    chosen = learner.hf.config._attn_implementation
    learner.hf.config._attn_implementation = "eager"
    try:
        alone = [learner(input_ids=row, attention_mask=torch.ones_like(row)) for row in rows]
        scale = max(float(logits.std()) for logits in alone)
        off = []
        for order in ((0, 1), (1, 0)):
            ids = torch.cat([rows[i] for i in order], 1)
            position_ids = torch.cat([torch.arange(rows[i].shape[1]) for i in order])[None]
            packed = learner(input_ids=ids, position_ids=position_ids)
            off.append(float((packed - torch.cat([alone[i] for i in order], 1)).abs().max()) / scale)
    finally:
        learner.hf.config._attn_implementation = chosen
    wrong = [each for each in off if not each < 1e-3]
    if wrong:
        raise UsageError(
            f"packing=True: rows that share a sequence see each other in {type(learner.hf).__name__}"
            f" (logits move by {wrong[0]:.1e} of their spread); leave it out"
        )
