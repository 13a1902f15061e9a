"""Builds a learner on the meta device and loads its weights from the checkpoint one tensor at a time.

Pipeline stages and ZeRO 3 begin here, so that no rank ever holds a whole model. What the checkpoint lacks (a
new classifier, adapters) is made whole on every rank as transformers and peft would make it, from the same
random stream. Never reads pickles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.models.files import base_of, cached_file
from fmmeta.models.learner import Learner
from fmmeta.models.load import Description, auto_class, load_learner, restore_head, wrap

Entry = tuple[str, str]  # file, key in it


@dataclass
class LazyModel:
    """`learner`: parameters on the meta device, except fresh ones; buffers are real.

    `where`: what the checkpoint holds.
    """

    learner: Learner
    where: dict[str, Entry] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(
        default_factory=dict
    )  # exact initial values of what the checkpoint lacks

    def read(self, name: str) -> Tensor:
        """One complete parameter in fp32, in separate memory."""
        if name in self.fresh:
            return self.fresh[name].clone()
        from safetensors import safe_open

        path, key = self.where[name.replace(".base_layer.", ".")]  # peft's name for the adapted layer
        with safe_open(
            path, "pt"
        ) as file:  # opened again each time: an open file keeps the pages that it has read
            return file.get_tensor(key).to(torch.float32, copy=True)

    def fill(self, names: Sequence[str], then: Callable[[nn.Parameter], None] = lambda param: None) -> None:
        """Give these parameters their storage and values, one after another; tied places stay tied.

        `then` is called with each before the next is read, whether it had its values before or not.
        """
        places = places_of(self.learner)
        for name in names:
            param = self.learner.get_parameter(name)
            if param.is_meta:
                holders, param = places[id(param)], nn.Parameter(self.read(name), param.requires_grad)
                put(holders, param)
            then(param)


def open_lazy_model(config: Config, description: Description) -> LazyModel:
    """Find every tensor of the checkpoint without reading it. Raises `UsageError`.

    The built-in model has no checkpoint: it is made whole, and is small.
    """
    if config.builtin_model:
        learner = load_learner(config, description)
        return LazyModel(
            learner, fresh={name: param.detach().clone() for name, param in learner.named_parameters()}
        )
    auto, kwargs = auto_class(config, description)
    name = f"model_name_or_path={config.model_name_or_path}"
    try:
        with torch.device("meta"):
            hf = auto.from_config(description.hf_config, trust_remote_code=config.trust_remote_code, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{name} cannot be loaded: {one_line(error)}") from None
    hf.config.name_or_path = config.model_name_or_path
    found, shapes = find_tensors(hf, config)
    wrong = {
        key for key, param in hf.named_parameters() if key in found and shapes[key] != tuple(param.shape)
    }
    if wrong and config.task_type != "classification":
        key = min(wrong)
        raise UsageError(
            f"{name} holds {key} of shape {list(shapes[key])}, and its configuration says "
            f"{list(hf.get_parameter(key).shape)}; fix the checkpoint"
        )
    missing = [key for key, _ in hf.named_parameters() if key not in found or key in wrong]
    torch.manual_seed(config.seed)
    initialise(hf, missing, {key: found[key] for key, _ in hf.named_buffers() if key in found})
    torch.manual_seed(config.seed)
    learner = wrap_without_storage(hf, config, description)
    if config.head_init == "learned":
        restore_head(learner, config)
    places = places_of(learner)
    for head in learner.head_names:
        param = learner.get_parameter(head)
        if config.head_init != "learned":  # a head that every task initialises is not read
            put(places[id(param)], nn.Parameter(torch.zeros(param.shape)))
    where = {f"hf.{key}": entry for key, entry in found.items()}
    fresh = {name: param.detach().clone() for name, param in learner.named_parameters() if not param.is_meta}
    return LazyModel(learner.train(), where, fresh)


def wrap_without_storage(hf: Any, config: Config, description: Description) -> Learner:
    """`wrap`, with real adapters: peft makes them on the device of the adapted weights, so
    that these are presented as CPU tensors meanwhile, each of them one number seen in all its places.
    """
    places = places_of(hf)
    seeming = {
        id(param): nn.Parameter(torch.zeros(1).expand(param.shape))
        for param in hf.parameters()
        if param.is_meta
    }
    for key, param in seeming.items():
        put(places[key], param)
    learner = wrap(hf, config, description)
    places = places_of(learner)
    for param in seeming.values():
        put(places[id(param)], nn.Parameter(torch.empty(param.shape, device="meta"), param.requires_grad))
    return learner


def initialise(hf: Any, missing: list[str], saved_buffers: dict[str, Entry]) -> None:
    """Make `missing` parameters and all buffers as transformers does when it loads a checkpoint; the rest
    stays empty.
    """
    from safetensors import safe_open

    places = places_of(hf)
    for key in missing:
        param = hf.get_parameter(key)
        put(places[id(param)], nn.Parameter(torch.empty(param.shape), param.requires_grad))
    for module in hf.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    for key, param in hf.named_parameters():
        param._is_hf_initialized = key not in missing  # transformers' own mark
    hf.initialize_weights()
    for key, (path, stored) in saved_buffers.items():
        with safe_open(path, "pt") as file:
            hf.get_buffer(key).copy_(file.get_tensor(stored))


def find_tensors(hf: Any, config: Config) -> tuple[dict[str, Entry], dict[str, tuple[int, ...]]]:
    """Files and shapes of the tensors of `hf`, by their names in it; transformers translates old names."""
    from safetensors import SafetensorError, safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(hf)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    if len(renamings) < len(rules):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} ({type(hf).__name__}) stores its tensors in"
            " another form than it computes with, so that they cannot be read one by one; use ZeRO 0 to 2"
        )
    wanted = hf.state_dict()
    found: dict[str, Entry] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(config):
        try:
            with safe_open(path, "pt") as file:
                for stored in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                    key, _ = rename_source_key(stored, renamings, [], hf.base_model_prefix, wanted)
                    if key in wanted:
                        found[key], shapes[key] = (path, stored), tuple(file.get_slice(stored).get_shape())
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"model_name_or_path={config.model_name_or_path}: {path} cannot be read ({one_line(error)}); "
                "fetch it again"
            ) from None
    return found, shapes


def checkpoint_files(config: Config) -> list[str]:
    """The safetensors files of the checkpoint; those of a hub id are downloaded."""
    name = config.model_name_or_path
    if base_of(name) != name:
        raise UsageError(
            f"model_name_or_path={name} holds adapters, which are read together with a whole model; give a"
            " merged/ folder that --lora_merge wrote, or use ZeRO 0 to 2"
        )
    single = cached_file(config.model_name_or_path, "model.safetensors")
    if single:
        return [single]
    index = cached_file(config.model_name_or_path, "model.safetensors.index.json")
    if index is None:
        raise UsageError(
            f"model_name_or_path={name} has no model.safetensors; convert its weights to safetensors"
        )
    try:
        with open(index, encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"model_name_or_path={name}: {index} cannot be read ({one_line(error)}); fetch it again"
        ) from None
    paths = {file: cached_file(config.model_name_or_path, file) for file in files}
    absent = [file for file, path in paths.items() if path is None or not os.path.isfile(path)]
    if absent:
        raise UsageError(
            f"model_name_or_path={name} lacks {absent[0]}, which its index names; fetch it again"
        )
    return [path for path in paths.values() if path is not None]


def places_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every place where a parameter is registered, by its id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, leaf))
    return places


def put(places: list[tuple[nn.Module, str]], param: nn.Parameter) -> None:
    for module, leaf in places:
        module._parameters[leaf] = param
