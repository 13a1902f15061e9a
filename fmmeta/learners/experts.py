"""Mixtures of experts: the fused expert modules and the routers of a built model.

They are found by what transformers marks them with, not by names of families. A fused module computes all
its experts at once from parameters with a dimension of experts: `gate_up_proj` [E, 2 I, H], `down_proj`
[E, H, I].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
"""In configurations of mixtures."""


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules of classes that transformers' `use_experts_implementation` has made."""
    return {name: module for name, module in model.named_modules() if "_is_expert_parallel" in vars(module)}


def release_weights(experts: nn.Module) -> None:
    """Let the backward pass of a module read its weights from its parameters. Views of them, which torch
    saves for products, would keep what ZeRO 3 gathers: the experts of all layers at once.
    """
    forward, params = experts.forward, [*experts.parameters(recurse=False)]

    def pack(saved: Tensor) -> Any:
        for param in params:
            begin = saved.storage_offset() - param.storage_offset()
            same = saved.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
            if same and 0 <= begin < param.numel():
                return param, saved.size(), saved.stride(), begin
        return saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        param, size, stride, begin = packed
        return param.detach().as_strided(size, stride, param.storage_offset() + begin)

    def run(*inputs: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*inputs, **named)

    experts.forward = run


def router_names(model: nn.Module) -> list[str]:
    """Names of the parameters of the routers: of the classes whose outputs transformers records as
    `router_logits`.
    """
    models = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    recorded = [found["router_logits"] for found in models if "router_logits" in found]
    kinds = tuple({getattr(one, "target_class", one) for one in recorded})
    routers = [name for name, module in model.named_modules() if kinds and isinstance(module, kinds)]
    return [
        name
        for name, _ in model.named_parameters()
        if any(name.startswith(f"{router}.") for router in routers)
    ]


def frozen_names(config: Config, routers: Sequence[str]) -> list[str]:
    """Patterns of the names that the inner loop does not change: --freeze, or by default the routers of a
    mixture whose weights are all trained at fixed rates. A router that changes with a task sends tokens to
    experts that have not seen it. Without training only what is named is frozen: a model of such a training
    stores the names (fmmeta.json).

    routers: see `router_names`.
    """
    spec = find(config.algorithm)
    by_default = "freeze" in spec.supports and not spec.trains_nothing and config.inner_lr_learned == "no"
    if config.freeze or config.lora_r or not by_default:
        return [one for one in config.freeze if one != "none"]
    return [name.removeprefix("hf.") for name in routers]


def has_experts(hf_config: Any) -> bool:
    """Whether a configuration counts experts."""
    return any(getattr(hf_config, key, None) not in (None, 0, 1) for key in COUNTS)


def refuse_separate_experts(hf: Any, name: str) -> None:
    """Raise `UsageError` for a mixture whose experts are separate modules: ranks would run them in different
    orders. name: of the model.
    """
    if not fused_experts(hf):
        raise UsageError(
            f"model_name_or_path={name} is a mixture of experts ({hf.config.model_type}) whose experts"
            " transformers does not fuse, which is not supported; use a dense model, or a family such as"
            " qwen3_moe"
        )
