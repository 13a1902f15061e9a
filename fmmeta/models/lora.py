"""LoRA through peft: low-rank adapters on frozen linear layers, saved as a peft adapter folder.

    y = W x + (alpha / r) B A x        W frozen; A [r, in] random from the seed, B [out, r] zero

Hu et al. 2021 (arXiv 2106.09685), section 4.1. Trained are A and B, a classifier's head and the other
layers on top of the base; the base keeps the weights of the checkpoint and is never copied. Only this module
imports peft, and only when it is used.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.models.files import BASE_FOLDER
from fmmeta.models.learner import Learner, NativeClassifier, PooledClassifier

ADAPTER = "default"  # peft's name for an only adapter; its files leave it out


def import_peft(config: Config) -> Any:
    """peft, or a `UsageError` that says how to get it."""
    try:
        import peft
    except ImportError as error:
        asks = (
            f"lora_r={config.lora_r}"
            if config.lora_r
            else f"model_name_or_path={config.model_name_or_path} holds adapters and"
        )
        raise UsageError(
            f"{asks} needs peft ({error}); pip install 'fmmeta[lora]', or do without adapters"
        ) from None
    return peft


def inject(learner: Learner, config: Config) -> None:
    """Freeze the learner's base and give its target layers adapters, the same ones for the same seed.

    Raises `UsageError` for targets that are not there, that cannot be adapted, or that peft does not know for
    this model.
    """
    peft = import_peft(config)
    refuse_unknown(learner, config)
    torch.manual_seed(config.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names of transformers that peft still reads
            peft.inject_adapter_in_model(settings_of(learner, config), learner.hf)
    except ValueError as error:
        what = " ".join(config.lora_target_modules) or "(peft's choice)"
        raise UsageError(
            f"lora_target_modules={what} cannot be adapted in {type(learner.hf).__name__}: "
            f"{' '.join(str(error).split())}; name its linear layers, or use all-linear"
        ) from None
    refuse_shared(learner, config)
    for name in trained_whole(learner):
        learner.get_parameter(name).requires_grad_(True)


def settings_of(learner: Learner, config: Config) -> Any:
    """peft's configuration of the adapters; what is trained whole gets none."""
    peft = import_peft(config)
    kind = {NativeClassifier: "SEQ_CLS", PooledClassifier: "FEATURE_EXTRACTION"}.get(
        type(learner), "CAUSAL_LM"
    )
    given = config.lora_target_modules
    targets = None if not given else given[0] if given == ["all-linear"] else given
    without = [
        name.removeprefix("hf.")
        for name, module in learner.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(tuple(f"hf.{block}" for block in unreachable(learner)))
    ]
    name = (
        learner.hf.config.name_or_path or config.model_name_or_path
    )  # of adapters that are trained on: their base
    base = os.path.abspath(name) if Path(name).exists() else name
    return peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=without or None,
        task_type=kind,
        base_model_name_or_path=base,
    )


def top_block(learner: Learner) -> str | None:
    """The block of a sequence classifier above its base (`classifier`, `score`), trained in full."""
    return learner.head_path.split(".")[1] if isinstance(learner, NativeClassifier) else None


def unreachable(learner: Learner) -> list[str]:
    """Blocks of the HF model whose layers get no adapter: trained whole, or never reached."""
    return [top_block(learner) or "pooler"]


def trained_whole(learner: Learner) -> list[str]:
    """Names of the parameters that are trained beside the adapters."""
    top = top_block(learner)
    inside = f"hf.{top}." if top else "head."
    return [name for name, _ in learner.named_parameters() if name.startswith(inside)]


