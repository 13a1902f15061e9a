"""DeepSpeed files of transformers work; keys that break meta-training are refused by name."""

import importlib
import json
from contextlib import nullcontext
from copy import deepcopy
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
def ds_file(tmp_path):
    def write(value) -> str:
        path = tmp_path / "ds.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


def test_file_of_transformers_works_unchanged(ds_file):
    notices: list[str] = []
    precision = read(ds_file(HF), bf16=True, notice=notices.append)
    assert precision == DeepSpeedSettings(zero_stage=3, bf16=True, offload=False, bucket=0)
    for line, (key, instead) in zip(notices, OURS.items(), strict=True):
        check_message(line, f"ds.json: {key} is auto", f"({instead})")
    done = precision.complete(hidden_size=64)
    assert "auto" not in json.dumps(done)
    assert not {"optimizer", "scheduler", "fp16", "train_batch_size"} & set(done)
    zero = done["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (4096, 3686)
    assert zero["stage3_param_persistence_threshold"] == 640
    assert (zero["sub_group_size"], zero["overlap_comm"]) == (1e9, True)  # the user's own values stay
    assert not {"offload_optimizer", "offload_param"} & set(zero)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_completed_file_leaves_gradients_alone(stage):
    given = {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    config = deepcopy(given)
    done = DeepSpeedSettings(stage, False, False, file=config).complete(8)
    assert done["gradient_clipping"] == 0.0
    assert (done["train_micro_batch_size_per_gpu"], done["gradient_accumulation_steps"]) == (1, 1)
    assert (done["communication_data_type"], done["bf16"]) == ("fp32", {"enabled": False})
    assert done["zero_allow_untested_optimizer"] is True
    assert done["zero_force_ds_cpu_optimizer"] is False
    assert done.get("data_types") == ({"grad_accum_dtype": "fp32"} if stage else None)
    assert config == given  # the argument is not touched


@pytest.mark.parametrize(
    ("file", "flag", "bf16"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"bf16": {"enabled": "auto"}}, True, True),
        ({"bf16": {"enabled": True}}, False, True),
        ({"bf16": {"enabled": False}}, True, False),
        ({"bf16": None}, True, True),
    ],
)
def test_bf16_by_file_or_flag(ds_file, file, flag, bf16):
    assert read(ds_file(file), flag, pytest.fail) == DeepSpeedSettings(0, bf16, False)


@pytest.mark.parametrize(
    ("settings", "device", "native", "others", "bf16"),
    [
        ({}, "cuda", True, b"1", True),
        ({}, "cuda", True, b"", False),  # another rank has none
        ({}, "cuda", False, b"1", False),  # torch would emulate it
        ({}, "cpu", True, b"1", False),
        ({"bf16": True}, "cpu", False, b"", True),
        ({"bf16": False}, "cuda", True, b"1", False),
        ({"algorithm": "maml"}, "cuda", True, b"1", False),  # finite differences
        ({"algorithm": "imaml"}, "cuda", True, b"1", False),
        ({"algorithm": "maml", "lora_r": 2}, "cuda", True, b"1", True),
        ({"algorithm": "maml", "lora_r": 2, "second_order": "differences"}, "cuda", True, b"1", False),
        ({"algorithm": "maml", "lora_r": 2, "tensor_parallel_size": 2}, "cuda", True, b"1", False),
        ({"algorithm": "maml", "lora_r": 2, "zero_stage": 3}, "cuda", True, b"1", False),
    ],
)
def test_bf16_is_chosen_where_every_gpu_has_it(monkeypatch, settings, device, native, others, bf16):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation
    )
    comm: Any = SimpleNamespace(
        gather_bytes=lambda payload: [payload, others], raise_on_all=lambda doing: nullcontext()
    )
    stage = settings.get("zero_stage", 0)
    config = Config(**{name: value for name, value in settings.items() if name != "zero_stage"})
    assert chosen_bf16(config, stage, comm, torch.device(device)) is bf16


