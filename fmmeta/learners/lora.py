"""LoRA through peft: low-rank adapters on frozen linear layers, saved as a peft adapter folder.

    y = W x + (alpha / r) B A x        W frozen; A [r, in] random from the seed, B [out, r] zero

Hu et al. 2021 (arXiv 2106.09685), section 4.1. Trained are A and B, a classifier's head and the other
layers on top of the base; the base keeps the weights of the checkpoint and is never copied. Only this module
imports peft, and only when adapters are used.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fmmeta.common.errors import UsageError, one_line
from fmmeta.common.text import shortened
from fmmeta.config.peft_options import STARTS
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner
from fmmeta.learners.experts import fused_experts
from fmmeta.learners.files import (
    ADAPTER_FILE,
    BASE_FOLDER,
    adapter_folder,
    base_model_name,
    read_json,
    read_stored,
    reading,
    split_source,
)
from fmmeta.learners.parameter_sets import is_base, trains_base
from fmmeta.learners.text_part import outside, parts_of

PREFIX = "base_model.model."  # of the names in an adapter file
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


def inject(learner: HFLearner, config: Config) -> None:
    """Freeze the learner's base and add adapters to its target layers; they depend on the seed only.

    Raises `UsageError` for targets that do not exist or cannot be adapted, and for models that peft has no
    default targets for.
    """
    peft = import_peft(config)
    # peft raises errors of many kinds for options that cannot work
    unusable = Exception if options_of(config) else (ValueError, TypeError)
    torch.manual_seed(config.seed)
    try:
        refuse_unknown(learner, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses old names of transformers
            peft.inject_adapter_in_model(lora_config(learner, config), learner.hf)
    except UsageError:
        raise
    except unusable as error:
        targets, kind = " ".join(config.lora_target_modules) or "(peft's choice)", type(learner.hf).__name__
        if options_of(config):
            raise UsageError(
                f"peft_config={shortened(config.peft_config)} with lora_target_modules={targets} does not fit"
                f" {kind}: {one_line(error)}; change one of them"
            ) from None
        raise UsageError(
            f"lora_target_modules={targets} cannot be adapted in {kind}: {one_line(error)}; name its linear"
            " layers, or use all-linear"
        ) from None
    refuse_shared(learner, config)
    refuse_without_match(learner, config)
    for name, param in learner.named_parameters():
        if name.startswith(learner.top):
            param.requires_grad_(True)


def options_of(config: Config) -> dict[str, Any]:
    """The options of --peft_config beside rank, alpha and the names of layers."""
    return json.loads(config.peft_config or "{}")


def fully_trained(learner: HFLearner) -> list[str]:
    """Layers of the HF model that are trained beside adapters, as `modules_to_save` names them."""
    return [top.split(".")[1] for top in learner.top if top.startswith("hf.")]


def lora_config(learner: HFLearner, config: Config) -> Any:
    """peft's configuration of the adapters; fully trained and unused layers get none."""
    targets: Any = config.lora_target_modules or None
    options = {name: value for name, value in options_of(config).items() if name != "modules_to_save"}
    adaptable = layers_below_top(learner)
    without = [
        name
        for name, module in learner.hf.named_modules()
        if isinstance(module, nn.Linear) and name not in adaptable
    ]
    if (wanted := options.pop("layers_to_transform", None)) is not None:
        options["layers_to_transform"] = [*numbers_of_layers(learner.hf, wanted).values()]
    excluded = options.pop("exclude_modules", [])
    if isinstance(excluded, str):
        excluded = "|".join([f"(?:{excluded})", *map(re.escape, without)])
    else:
        excluded = [*without, *excluded]
    if not targets and not options.keys() & {"target_modules", "target_parameters"}:
        targets = attention_layers(learner)
    base = learner.hf.config.name_or_path or config.model_name_or_path  # the base of an adapter folder
    return import_peft(config).LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        exclude_modules=excluded or None,
        task_type=learner.peft_task,
        base_model_name_or_path=os.path.abspath(base) if Path(base).exists() else base,
        revision=split_source(base_model_name(config.model_source)).get("revision"),
        **{"target_modules": "all-linear" if targets == ["all-linear"] else targets, **options},
    )