def refuse_unknown(learner: Learner, config: Config) -> None:
    """Every target names a layer; peft is content if one of them does."""
    from transformers.pytorch_utils import Conv1D

    targets = config.lora_target_modules
    barred = tuple(f"{block}." for block in unreachable(learner))
    layers = {
        name: module for name, module in learner.hf.named_modules() if not f"{name}.".startswith(barred)
    }
    for target in targets if targets != ["all-linear"] else []:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            linear = sorted(
                {
                    name.split(".")[-1]
                    for name, layer in layers.items()
                    if isinstance(layer, (nn.Linear, Conv1D))
                }
            )
            raise UsageError(
                f"lora_target_modules={' '.join(targets)}: {type(learner.hf).__name__} has no layer"
                f" {target!r} to adapt; its linear layers are {', '.join(linear)}"
            )


def refuse_shared(learner: Learner, config: Config) -> None:
    """No adapter is on an embedding, nor on a layer that shares its weight with one: merging would part
    them.
    """
    from peft.tuners.lora import LoraLayer

    shared = {id(module.weight) for module in learner.hf.modules() if isinstance(module, nn.Embedding)}
    for name, module in learner.hf.named_modules():
        if isinstance(module, LoraLayer) and id(module.get_base_layer().weight) in shared:
            raise UsageError(
                f"lora_target_modules={' '.join(config.lora_target_modules)}: {name} holds the weight of an "
                "embedding; name linear layers that share nothing"
            )


def save_adapter(folder: Path, learner: Learner, weights: dict[str, Tensor], config: Config) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    `weights`: whole trained parameters by their names here.
    """
    from safetensors.torch import save_file

    settings = learner.hf.peft_config[ADAPTER]
    settings.inference_mode = True
    settings.modules_to_save = [top] if (top := top_block(learner)) else None  # earlier, peft would wrap it
    for name in ("target_modules", "exclude_modules"):
        if isinstance(getattr(settings, name), set):
            setattr(settings, name, sorted(getattr(settings, name)))
    if config.builtin_model:
        settings.base_model_name_or_path = os.path.abspath(folder / BASE_FOLDER)
    settings.save_pretrained(folder)
    trained = {
        name for name, param in learner.named_parameters() if param.requires_grad and name.startswith("hf.")
    }
    named = {file_name(name): weights[name].contiguous() for name in trained}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def restore_adapters(
    learner: Learner, config: Config, settings: dict[str, Any], stored: dict[str, Tensor]
) -> None:
    """Load adapters that were trained before: `settings` and tensors as `save_adapter` wrote them.

    A head of other classes is left as it is. Raises `UsageError` where they are not those that `config`
    describes.
    """
    there = {
        name: learner.get_parameter(name) for name, param in learner.named_parameters() if ".lora_" in name
    }
    named = {file_name(name): param for name, param in there.items()}
    found = {name: tuple(value.shape) for name, value in stored.items() if ".lora_" in name}
    scale = settings.get("lora_alpha", 0) / (settings.get("r") or 1)
    if (
        found != {name: tuple(param.shape) for name, param in named.items()}
        or scale != config.lora_alpha / config.lora_r
    ):
        raise UsageError(
            f"lora_r={config.lora_r}: {config.model_name_or_path} holds adapters of rank {settings.get('r')},"
            f" alpha {settings.get('lora_alpha', 0):g} and of {len(found) // 2} layers, not these; give the"
            " same --lora_r, --lora_alpha and --lora_target_modules to continue with them, or a merged/"
            " folder for others"
        )
    whole = {
        file_name(name): learner.get_parameter(name)
        for name in trained_whole(learner)
        if name.startswith("hf.")
    }
    for name, param in (named | whole).items():
        if name in stored and stored[name].shape == param.shape:
            param.data.copy_(stored[name])


def file_name(name: str) -> str:
    """A trained parameter's name in an adapter folder."""
    return f"base_model.model.{name.removeprefix('hf.').replace(f'.{ADAPTER}.', '.')}"


def merged(hf: Any, folder: Path, config: Config) -> Any:
    """`hf`, the base as it was loaded, with the adapters of `folder` added to its weights: W + (alpha / r) B
    A.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return (
            import_peft(config)
            .PeftModel.from_pretrained(
                hf, str(folder), ignore_mismatched_sizes=config.task_type == "classification"
            )
            .merge_and_unload()
        )
