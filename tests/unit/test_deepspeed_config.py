"""DeepSpeed files of transformers work; keys that break meta-training are refused by name."""

import importlib
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fmmeta.common.progress import Warn
from fmmeta.config.settings import Config
from fmmeta.parallel.deepspeed_config import (
    KNOWN,
    NO_EFFECT,
    OURS,
    REFUSED,
    DeepSpeedSettings,
    read,
    with_model_ranks,
)
from fmmeta.parallel.layout import ParallelPlan
from fmmeta.parallel.process_groups import chosen_bf16
from fmmeta.parallel.workers.zero import refusals
from tests.support.helpers import ROOT
from tests.support.messages import check_message, refusal

OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}
HF = {  # a typical file of transformers' documentation
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.fixture
def read_file(tmp_path):
    """read_file(content, bf16, notice): the settings of a file of this content, text or an object."""

    def written(content: Any, bf16: bool = False, notice: Any = pytest.fail) -> DeepSpeedSettings:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read(str(path), bf16, notice)

    return written


def test_file_of_transformers_works_unchanged(read_file):
    notices: list[str] = []
    precision = read_file(HF, True, notices.append)
    assert precision == DeepSpeedSettings(zero_stage=3, bf16=True, offload=False, bucket=0)
    for line, (key, instead) in zip(notices, OURS.items(), strict=True):
        check_message(line, f"ds.json: {key} is auto", f"({instead})")
    done = precision.complete(hidden_size=64)
    assert "auto" not in json.dumps(done)
    assert not {"optimizer", "scheduler", "fp16", "train_batch_size"} & set(done)
    wanted = {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
        "sub_group_size": 1e9,  # the user's own values stay
        "overlap_comm": True,
        "offload_optimizer": None,
        "offload_param": None,
    }
    assert {key: done["zero_optimization"].get(key) for key in wanted} == wanted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_completed_file_leaves_gradients_alone(stage):
    own = {"gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": "bf16"}}
    given = {"zero_optimization": {"stage": stage}, **own}
    done = DeepSpeedSettings(stage, False, False, file=given).complete(8)
    wanted = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "communication_data_type": "fp32",
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"} if stage else None,
    }
    assert {key: done.get(key) for key in wanted} == wanted
    assert given == {"zero_optimization": {"stage": stage}, **own}  # the argument is not touched
    assert own["data_types"] == {"grad_accum_dtype": "bf16"}


@pytest.mark.parametrize(
    ("file", "flag", "settings"),
    [
        ({}, True, DeepSpeedSettings(0, True, False)),
        ({}, False, DeepSpeedSettings(0, False, False)),
        ({"bf16": {"enabled": "auto"}}, True, DeepSpeedSettings(0, True, False)),
        ({"bf16": {"enabled": True}}, False, DeepSpeedSettings(0, True, False)),
        ({"bf16": {"enabled": False}}, True, DeepSpeedSettings(0, False, False)),
        ({"bf16": None}, True, DeepSpeedSettings(0, True, False)),
        ({"gradient_allreduce_op": "mean"}, False, DeepSpeedSettings(0, False, False)),
        ({"zero_optimization": {}}, False, DeepSpeedSettings(0, False, False)),
        ({"zero_optimization": {"overlap_comm": False}}, False, DeepSpeedSettings(0, False, False)),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5e7}},
            False,
            DeepSpeedSettings(3, False, False, 50_000_000),
        ),
        (
            {"zero_optimization": {"stage": 3, **OFFLOAD}},
            False,
            DeepSpeedSettings(3, False, True, offload_param=True),
        ),
    ],
)
def test_settings_are_read_from_file_and_flag(read_file, file, flag, settings):
    found = read_file(file, flag)
    assert found == settings
    zero = found.complete(64)["zero_optimization"]
    assert (zero["stage"], "offload_optimizer" in zero) == (settings.zero_stage, False)
    assert ("offload_param" in zero) == settings.offload_param


