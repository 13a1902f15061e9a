"""The arithmetic of benchmarks/gpu.py, which only a GPU can run completely."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import flops_of, mfu, peak_of, task_flops
from fmmeta.config.algorithms import find
from fmmeta.planning.compute import count_matmuls
from tests.support.helpers import ROOT
from tests.support.launch import environment
from tests.support.learners import (
    RuleOn,
    batches_of,
    config_of,
    episode_of,
    llama,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message


def test_flops_of_a_task_equal_torch():
    learner = llama()
    learner.hf.config._attn_implementation = "eager"
    config, episode = config_of(learner, inner_steps=3), batches_of(episode_of(learner))
    worker, counts = worker_of(learner, config), count_matmuls(copy.deepcopy(learner), config)
    rule = RuleOn(find("fomaml").rule, setup_of(worker, config))
    with FlopCounterMode(display=False) as counted:
        task_gradient(rule, worker, episode)
    assert task_flops(counts, episode, 3) == pytest.approx(counted.get_total_flops(), rel=1e-9)
    both = flops_of(counts, episode.support, True), flops_of(counts, episode.query, True)
    assert task_flops(counts, episode, 3) == 3 * both[0] + both[1]


def test_share_of_the_peak():
    assert mfu(3e12, 2.0, peak_of("NVIDIA A100-SXM4-80GB", "fp32", None)) == pytest.approx(3 / 39)
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16", None) == 989e12
    assert peak_of("some other", "bf16", 100.0) == 1e14
    with pytest.raises(SystemExit, match=r"some other in bf16 .* give it in TFLOPS"):
        peak_of("some other", "bf16", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_exits_with_2():
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 2
    check_message(ended.stderr.strip().splitlines()[-1], "gpu: no GPU is there", "benchmarks.floor")
    assert "Traceback" not in ended.stderr
