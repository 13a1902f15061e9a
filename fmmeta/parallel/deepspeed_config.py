"""Completes the user's DeepSpeed JSON: fills "auto", sets our keys, refuses what breaks meta-training.

Source of each rule: docs/architecture.md, "What DeepSpeed does by itself".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError

# block -> what to use instead. Dropped with a notice where every value in it is "auto".
OURS = {
    "optimizer": "--outer_optimizer, --outer_lr and --inner_lr",
    "scheduler": "--lr_scheduler_type and --warmup_steps",
    "gradient_clipping": "--max_grad_norm, which clips the meta-gradient",
    "train_batch_size": "--meta_batch_size, --n_way and --k_shot",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--micro_batch_size; the support set decides how many passes there are",
}
# block -> why it is refused whenever it is on
REFUSED = {
    "fp16": "loss scaling skips inner steps on its own; use bf16 or fp32",
    "amp": "Apex AMP scales losses on its own; use bf16 or fp32",
    "torch_autocast": "it changes precision behind the fp32 shards; use bf16",
    "elasticity": "DeepSpeed removed it",
    "compression_training": "it changes weights between steps",
    "data_efficiency": "it changes the data by step count, and inner steps would count",
    "curriculum_learning": "it changes the data by step count, and inner steps would count",
    "progressive_layer_drop": "it drops layers by step count, and inner steps would count",
    "eigenvalue": "it is tied to DeepSpeed's own training loop",
    "autotuning": "it starts separate runs; use --group_size auto",
    "tensor_parallel": "it is made by --tensor_parallel_size",
    "sequence_parallel_size": "it is not supported yet",
    "pipeline": "stages are made by --pipeline_stages",
    "hybrid_engine": "it is for RLHF generation",
    "zero_quantized_weights": "it makes passes inexact",
    "zero_quantized_gradients": "it makes passes inexact",
    "zero_quantized_nontrainable_weights": "it makes passes inexact",
    "zero_hpz_partition_size": "it keeps second copies of the weights that a restore does not reach",
    "mics_shard_size": "groups are made by --group_size",
    "zenflow": "it updates parts of the weights later",
    "super_offload": "it replaces the optimizer step",
}

# Blocks that change theta by rounding at most: how shards, buffers and logs are laid out.
LAYOUT = {
    "zero_optimization",
    "activation_checkpointing",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "flops_profiler",
    "comms_logger",
    "monitor_config",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "aio",
    "nebula",
    "checkpoint",
}
# Set by `complete`, whatever the file says.
REPLACED = {
    "bf16",
    "data_types",
    "communication_data_type",
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Settings of the DeepSpeed file that the rest of a run needs to know."""

    zero_stage: int
    bf16: bool
    offload: bool
    live: int = 10**9  # parameters that ZeRO 3 may hold whole at a time
    bucket: int = (
        5 * 10**8
    )  # gradients that are reduced at a time; 0: as many as the square of the hidden size
    sub_group: int = 10**9  # parameters of a shard that ZeRO 3 updates at a time
    offload_param: bool = False  # the shards of the weights too


def read(
    path: str | None, bf16: bool, notice: Callable[[str], None]
) -> tuple[dict[str, Any], DeepSpeedSettings]:
    """Read and check a DeepSpeed file; no file means ZeRO 0.

    Raises `UsageError` naming the key, its value and what to use. `notice` gets a line per dropped block.
    """
    if path:
        return check(load(path), Path(path).name, bf16, notice)
    return check({"zero_optimization": {"stage": 0}}, "the default", bf16, notice)


def check(
    config: dict[str, Any], name: str, bf16: bool, notice: Callable[[str], None]
) -> tuple[dict[str, Any], DeepSpeedSettings]:
    """The same for what a file holds; `name` is what messages call it. `config` is changed."""
    for key, instead in OURS.items():
        if key in config:
            value = config.pop(key)
            if not all_auto(value):
                raise UsageError(
                    f"deepspeed={name} sets {key}={short(value)}, which fmmeta owns; remove it and use"
                    f" {instead}"
                )
            notice(f"{name}: {key} is auto and left to fmmeta ({instead})")
    zero = config.setdefault("zero_optimization", {"stage": 0})
    if not isinstance(zero, dict):
        raise UsageError(f'deepspeed={name} sets zero_optimization={short(zero)}; write {{"stage": 2}}')
    for block in (config, zero):
        for key in [k for k in block if k in REFUSED]:
            if is_on(block[key]):
                raise UsageError(
                    f"deepspeed={name} sets {key}={short(block[key])}: {REFUSED[key]}; remove it"
                )
            del block[key]
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"deepspeed={name} sets zero_optimization.stage={short(stage)}; use 0, 1, 2 or 3")
    offload = check_offload(zero, stage, name)
    asked = block_of(config, "bf16", '{"enabled": true}', name).get("enabled", "auto")
    bf16 = bf16 if asked == "auto" else bool(asked)
    sizes = {
        "live": "stage3_max_live_parameters",
        "bucket": "reduce_bucket_size",
        "sub_group": "sub_group_size",
    }
    given = {field: int(zero[key]) for field, key in sizes.items() if zero.get(key, "auto") != "auto"}
    if zero.get("reduce_bucket_size") == "auto":
        given["bucket"] = 0
    return config, DeepSpeedSettings(stage, bf16, offload, offload_param="offload_param" in zero, **given)


