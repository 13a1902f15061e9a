"""LoRA through peft: low-rank adapters on frozen linear layers, saved as a peft adapter folder.

    y = W x + (alpha / r) B A x        W frozen; A [r, in] random from the seed, B [out, r] zero

Hu et al. 2021 (arXiv 2106.09685), section 4.1. Trained are A and B, a classifier's head and the other
layers on top of the base; the base keeps the weights of the checkpoint and is never copied. Only this module
imports peft, and only when adapters are used.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.models.files import ADAPTER_FILE, BASE_FOLDER, adapter_folder, read_json, read_tensors
from fmmeta.models.learner import Learner, NativeClassifier, PooledClassifier

ADAPTER = "default"  # peft's name of a single adapter; names in its files lack it


def import_peft(config: Config) -> Any:
    """peft, or a `UsageError` with the command that installs it."""
    try:
        import peft
    except ImportError as error:
        adapters = f"model_name_or_path={config.model_name_or_path} holds adapters and"
        raise UsageError(
            f"{f'lora_r={config.lora_r}' if config.lora_r else adapters} needs peft ({error}); "
            "pip install 'fmmeta[lora]', or do without adapters"
        ) from None
    return peft


def inject(learner: Learner, config: Config) -> None:
    """Freeze the learner's base and add adapters to its target layers; they depend on the seed only.

    Raises `UsageError` for targets that do not exist or cannot be adapted, and for models that peft has no
    default targets for.
    """
    peft = import_peft(config)
    refuse_unknown(learner, config)
    torch.manual_seed(config.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses old names of transformers
            peft.inject_adapter_in_model(lora_config(learner, config), learner.hf)
    except ValueError as error:
        targets = " ".join(config.lora_target_modules) or "(peft's choice)"
        raise UsageError(
            f"lora_target_modules={targets} cannot be adapted"
            f" in {type(learner.hf).__name__}: {one_line(error)}; name its linear layers, or use all-linear"
        ) from None
    refuse_shared(learner, config)
    for name, param in learner.named_parameters():
        if name.startswith(learner.top):
            param.requires_grad_(True)


def lora_config(learner: Learner, config: Config) -> Any:
    """peft's configuration of the adapters; fully trained and unused layers get none."""
    kinds = {NativeClassifier: "SEQ_CLS", PooledClassifier: "FEATURE_EXTRACTION"}
    targets: Any = config.lora_target_modules or None
    adaptable = layers_below_top(learner)
    without = [
        name
        for name, module in learner.hf.named_modules()
        if isinstance(module, nn.Linear) and name not in adaptable
    ]
    base = learner.hf.config.name_or_path or config.model_name_or_path  # the base of an adapter folder
    return import_peft(config).LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=without or None,
        task_type=kinds.get(type(learner), "CAUSAL_LM"),
        base_model_name_or_path=os.path.abspath(base) if Path(base).exists() else base,
    )


def layers_below_top(learner: Learner) -> dict[str, nn.Module]:
    """Modules of the HF model that can get adapters: not the fully trained ones, nor an unused pooler."""
    without = learner.top if isinstance(learner, NativeClassifier) else "hf.pooler."
    return {
        name: module for name, module in learner.hf.named_modules() if not f"hf.{name}.".startswith(without)
    }


def refuse_unknown(learner: Learner, config: Config) -> None:
    """Raise `UsageError` if a target matches no layer; peft raises only if none of them does."""
    from transformers.pytorch_utils import Conv1D

    targets, layers = config.lora_target_modules, layers_below_top(learner)
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
    """Raise `UsageError` for an adapter on a layer that shares its weight with an embedding: merging would
    make them different.
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

    `weights`: complete trained parameters by their names in `learner`.
    """
    settings = learner.hf.peft_config[ADAPTER]
    settings.inference_mode = True
    tops = [prefix.split(".")[1] for prefix in learner.top if prefix.startswith("hf.")]
    settings.modules_to_save = tops or None  # peft would wrap them if they were set before the injection
    for name in ("target_modules", "exclude_modules"):
        if isinstance(getattr(settings, name), set):
            setattr(settings, name, sorted(getattr(settings, name)))
    if config.builtin_model:
        settings.base_model_name_or_path = os.path.abspath(folder / BASE_FOLDER)
    settings.save_pretrained(folder)
    named = {
        file_name(name): weights[name].contiguous()
        for name, param in learner.named_parameters()
        if param.requires_grad and name.startswith("hf.")
    }
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})


def restore_adapters(learner: Learner, config: Config) -> None:
    """Load the adapters of an adapter folder, to train them further; a base model has none.

    A head of other classes is left as it is. Raises `UsageError` if rank, alpha or layers differ from those
    in `config`.
    """
    name = config.model_name_or_path
    settings = read_json(name, "adapter_config.json", dict)
    if settings is None:
        return
    adapter_folder(name)
    stored = read_tensors(name, ADAPTER_FILE) or {}
    params = {file_name(name): param for name, param in learner.named_parameters() if param.requires_grad}
    found = {name: value.shape for name, value in stored.items() if ".lora_" in name}
    wanted = {name: param.shape for name, param in params.items() if ".lora_" in name}
    scale = settings.get("lora_alpha", 0) / (settings.get("r") or 1)
    if found != wanted or scale != config.lora_alpha / config.lora_r:
        raise UsageError(
            f"lora_r={config.lora_r}: {name} holds adapters of rank {settings.get('r')},"
            f" alpha {settings.get('lora_alpha', 0):g} and of {len(found) // 2} layers, not these; give the"
            " same --lora_r, --lora_alpha and --lora_target_modules to continue with them, or a merged/"
            " folder for others"
        )
    for name, param in params.items():
        if name in stored and stored[name].shape == param.shape:
            param.data.copy_(stored[name])


def file_name(name: str) -> str:
    """A trained parameter's name in an adapter folder."""
    return f"base_model.model.{name.removeprefix('hf.').replace(f'.{ADAPTER}.', '.')}"


def merged(hf: Any, folder: Path, config: Config) -> Any:
    """`hf`, the base as it was loaded, with the adapters of `folder` added to its weights:
    W + (alpha / r) B A.
    """
    peft = import_peft(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.PeftModel.from_pretrained(
            hf, str(folder), ignore_mismatched_sizes=config.task_type == "classification"
        )
        return adapted.merge_and_unload()
