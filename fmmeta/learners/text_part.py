"""The language model of a checkpoint that also reads images or sounds: taken out of the whole model, and its
tensors written back under their names there.

    whole.model.language_model.layers.0  <-->  hf.model.layers.0        the same modules

The language model is of the class that transformers has for its configuration, so that every layout runs it
as a model of texts. The other parts are not trained, nor kept in memory; an export copies their tensors.
"""

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as known


def text_config(whole: Any) -> Any | None:
    """The configuration of the language model of a `whole` one, with what it has in common with it; None for
    a model without such a part.
    """
    text = whole.get_text_config()
    of_whole = whole.model_type in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and text is not whole
    if not of_whole or text.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    text.update(
        {
            name: getattr(whole, name)
            for name in ("name_or_path", "tie_word_embeddings", "quantization_config")
            if hasattr(whole, name)
        }
    )
    return text


def take(whole: Any) -> Any:
    """The language model of `whole`, a model of transformers, with the names of its modules there; one on the
    meta device keeps `whole`.
    """
    config, outputs = whole.config.get_text_config(), whole.get_output_embeddings()
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config)
    hf.config, parts, own = config, dict[str, str](), hf.get_output_embeddings()
    for child, module in list(hf.named_children()):
        parts[child], found = next(
            (name, one)
            for name, one in whole.named_modules()
            if (one is outputs if module is own else type(one) is type(module))
        )
        setattr(hf, child, found)
    hf.__dict__.update(parts=parts, **({"whole": whole} if whole.device.type == "meta" else {}))
    return hf


def parts_of(hf: Any) -> dict[str, str]:
    """By the name of each child of `hf`, that in the whole model; empty if `hf` is no part."""
    return hf.__dict__.get("parts", {})


def whole_of(hf: Any) -> Any:
    """The model that a checkpoint is of: `hf` on the meta device, or the whole one that it is a part of."""
    return hf.__dict__.get("whole", hf)


def outside(hf: Any, name: str) -> str:
    """The name in the whole model of a tensor or module of `hf`."""
    child, dot, rest = name.partition(".")
    return f"{parts_of(hf).get(child, child)}{dot}{rest}"


def inside(hf: Any, name: str) -> str:
    """The name in `hf` of a tensor or module of the whole model; unchanged if it is not in `hf`."""
    return next(
        (
            child + name.removeprefix(one)
            for child, one in parts_of(hf).items()
            if f"{name}.".startswith(f"{one}.")
        ),
        name,
    )
