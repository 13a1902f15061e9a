"""Tensor parallelism: an explicit plan of the weights that DeepSpeed's AutoTP splits.

    column   rows of the weight (output features) are split: queries, keys, values, first MLP projection
    row      columns of the weight (input features) are split: output projections of attention and MLP;
             their products are summed over the ranks
    partial  replicated, but applied to the rank's own heads; gradients are summed (Qwen3's query norm)

All other weights (embeddings, norms, heads) are replicated.
Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

import re
from collections.abc import Callable
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.parallel.param_map import TensorSlice

LLAMA = {
    "column": r".*\.(q|k|v|gate|up)_proj\.weight$",
    "row": r".*\.(o|down)_proj\.weight$",
    "partial": r".*\.(q|k)_norm\.weight$",
}
PLANS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA)


def tensor_parallel_block(hf_config: Any, size: int) -> dict[str, Any]:
    """The `tensor_parallel` block of a DeepSpeed file.

    Raises `UsageError` for a model that cannot be cut into `size` equal parts.
    """
    if hf_config.model_type not in PLANS:
        raise UsageError(
            f"tensor_parallel_size={size}: model_type={hf_config.model_type} has no plan; use one"
            f" of {', '.join(PLANS)}, or pipeline stages or ZeRO 3 for this one"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(hf_config, name) % size:
            raise UsageError(
                f"tensor_parallel_size={size} does not divide {name}={getattr(hf_config, name)} of the model;"
                " use a divisor of it"
            )
    plan = PLANS[hf_config.model_type]
    specs: list[dict[str, Any]] = [
        {"patterns": [plan[kind]], "partition_type": kind} for kind in ("column", "row")
    ]
    specs.append({"patterns": [plan["partial"]], "partition_type": "skip", "grad_allreduce": True})
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def cut_patterns(hf_config: Any) -> Callable[[str], bool]:
    """A function of a parameter's name: whether its weight is split."""
    plan = PLANS[hf_config.model_type]
    return lambda name: any(re.match(plan[kind], name) for kind in ("column", "row"))


def slice_of(whole: tuple[int, ...], part: tuple[int, ...], rank: int) -> TensorSlice | None:
    """The part of a parameter that a tensor-parallel rank holds, given both shapes; None if it holds all."""
    if whole == part:
        return None
    (dim,) = [i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return TensorSlice(dim, rank * part[dim], part[dim])
