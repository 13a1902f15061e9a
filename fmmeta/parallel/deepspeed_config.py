"""Reads the user's DeepSpeed JSON, refuses what breaks meta-training, fills in "auto" and sets fmmeta's keys.

Source of each rule: docs/explanation/architecture.md, "What DeepSpeed does by itself".
"""

import difflib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.install import shipped
from fmmeta.common.progress import Warn
from fmmeta.common.text import nearest

# Block -> what to use instead. A block is dropped with a notice if every value in it is "auto".
OURS = {
    "optimizer": "--outer_optimizer, --outer_lr and --inner_lr",
    "scheduler": "--lr_scheduler_type and --warmup_steps",
    "gradient_clipping": "--max_grad_norm, which clips the meta-gradient",
    "train_batch_size": "--meta_batch_size, --n_way and --k_shot",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--micro_batch_size; the support set decides how many passes there are",
}
# Values beside "auto" that choose nothing: the class, a start at the first step, kernels.
SAYS_NOTHING: dict[str, list[Any]] = {
    "last_batch_iteration": [-1],
    "torch_adam": [True, False],
    "adam_w_mode": [True],
}
# Block -> why it is refused whenever it is enabled.
REFUSED = {
    "fp16": "loss scaling skips inner steps; use bf16 or fp32",
    "amp": "Apex AMP scales losses; use bf16 or fp32",
    "torch_autocast": "it changes precision behind the fp32 shards; use bf16",
    "elasticity": "DeepSpeed removed it",
    "compression_training": "it changes weights between steps",
    "data_efficiency": "it changes the data by step count, and inner steps would count",
    "curriculum_learning": "it changes the data by step count, and inner steps would count",
    "progressive_layer_drop": "it drops layers by step count, and inner steps would count",
    "eigenvalue": "it needs DeepSpeed's training loop",
    "autotuning": "it starts separate runs; use --group_size auto",
    "tensor_parallel": "it is made by --tensor_parallel_size",
    "sequence_parallel_size": "it is not supported yet",
    "expert_parallel": "it replaces the modules of experts, and the names of their weights; use ZeRO 3",
    "pipeline": "stages are made by --pipeline_stages",
    "hybrid_engine": "it is for RLHF generation",
    "zero_quantized_weights": "it makes passes inexact",
    "zero_quantized_gradients": "it makes passes inexact",
    "zero_quantized_nontrainable_weights": "it makes passes inexact",
    "weight_quantization": "it makes passes inexact",
    "zero_hpz_partition_size": "it keeps second copies of the weights that a restore does not reach",
    "mics_shard_size": "groups are made by --group_size",
    "zenflow": "it updates parts of the weights later",
    "super_offload": "it replaces the optimizer step",
    "nebula": "DeepSpeed removed it",
    "sparse_gradients": "DeepSpeed removed it",
    "datastates_ckpt": "fmmeta writes checkpoints itself",
    "stage3_gather_fp16_weights_on_model_save": "fmmeta gathers what it writes",
    "cpu_offload": 'it is the old name of "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'it is the old name of "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'it is the old name of "pin_memory": true inside offload_optimizer',
}