def test_no_file_is_zero_0():
    settings = read(None, False, pytest.fail)
    assert settings == DeepSpeedSettings(0, False, False)
    assert settings.file == {"zero_optimization": {"stage": 0}}


VALUES = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("key", OURS)
def test_keys_that_fmmeta_sets_are_refused(ds_file, key):
    shown = json.dumps(VALUES[key])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = refusal(read, ds_file({key: VALUES[key]}), False, pytest.fail)
    check_message(message, "deepspeed=ds.json", f"{key}={shown}", f"remove it and use {OURS[key]}")


def test_optimizer_with_one_explicit_value_is_refused(ds_file):
    mixed = {**HF["optimizer"], "params": {**HF["optimizer"]["params"], "lr": 3e-5}}
    assert "sets optimizer=" in refusal(read, ds_file({**HF, "optimizer": mixed}), False, print)


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
def test_features_that_break_meta_training_are_refused(ds_file, key, inside_zero):
    value = BLOCKS.get(key, {"enabled": True})
    file = ds_file({"zero_optimization": {"stage": 2, key: value}} if inside_zero else {key: value})
    message = refusal(read, file, False, pytest.fail)
    check_message(message, "deepspeed=ds.json", f"{key}={json.dumps(value)}", "remove it")


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
def test_disabled_features_are_dropped(ds_file, key, value):
    file = ds_file({key: value, "zero_optimization": {"stage": 1, key: value}})
    assert read(file, False, pytest.fail).file == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("zero", "setting", "remedy"),
    [
        (2, "zero_optimization=2", 'write {"stage": 2}'),
        ({"stage": 4}, "zero_optimization.stage=4", "use 0, 1, 2 or 3"),
        ({"stage": "auto"}, 'zero_optimization.stage="auto"', "use 0, 1, 2 or 3"),
        ({"stage": True}, "zero_optimization.stage=true", "use 0, 1, 2 or 3"),
        ({"stage": 2.0}, "zero_optimization.stage=2.0", "use 0, 1, 2 or 3"),
        ({"stage": 3, "sub_group_size": ""}, 'zero_optimization.sub_group_size=""', "a number of elements"),
        (
            {"stage": 3, "sub_group_size": None},
            "zero_optimization.sub_group_size=null",
            "a number of elements",
        ),
        (
            {"stage": 2, "reduce_bucket_size": float("nan")},
            "zero_optimization.reduce_bucket_size=NaN",
            "or auto",
        ),
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
def test_bad_zero_settings_are_refused(ds_file, zero, setting, remedy):
    message = refusal(read, ds_file({"zero_optimization": zero}), False, pytest.fail)
    check_message(message, f"deepspeed=ds.json sets {setting}", remedy)


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("bf16", True, ("bf16=true", 'write {"enabled": true}')),
        *(
            ("bf16", {"enabled": value}, (f"bf16.enabled={json.dumps(value)}", "true, false or"))
            for value in ("false", 1, None)
        ),
        ("gradient_allreduce_op", "sum", ('gradient_allreduce_op="sum"', "use mean")),
        *(
            (key, {"stage": 3}, (f'{key}={{"stage": 3}}, which is unknown', f"write {known}"))
            for key, known in (
                ("zero_optimisation", "zero_optimization"),
                ("activation_checkpoint", "activation_checkpointing"),
                ("bf_16", "bf16"),
            )
        ),
    ],
)
def test_other_values_and_misspelt_keys_are_refused(ds_file, key, value, parts):
    message = refusal(read, ds_file({key: value}), False, pytest.fail)
    check_message(message, f"deepspeed=ds.json sets {parts[0]}", parts[1])


def test_a_mean_over_ranks_is_accepted(ds_file):
    assert read(ds_file({"gradient_allreduce_op": "mean"}), False, pytest.fail)


