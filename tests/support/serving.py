"""What programs that serve adapters ask of a folder that fmmeta wrote, restated from their sources.

vllm_problems     vLLM 0.33.0, lora/peft_helper.py, lora/lora_model.py, lora/utils.py, lora/model_manager.py
resolved          vLLM 0.33.0, plugins/lora_resolvers/filesystem_resolver.py
sglang_problems   SGLang 0.5.10, srt/lora/lora_config.py, lora.py, lora_manager.py
gguf_problems     llama.cpp (2026-09, in llama-cpp-python 0.3.36), convert_lora_to_gguf.py
"""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM, config/lora.py: values of --max-lora-rank
HEADS = ("classifier", "score")
FACTOR = re.compile(r".*\.lora_[AB]\.weight$")
PREFIX = "base_model.model."
STARTS = (
    "gaussian",
    "eva",
    "orthogonal",
    "mica",
    "lora_ga",
)  # that leave the weights of the base as they are
REFUSED = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication"),
    *("use_bdlora", "use_qalora"),
)


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def shapes_of(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def vllm_rank(settings: dict[str, Any], layer: str) -> int:
    """The rank of a layer: of the first pattern that its name ends with."""
    for pattern, rank in (settings.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return rank
    return settings["r"]


def vllm_problems(folder: Path, layers: Collection[str], max_rank: int) -> Iterator[str]:
    """Why vLLM refuses a folder. layers: last names of linear layers of the served model."""
    settings, heads, factors = settings_of(folder), dict[str, dict[str, list[int]]](), dict[str, set[str]]()
    largest = max(settings["r"], *(settings.get("rank_pattern") or {0: 0}).values())
    if max_rank not in RANKS or largest > max_rank:
        yield f"rank {largest} at --max-lora-rank {max_rank}"
    if settings.get("bias", "none") != "none":
        yield "bias"
    yield from (name for name in REFUSED if settings.get(name))
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start not in STARTS:
        yield f"init_lora_weights {start}"
    saved = settings.get("modules_to_save") or []
    yield from (f"modules_to_save {name}" for name in saved if name not in HEADS)
    for name, shape in shapes_of(folder).items():
        *above, last, kind = name.removeprefix(PREFIX).split(".")
        layer = ".".join(above)
        if last in ("lora_A", "lora_B") and kind == "weight":
            factors.setdefault(layer, set()).add(last)
            if shape[last == "lora_B"] != vllm_rank(settings, layer):
                yield f"{name} is of rank {shape[last == 'lora_B']}"
            if above[-1] not in layers:
                yield f"{layer} is no layer of the model"
        elif last in HEADS and last in saved:
            heads.setdefault(last, {})[kind] = shape
        else:
            yield f"{name} is neither a factor nor a head"
    yield from (f"{layer} has one factor" for layer, found in factors.items() if len(found) < 2)
    if len(heads) > 1 or any(len(head.get("weight", [])) != 2 for head in heads.values()):
        yield f"more than one linear layer in the head {sorted(heads)}"


def resolved(folder: Path, name: str, served: str) -> Path | None:
    """The folder in VLLM_LORA_RESOLVER_CACHE_DIR that a request for the model `name` loads.

    served: the model of `vllm serve`, letter for letter.
    """
    found = folder / name
    if not (found / "adapter_config.json").is_file():
        return None
    settings = settings_of(found)
    fits = settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == served
    return found if fits else None


def sglang_problems(folder: Path, base_tokens: int) -> Iterator[str]:
    """Why SGLang refuses a folder, or computes something else. base_tokens: vocabulary of the base."""
    settings, file = settings_of(folder), folder / "added_tokens.json"
    targets = settings["target_modules"]
    if not isinstance(targets, list) and targets not in ("all", "all-linear"):
        yield f"target_modules {targets}"
    # the factor is lora_alpha / r everywhere
    yield from (name for name in ("use_rslora", "rank_pattern", "alpha_pattern") if settings.get(name))
    if file.is_file() and any(number >= base_tokens for number in json.loads(file.read_text()).values()):
        yield "added tokens"
    yield from (f"{name} is left out without a word" for name in shapes_of(folder) if not FACTOR.match(name))
    # q_proj, k_proj and v_proj become one layer: the first and last are expected, the second may be missing
    names = {name.split(".")[-3] for name in shapes_of(folder)}
    if names & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= names:
        yield "adapters of attention without q_proj and v_proj"


def gguf_problems(folder: Path) -> Iterator[str]:
    """Why llama.cpp converts no adapter, or one that computes something else: it scales by alpha / rank."""
    settings = settings_of(folder)
    yield from (name for name in ("use_rslora", "alpha_pattern") if settings.get(name))
    yield from (f"{name} is no factor" for name in shapes_of(folder) if not FACTOR.match(name))
