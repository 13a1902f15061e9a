"""How a forward pass is done: which attention, which activations are kept.

What a model cannot do is refused before its weights are read.
"""

from __future__ import annotations

from typing import Any

from fmmeta.config import Config, UsageError


def check_attention(config: Config, bf16: bool, device: str) -> None:
    """Refuse an attention that this precision or device cannot train with. Whether the model has it, `unsupported` says.

    Flash attention computes in bf16 on GPUs, torch's flex attention has no backward pass on CPUs, paged ones serve generation.
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
    why = " ".join(str(error).split()).split(". ")[0]
    if config.attn_implementation:
        return UsageError(f"attn_implementation={config.attn_implementation} does not work with "
                          f"model_name_or_path={config.model_name_or_path} here ({why}); use eager, or leave it out")  # fmt: skip
    return UsageError(f"model_name_or_path={config.model_name_or_path} cannot be built ({why}); use another model")


def checkpoint_layers(hf: Any) -> None:
    """Keep only the input of each layer for the backward pass, and compute the rest again there: equal numbers, less memory.

    Chen et al. 2016 (arXiv 1604.06174). Not reentrant, so that frozen layers need no inputs with gradients.
    """
    if not hf.supports_gradient_checkpointing:
        raise UsageError(f"gradient_checkpointing=True: {type(hf).__name__} has none in transformers; leave it out, or lower "
                         "--micro_batch_size")  # fmt: skip
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable  # its name before 5.23
    enable({"use_reentrant": False})
    hf.disable_input_require_grads()  # transformers turns it on for the reentrant kind
