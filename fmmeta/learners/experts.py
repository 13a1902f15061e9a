"""Mixtures of experts: the fused expert modules and the routers of a built model.

They are found by what transformers marks them with, not by names of families. A fused module computes all
its experts at once from parameters with a dimension of experts: `gate_up_proj` [E, 2 I, H], `down_proj`
[E, H, I].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
"""In configurations of mixtures."""


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules of classes that transformers' `use_experts_implementation` has made, or that hold
    fused experts without it (Llama 4).
    """
    return {
        name: module
        for name, module in model.named_modules()
        if "_is_expert_parallel" in vars(module) or "gate_up_proj" in module._parameters
    }


def release_weights(experts: nn.Module) -> None:
    """Let the backward pass of a module read its weights from its parameters. Views of them, which torch
    saves for products, would keep what ZeRO 3 gathers: the experts of all layers at once.
    """
    forward, params = experts.forward, [*experts.parameters(recurse=False)]

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        size, stride = saved.size(), saved.stride()
        for param in params:
            begin = saved.storage_offset() - param.storage_offset()
            same = saved.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
            if same and 0 <= begin < param.numel():
                return lambda: param.detach().as_strided(size, stride, param.storage_offset() + begin)
        return lambda kept=saved: kept

    def run(*inputs: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed()):
            return forward(*inputs, **named)

    experts.forward = run


def router_names(model: nn.Module) -> list[str]:
    """Names of the parameters of the routers: of the classes whose outputs transformers records as
    `router_logits`.
    """
    models = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    recorded = [found["router_logits"] for found in models if "router_logits" in found]
    kinds = tuple({getattr(one, "target_class", one) for one in recorded})
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        for own, _ in module.named_parameters()
    ]


def has_experts(hf_config: Any) -> bool:
    """Whether a configuration counts experts."""
    return any(getattr(hf_config, key, None) not in (None, 0, 1) for key in COUNTS)


def experts_per_token(hf_config: Any) -> int:
    """Experts that a token is sent to; 0 for a dense model."""
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k") if has_experts(hf_config) else ()
    return next((count for key in keys if isinstance(count := getattr(hf_config, key, None), int)), 0)


def check_mixture(hf: Any, config: Config, router_loss: bool) -> None:
    """Raise `UsageError` for a mixture whose experts are separate modules, which ranks would run in different
    orders, and for settings that its `router_loss` does not go with: it depends on all rows of a pass.
    """
    name = f"model_name_or_path={config.model_name_or_path}"
    others = {
        f"task_type={config.task_type}": not (config.learner.generates and config.learner.plain),
        f"pipeline_stages={config.pipeline_stages}": config.pipeline_stages > 1,
        f"tasks_per_pass={config.tasks_per_pass}": config.tasks_per_pass != "1",
        f"packing={config.packing}": config.packing,
        f"{hf.config.model_type}, which computes none,": not hasattr(hf, "router_aux_loss_coef"),
    }
    refuse_first(
        [
            (
                not fused_experts(hf),
                f"{name} is a mixture of experts ({hf.config.model_type}) whose experts transformers does not"
                " fuse, which is not supported; use a dense model, or a family such as qwen3_moe",
            ),
            *(
                (
                    router_loss and holds,
                    f"{given} does not go with the loss of routers that {name} asks for; set"
                    " output_router_logits to false in its config.json",
                )
                for given, holds in others.items()
            ),
        ]
    )
