"""Loads a learner and its tokenizer from a folder, a hub id or `tiny`.

Weights come from safetensors, never from pickles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.models.files import (
    HEAD_FILE,
    adapter_folder,
    adapters_in,
    base_of,
    cached_file,
    is_path,
    reachable,
)
from fmmeta.models.forward_options import check_packing, check_positions, checkpoint_layers, unsupported
from fmmeta.models.learner import CausalLearner, Learner, NativeClassifier, PooledClassifier
from fmmeta.models.lengths import DEFAULT, positions
from fmmeta.models.lora import import_peft, inject, merged, restore_adapters
from fmmeta.models.tiny import byte_tokenizer, tiny_config

DROPOUTS = ("dropout", "pdrop", "layerdrop")  # in the names of chances that something is left out
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class Description:
    """What is known of a model before its weights are read."""

    hf_config: Any
    pooling: str  # model, mean or cls
    dropouts: dict[str, Any]  # as the checkpoint has them; training runs without, export puts them back
    normalizes: bool = (
        False  # whether sentence-transformers scales the folder's vectors to length 1; export says so again
    )
    labels: tuple[str, ...] = ()  # names of the classes of a model that is adapted to one task
    classes: int = (
        0  # of all training tasks, where one head serves them; 0: a head for the classes of an episode
    )

    def outputs(self, config: Config) -> int:
        """Of the classifier head; 0 for causal_lm."""
        return max(self.classes, config.most_classes)


def describe(config: Config) -> Description:
    """Read and check a model's configuration. Raises `UsageError` for what cannot be meta-trained."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # one per rank and file otherwise
    logging.set_verbosity_error()
    name = config.model_name_or_path
    if config.lora_r:
        import_peft(config)
    if config.builtin_model:
        hf_config = tiny_config(config.task_type, max(512, config.max_length))
    else:
        name = base_of(name)
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise UsageError(
                f"model_name_or_path={name} holds no config.json; give a Hugging Face folder or hub id"
            )
        if not Path(name).exists() and is_path(name):
            raise UsageError(f"model_name_or_path={name} is not a folder; check the path")
        try:
            hf_config = AutoConfig.from_pretrained(
                name, trust_remote_code=config.trust_remote_code, local_files_only=not reachable(name)
            )
        except Exception as error:  # transformers has many ways to say no
            if not reachable(name) and cached_file(name, "config.json") is None:
                raise UsageError(
                    f"model_name_or_path={name} is no folder, and the hub cannot be reached for a model of"
                    " that name; check the path, or the network"
                ) from None
            raise UsageError(f"model_name_or_path={name} cannot be read: {one_line(error)}") from None
    if not hasattr(hf_config, "pad_token_id") and hf_config.get_text_config() is not hf_config:
        raise UsageError(
            f"model_name_or_path={name} is a {hf_config.model_type}, a text model with others around it; give"
            " a text model alone"
        )
    if config.task_type == "causal_lm" and looks_ahead(hf_config):
        raise UsageError(
            f"model_name_or_path={name} is a {hf_config.model_type}, whose tokens see those behind them,"
            " answers included; give a decoder, or use --task_type classification"
        )
    if any((getattr(hf_config, key, None) or 0) > 1 for key in EXPERTS):
        raise UsageError(
            f"model_name_or_path={name} is a mixture of experts ({hf_config.model_type}), which is not "
            "supported yet; use a dense model"
        )
    if getattr(hf_config, "quantization_config", None) is not None:
        raise UsageError(
            f"model_name_or_path={name} is quantised, and its weights cannot be trained; use the full one"
        )
    dropouts = {
        key: value
        for key, value in vars(hf_config).items()
        if isinstance(value, float) and any(part in key for part in DROPOUTS)
    }
    for key in dropouts:
        setattr(hf_config, key, 0.0)
    if getattr(hf_config, "pad_token_id", None) is None:
        hf_config.pad_token_id = first_of(getattr(hf_config, "eos_token_id", None)) or 0
    pooling = resolve_pooling(config)
    return Description(hf_config, pooling, dropouts, pooling != "model" and normalizes(config))