@pytest.mark.parametrize(
    ("settings", "device", "native", "others", "bf16"),
    [
        ({}, "cuda", True, True, True),
        ({}, "cuda", True, False, False),  # another rank has none
        ({}, "cuda", False, True, False),  # torch would emulate it
        ({}, "cpu", True, True, False),
        ({"bf16": True}, "cpu", False, False, True),
        ({"bf16": False}, "cuda", True, True, False),
        ({"algorithm": "maml"}, "cuda", True, True, False),  # finite differences
        ({"algorithm": "imaml"}, "cuda", True, True, False),
        ({"algorithm": "maml", "lora_r": 2}, "cuda", True, True, True),
        ({"algorithm": "maml", "lora_r": 2, "second_order": "differences"}, "cuda", True, True, False),
        ({"algorithm": "maml", "lora_r": 2, "tensor_parallel_size": 2}, "cuda", True, True, False),
        ({"algorithm": "maml", "lora_r": 2, "zero_stage": 3}, "cuda", True, True, False),
    ],
)
def test_bf16_is_chosen_where_every_gpu_has_it(monkeypatch, settings, device, native, others, bf16):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation
    )
    comm: Any = SimpleNamespace(gather=lambda here: [here, others], raise_on_all=lambda doing: nullcontext())
    stage = settings.get("zero_stage", 0)
    config = Config(**{name: value for name, value in settings.items() if name != "zero_stage"})
    assert chosen_bf16(config, stage, comm, torch.device(device)) is bf16


def test_no_file_is_zero_0():
    assert read(None, False, pytest.fail).file == {"zero_optimization": {"stage": 0}}


VALUES = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("key", OURS)
def test_keys_that_fmmeta_sets_are_refused(read_file, key):
    shown = json.dumps(VALUES[key])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    parts = ("deepspeed=ds.json", f"{key}={shown}", f"remove it and use {OURS[key]}")
    check_message(refusal(read_file, {key: VALUES[key]}), *parts)


def test_optimizer_with_one_explicit_value_is_refused(read_file):
    mixed = {**HF["optimizer"], "params": {**HF["optimizer"]["params"], "lr": 3e-5}}
    assert "sets optimizer=" in refusal(read_file, {**HF, "optimizer": mixed}, notice=print)


BLOCKS = {
    "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2,
    "zero_hpz_partition_size": 2,
    "mics_shard_size": 4,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_quantized_nontrainable_weights": True,
    "cpu_offload": True,
    "cpu_offload_param": True,
    "datastates_ckpt": {"host_cache_size": 1},
}


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("inside_zero", [False, True])
def test_features_that_break_meta_training_are_refused(read_file, key, inside_zero):
    value = BLOCKS.get(key, {"enabled": True})
    file = {"zero_optimization": {"stage": 2, key: value}} if inside_zero else {key: value}
    check_message(refusal(read_file, file), "deepspeed=ds.json", f"{key}={json.dumps(value)}", "remove it")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp16", {"enabled": False}),
        ("fp16", {"enabled": "auto"}),
        ("fp16", {}),
        ("amp", None),
        ("elasticity", {"enabled": False}),
        ("sequence_parallel_size", 1),
        ("zero_hpz_partition_size", 1),
        ("mics_shard_size", -1),
        ("zero_quantized_weights", False),
        ("nebula", {"enabled": False}),
        ("cpu_offload", False),
    ],
)
def test_disabled_features_are_dropped(read_file, key, value):
    file = {key: value, "zero_optimization": {"stage": 1, key: value}}
    assert read_file(file).file == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("zero", "setting", "remedy"),
    [
        (2, "zero_optimization=2", 'write {"stage": 2}'),
        ({"stage": 4}, "zero_optimization.stage=4", "use 0, 1, 2 or 3"),
        ({"stage": "auto"}, 'zero_optimization.stage="auto"', "use 0, 1, 2 or 3"),
        ({"stage": True}, "zero_optimization.stage=true", "use 0, 1, 2 or 3"),
        ({"stage": 2.0}, "zero_optimization.stage=2.0", "use 0, 1, 2 or 3"),
        ({"stage": 3, "sub_group_size": ""}, 'zero_optimization.sub_group_size=""', "a number of elements"),
        ({"stage": 3, "sub_group_size": None}, "zero_optimization.sub_group_size=null", "a number of"),
        ({"stage": 2, "reduce_bucket_size": math.nan}, "zero_optimization.reduce_bucket_size=NaN", "or auto"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, 'offload_param.device="nvme"', "use cpu or none"),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "offload_optimizer.ratio=0.5",
            "use 1.0",
        ),
        (
            {"stage": 2, "offload_param": {"device": "cpu"}},
            "zero_optimization.stage=2 with offload_param",
            "use stage 3 or more",
        ),
        (
            {"stage": 0, "offload_optimizer": {"device": "cpu"}},
            "zero_optimization.stage=0",
            "use stage 1 or more",
        ),
        ({"stage": 2, "offload_optimizer": "cpu"}, 'offload_optimizer="cpu"', 'write {"device": "cpu"}'),
    ],
)
def test_bad_zero_settings_are_refused(read_file, zero, setting, remedy):
    message = refusal(read_file, {"zero_optimization": zero})
    check_message(message, f"deepspeed=ds.json sets {setting}", remedy)


