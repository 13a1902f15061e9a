"""On a GPU: NCCL, bf16 and memory.

One device is enough; with one, groups have one rank. Skipped where there is none.
"""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from benchmarks.elastic import SLEEP
from fmmeta.elastic.supervisor import ElasticConfig, Group, Supervisor
from tests.support.launch import run_ranks
from tests.support.matrix import AXES, TOLERANCE, Case, ParityFixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CASES = [
    case
    for stage in ("plain", 0, 1, 2, 3)
    for algorithm, model in (("fomaml", "llama"), ("reptile", "bert"))
    for dtype in ("fp32", "bf16")
    for also in AXES["also"]
    if (
        case := Case(
            (1, 1), stage, algorithm, "several", "default", model, dtype, "sgd", "zero", "none", also
        )
    ).possible
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    bench = ParityFixture(tmp_path_factory.mktemp("gpu"))
    done = bench.run(CASES)
    return lambda case: bench.error(case, done[case.id][0])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ends_where_the_oracle_ends(case, outcomes):
    assert outcomes(case) < TOLERANCE[case.dtype, case.outer]


@pytest.mark.timeout(600)
def test_a_run_uses_the_gpu_and_offload_starts_the_engine(tmp_path):
    flags = ["--outer_steps=3", "--eval_episodes=4", "--bf16", "--deepspeed=ds_configs/zero3_offload.json"]
    ended = run_ranks(["launch/train.py", f"--output_dir={tmp_path / 'run'}", *flags], 1).ok()
    assert "1 group of 1 rank on cuda; DeepSpeed ZeRO 3; bf16" in ended.output[0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


@pytest.mark.timeout(600)
def test_a_group_that_joins_has_its_moments_on_the_gpu(tmp_path, monkeypatch):
    """Two elastic groups share the device.

    The second starts after an outer step; the moments reach it by way of host memory.
    """
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    folder, seconds, log = tmp_path / "run", tmp_path / "seconds", list[str]()
    seconds.write_text("1")
    monkeypatch.setenv(SLEEP, str(seconds))
    settings = {
        "outer_steps": 200,
        "eval_episodes": 0,
        "logging_steps": 1,
        "inner_lr_learned": "element",
        "num_workers": "0",
        "meta_batch_size": 2,
        "episode_transforms": ["benchmarks.elastic:slowly"],
    }
    supervisor = Supervisor(ElasticConfig(groups=1, output_dir=str(folder), **settings), log.append)
    supervisor.devices = lambda number: {}
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        while not (folder / "metrics.jsonl").is_file() and thread.is_alive():
            time.sleep(0.1)
        supervisor.groups.append(Group("late0"))
        while not any("state received from group group0" in line for line in log) and thread.is_alive():
            time.sleep(0.1)
        seconds.unlink()
    finally:
        thread.join(300)
        for group in supervisor.groups:
            group.kill()
    assert [(group.starts, group.ended) for group in supervisor.groups] == [(1, 0)] * 2, "\n".join(log[-50:])
    assert json.loads((folder / "run.json").read_text())["finished"]
    assert 2 in {json.loads(line)["groups"] for line in (folder / "metrics.jsonl").read_text().splitlines()}