def looks_ahead(hf_config: Any) -> bool:
    """Whether a token sees those behind it: in the models that transformers also knows as masked language
    models, unless they say that they are decoders.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = getattr(hf_config, "is_decoder", False) or getattr(hf_config, "is_encoder_decoder", False)
    return hf_config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def resolve_pooling(config: Config) -> str:
    """`auto` follows a sentence-transformers folder's 1_Pooling/config.json; otherwise the model's own
    pooling.
    """
    if config.task_type != "classification" or config.pooling != "auto":
        return "model" if config.task_type != "classification" else config.pooling
    if config.builtin_model:
        return "mean"
    path = cached_file(config.model_name_or_path, "1_Pooling/config.json")
    if path is None:
        return "model"
    try:
        modes = dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"pooling=auto: {path} cannot be read ({one_line(error)}); fix it, or choose one with --pooling"
        ) from None
    if modes.get("pooling_mode_cls_token") or modes.get("pooling_mode") == "cls":
        return "cls"
    if modes.get("pooling_mode_mean_tokens") or modes.get("pooling_mode") == "mean":
        return "mean"
    raise UsageError(
        f"pooling=auto: {path} asks for a pooling that is not mean or cls; choose one with --pooling"
    )


def normalizes(config: Config) -> bool:
    """Whether a sentence-transformers folder ends with a Normalize module. Raises `UsageError`."""
    path = None if config.builtin_model else cached_file(config.model_name_or_path, "modules.json")
    if path is None:
        return False
    try:
        return any(
            "Normalize" in module["type"] for module in json.loads(Path(path).read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: modules.json cannot be read"
            f" ({one_line(error)}); fix or remove it"
        ) from None


def load_tokenizer(config: Config, description: Description, notice: Callable[[str], None]) -> Any:
    """The checkpoint's tokenizer; bytes for the built-in model and for checkpoints that have none."""
    from transformers import AutoTokenizer

    if config.max_length < DEFAULT and config.max_length == positions(description.hf_config):
        notice(f"max_length {config.max_length}: {config.model_name_or_path} has no more positions")
    if not config.builtin_model:
        files = (
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
            "vocab.json",
            "tokenizer.model",
            "spiece.model",
        )
        for place in dict.fromkeys(
            (config.model_name_or_path, base_of(config.model_name_or_path))
        ):  # peft saves no tokenizer
            if not any(cached_file(place, name) for name in files):
                continue
            try:
                found = AutoTokenizer.from_pretrained(
                    place, trust_remote_code=config.trust_remote_code, local_files_only=not reachable(place)
                )
            except Exception as error:
                raise UsageError(
                    f"model_name_or_path={place}: its tokenizer cannot be read: {one_line(error)}"
                ) from None
            return pad_alike(description, found)
        notice(f"{config.model_name_or_path} has no tokenizer: texts are read as bytes")
    tokenizer = byte_tokenizer()
    if description.hf_config.vocab_size < len(tokenizer):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} has no tokenizer, and its"
            f" vocab_size={description.hf_config.vocab_size} is below the byte tokenizer's {len(tokenizer)};"
            " add a tokenizer"
        )
    return pad_alike(description, tokenizer)


def pad_alike(description: Description, tokenizer: Any) -> Any:
    """The tokenizer, whose padding the model knows from now on: sequence classifiers and RoBERTa look for it
    among the ids.
    """
    pad, hf_config = tokenizer.pad_token_id, description.hf_config
    if pad is not None and pad < getattr(hf_config, "vocab_size", math.inf):
        hf_config.pad_token_id = pad
    return tokenizer