@pytest.mark.parametrize(
    ("file", "setting", "remedy"),
    [
        ({"bf16": True}, "bf16=true", 'write {"enabled": true}'),
        ({"bf16": False}, "bf16=false", 'write {"enabled": true}'),
        ({"bf16": {"enabled": "false"}}, 'bf16.enabled="false"', "true, false or"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled=1", "true, false or"),
        ({"bf16": {"enabled": None}}, "bf16.enabled=null", "true, false or"),
        ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op="sum"', "use mean"),
        ({"zero_optimisation": {}}, "zero_optimisation={}, which is unknown", "write zero_optimization"),
        ({"bf_16": {}}, "bf_16={}, which is unknown", "write bf16"),
        ({"activation_checkpoint": {}}, "activation_checkpoint={}, ", "write activation_checkpointing"),
        *(
            ({key: value}, f"{key}={json.dumps(value)}", "write a block, {...}")
            for key, value in (
                *(("activation_checkpointing", "x"), ("aio", None), ("checkpoint", [1])),
                *(("flops_profiler", "x"), ("comms_logger", None), ("timers", [1])),
            )
        ),
        ({"timers": {"throughput": 3}}, "timers.throughput=3", "write a block, {...}"),
        ({"wall_clock_breakdown": "yes"}, 'wall_clock_breakdown="yes"', "use true or false"),
        ({"dump_state": None}, "dump_state=null", "use true or false"),
        ({"flops_profiler": {"profile_step": "x"}}, 'flops_profiler.profile_step="x"', "use a whole number"),
        ({"flops_profiler": {"module_depth": True}}, "flops_profiler.module_depth=true", "a whole number"),
        ({"checkpoint": {"tag_validation": 3}}, "checkpoint.tag_validation=3", "write a text"),
    ],
)
def test_values_of_another_kind_and_misspelt_keys_are_refused(read_file, file, setting, remedy):
    check_message(refusal(read_file, file), f"deepspeed=ds.json sets {setting}", remedy)


def test_keys_that_deepspeed_reads_are_known():
    constants = importlib.import_module("deepspeed.runtime.constants")
    names = (
        *("TRAIN_BATCH_SIZE", "OPTIMIZER", "SCHEDULER", "BFLOAT16", "FP16", "TORCH_AUTOCAST", "CHECKPOINT"),
        *("GRADIENT_ALLREDUCE_OP", "PRESCALE_GRADIENTS", "DISABLE_PYTHON_GC", "VOCABULARY_SIZE"),
        *("MANAGED_GRADIENT_ACCUMULATION", "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE", "LOG_LEVEL"),
        *("DATALOADER_DROP_LAST", "USE_DATA_BEFORE_EXPERT_PARALLEL", "DUMP_STATE", "DATA_TYPES"),
    )
    assert [name for name in names if getattr(constants, name) not in KNOWN] == []


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("{", "line 1 column 2", "fix the file"),
        *((text, "is empty", "write one, such as") for text in ("", " \n", "# only a comment")),
        ("[]", "holds no JSON object", 'write one, such as {"zero_optimization": {"stage": 2}}'),
    ],
)
def test_unreadable_file_is_refused(read_file, tmp_path, text, cause, remedy):
    check_message(refusal(read_file, text), f"deepspeed={tmp_path / 'ds.json'} ", cause, f"; {remedy}")


def test_values_of_the_right_kind_are_accepted(read_file):
    profiler = {"enabled": True, "profile_step": 1, "module_depth": -1, "detailed": "auto"}
    file = {"flops_profiler": profiler, "wall_clock_breakdown": "auto", "timers": {"throughput": {}}}
    assert read_file(file).file == {**file, "zero_optimization": {"stage": 0}}


@pytest.mark.parametrize("timers", [{}, {"throughput": {}}, {"throughput": {"enabled": True}}])
def test_the_timer_that_waits_for_the_device_is_off_unless_it_is_asked_for(read_file, timers):
    wanted = {"enabled": False, **timers.get("throughput", {})}
    assert read_file({"timers": timers}).complete(64)["timers"]["throughput"] == wanted


@pytest.mark.parametrize(
    ("key", "part"), [*NO_EFFECT.items(), ("bfloat16", "is unknown and has no effect; did you mean bf16?")]
)
def test_a_key_without_effect_is_warned_of(read_file, key, part):
    scalar = {"communication_data_type": "bf16", "dataloader_drop_last": True}
    notices: list[str] = []
    read_file({key: scalar.get(key, {"a": True}), "_comment": "ours"}, notice=notices.append)
    check_message(*notices, f"ds.json: {key} ", "has no effect", part)
    assert isinstance(notices[0], Warn)
    if key in NO_EFFECT:
        read_file({key: "auto" if key in scalar else {"a": False, "b": None}})