def recorded(config: dict[str, Any], precision: DeepSpeedSettings) -> dict[str, Any]:
    """What a run's settings keep of a checked file: `precision` and what else changes theta, and the layout,
    which does not.
    """
    kept = {key: value for key, value in config.items() if key not in REPLACED and value != "auto"}
    return {
        "precision": "bf16" if precision.bf16 else "fp32",
        "deepspeed_values": {key: value for key, value in kept.items() if key not in LAYOUT},
        "deepspeed_layout": {key: value for key, value in kept.items() if key in LAYOUT},
    }


def for_pipeline(
    config: dict[str, Any], precision: DeepSpeedSettings, notice: Callable[[str], None]
) -> tuple[dict[str, Any], DeepSpeedSettings]:
    """The same file for a pipeline. Raises `UsageError` for what DeepSpeed's pipeline engine cannot do.

    ZeRO 0 in bf16 becomes ZeRO 1: DeepSpeed uses one wrapper (BF16_Optimizer) for both, and adds gradients up
    in fp32 in ZeRO 1 only. In fp32, ZeRO 1 computes no gradient norm: it would do so with one reduction over
    the stages per parameter group, and stages have different groups (only the last one has a head), so they
    would wait for each other for ever.
    """
    if precision.zero_stage > 1:
        raise UsageError(
            f"pipeline_stages does not go with ZeRO {precision.zero_stage}, which cuts what a stage computes"
            " with; use a DeepSpeed file with zero_optimization.stage 0 or 1"
        )
    if precision.offload:
        raise UsageError(
            "pipeline_stages does not go with offload_optimizer, which DeepSpeed's pipeline engine was not"
            " tested with; remove it, or use ZeRO 3 without stages"
        )
    if precision.bf16 and precision.zero_stage == 0:
        notice("ZeRO 0 in bf16 runs as ZeRO 1 in a pipeline, which adds gradients up in fp32")
        config = {**config, "zero_optimization": {**config["zero_optimization"], "stage": 1}}
        precision = replace(precision, zero_stage=1)
    if precision.zero_stage == 1 and not precision.bf16:
        config = {**config, "zero_optimization": {**config["zero_optimization"], "compute_grad_norm": False}}
    return config, precision


def for_tensor(precision: DeepSpeedSettings) -> None:
    """Raises `UsageError` for what was not tested around tensor parallelism."""
    if precision.zero_stage > 1 or precision.offload:
        what = "offload_optimizer" if precision.offload else f"ZeRO {precision.zero_stage}"
        raise UsageError(
            f"tensor_parallel_size does not go with {what}, which was not tested around it; use a DeepSpeed "
            "file with zero_optimization.stage 0 or 1 and no offload"
        )


def complete(config: dict[str, Any], precision: DeepSpeedSettings, hidden_size: int) -> dict[str, Any]:
    """Fill "auto" values and set what meta-training relies on.

    `hidden_size` sizes the ZeRO-3 buckets as HF does.
    """
    config = json.loads(json.dumps(config))
    zero = config["zero_optimization"]
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero.update({key: max(1, value) for key, value in sizes.items() if zero.get(key) == "auto"})
    zero["stage3_gather_16bit_weights_on_model_save"] = False
    config["bf16"] = {"enabled": precision.bf16}
    drop_auto(config)
    config.update(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        gradient_clipping=0.0,  # DeepSpeed clips at 1.0 unless told otherwise, inner steps included
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
        communication_data_type="fp32",
        steps_per_print=None,
    )
    config.pop("data_types", None)
    if precision.zero_stage > 0:  # ZeRO 0 refuses to accumulate in another type than the model's
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def load(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise UsageError(f"deepspeed={path} is not a file; see ds_configs/ for ready ones")
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"deepspeed={path} is not JSON ({error}); fix the file") from None
    if not isinstance(config, dict):
        raise UsageError(f"deepspeed={path} holds no JSON object; see ds_configs/ for ready ones")
    return config


def check_offload(zero: dict[str, Any], stage: int, name: str) -> bool:
    """Return whether anything is offloaded to the CPU; refuse NVMe and partial offload."""
    on = False
    for key in ("offload_optimizer", "offload_param"):
        block = block_of(zero, key, '{"device": "cpu"}', name)
        device = block.get("device", "none")
        if device in (None, "none", "auto"):
            zero.pop(key, None)
            continue
        if device != "cpu":
            raise UsageError(
                f"deepspeed={name} sets {key}.device={device}; shards must stay in memory: use cpu or none"
            )
        if block.get("ratio", 1.0) != 1.0:
            raise UsageError(
                f"deepspeed={name} sets {key}.ratio={block['ratio']}, which needs DeepSpeed's own Adam;"
                " use 1.0"
            )
        least = 3 if key == "offload_param" else 1
        if stage < least:
            raise UsageError(
                f"deepspeed={name} sets {key} at zero_optimization.stage={stage}; use stage {least} or more"
            )
        on = True
    return on


def block_of(parent: dict[str, Any], key: str, example: str, name: str) -> dict[str, Any]:
    block = parent.get(key) or {}
    if not isinstance(block, dict):
        raise UsageError(f"deepspeed={name} sets {key}={short(block)}; write {example}")
    return block


def all_auto(value: Any) -> bool:
    if isinstance(value, dict):
        return all(key == "type" or all_auto(item) for key, item in value.items()) and "auto" in json.dumps(
            value
        )
    return value == "auto"


def is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled", bool(value)) not in (False, "auto")
    return value not in (False, None, "auto", 0, 1, -1) or value is True


def drop_auto(block: dict[str, Any]) -> None:
    for key, value in list(block.items()):
        if value == "auto":
            del block[key]
        elif isinstance(value, dict):
            drop_auto(value)


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