# Blocks that change theta by rounding at most: shards, buffers and logs.
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
    "checkpoint",
}
# Set by `complete`, whatever the file contains.
REPLACED = {
    "bf16",
    "data_types",
    "communication_data_type",
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
# Other keys that DeepSpeed reads.
OTHERS = {
    "allgather_size",
    "compile",
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
    "log_level",
    "managed_gradient_accumulation",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "timers",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
}
KNOWN = sorted({*OURS, *REFUSED, *LAYOUT, *REPLACED, *OTHERS})
# Key -> why it has no effect, or what to use. It is for parts of DeepSpeed that do not run, or `complete`
# sets it.
NO_EFFECT = {
    "activation_checkpointing": "use --gradient_checkpointing",
    "aio": "shards stay in memory",
    "checkpoint": "fmmeta writes checkpoints itself",
    "communication_data_type": "gradients are reduced in fp32",
    "compile": "use --compile",
    "data_types": "gradients are accumulated in fp32",
    "dataloader_drop_last": "fmmeta reads the data itself",
    "monitor_config": "write its blocks by themselves, such as tensorboard",
}
# Remedy -> the type of the values of keys, beside "auto". DeepSpeed does not check them, or names no key.
KINDS: dict[str, tuple[type, Collection[str]]] = {
    "write a block, {...}": (
        dict,
        {
            *("activation_checkpointing", "aio", "checkpoint", "checkpoint.parallel_write", "comet"),
            *("comms_logger", "compile", "csv_monitor", "data_types", "flops_profiler"),
            *("monitor_config", "tensorboard", "timers", "timers.throughput", "wandb"),
        },
    ),
    "use true or false": (
        bool,
        {
            *("wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients"),
            *("disable_allgather", "disable_python_gc", "managed_gradient_accumulation"),
            *("dataloader_drop_last", "use_data_before_expert_parallelism"),
            *("flops_profiler.enabled", "flops_profiler.detailed"),
        },
    ),
    "use a whole number": (
        int,
        {
            *("flops_profiler.profile_step", "flops_profiler.module_depth", "flops_profiler.top_modules"),
            "vocabulary_size",
        },
    ),
    "write a text": (str, {"checkpoint.tag_validation"}),
}
MISSPELT = 0.85  # difflib's ratio to a known key from which an unknown one is refused


OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}  # block -> lowest ZeRO stage that it works with
SIZES = {
    "live": "stage3_max_live_parameters",
    "bucket": "reduce_bucket_size",
    "sub_group": "sub_group_size",
}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed file that was checked, and what the rest of a run reads from it."""

    zero_stage: int
    bf16: bool
    offload: bool
    live: int = 10**9  # parameters that ZeRO 3 may gather at a time
    bucket: int = 5 * 10**8  # gradients that are reduced at a time; 0: the square of the hidden size
    sub_group: int = 10**9  # parameters of a shard that ZeRO 3 updates at a time
    offload_param: bool = False  # the shards of the weights too
    file: dict[str, Any] = field(default_factory=dict, compare=False)  # with its "auto" values

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp32"

    def recorded(self) -> dict[str, Any]:
        """What run.json stores: what changes theta, and apart from it the layout, which does not."""
        kept = {key: value for key, value in self.file.items() if key not in REPLACED and value != "auto"}
        return {
            "precision": self.precision,
            "deepspeed_values": {key: value for key, value in kept.items() if key not in LAYOUT},
            "deepspeed_layout": {key: value for key, value in kept.items() if key in LAYOUT},
        }

    def with_zero(self, **more: Any) -> "DeepSpeedSettings":
        """The same with other values in the block of ZeRO."""
        zero = {**self.file.get("zero_optimization", {}), **more}
        return replace(self, file={**self.file, "zero_optimization": zero})

    def of_engine(self) -> "DeepSpeedSettings":
        """The settings that DeepSpeed gets: in bf16, ZeRO 0 runs as ZeRO 1.

        ZeRO 0 accumulates gradients in bf16, and waits for the device once per parameter.
        """
        if self.zero_stage or not self.bf16:
            return self
        return replace(self.with_zero(stage=1), zero_stage=1)

    def complete(self, hidden_size: int) -> dict[str, Any]:
        """The file for DeepSpeed: "auto" filled in (buckets as in transformers), fmmeta's keys set."""
        sizes = {
            "reduce_bucket_size": hidden_size * hidden_size,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        zero = self.file["zero_optimization"]
        zero = zero | {key: max(1, size) for key, size in sizes.items() if zero.get(key) == "auto"}
        zero["stage3_gather_16bit_weights_on_model_save"] = False
        kept = {key: value for key, value in self.file.items() if key not in REPLACED}
        filled = without_auto(kept | {"zero_optimization": zero})
        if self.zero_stage > 0:  # ZeRO 0 accumulates in the model's type only
            filled["data_types"] = {"grad_accum_dtype": "fp32"}
        timers = filled.get("timers", {})
        return filled | {
            "bf16": {"enabled": self.bf16},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # DeepSpeed's default of 1.0 would clip inner steps
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
            "steps_per_print": None,
            # it waits for the device twice in each step
            "timers": {**timers, "throughput": {"enabled": False, **timers.get("throughput", {})}},
        }


def quiet(text: str) -> None:
    """Drop a notice."""


def read(path: str | None, bf16: bool, notice: Callable[[str], None] = quiet) -> DeepSpeedSettings:
    """Read and check a DeepSpeed file, or the shipped file of this name; no file means ZeRO 0. As DeepSpeed
    reads it, it may hold comments and commas at the end.

    bf16: the precision if the file leaves it open. notice: gets a line per dropped block. Raises `UsageError`
    naming the key, its value and what to use.
    """
    if not path:
        return check({}, "the default", bf16, notice)
    found = find(path)
    import hjson

    with usage_errors(f"deepspeed={path} is not JSON", "fix the file"):
        text = found.read_text(encoding="utf-8")
        try:
            file = json.loads(text, object_pairs_hook=without_repeats)
        except json.JSONDecodeError:  # comments and trailing commas, as DeepSpeed reads them
            file = hjson.loads(text, object_pairs_hook=without_repeats)
    if not isinstance(file, dict) or (not file and "{" not in text):
        what = "is empty" if isinstance(file, dict) else "holds no JSON object"
        raise UsageError(
            f'deepspeed={path} {what}; write one, such as {{"zero_optimization": {{"stage": 2}}}}'
        )
    return check(file, found.name, bf16, notice)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. Raises `ValueError` for a key that is in it twice."""
    block = dict[str, Any]()
    for key, value in pairs:
        if key in block:
            raise ValueError(f"{key} is in one block twice")
        block[key] = value
    return block


def find(path: str) -> Path:
    """The file at this path; else, for a name such as `zero2`, the shipped file. Raises `UsageError`."""
    if Path(path).is_file():
        return Path(path)
    ready = {file.stem: file for file in sorted(shipped("ds_configs").glob("*.json"))}
    if path not in ready:
        raise UsageError(
            f"deepspeed={path} is not a file; give the path of a DeepSpeed JSON file, or a name of"
            f" {', '.join(ready)}"
        )
    return ready[path]


def check(
    file: dict[str, Any], name: str, bf16: bool, notice: Callable[[str], None] = quiet
) -> DeepSpeedSettings:
    """`read` for the contents of a file, which are changed. name: of the file, for messages."""
    # DeepSpeed ignores them silently
    for key in [key for key in file if key not in KNOWN and not key.startswith("_")]:
        if close := difflib.get_close_matches(key, KNOWN, 1, MISSPELT):
            raise refusal(name, key, file[key], f", which is unknown; write {close[0]}")
        notice(Warn(f"{name}: {key} is unknown and has no effect{nearest(key, KNOWN)}"))
    check_kinds(file, name)
    for key in [key for key in NO_EFFECT if asks_for(file.get(key))]:
        notice(Warn(f"{name}: {key} has no effect; {NO_EFFECT[key]}"))
    for key in [key for key in OURS if key in file]:
        value = file.pop(key)
        if not all_auto(value):
            raise refusal(name, key, value, f", which fmmeta owns; remove it and use {OURS[key]}")
        notice(f"{name}: {key} is auto and left to fmmeta ({OURS[key]})")
    zero = file.setdefault("zero_optimization", {"stage": 0})
    if not isinstance(zero, dict):
        raise refusal(name, "zero_optimization", zero, '; write {"stage": 2}')
    for block in (file, zero):
        for key in [key for key in block if key in REFUSED]:
            if is_on(value := block.pop(key)):
                raise refusal(name, key, value, f": {REFUSED[key]}; remove it")
    if (operation := file.get("gradient_allreduce_op", "mean")) != "mean":
        why = ": the rows of a rank are weighted for a mean, and inner steps would be longer"
        raise refusal(name, "gradient_allreduce_op", operation, f"{why}; use mean")
    stage = zero.setdefault("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise refusal(name, "zero_optimization.stage", stage, "; use 0, 1, 2 or 3")
    offload = check_offload(zero, stage, name)
    enabled = block_of(file, "bf16", '{"enabled": true}', name).get("enabled", "auto")
    if enabled != "auto" and not isinstance(enabled, bool):
        raise refusal(name, "bf16.enabled", enabled, '; use true, false or "auto"')
    given = {}
    for size, key in SIZES.items():
        if (value := zero.get(key, "auto")) != "auto":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**63:
                raise refusal(name, f"zero_optimization.{key}", value, "; use a number of elements, or auto")
            given[size] = int(value)
    if zero.get("reduce_bucket_size") == "auto":
        given["bucket"] = 0
    bf16 = bf16 if enabled == "auto" else enabled
    return DeepSpeedSettings(stage, bf16, offload, offload_param="offload_param" in zero, file=file, **given)


def with_model_ranks(settings: DeepSpeedSettings, stages: int, tensor: int) -> DeepSpeedSettings:
    """The settings inside pipeline stages or tensor ranks. Raises `UsageError` for what does not work there.

    In a pipeline, ZeRO 1 in fp32 computes no gradient norm: it would take one reduction over the stages per
    parameter group, and since only the last stage has a head, stages with different numbers of groups would
    wait for each other forever.
    """
    if stages * tensor == 1:
        return settings
    flag, size = ("pipeline_stages", stages) if stages > 1 else ("tensor_parallel_size", tensor)
    if settings.zero_stage > 1 or settings.offload:
        what = "offload_optimizer" if settings.offload else f"ZeRO {settings.zero_stage}"
        raise UsageError(
            f"{flag}={size} does not work with {what}; use a DeepSpeed file with"
            f" zero_optimization.stage 0 or 1 and no offload, or leave {flag} out"
        )
    if stages > 1 and settings.zero_stage == 1 and not settings.bf16:
        return settings.with_zero(compute_grad_norm=False)
    return settings


def check_kinds(file: dict[str, Any], name: str) -> None:
    """Refuse values that are not of the kind that their key needs."""
    blocks = {key: block for key, block in file.items() if isinstance(block, dict)}
    inside = {f"{key}.{one}": value for key, block in blocks.items() for one, value in block.items()}
    for remedy, (kind, keys) in KINDS.items():
        for key, value in {**file, **inside}.items():
            fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
            if key in keys and value != "auto" and not fits:
                raise refusal(name, key, value, f"; {remedy}")


def check_offload(zero: dict[str, Any], stage: int, name: str) -> bool:
    """Whether anything is offloaded to the CPU. Refuses NVMe and partial offload; drops disabled blocks."""
    for key, least in OFFLOADS.items():
        block = block_of(zero, key, '{"device": "cpu"}', name)
        device, ratio = block.get("device", "none"), block.get("ratio", 1.0)
        if device in (None, "none", "auto"):
            zero.pop(key, None)
        elif device != "cpu":
            raise refusal(name, f"{key}.device", device, "; shards must stay in memory: use cpu or none")
        elif ratio != 1.0:
            raise refusal(name, f"{key}.ratio", ratio, ", which needs DeepSpeed's Adam; use 1.0")
        elif stage < least:
            raise refusal(name, "zero_optimization.stage", stage, f" with {key}; use stage {least} or more")
    return any(key in zero for key in OFFLOADS)


def block_of(parent: dict[str, Any], key: str, example: str, name: str) -> dict[str, Any]:
    block = parent.get(key)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise refusal(name, key, block, f"; write {example}")
    return block


def refusal(name: str, key: str, value: Any, why: str) -> UsageError:
    """The error for a value of the file. why: the rest of the line, with what to do."""
    text = json.dumps(value)
    return UsageError(f"deepspeed={name} sets {key}={text if len(text) <= 60 else text[:57] + '...'}{why}")


def all_auto(value: Any) -> bool:
    """Whether a value is "auto", or a block with at least one "auto" and otherwise values of SAYS_NOTHING."""
    if isinstance(value, dict):
        asked = [one for key, one in value.items() if key != "type" and one not in SAYS_NOTHING.get(key, [])]
        return "auto" in json.dumps(value) and all(all_auto(one) for one in asked)
    return value == "auto"


def asks_for(value: Any) -> bool:
    """Whether a value, or one in its block, is more than a default."""
    return any(map(asks_for, value.values())) if isinstance(value, dict) else is_on(value)


def is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled", bool(value)) not in (False, "auto")
    return value not in (False, None, "auto", 0, 1, -1) or value is True


def without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """A copy without the values that are still "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in block.items()
        if value != "auto"
    }
