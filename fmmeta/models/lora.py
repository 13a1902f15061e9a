"""LoRA through peft: low-rank adapters on frozen linear layers, saved as a peft adapter folder.

    y = W x + (alpha / r) B A x        W frozen; A [r, in] random from the seed, B [out, r] zero

Hu et al. 2021 (arXiv 2106.09685), section 4.1. Trained are A and B, a classifier's head and the other
layers on top of the base; the base keeps the weights of the checkpoint and is never copied. Only this module
imports peft, and only when adapters are used.

Adapters and heads can have a task axis (`TaskAxis`): one pass of the frozen base for rows of several tasks.

    y = W x + (alpha / r) B_t A_t x        LoRA, rows of task t
    y = W_t x + b_t                        a head, or another fully trained layer

The rows of a task are contiguous, the same number for each task: x [N B, ...] for N tasks; without padding
(`Unpadded`) its tokens are contiguous, x [1, tokens, ...]. Callers pass the values by the names of the
parameters that they replace; the modules' parameters are neither read nor changed. The base is called once
per pass for all tasks, through the modules that an engine has hooks on, so that ZeRO 3 gathers it once.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.common.text import shortened
from fmmeta.config.settings import Config
from fmmeta.models.files import ADAPTER_FILE, BASE_FOLDER, adapter_folder, read_json, read_stored, reading
from fmmeta.models.learner import Learner, NativeClassifier, PooledClassifier

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
    except (ValueError, TypeError) as error:
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


def fully_trained(learner: Learner) -> list[str]:
    """Layers of the HF model that are trained beside adapters, as `modules_to_save` names them."""
    return [top.split(".")[1] for top in learner.top if top.startswith("hf.")]


def lora_config(learner: Learner, config: Config) -> Any:
    """peft's configuration of the adapters; fully trained and unused layers get none."""
    targets: Any = config.lora_target_modules or None
    options = {name: value for name, value in options_of(config).items() if name != "modules_to_save"}
    adaptable = layers_below_top(learner)
    without = [
        name
        for name, module in learner.hf.named_modules()
        if isinstance(module, nn.Linear) and name not in adaptable
    ]
    excluded = options.pop("exclude_modules", [])
    if isinstance(excluded, str):
        excluded = "|".join([f"(?:{excluded})", *map(re.escape, without)])
    else:
        excluded = [*without, *excluded]
    base = learner.hf.config.name_or_path or config.model_name_or_path  # the base of an adapter folder
    return import_peft(config).LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        exclude_modules=excluded or None,
        task_type={NativeClassifier: "SEQ_CLS", PooledClassifier: "FEATURE_EXTRACTION"}.get(
            type(learner), "CAUSAL_LM"
        ),
        base_model_name_or_path=os.path.abspath(base) if Path(base).exists() else base,
        **{"target_modules": "all-linear" if targets == ["all-linear"] else targets, **options},
    )


def layers_below_top(learner: Learner) -> dict[str, nn.Module]:
    """Modules of the HF model that can get adapters: not the fully trained ones, nor an unused pooler."""
    without = learner.top if isinstance(learner, NativeClassifier) else "hf.pooler."
    return {
        name: module for name, module in learner.hf.named_modules() if not f"hf.{name}.".startswith(without)
    }