def test_an_unknown_key_is_warned_of(ds_file):
    notices: list[str] = []
    read(ds_file({"bfloat16": {"enabled": True}, "_comment": "ours"}), False, notices.append)
    (line,) = notices
    assert isinstance(line, Warn)
    check_message(line, "ds.json: bfloat16 is unknown and has no effect; did you mean bf16?")


def test_keys_that_deepspeed_reads_are_known():
    constants = importlib.import_module("deepspeed.runtime.constants")
    names = (
        *("TRAIN_BATCH_SIZE", "OPTIMIZER", "SCHEDULER", "BFLOAT16", "FP16", "TORCH_AUTOCAST", "CHECKPOINT"),
        *("GRADIENT_ALLREDUCE_OP", "PRESCALE_GRADIENTS", "DISABLE_PYTHON_GC", "VOCABULARY_SIZE"),
        *("MANAGED_GRADIENT_ACCUMULATION", "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE", "LOG_LEVEL"),
        *("DATALOADER_DROP_LAST", "USE_DATA_BEFORE_EXPERT_PARALLEL", "DUMP_STATE", "DATA_TYPES"),
    )
    assert [name for name in names if getattr(constants, name) not in KNOWN] == []


def test_offload_is_detected(ds_file):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}
    precision = read(ds_file({"zero_optimization": zero}), False, pytest.fail)
    assert precision == DeepSpeedSettings(3, False, True, offload_param=True)
    assert precision.file["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("{", "line 1 column 2", "fix the file"),
        *((text, "is empty", "write one, such as") for text in ("", " \n", "# only a comment")),
        ("[]", "holds no JSON object", 'write one, such as {"zero_optimization": {"stage": 2}}'),
    ],
)
def test_unreadable_file_is_refused(ds_file, text, cause, remedy):
    path = ds_file(text)
    check_message(refusal(read, path, False, pytest.fail), f"deepspeed={path} ", cause, f"; {remedy}")


