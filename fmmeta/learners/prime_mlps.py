"""Adds an MLP behind each of the last blocks of a decoder: fast weights beside what the model knows.

    h <- h + attention(norm(h));  h <- h + MLP(norm(h))         a block
    h <- h + 0 attention'(norm(h));  h <- h + MLP'(norm'(h))    the block that is added behind it

Tandon et al. 2025 (arXiv 2512.23675) change such prime MLPs in the inner loop and keep the others. They are
written as blocks whose attention returns zeros and whose MLP begins as a copy that returns zeros (LLaMA Pro:
Wu et al. 2024, arXiv 2401.02415, section 3.2): the model computes what it did, and its folder is an ordinary
checkpoint of more layers, which every layout and every program reads. The price is the attention of zeros.
"""

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import hide_download_bars
from fmmeta.common.security import publishing
from fmmeta.learners.files import base_model_name, reading

ZEROS = ("self_attn.o_proj", "mlp.down_proj")  # layers of an added block that begin with zeros


def add_prime_mlps(name: str, folder: Path, count: int) -> str:
    """Write the model `name` with MLPs behind the last `count` blocks; returns the flags that train them.

    Raises `UsageError` for a model whose blocks are not of this kind.
    """
    hide_download_bars()
    given = f"prime_mlps={count}"
    if base_model_name(name) != name:
        raise UsageError(f"{given} needs a full model, and {name} has adapters; give its merged/ folder")
    with reading(name, "the model"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", use_safetensors=True
        )
    layers = getattr(model.base_model, "layers", nn.ModuleList())
    if not all({*ZEROS} <= dict(layer.named_modules()).keys() for layer in layers) or not len(layers):
        raise UsageError(
            f"{given} needs blocks with {' and '.join(ZEROS)}, and {type(model).__name__} has others; give a"
            " model such as Llama, Mistral or Qwen"
        )
    if count > len(layers):
        raise UsageError(f"{given}, and {name} has {len(layers)} blocks; give at most as many")
    ids = torch.arange(min(64, model.config.vocab_size))[None]
    with torch.no_grad():
        before = model.eval()(ids).logits
    numbers = expand(model, count)
    with publishing(folder) as temporary:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        with suppress(OSError, ValueError):  # a model without a tokenizer
            transformers.AutoTokenizer.from_pretrained(name).save_pretrained(temporary)
        written: Any = transformers.AutoModelForCausalLM.from_pretrained(temporary, dtype="auto")
        with torch.no_grad():
            after = written.eval()(ids).logits
        if not torch.allclose(before, after, atol=1e-4 * float(before.abs().max())):
            raise UsageError(
                f"{given}: {type(model).__name__} with more layers computes something else, as its"
                " configuration tells layers apart by their numbers; give another model"
            )
    names = [f"model.layers.{number}" for number in numbers]
    inner, fixed = (" ".join(f"'{one}.{part}.*'" for one in names) for part in ("mlp", "self_attn"))
    return f"--inner_parameters {inner} --outer_parameters all except {fixed}"


def expand(model: Any, count: int) -> list[int]:
    """Add a block behind each of the last `count`; returns the numbers of the added ones."""
    config, layers = model.config, model.base_model.layers
    first, kept, numbers = len(layers) - count, list[nn.Module](), list[int]()
    order = [(number, added) for number in range(len(layers)) for added in range(1 + (number >= first))]
    for number, added in order:
        kept.append(copy.deepcopy(layers[number]) if added else layers[number])
        if added:
            numbers.append(len(kept) - 1)
            for part in ZEROS:
                for param in kept[-1].get_submodule(part).parameters():
                    nn.init.zeros_(param)
    for key, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == len(layers):
            setattr(config, key, [value[number] for number, _ in order])
    config.num_hidden_layers, model.base_model.layers = len(kept), nn.ModuleList(kept)
    return numbers