def attention_layers(learner: HFLearner) -> list[str] | None:
    """The targets in a mixture of experts, for which peft finds none: names of the linear layers of
    attention, which transformers marks by `is_causal`. None for other models: peft's choice.
    """
    if not fused_experts(learner.hf):
        return None
    attentions = [module for module in learner.hf.modules() if hasattr(module, "is_causal")]
    layers = [(name, layer) for module in attentions for name, layer in module.named_children()]
    return sorted({name for name, layer in layers if isinstance(layer, nn.Linear)})


def layers_below_top(learner: HFLearner) -> dict[str, nn.Module]:
    """Modules of the HF model that can get adapters: not the fully trained ones, nor unused ones."""
    without = (*learner.top, *learner.unused)
    return {
        name: module for name, module in learner.hf.named_modules() if not f"hf.{name}.".startswith(without)
    }


def refuse_unknown(learner: HFLearner, config: Config) -> None:
    """Raise `UsageError` if a target matches no layer; peft raises only if none of them does. Also if an
    excluded module does not exist, and for `modules_to_save` of --peft_config beside the head.
    """
    from transformers.pytorch_utils import Conv1D

    kind, options = type(learner.hf).__name__, options_of(config)
    modules = [name for name, _ in learner.hf.named_modules()]
    others = {*options.get("modules_to_save", ())} - {*fully_trained(learner)}
    if others := {name for name in others if any(has_suffix(module, name) for module in modules)}:
        raise UsageError(
            f"peft_config: modules_to_save {' '.join(sorted(others))} cannot be trained beside adapters; of"
            f" {kind} the head is, and nothing else: leave it out"
        )
    excluded = options.get("exclude_modules", [])
    leaves = [name for name, module in learner.hf.named_modules() if not any(module.children())]
    leaves += [f"{learner.hf.base_model_prefix}.{name}" for name in leaves]  # see `save_adapter`
    for one in [excluded] if isinstance(excluded, str) else excluded:
        fits = partial(re.fullmatch, one) if isinstance(excluded, str) else partial(has_suffix, suffix=one)
        if not any(map(fits, leaves)):
            raise UsageError(
                f"peft_config: exclude_modules {one} fits no layer of {kind}; fix it, or leave it out"
            )
    params = [name for name, _ in learner.hf.named_parameters()]
    for target in options.get("target_parameters", ()):
        if not any(has_suffix(name, target) for name in params):
            experts = {name.split(".")[-1] for name in params if name.split(".")[-2] == "experts"}
            raise UsageError(
                f"peft_config: target_parameters {target} fits no parameter of {kind}; use the end of a name"
                f" such as mlp.experts.gate_up_proj ({', '.join(sorted(experts)) or 'it has no experts'})"
            )
    targets, layers = config.lora_target_modules, layers_below_top(learner)
    for target in targets if targets != ["all-linear"] else []:
        if not any(has_suffix(name, target) for name in layers):
            linear = sorted(
                {
                    name.split(".")[-1]
                    for name, layer in layers.items()
                    if isinstance(layer, (nn.Linear, Conv1D))
                }
            )
            raise UsageError(
                f"lora_target_modules={' '.join(targets)}: {kind} has no layer"
                f" {target!r} to adapt; its linear layers are {', '.join(linear)}"
            )


def has_suffix(name: str, suffix: str) -> bool:
    """Whether a module's name is `suffix` or ends with it after a dot, as peft compares names of a list."""
    return f".{name}".endswith(f".{suffix}")


def refuse_shared(learner: HFLearner, config: Config) -> None:
    """Raise `UsageError` for an adapter on a layer that shares its weight with an embedding: merging would
    make them different.
    """
    shared = {id(module.weight) for module in learner.hf.modules() if isinstance(module, nn.Embedding)}
    for name, module in learner.hf.named_modules():
        if id(getattr(getattr(module, "base_layer", None), "weight", None)) in shared:
            raise UsageError(
                f"lora_target_modules={' '.join(config.lora_target_modules)}: {name} holds the weight of an "
                "embedding; name linear layers that share nothing"
            )


