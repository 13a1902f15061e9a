"""Runs on the pretended GPU end where they end on the CPU, bit for bit: weights, held-out table, validations.

The kernels are the CPU's, so that a difference is one of code. Some things fmmeta does on CPUs only, with
sums in another order. These runs leave them out: encoders without padding (for sdpa), AdamW in one kernel,
sparse gradients of embeddings (plain fp32, where several are added), prompts that share their prefix.
"""

import json

import pytest

from tests.support import golden, pretended_cuda
from tests.support.golden import PAIRS, zero
from tests.support.helpers import fast_or_slow
from tests.support.models import write_classes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("pretended"),
]
SAME = {"attn_implementation": "eager", "outer_optimizer": "sgd", "outer_lr": 0.1}
FP32 = {"bf16": "false"}  # unless a run says otherwise: the default on the GPU is bf16
ON_DEVICE = {"engine": "deepspeed"}
STALE = {"max_staleness": 1, "meta_batch_size": 4, "outer_steps": 4}
LORA = {"lora_r": 2}
DIGITS = {"dataset": "digits", "inner_steps": 2}
RUNS = {  # ranks, flags
    "plain": (1, {}),
    "plain bf16": (1, {"bf16": "true"}),
    "causal_lm bf16": (1, {**PAIRS, "bf16": "true"}),
    "causal_lm ZeRO 1": (1, zero(1, **PAIRS, **ON_DEVICE)),
    **{f"ZeRO {stage}": (1, zero(stage, **ON_DEVICE)) for stage in range(4)},
    **{f"ZeRO {stage} 1x2": (2, zero(stage, group_size=2)) for stage in range(4)},
    "ZeRO 3 bf16 1x2": (2, zero(3, group_size=2, bf16="true")),
    "plain 2x1": (2, {"group_size": 1}),
    "ZeRO 2 2x2": golden.RUNS["ZeRO 2 2x2"],
    "LoRA": (1, LORA),
    "adapters ZeRO 3 1x2": golden.RUNS["adapters ZeRO 3 1x2"],
    "several tasks per pass": (1, {**LORA, "tasks_per_pass": 2}),
    "images": (1, DIGITS),
    "images ZeRO 3 1x2": (2, zero(3, **DIGITS, group_size=2)),
    "loader processes": (1, {"num_workers": 1}),
    "offload_outer 2x1": (2, {"offload_outer": "true", "group_size": 1}),
    "offload ZeRO 3 1x2": (2, {"deepspeed": "ds_configs/zero3_offload.json", "group_size": 2}),
    "checkpointing": (1, {"gradient_checkpointing": "true"}),
    "packing": (1, {**PAIRS, "packing": "true", "bf16": "true"}),
    "micro-batches": (1, {"micro_batch_size": 4, "bf16": "true"}),
    "dynamic": (1, {"task_schedule": "dynamic"}),
    "tensor 1x2": golden.RUNS["tensor 1x2"],
    "pipeline 1x2": golden.RUNS["pipeline 1x2"],
    "adam, kept": (1, {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_lr": 0.001}),
    "resumed": golden.RUNS["resumed"],  # maml
    "validation 2x1": golden.RUNS["validation 2x1"],
    **{
        f"algorithm {name}": (1, {"algorithm": name})
        for name in ("maml", "imaml", "joint", "proto_maml", "meta_sgd")
    },
    **{f"algorithm {name} bf16": (1, {"algorithm": name, "bf16": "true"}) for name in ("anil", "protonet")},
    "maml ZeRO 2 1x2": (2, zero(2, group_size=2, algorithm="maml")),
}
COMMANDS = ("evaluate 2x1", "evaluate ZeRO 3 1x2", "evaluate pipeline 1x2")
UNEQUAL = {  # groups claim tasks as they become free: sums are added in another order in every run
    "dynamic 2x1": (2, {"task_schedule": "dynamic", "group_size": 1}),
    "stale 2x1": (2, {**STALE, "group_size": 1}),
    "stale ZeRO 2 2x2": (4, zero(2, group_size=2, **STALE)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for device in ("cpu", "cuda"):
        found[device] = tmp_path_factory.mktemp(device)
        write_classes(found[device] / "rows.jsonl")
    return found


def on(device):
    return pretended_cuda.on_cpu() if device == "cpu" else pretended_cuda.on_device()


@pytest.mark.parametrize("name", fast_or_slow([*RUNS], lambda _: False, str, set([*RUNS][1::2]).__contains__))
def test_a_run_is_the_cpus(name, folders):
    found = {}
    for device, out in folders.items():
        with on(device):
            ranks, flags = RUNS[name]
            found[device] = golden.trained(out, name, ranks, {**FP32, **flags, **SAME})
        said = (out / f"{name.replace(' ', '-')}-logs-0" / "rank-0.log").read_text()
        assert f" on {device}; " in said
    assert found["cuda"] == found["cpu"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_cpus(name, folders):
    found = {}
    for device, out in folders.items():
        with on(device):
            ranks, command, flags = golden.COMMANDS[name]
            flags = {**FP32, **flags, "attn_implementation": "eager"}
            found[device] = golden.printed_by(out, name, ranks, command, flags)
    assert json.loads(found["cuda"]["output"]) == json.loads(found["cpu"]["output"])


@pytest.mark.parametrize("name", UNEQUAL)
def test_groups_that_claim_tasks_train_on_the_device(name, folders):
    with on("cuda"):
        ranks, flags = UNEQUAL[name]
        found = golden.trained(folders["cuda"], name, ranks, {**FP32, **flags})
    run = json.loads((folders["cuda"] / name.replace(" ", "-") / "run.json").read_text())
    assert run["finished"]
    assert json.loads(found["held_out"])["episodes"] == golden.SHORT["eval_episodes"]