@pytest.mark.parametrize(
    ("module", "name", "value", "parts"),
    [
        (
            "utils.config",
            "DeepSpeedThroughputTimerConfig",
            {"enabled": "x"},
            ('sets enabled="x", which DeepSpeedThroughputTimerConfig of DeepSpeed refuses',),
        ),
        (
            "runtime.zero.config",
            "DeepSpeedZeroConfig",
            {"stage": 7},
            ("sets stage=7, which DeepSpeedZeroConfig of DeepSpeed refuses", "Input should be 0, 1, 2"),
        ),
        ("compile.config", "CompileConfig", {"passes": ["z1", "x"]}, ('sets passes.1="x", which',)),
    ],
)
def test_a_value_that_deepspeed_refuses_is_named_with_its_key(module, name, value, parts):
    block = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    message = refusal(refusals("ds.json")(block), **value)
    check_message(message, "deepspeed=ds.json", *parts, "change or remove it")


def test_a_folder_of_a_monitor_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    from deepspeed.monitor import config, csv_monitor

    monkeypatch.setattr(csv_monitor.dist, "get_rank", lambda: 0)
    (tmp_path / "file").touch()
    block = config.CSVConfig(enabled=True, output_path=str(tmp_path / "file" / "x"))
    message = refusal(refusals("ds.json")(csv_monitor.csvMonitor), block)
    check_message(message, "deepspeed=ds.json", "csv_monitor.py", block.output_path, "change or remove")
    with pytest.raises(OSError, match="full"), refusals("ds.json"):
        raise OSError("full")


def test_a_missing_file_is_refused_with_the_shipped_names():
    names = "give the path of a DeepSpeed JSON file, or a name of zero0, zero1, zero2, zero3, zero3_offload"
    check_message(refusal(read, "x/ds.json", False), "deepspeed=x/ds.json", names)


@pytest.mark.parametrize("file", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda file: file.stem)
def test_every_shipped_file_is_accepted_by_path_and_by_name(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    precision = read(str(file), False, pytest.fail)
    assert read(file.stem, False, pytest.fail) == precision
    assert precision.zero_stage == int(file.stem.removeprefix("zero")[0])
    assert precision.offload == ("offload" in file.stem)
    assert "auto" not in json.dumps(precision.complete(64))
    Path(file.stem).write_text('{"zero_optimization": {"stage": 1}}')  # a file of the user wins
    assert read(file.stem, False) == DeepSpeedSettings(1, False, False)


def test_file_is_adjusted_for_a_pipeline():
    one = {"zero_optimization": {"stage": 1}}
    settings = with_model_ranks(DeepSpeedSettings(1, False, False, file=one), 2, 1)
    assert settings.file["zero_optimization"] == {"stage": 1, "compute_grad_norm": False}
    assert one == {"zero_optimization": {"stage": 1}}


def test_zero_0_in_bf16_runs_as_zero_1():
    settings = DeepSpeedSettings(0, True, False, file={"zero_optimization": {"stage": 0}})
    used = ParallelPlan.of(Config(), settings, 2, "cpu").deepspeed
    assert (used, used.file) == (DeepSpeedSettings(1, True, False), {"zero_optimization": {"stage": 1}})
    assert ParallelPlan.of(Config(), settings, 1, "cpu").deepspeed == settings
    in_fp32 = replace(settings, bf16=False)
    assert ParallelPlan.of(Config(), in_fp32, 2, "cpu").deepspeed == in_fp32


@pytest.mark.parametrize(("ranks", "name"), [((2, 1), "pipeline_stages"), ((1, 4), "tensor_parallel_size")])
def test_model_parallel_conflicts_are_refused(ranks, name):
    fine = DeepSpeedSettings(1, True, False, file={"zero_optimization": {"stage": 1}})
    assert with_model_ranks(fine, *ranks) == fine
    remedies = "zero_optimization.stage 0 or 1", f"leave {name} out"
    for settings, what in (
        (DeepSpeedSettings(2, False, False), "ZeRO 2"),
        (DeepSpeedSettings(1, False, True), "offload_optimizer"),
    ):
        message = refusal(with_model_ranks, settings, *ranks)
        check_message(message, f"{name}={max(ranks)}", what, *remedies)
        assert with_model_ranks(settings, 1, 1) == settings