def refuse_without_match(learner: HFLearner, config: Config) -> None:
    """Raise `UsageError` for a pattern of ranks or alphas, or a number of a layer, that fits no adapter."""
    from peft.utils.other import get_pattern_key

    options, layers = options_of(config), [*scalings(learner)]
    for option in ("rank_pattern", "alpha_pattern"):
        patterns = options.get(option, {})
        if unused := set(patterns) - {get_pattern_key(patterns, layer) for layer in layers}:
            raise UsageError(
                f"peft_config: {option} {' '.join(sorted(unused))} fits no layer with an adapter"
                f" ({', '.join(sorted({layer.split('.')[-1] for layer in layers}))}), or patterns before it"
                " do; leave it out, or put it first"
            )
    for given, number in numbers_of_layers(learner.hf, options.get("layers_to_transform", [])).items():
        if not any(f".{number}." in f".{layer}" for layer in layers):
            raise UsageError(
                f"peft_config: layers_to_transform {given} is no layer of"
                f" {type(learner.hf).__name__} with adapters; leave it out"
            )


def numbers_of_layers(hf: Any, wanted: int | list[int]) -> dict[int, int]:
    """peft's number of each of the wanted layers; negative ones count from the last layer.

    Raises `UsageError` for what is no number of a layer.
    """
    layers = getattr(hf.config.get_text_config(), "num_hidden_layers", 0)
    numbers = wanted if isinstance(wanted, list) else [wanted]
    for number in numbers:
        if type(number) is not int or number < -layers or number >= (layers or math.inf):
            raise UsageError(
                f"peft_config: layers_to_transform {number} is no layer of {type(hf).__name__}, which has"
                f" {layers}; use numbers from {-layers} to {layers - 1}"
            )
    return {number: number + layers if number < 0 else number for number in numbers}


def adapted_layers(hf: Any) -> Iterator[tuple[str, str, Any]]:
    """Name, name in peft's patterns and module of each adapter. The adapters of several parameters of a
    module are wrapped around each other, and peft's patterns name the parameters.
    """
    for name, module in hf.named_modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            param = getattr(module, "parameter_name", None)
            yield name, name if param is None else f"{name.replace('.base_layer', '')}.{param}", module


def scalings(learner: HFLearner) -> dict[str, float]:
    """The factor of each adapter's output, by the name of its layer or parameter in the HF model."""
    return {key: module.scaling[ADAPTER] for _, key, module in adapted_layers(learner.hf)}