def refuse_unknown(learner: Learner, config: Config) -> None:
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
    for one in [excluded] if isinstance(excluded, str) else excluded:
        fits = partial(re.fullmatch, one) if isinstance(excluded, str) else partial(has_suffix, suffix=one)
        if not any(map(fits, leaves)):
            raise UsageError(
                f"peft_config: exclude_modules {one} fits no layer of {kind}; fix it, or leave it out"
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


def refuse_without_match(learner: Learner, config: Config) -> None:
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
    wanted = options.get("layers_to_transform", [])
    for number in wanted if isinstance(wanted, list) else [wanted]:
        if not any(f".{number}." in f".{layer}" for layer in layers):
            raise UsageError(
                f"peft_config: layers_to_transform {number} is no layer of"
                f" {type(learner.hf).__name__} with adapters; leave it out"
            )


def scalings(learner: Learner) -> dict[str, float]:
    """The factor of each adapter's output, by the name of its layer in the HF model."""
    return {
        name: module.scaling[ADAPTER]
        for name, module in learner.hf.named_modules()
        if ADAPTER in getattr(module, "lora_A", ())
    }


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


def save_adapter(folder: Path, learner: Learner, weights: dict[str, Tensor], config: Config) -> None:
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
        exact = {exactly(name): pattern[key] for name, key in of_layer.items() if key in pattern}
        pattern.clear()
        pattern.update(exact)  # the file has its keys in another order, and the first that fits counts
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
    name = config.model_source
    settings = read_json(name, "adapter_config.json", dict)
    if settings is None:
        return
    adapter_folder(name)
    stored = read_stored(name, ADAPTER_FILE, load_file) or {}
    params = {file_name(name): param for name, param in learner.named_parameters() if param.requires_grad}
    found = {name: value.shape for name, value in stored.items() if ".lora_" in name}
    wanted = {name: param.shape for name, param in params.items() if ".lora_" in name}
    with reading(name, "adapter_config.json"):
        alpha = float(settings.get("lora_alpha", 0))
        differs = found != wanted or any(
            scale != stored_scaling(settings, layer, wanted[f"{PREFIX}{layer}.lora_A.weight"][0])
            for layer, scale in scalings(learner).items()
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


def file_name(name: str) -> str:
    """A trained parameter's name in an adapter folder."""
    return f"{PREFIX}{name.removeprefix('hf.').replace(f'.{ADAPTER}.', '.')}"


def merged(hf: Any, folder: Path, config: Config) -> Any:
    """`hf`, the base as it was loaded, with the adapters of `folder` added to its weights:
    W + (alpha / r) B A.
    """
    peft = import_peft(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(
            hf, str(folder), ignore_mismatched_sizes=config.task_type == "classification"
        ).merge_and_unload()


Values = Mapping[str, Tensor]
"""Name of a trained parameter -> [N, *shape]."""
Counts = Callable[[Tensor], "list[int] | None"]
"""Tokens of each task in an input without padding; None for one that has rows."""


def lora_forward(
    layer: Any, names: Sequence[str], values: Values, counts: Counts, x: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """A frozen layer with an adapter; names of A [r, in] and B [out, r]."""
    y = layer.base_layer(x, *rest, **named)
    down, up = (values[name] for name in names)
    low = per_task(x.to(down.dtype), down, None, counts(x))
    return y + per_task(low, up, None, counts(x)).view(y.shape).to(y.dtype) * layer.scaling[ADAPTER]


def linear_forward(layer: Any, names: Sequence[str], values: Values, counts: Counts, x: Tensor) -> Tensor:
    """A linear layer that is trained in full: names of its weight [out, in] and bias [out], if any."""
    weight, *bias = (values[name] for name in names)
    return per_task(x.to(weight.dtype), weight, *(bias or [None]), counts=counts(x))


def per_task(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int] | None = None) -> Tensor:
    """x [N B, ..., in], weight [N, out, in], bias [N, out] -> [N B, ..., out].

    counts: tokens of each task, where x [1, tokens, in] has no padding.
    """
    if counts is not None:
        biases = [None] * len(weight) if bias is None else bias
        parts = zip(x[0].split(counts), weight, biases, strict=True)
        return torch.cat([F.linear(*part) for part in parts])[None]
    rows, turned = x.reshape(len(weight), -1, x.shape[-1]), weight.transpose(1, 2)
    y = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias[:, None], rows, turned)
    return y.view(*x.shape[:-1], weight.shape[1])


class TaskAxis:
    """The layers of a learner with trained parameters.

    Raises `UsageError` for trained parameters of other layers than linear ones.
    """

    def __init__(self, learner: Learner) -> None:
        self.layers: list[tuple[Any, tuple[str, ...], Callable[..., Tensor]]] = []  # with names, forward
        self.unpadded = learner.unpadded
        trained = [name for name, param in learner.named_parameters() if param.requires_grad]
        for name, module in learner.named_modules():
            adapter = tuple(f"{name}.lora_{part}.{ADAPTER}.weight" for part in "AB")
            direct = tuple(f"{name}.{part}" for part, _ in module.named_parameters(recurse=False))
            linear = type(module) is nn.Linear and ".lora_" not in name
            if hasattr(module, "base_layer") and set(adapter) <= set(trained):
                self.layers.append((module, adapter, lora_forward))
            elif linear and direct and set(direct) <= set(trained):
                self.layers.append((module, direct, linear_forward))
        self.names = [name for _, names, _ in self.layers for name in names]
        if missing := [name for name in trained if name not in self.names]:
            raise UsageError(
                f"tasks_per_pass: {missing[0]} is trained, and belongs to no linear layer nor to an adapter"
                " of one; use --tasks_per_pass 1"
            )

    @contextmanager
    def of(self, values: Values) -> Iterator[None]:
        """Inside, the learner computes with `values`.

        Backward passes with recomputation belong inside, too.
        """
        counts = partial(self.unpadded.counts, tasks=len(next(iter(values.values()))))
        for layer, names, forward in self.layers:
            layer.forward = partial(forward, layer, names, values, counts)
        try:
            yield
        finally:
            for layer, _, _ in self.layers:
                del layer.forward


@dataclass(frozen=True)
class StoredAdapter:
    """The weights of an adapter folder by module of a learner without adapters.

    pairs: A [r, in] and B [out, r], times the factor of the adapter's output. layers: weight and bias (None:
    none) of layers that were trained in full, the head among them.
    """

    pairs: dict[str, tuple[Tensor, Tensor]]
    layers: dict[str, tuple[Tensor, Tensor | None]]

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], head: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> "StoredAdapter":
        """tensors: of an adapter file. head: of HEAD_FILE. settings: of adapter_config.json.

        Raises `ValueError`, `ArithmeticError` or `LookupError`.
        """
        named = {f"hf.{name.removeprefix(PREFIX)}": one for name, one in tensors.items() if PREFIX in name}
        if len(named) < len(tensors) or not named:
            raise ValueError("its tensors are not those of LoRA adapters")
        pairs = {
            layer: (
                one,
                stored_scaling(settings, layer.removeprefix("hf."), len(one))
                * named[f"{layer}.lora_B.weight"],
            )
            for layer, one in (
                (name.removesuffix(".lora_A.weight"), one)
                for name, one in named.items()
                if name.endswith(".lora_A.weight")
            )
        }
        direct = {name: one for name, one in named.items() if ".lora_" not in name} | dict(head)
        layers = {
            name.removesuffix(".weight"): (one, direct.get(f"{name.removesuffix('.weight')}.bias"))
            for name, one in direct.items()
            if name.endswith(".weight")
        }
        return cls(pairs, layers)

    def to(self, device: torch.device) -> "StoredAdapter":
        """The same on a device, in fp32."""

        def moved(tensors: Sequence[Tensor | None]) -> Any:
            return tuple(None if one is None else one.to(device, torch.float32) for one in tensors)

        return StoredAdapter(
            {name: moved(pair) for name, pair in self.pairs.items()},
            {name: moved(layer) for name, layer in self.layers.items()},
        )

    def misfit(self, learner: Learner) -> str:
        """What does not fit the layers of `learner`, in words; empty if everything fits."""
        modules = dict(learner.named_modules())
        for name, (down, up) in self.pairs.items():
            weight = getattr(modules.get(name), "weight", None)
            wanted = {(up.shape[0], down.shape[1]), (down.shape[1], up.shape[0])}  # Conv1D is transposed
            if weight is None or tuple(weight.shape) not in wanted or down.shape[0] != up.shape[1]:
                return f"{name} has no layer of shape {[up.shape[0], down.shape[1]]}"
        for name, (own, _) in self.layers.items():
            weight = getattr(modules.get(name), "weight", None)
            if weight is None or weight.shape[1:] != own.shape[1:]:
                return f"{name} has no layer with {list(own.shape[1:])} inputs"
        tensors = [one for each in (*self.pairs.values(), *self.layers.values()) for one in each]
        return "" if all(one is None or bool(one.isfinite().all()) for one in tensors) else "it has NaNs"


@contextmanager
def adapters_of_rows(
    learner: Learner, adapters: Sequence[StoredAdapter], runs: Sequence[int]
) -> Iterator[None]:
    """Inside, the first runs[0] rows of an input use adapters[0], the next runs[1] rows adapters[1], ...

    The learner has no adapters itself, so that these may have any ranks and layers. A head with fewer classes
    than another one gives -inf for the classes that it lacks. Without gradients.
    """
    counts = partial(learner.unpadded.counts, tasks=len(runs), runs=runs)
    replaced = list[Any]()
    try:
        for kind, forward in (("pairs", forward_pairs), ("layers", forward_layers)):
            for name in dict.fromkeys(name for one in adapters for name in getattr(one, kind)):
                module: Any = learner.get_submodule(name)
                own = [getattr(one, kind).get(name) for one in adapters]
                module.forward = partial(forward, module, own, lambda x: counts(x), runs)
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward


def forward_pairs(
    module: Any, pairs: Sequence[Any], counts: Counts, runs: Sequence[int], x: Tensor
) -> Tensor:
    """A layer with one adapter, or None, for each run of rows."""
    y, found = type(module).forward(module, x), counts(x)
    dim, sizes = (0, list(runs)) if found is None else (1, found)
    parts = zip(x.split(sizes, dim), y.split(sizes, dim), pairs, strict=True)
    return torch.cat(
        [
            of_y if pair is None else of_y + F.linear(F.linear(of_x.to(pair[0].dtype), pair[0]), pair[1])
            for of_x, of_y, pair in parts
        ],
        dim,
    )


def forward_layers(
    module: Any, layers: Sequence[Any], counts: Counts, runs: Sequence[int], x: Tensor
) -> Tensor:
    """A linear layer with separate weights, or the model's (None), for each run of rows."""
    found = counts(x)
    dim, sizes = (0, list(runs)) if found is None else (1, found)
    outputs = [
        type(module).forward(module, of_x) if layer is None else F.linear(of_x.to(layer[0].dtype), *layer)
        for of_x, layer in zip(x.split(sizes, dim), layers, strict=True)
    ]
    width = max(each.shape[-1] for each in outputs)
    return torch.cat([F.pad(each, (0, width - each.shape[-1]), value=-math.inf) for each in outputs], dim)
