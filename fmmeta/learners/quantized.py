"""4-bit and 8-bit bases under adapters (bitsandbytes: NF4, FP4, int8): which are trained, how they compute,
and the bytes that they take.

    y = x W^T + (alpha / r) x A^T B^T        W constant, dequantised in each pass; A, B trained

Dettmers et al. 2023 (arXiv 2305.14314), equation 5. The product with W is one function, whose derivative is
the same function of the transposed W: gradients are those of the dequantised base, and Hessian products are
exact. The int8 products of activations of LLM.int8() are not used: their rounding has no derivative. Only
this module imports bitsandbytes.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import usage_errors
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config

METHODS = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def settings_of(config: Config, hf_config: Any) -> dict[str, Any]:
    """How the base is quantised: the `quantization_config` of the checkpoint, or NF4 by --load_in_4bit; empty
    if it is not.
    """
    given = {"quant_method": METHODS[0], **NF4} if config.load_in_4bit else {}
    found = getattr(hf_config, "quantization_config", None) or given
    return found if isinstance(found, dict) else found.to_dict()


def check_kind(name: str, config: Config, hf_config: Any) -> None:
    """Raise `UsageError` for a quantised base that cannot be trained under adapters."""
    if not (settings := settings_of(config, hf_config)):
        return
    stored = getattr(hf_config, "quantization_config", None) is not None
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    storage = str(settings.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    where = f"model_name_or_path={name} is quantised by {method}" if stored else "load_in_4bit=True"
    refuse_first(
        [
            (
                method not in METHODS,
                f"{where}, through which nothing is trained here; give the checkpoint that is not quantised,"
                " with --lora_r 8 --load_in_4bit true, or one of bitsandbytes",
            ),
            (storage != "uint8", f"{where} with bnb_4bit_quant_storage={storage}; store it with uint8"),
            (stored and config.load_in_4bit, f"load_in_4bit=True, and {where} already; leave it out"),
        ]
    )
    with usage_errors(f"{where} needs bitsandbytes", "pip install 'fmmeta[quantized]'"):
        import bitsandbytes  # noqa: F401


def check_use(config: Config, hf_config: Any, zero_stage: int = 0, trains: bool = True) -> None:
    """Raise `UsageError` for what a quantised base does not go with. trains: whether an inner loop or an
    outer step changes weights.
    """
    if not settings_of(config, hf_config):
        return
    given = f"model_name_or_path={config.model_name_or_path} with a quantised base"
    refuse_first(
        [
            (
                trains and not config.lora_r,
                f"lora_r=0: the weights of {given} cannot be trained; give --lora_r 8, or the full model",
            ),
            (
                config.lora_merge,
                f"lora_merge=True: {given} takes no sums; leave it out, and merge into the full model",
            ),
            *(
                (holds, f"{name} does not split {given}; use ZeRO 0 to 2, or the full model")
                for name, holds in (
                    (f"ZeRO {zero_stage}", zero_stage == 3),
                    (f"pipeline_stages={config.pipeline_stages}", config.pipeline_stages > 1),
                    (f"tensor_parallel_size={config.tensor_parallel_size}", config.tensor_parallel_size > 1),
                )
            ),
        ]
    )


class Product(torch.autograd.Function):
    """x W^T, or x W if `turned`, of a quantised W [out, in], of which no dequantised copy is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, turned: bool) -> Tensor:
        ctx.layer, ctx.turned = layer, turned
        weight = dequantised(layer).to(x.dtype)
        return x @ (weight if turned else weight.T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Product.apply(grads[0], ctx.layer, not ctx.turned), None, None


def dequantised(layer: Any) -> Tensor:
    """The weight [out, in] of a quantised layer."""
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    if hasattr(layer, "state"):  # int8: a scale for each row
        scale = layer.state.SCB if weight.SCB is None else weight.SCB
        return weight.data * (scale / 127)[:, None]
    return dequantize_4bit(weight.data, weight.quant_state)


def forward(layer: Any, x: Tensor) -> Tensor:
    """The output of a quantised layer, in the dtype of its input."""
    y = Product.apply(x, layer, False)
    return y if layer.bias is None else y + layer.bias.to(x.dtype)


def replace_products(hf: Any) -> None:
    """Let the quantised layers of a loaded model compute by `Product`."""
    import bitsandbytes

    for module in hf.modules():
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            kind: Any = type(type(module).__name__, (type(module),), {"forward": forward})
            module.__class__ = kind


def mark(hf: Any, settings: dict[str, Any]) -> None:
    """Set `packed_bytes` of the weights of a model on the meta device that are quantised when it is loaded:
    bytes with their scales.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer, twin = AutoHfQuantizer.from_config(settings, pre_quantized=False), copy.deepcopy(hf)
    quantizer.preprocess_model(twin, device_map=None)
    for name, param in hf.named_parameters():
        if quantizer.param_needs_quantization(twin, name):
            param.packed_bytes = packed_bytes(settings, *param.shape)


def packed_bytes(settings: dict[str, Any], rows: int, columns: int) -> int:
    """Bytes of a weight with its scales: of int8 one in fp32 for each row; of 4 bits one in fp32 for 64
    weights, or (double quantisation) a byte, and a scale for 256 of these with a table; and the 16 values.
    """
    if settings.get("load_in_8bit"):
        return rows * columns + 4 * rows
    blocks = -(-rows * columns // 64)
    scales = (
        blocks - blocks // -256 * 4 + 4 * 256 if settings.get("bnb_4bit_use_double_quant") else 4 * blocks
    )
    return -(-rows * columns // 2) + scales + 4 * 16