@contextmanager
def base_alone(hf: Any) -> Iterator[None]:
    """Inside, a model with adapters computes as its base. Their parameters stay trainable, which peft's own
    switch changes: an engine looks at that.
    """
    layers = [module for *_, module in adapted_layers(hf)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def exactly(layer: str) -> str:
    """A pattern of peft that fits one layer."""
    return f"^{re.escape(layer)}"


def stored_scaling(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """The factor of an adapter's output by an adapter_config.json that `save_adapter` wrote: alpha / r, or
    with rank-stabilised adapters alpha / sqrt(r) (Kalajdzievski 2023, arXiv 2312.03732, section 3).

    Raises `ValueError` for patterns of another form.
    """
    alphas: Any = settings.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(name.startswith("^") for name in alphas):
        raise ValueError("alpha_pattern is not one that fmmeta writes")
    alpha = alphas.get(exactly(layer), settings["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def save_adapter(folder: Path, learner: HFLearner, weights: dict[str, Tensor], config: Config) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    `weights`: complete trained parameters by their names in `learner`.
    """
    from peft.utils.other import get_pattern_key

    settings = learner.hf.peft_config[ADAPTER]
    settings.inference_mode = True
    # peft would wrap them if they were set before the injection
    settings.modules_to_save = fully_trained(learner) or None
    for pattern in filter(None, (settings.rank_pattern, settings.alpha_pattern)):
        of_layer = {name: get_pattern_key(pattern, name) for name in scalings(learner)}
        exact = {
            exactly(outside(learner.hf, name)): pattern[key]
            for name, key in of_layer.items()
            if key in pattern
        }
        pattern.clear()
        pattern.update(exact)  # the file has its keys in another order, and the first that fits counts
    if learner.own_head and (above := learner.hf.base_model_prefix):
        # in a classifier of transformers, which would have a random head, the layers have this prefix: peft
        # refuses to load adapters without a layer
        known = settings.exclude_modules or ()
        others = [known] if isinstance(known, str) else [rf"(?:.*\.)?{re.escape(one)}" for one in known]
        settings.exclude_modules = "|".join(f"(?:{one})" for one in (rf"{above}\..*", *sorted(others)))
    if parts_of(learner.hf):  # others have layers of the same names
        settings.exclude_modules = None
        layers = [name for name, key, _ in adapted_layers(learner.hf) if name == key]
        settings.target_modules = {outside(learner.hf, name) for name in layers}
    for name in ("target_modules", "target_parameters", "exclude_modules"):
        if isinstance(getattr(settings, name), set):
            setattr(settings, name, sorted(getattr(settings, name)))
    if config.builtin_model or trains_base(learner):
        settings.base_model_name_or_path = os.path.abspath(folder / BASE_FOLDER)
    settings.save_pretrained(folder)
    named = {
        file_name(name, learner.hf): weights[name].contiguous()
        for name, param in learner.named_parameters()
        if param.requires_grad and name.startswith("hf.") and not is_base(learner, name)
    }
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})


def restore_adapters(learner: HFLearner, config: Config) -> None:
    """Load the adapters of an adapter folder, to train them further; a base model has none.

    A head of other classes is left as it is. Raises `UsageError` if rank, alpha or layers differ from those
    in `config`, and for what is stored beside them or needs another base.
    """
    name = config.model_source
    settings = read_json(name, "adapter_config.json", dict)
    if settings is None:
        return
    read_settings(adapter_folder(name), config)
    start = settings.get("init_lora_weights")
    if start not in (None, *STARTS, "eva", "mica"):
        raise UsageError(
            f"lora_r={config.lora_r}: {name} holds adapters with init_lora_weights={start}, which changed the"
            " weights of their base; leave --lora_r out, which merges them"
        )
    stored = read_stored(name, ADAPTER_FILE, load_file) or {}
    params = {
        file_name(name, learner.hf): param
        for name, param in learner.named_parameters()
        if param.requires_grad
    }
    if beside := [
        name
        for name in sorted({*stored} - {*params})
        if not re.search(r"\.lora_[AB]\.weight$", name) and not is_head(name, learner.hf, config)
    ]:
        raise UsageError(
            f"lora_r={config.lora_r}: {name} stores {len(beside)} weights that are not trained further and"
            f" would be lost ({beside[0]}); leave --lora_r out, which merges them"
        )
    found = {name: value.shape for name, value in stored.items() if ".lora_" in name}
    wanted = {name: param.shape for name, param in params.items() if ".lora_" in name}
    with reading(name, "adapter_config.json"):
        alpha = float(settings.get("lora_alpha", 0))
        differs = found != wanted or any(
            layer.scaling[ADAPTER] != stored_scaling(settings, outside(learner.hf, key), layer.r[ADAPTER])
            for _, key, layer in adapted_layers(learner.hf)
        )
    if differs:
        raise UsageError(
            f"lora_r={config.lora_r}: {name} holds adapters of rank {settings.get('r')},"
            f" alpha {alpha:g} and of {len(found) // 2} layers, not these; give the"
            " same --lora_r, --lora_alpha and --lora_target_modules, or its adapter_config.json as"
            " --peft_config, to continue with them, or a merged/ folder for others"
        )
    for name, param in params.items():
        if name in stored and stored[name].shape == param.shape:
            param.data.copy_(stored[name])


def file_name(name: str, hf: Any) -> str:
    """A trained parameter's name in an adapter folder."""
    return f"{PREFIX}{outside(hf, name.removeprefix('hf.')).replace(f'.{ADAPTER}.', '.')}"


def merge(hf: Any, folder: Path, config: Config, keep: bool = False) -> None:
    """Add the adapters of `folder` to the weights of `hf`, the base as it was loaded: for LoRA
    W + (alpha / r) B A. keep: leave them beside the weights, which are quantised.

    They may be those of another class of the same base: adapters of a language model go into the base of a
    classifier, without those above it. Raises `UsageError`.
    """
    peft = import_peft(config)
    settings = read_settings(folder, config)
    with reading(config.model_source, "its adapters"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old names in transformers, and of what is checked here
        stored = load_file(folder / ADAPTER_FILE)
        settings.task_type, settings.inference_mode = None, True  # peft's class for a task needs its methods
        model = peft.PeftModel(root_of(hf, stored), settings)
        wanted = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        for name, value in wanted.items():
            if is_head(name, hf, config) and (name not in stored or stored[name].shape != value.shape):
                stored[name] = value  # a head of other classes
        unused = peft.set_peft_model_state_dict(model, stored).unexpected_keys
        if wrong := {*wanted} - {*stored} | {name for name in unused if not is_head(name, hf, config)}:
            raise ValueError(f"{', '.join(sorted(wrong)[:3])} does not fit {type(hf).__name__}")
        if not keep:
            model.merge_and_unload()


def is_head(name: str, hf: Any, config: Config) -> bool:
    """Whether a name in an adapter file is above the base of a model with a head."""
    inner = {name for name, _ in hf.base_model.named_children()} | {hf.base_model_prefix}
    return config.learner.has_head and first_part(name) not in inner


def first_part(name: str) -> str:
    """Of a name in an adapter file: the child of the model."""
    return name.removeprefix(PREFIX).split(".")[0]


def read_settings(folder: Path, config: Config) -> Any:
    """peft's settings of the adapters in a folder.

    Raises `UsageError` for adapters that are no change of weights, and for options that this peft does not
    know: they may change what the adapters compute.
    """
    with reading(config.model_source, "its adapters"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown options
        settings = import_peft(config).PeftConfig.from_pretrained(str(folder))
        refuse_unmergeable(settings, config)
    stored = read_json(config.model_source, "adapter_config.json", dict) or {}
    if unknown := [name for name, value in stored.items() if value and not hasattr(settings, name)]:
        raise UsageError(
            f"model_name_or_path={config.model_source}: adapter_config.json has"
            f" {unknown[0]}={shortened(stored[unknown[0]])}, which this version of peft does not know; pip"
            " install --upgrade peft"
        )
    return settings


def refuse_unmergeable(settings: Any, config: Config) -> None:
    """Raise `UsageError` for adapters that are no change of weights. settings: of peft."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    tuner = PEFT_TYPE_TO_TUNER_MAPPING[settings.peft_type]
    options = [
        name for name in ("alora_invocation_tokens", "layer_replication") if getattr(settings, name, None)
    ]
    if settings.is_prompt_learning or not hasattr(tuner, "merge_and_unload") or options:
        raise UsageError(
            f"model_name_or_path={config.model_source} holds adapters of"
            f" {' with '.join([f'peft_type={settings.peft_type.value}', *options])}, which cannot be merged"
            " into a model's weights; give LoRA adapters, or a whole model"
        )


def root_of(hf: Any, stored: Mapping[str, Any]) -> Any:
    """The module whose layers have the names of these adapters: `hf`, its base, or one around it."""
    base, prefix, parts = hf.base_model, hf.base_model_prefix, {first_part(name) for name in stored}
    if prefix not in parts:
        return base if parts & {name for name, _ in base.named_children()} else hf
    if base is not hf:
        return hf
    around = nn.Module()
    around.add_module(prefix, hf)
    around.config = hf.config
    return around