def load_learner(config: Config, description: Description) -> Learner:
    """Read the weights in fp32; fresh ones (the built-in model, a new head, adapters) depend on the seed
    only.
    """
    hf = load_hf(config, description)
    torch.manual_seed(config.seed)
    learner = wrap(hf, config, description)
    if config.lora_r and (adapters := adapters_in(config)):
        restore_adapters(learner, config, *adapters)
    if config.head_init != "learned":
        for name in learner.head_names:
            learner.get_parameter(name).data.zero_()
    else:
        restore_head(learner, config)
    if config.packing:
        check_packing(learner)
    return learner.train()


def restore_head(learner: Learner, config: Config) -> None:
    """Give an encoder with fmmeta's pooling the head stored beside it, if it has outputs for as many
    classes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if config.builtin_model or not isinstance(learner, PooledClassifier):
        return
    path = cached_file(config.model_name_or_path, HEAD_FILE)
    if path is None:
        return
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: {HEAD_FILE} cannot be read ({one_line(error)});"
            " fetch it again"
        ) from None
    for name in learner.head_names:
        param, found = learner.get_parameter(name), stored.get(name)
        if found is not None and found.shape == param.shape:
            param.data.copy_(found)
        elif find(config.algorithm).trains_nothing:  # nothing would train it
            raise UsageError(
                f"head_init=learned: the head of {config.model_name_or_path} has the shape"
                f" {list(found.shape) if found is not None else None}, and that of these tasks"
                f" {list(param.shape)}; use --head_init zero, or tasks of as many classes"
            )


def load_hf(config: Config, description: Description) -> Any:
    """The HF model as it is before anything is trained, in fp32."""
    from safetensors import SafetensorError

    auto, kwargs = auto_class(config, description)
    torch.manual_seed(config.seed)
    try:
        if config.builtin_model:
            return auto.from_config(description.hf_config, **kwargs)
        base = base_of(config.model_name_or_path)
        local = {"local_files_only": not reachable(base)}
        hf = auto.from_pretrained(
            base,
            config=description.hf_config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            **local,
            adapter_kwargs=dict(local),
            ignore_mismatched_sizes=config.task_type == "classification",
            **kwargs,
        )
        if (
            base == config.model_name_or_path or config.lora_r
        ):  # adapters that are trained on stay beside their base
            return hf
        return merged(hf, adapter_folder(config.model_name_or_path), config).requires_grad_(
            True
        )  # peft had frozen the base
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} cannot be loaded: {one_line(error)}"
        ) from None


def empty_learner(config: Config, description: Description) -> Learner:
    """The same learner without storage: to count its parameters, and to save under its names."""
    auto, kwargs = auto_class(config, description)
    with torch.device("meta"):
        try:
            hf = auto.from_config(description.hf_config, **kwargs)
        except (ValueError, ImportError) as error:
            raise unsupported(config, error) from None
        return wrap(hf, config, description)


def auto_class(config: Config, description: Description) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    kwargs = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    if config.task_type == "causal_lm":
        return AutoModelForCausalLM, kwargs
    if description.pooling != "model":
        return AutoModel, kwargs
    description.hf_config.num_labels = description.outputs(config)
    return AutoModelForSequenceClassification, kwargs


def wrap(hf: Any, config: Config, description: Description) -> Learner:
    """A learner around `hf`, with adapters and checkpointed layers if asked for."""
    if config.gradient_checkpointing:
        checkpoint_layers(hf)
    if config.packing:
        check_positions(hf)
    if config.task_type == "causal_lm":
        learner: Learner = CausalLearner(hf)
    elif description.pooling == "model":
        learner = NativeClassifier(hf, description.outputs(config))
        if config.feature_norm:
            raise UsageError(
                f"feature_norm={config.feature_norm:g} scales pooled features, and {type(hf).__name__} pools"
                " by itself; use --pooling mean or cls, or leave it out"
            )
        if config.head_init == "prototype" and len(learner.head_names) < 2:
            raise UsageError(
                f"head_init=prototype needs a head with a bias, and that of {type(hf).__name__} has none; "
                "use --pooling mean or another --head_init"
            )
    else:
        learner = PooledClassifier(hf, description.outputs(config), description.pooling, config.feature_norm)
    if config.lora_r:
        inject(learner, config)
    return learner
