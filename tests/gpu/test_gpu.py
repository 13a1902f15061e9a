"""On GPUs: NCCL, bf16 and memory.

Without a GPU the ranks have pretended ones (conftest.py). One is enough for most cases, whose groups have
one rank; those of `SEVERAL` have one rank per GPU and are skipped where there are fewer GPUs.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from harness.elastic import Group, Trial
from tests.support.launch import run_ranks
from tests.support.matrix import AXES, Case, Launches, ParityFixture, selected, tolerance
from tests.support.nccl_breaks import ALONE, HOST
from tests.support.pretended_cuda import gpus, on_cpu
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow
STAGES = ("plain", 0, 1, 2, 3)
CASES = [  # every stage without an option, and every option on one stage
    case
    for at, stage in enumerate(STAGES)
    for algorithm, model in (("fomaml", "llama"), ("reptile", "bert"))
    for dtype in ("fp32", "bf16")
    for number, also in enumerate(AXES["also"])
    if also == "nothing" or number % len(STAGES) == at
    if (
        case := Case(
            (1, 1), stage, algorithm, "several", "default", model, dtype, "sgd", "zero", "none", also
        )
    ).possible
]

ROWS = [  # layout, stage, algorithm, model, dtype, outer, extra, also, pipeline stages (-T: tensor ranks)
    ((2, 1), "plain", "fomaml", "llama", "fp32", "sgd", "none", "offload_outer", 1),
    ((2, 1), 2, "reptile", "llama", "bf16", "adamw", "none", "nothing", 1),
    ((2, 1), 1, "fomaml", "llama", "fp32", "sgd", "none", "checkpointing", 1),
    ((1, 2), 1, "fomaml", "llama", "bf16", "adamw", "none", "lora", 1),
    ((1, 2), 3, "fomaml", "llama", "fp32", "sgd", "none", "nothing", 1),
    ((1, 2), 0, "fomaml", "llama3", "fp32", "sgd", "none", "nothing", 2),
    ((1, 2), 0, "reptile", "llama3", "fp32", "adamw", "none", "nothing", -2),
    ((2, 2), 2, "fomaml", "llama", "fp32", "sgd", "offload", "nothing", 1),
    ((2, 2), 3, "reptile", "llama", "bf16", "adamw", "none", "offload_outer", 1),
    ((2, 2), 3, "fomaml", "llama", "fp32", "adamw", "offload", "nothing", 1),
    ((2, 2), 1, "fomaml", "llama3", "fp32", "sgd", "none", "nothing", 2),
    ((1, 4), 1, "fomaml", "llama3", "bf16", "adamw", "none", "nothing", 2),
    ((1, 4), 1, "fomaml", "qwen33", "fp32", "sgd", "none", "nothing", -2),
    ((4, 1), "plain", "reptile", "llama", "fp32", "adamw", "none", "wire", 1),
]
SEVERAL = [
    Case.of_row(layout, stage, algorithm, model, dtype, outer, "zero", also, spread, extra=extra)
    for layout, stage, algorithm, model, dtype, outer, extra, also, spread in ROWS
]


def on_gpus(case: Case):
    """A case, skipped where it has more ranks than there are GPUs."""
    ranks, visible = case.layout[0] * case.layout[1], gpus()
    reason = f"needs {ranks} GPUs, one per rank; {visible} visible"
    return pytest.param(case, id=case.id, marks=pytest.mark.skipif(visible < ranks, reason=reason))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def launches(request, bench):
    chosen = [case for case in selected(request) if math.prod(case.layout) <= gpus()]
    return Launches(bench, chosen, lambda case: (case.layout, case.stages, case.tensor), most=50)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [on_gpus(case) for case in (*CASES, *SEVERAL)])
def test_ends_where_the_oracle_ends(case, bench, launches):
    theta, facts = launches.outcome(case)
    assert bench.error(case, theta) < (0.05 if "wire" in case.also else tolerance(case))
    assert facts["effects"] == case.settings


@on_ranks(1)
def refusals(world):
    """What NCCL raises in a group of one rank, by name of the break."""
    group, raised = world.split(1).group.backend, {}
    for name, (_, call) in {**ALONE, **HOST}.items():
        try:
            call(group, torch.device("cuda", 0))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raised[name] = str(error)
    return raised


@pytest.fixture(scope="module")
def refused():
    return refusals()[0]


@pytest.mark.parametrize("name", [*ALONE, *HOST])
def test_nccl_refuses_what_the_rules_on_cpus_refuse(name, refused):
    assert refused[name]


@pytest.mark.timeout(600)
def test_a_run_uses_the_gpu_and_offload_starts_the_engine(tmp_path):
    flags = ["--outer_steps=3", "--eval_episodes=4", "--bf16", "--deepspeed=ds_configs/zero3_offload.json"]
    ended = run_ranks(["launch/train.py", f"--output_dir={tmp_path / 'run'}", *flags], 1).ok()
    assert "1 group of 1 rank on cuda; DeepSpeed ZeRO 3; bf16" in ended.output[0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


@pytest.mark.timeout(600)
def test_bf16_is_the_default_and_a_resume_on_the_cpu_keeps_it(tmp_path, monkeypatch):
    """fp32 has to be asked for, and its price is named."""
    flags = ["launch/train.py", "--outer_steps=1", "--eval_episodes=0"]
    first = [*flags, f"--output_dir={tmp_path / 'run'}"]
    text = run_ranks(first, 1).ok().output[0]
    assert "on cuda; plain PyTorch, nothing to shard; bf16" in text
    assert "precision: bf16 weights and activations over fp32 shards" in text
    run = tmp_path / "run" / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "finished": False}))
    for more in (["--bf16=false"], ["--algorithm=imaml"]):
        text = run_ranks([*flags, f"--output_dir={tmp_path / more[0]}", *more], 1).ok().output[0]
        assert "precision: fp32 without TF32: matrix products run at about 1/" in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with on_cpu():
        text = run_ranks(first, 1).ok().output[0]
    assert "on cpu; plain PyTorch, nothing to shard; bf16" in text
    assert "resumed from" in text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    [
        ["--algorithm=fomaml", "--inner_optimizer=adamw", "--inner_lr=0.001"],
        ["--algorithm=fomaml", "--inner_optimizer=momentum", "--init_interpolation=0.5"],
        ["--algorithm=reptile", "--inner_optimizer=adamw", "--offload_outer"],
        ["--algorithm=imaml", "--load_best_model_at_end", "--eval_steps=1"],
        ["--algorithm=maml", "--deepspeed=ds_configs/zero3_offload.json"],
        ["--algorithm=maml", "--head_init=prototype", "--deepspeed=ds_configs/zero3_offload.json"],
        ["--algorithm=fomaml", "--inner_optimizer=adamw", "--deepspeed=ds_configs/zero3_offload.json"],
    ],
    ids=" ".join,
)
def test_theta_in_host_memory_is_adapted_on_the_gpu(tmp_path, flags):
    """The held-out table adapts copies in host memory; DeepSpeed's offload keeps the shards there."""
    flags = [
        f"--output_dir={tmp_path / 'run'}",
        "--outer_steps=2",
        "--eval_episodes=2",
        "--bf16=false",
        *flags,
    ]
    run_ranks(["launch/train.py", *flags], 1).ok()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["held_out"]["episodes"] == 2


@pytest.mark.timeout(600)
def test_a_group_that_joins_has_its_moments_on_the_gpu(tmp_path):
    """Two elastic groups share the device.

    The second starts after an outer step; the moments reach it by way of host memory.
    """
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    settings = {
        "outer_steps": 200,
        "eval_episodes": 0,
        "logging_steps": 1,
        "inner_lr_learned": "element",
        "num_workers": "0",
        "meta_batch_size": 2,
        "bf16": False,
        "episode_transforms": ["harness.elastic:slowly"],
        "output_dir": str(tmp_path / "run"),
    }
    run = Trial({**settings, "groups": 1, "heartbeat_timeout": 5.0}, 1.0)
    try:
        run.start()
        run.wait_for_step(1, 200)
        run.launch(Group("late"))
        run.wait_for_step(2, 200)
        run.hurry()
        run.end(300)
    finally:
        run.close()
    assert run.code == 0, "\n".join(run.log[-50:])
    assert any("state received from group group0" in line for line in run.log)
    assert json.loads((run.folder / "run.json").read_text())["finished"]