@pytest.mark.parametrize(
    ("file", "setting", "remedy"),
    [
        *(
            ({key: value}, f"{key}={json.dumps(value)}", "write a block, {...}")
            for key in (
                "activation_checkpointing",
                "aio",
                "checkpoint",
                "flops_profiler",
                "comms_logger",
                "timers",
            )
            for value in ("x", None, [1])
        ),
        ({"timers": {"throughput": 3}}, "timers.throughput=3", "write a block, {...}"),
        ({"bf16": False}, "bf16=false", 'write {"enabled": true}'),
        ({"wall_clock_breakdown": "yes"}, 'wall_clock_breakdown="yes"', "use true or false"),
        ({"dump_state": None}, "dump_state=null", "use true or false"),
        ({"flops_profiler": {"profile_step": "x"}}, 'flops_profiler.profile_step="x"', "use a whole number"),
        (
            {"flops_profiler": {"module_depth": True}},
            "flops_profiler.module_depth=true",
            "use a whole number",
        ),
        ({"checkpoint": {"tag_validation": 3}}, "checkpoint.tag_validation=3", "write a text"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_key(ds_file, file, setting, remedy):
    message = refusal(read, ds_file(file), False, pytest.fail)
    check_message(message, f"deepspeed=ds.json sets {setting}", remedy)


def test_values_of_the_right_kind_are_accepted(ds_file):
    profiler = {"enabled": True, "profile_step": 1, "module_depth": -1, "detailed": "auto"}
    file = {"flops_profiler": profiler, "wall_clock_breakdown": "auto", "timers": {"throughput": {}}}
    assert read(ds_file(file), False, pytest.fail).file == {**file, "zero_optimization": {"stage": 0}}


def test_the_timer_that_waits_for_the_device_is_off_unless_it_is_asked_for(ds_file):
    def timer(file):
        return read(ds_file(file), False, pytest.fail).complete(64)["timers"]["throughput"]

    assert timer({}) == timer({"timers": {"throughput": {}}}) == {"enabled": False}
    assert timer({"timers": {"throughput": {"enabled": True}}}) == {"enabled": True}


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_effect_is_warned_of(ds_file, key):
    scalar = {"communication_data_type": "bf16", "dataloader_drop_last": True}
    notices: list[str] = []
    read(ds_file({key: scalar.get(key, {"a": True})}), False, notices.append)
    check_message(*notices, f"ds.json: {key} has no effect", NO_EFFECT[key])
    assert isinstance(notices[0], Warn)
    read(ds_file({key: "auto" if key in scalar else {"a": False, "b": None}}), False, pytest.fail)


def test_zero_without_a_stage_is_zero_0(ds_file):
    for zero in ({}, {"overlap_comm": False}):
        settings = read(ds_file({"zero_optimization": zero}), False, pytest.fail)
        assert (settings.zero_stage, settings.complete(64)["zero_optimization"]["stage"]) == (0, 0)


@pytest.mark.parametrize(
    ("model", "value", "parts"),
    [
        (
            "utils.config.DeepSpeedThroughputTimerConfig",
            {"enabled": "x"},
            ('sets enabled="x", which DeepSpeedThroughputTimerConfig of DeepSpeed refuses',),
        ),
        (
            "runtime.zero.config.DeepSpeedZeroConfig",
            {"stage": 7},
            ("sets stage=7, which DeepSpeedZeroConfig of DeepSpeed refuses", "Input should be 0, 1, 2"),
        ),
        ("compile.config.CompileConfig", {"passes": ["z1", "x"]}, ('sets passes.1="x", which',)),
    ],
)
def test_a_value_that_deepspeed_refuses_is_named_with_its_key(model, value, parts):
    module, _, name = model.rpartition(".")
    block = getattr(importlib.import_module(f"deepspeed.{module}"), name)

    def start():
        with refusals("ds.json"):
            block(**value)

    check_message(refusal(start), "deepspeed=ds.json", *parts, "change or remove it")


def test_a_folder_of_a_monitor_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    from deepspeed.monitor import config, csv_monitor

    monkeypatch.setattr(csv_monitor.dist, "get_rank", lambda: 0)
    (tmp_path / "file").touch()
    block = {"enabled": True, "output_path": str(tmp_path / "file" / "x")}

    def start():
        with refusals("ds.json"):
            csv_monitor.csvMonitor(config.CSVConfig(**block))

    check_message(
        refusal(start), "deepspeed=ds.json", "csv_monitor.py", block["output_path"], "change or remove"
    )
    with pytest.raises(OSError, match="full"), refusals("ds.json"):
        raise OSError("full")


def test_a_missing_file_is_refused_with_the_shipped_names():
    names = "give the path of a DeepSpeed JSON file, or a name of zero0, zero1, zero2, zero3, zero3_offload"
    check_message(refusal(read, "x/ds.json", False, pytest.fail), "deepspeed=x/ds.json", names)


@pytest.mark.parametrize("file", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda file: file.stem)
def test_every_shipped_file_is_accepted_by_path_and_by_name(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notices: list[str] = []
    precision = read(str(file), False, notices.append)
    assert read(file.stem, False, pytest.fail) == precision
    assert precision.zero_stage == int(file.stem.removeprefix("zero")[0])
    assert precision.offload == ("offload" in file.stem)
    assert "auto" not in json.dumps(precision.complete(64))
    assert notices == []


def test_a_file_of_the_user_wins_over_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero2").write_text('{"zero_optimization": {"stage": 1}}')
    assert read("zero2", False).zero_stage == 1


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


def test_zero_3_max_live_parameters_are_read(ds_file):
    zero = {"stage": 3, "stage3_max_live_parameters": 5e7}
    assert read(ds_file({"zero_optimization": zero}), False, print) == DeepSpeedSettings(
        3, False, False, 50_000_000
    )
