"""`accelerate launch --config_file`: ranks train; settings of the file that are not read get a line each."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helpers import fast_or_slow
from tests.support.launch import ROOT, environment, free_port

RANKS = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "num_processes": 2}
DEEPSPEED = {"zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "none"} | {
    "gradient_accumulation_steps": 4,
    "zero3_init_flag": False,
}
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FILES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # the file's settings; variables that are named, with the flag to use
    "ranks": ({"distributed_type": "MULTI_GPU", "mixed_precision": "no"}, {}),
    "precision": (
        {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"},
        {"ACCELERATE_MIXED_PRECISION=fp16": "--bf16"},
    ),
    "deepspeed": (
        {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": DEEPSPEED},
        {
            "ACCELERATE_MIXED_PRECISION=bf16": "--bf16",
            "ACCELERATE_USE_DEEPSPEED=true": "--deepspeed FILE",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE=3": "--deepspeed zero3",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4": "--micro_batch_size",
        },
    ),
    "fsdp": (
        {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": FSDP},
        {"ACCELERATE_USE_FSDP=true": "--deepspeed zero3"},
    ),
}
SHORT = "--outer_steps 2 --inner_steps 1 --eval_episodes 0 --meta_batch_size 2 --save_steps 0 --num_workers 0"


def launched(file: Path, run: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks of the tiny model, as the page says."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", str(file)]
    words = [*accelerate, "--main_process_port", str(free_port()), "launch/train.py", *SHORT.split()]
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    streams = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([*words, "--output_dir", str(run)], cwd=ROOT, env=env, timeout=280, **streams)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", fast_or_slow([*FILES], lambda name: name == "precision", str))
def test_a_config_file_gives_ranks_and_what_is_not_read_is_named(name, tmp_path):
    settings, named = FILES[name]
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({**RANKS, **settings}))
    ended = launched(tmp_path / "file.yaml", tmp_path / "run")
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text[-4000:]
    assert "2 ranks" in text or "2 groups" in text
    assert (tmp_path / "run/model/config.json").is_file()
    lines = dict(re.findall(r"(\w+=\S+) \(accelerate launch\) is not read; use (.*)", text))
    assert set(lines) == set(named)
    assert all(lines[one].startswith(flag) for one, flag in named.items())
