"""--compile gives the same meta-gradient and refuses settings that conflict with it."""

from __future__ import annotations

import shutil

import pytest
import torch

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.models import forward_options
from fmmeta.models.forward_options import compile_model
from fmmeta.train import MetaTrainer
from tests.support.helpers import refusal
from tests.support.learners import batches_of, bert, config_of, episode_of, setup_of, task_gradient, worker_of
from tests.support.messages import check_message

CPU = torch.device("cpu")


def gradient_of(learner, algorithm, compiles: bool):
    """The meta-gradient of an episode with micro-batches of different lengths."""
    config, episode = config_of(learner, algorithm=algorithm), batches_of(episode_of(learner))
    worker = worker_of(learner, config)
    if compiles:
        compile_model(worker.model, CPU)
    rule = find(algorithm).rule(setup_of(worker, config), 0)
    return task_gradient(rule, worker, episode).gradient


@pytest.mark.parametrize("algorithm", ["fomaml", pytest.param("anil", marks=pytest.mark.slow)])
def test_meta_gradient_equals_that_of_the_plain_model(algorithm, monkeypatch):
    """The model is traced, differentiated and run as graphs, without a C++ compiler."""
    calls = []

    def backend(graph, inputs):
        from functorch.compile import aot_module_simplified, nop

        calls.append(graph)
        return aot_module_simplified(graph, inputs, fw_compiler=nop)

    monkeypatch.setattr(forward_options, "BACKEND", backend)
    torch._dynamo.reset()
    found = gradient_of(bert(), algorithm, True)
    assert (
        1 <= len(calls) <= 4
    )  # with and without gradients; the first size may get a separate graph, but not every length
    torch.testing.assert_close(found, gradient_of(bert(), algorithm, False), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_inductor_gives_the_same_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.testing.assert_close(
        gradient_of(bert(), "fomaml", True), gradient_of(bert(), "fomaml", False), rtol=1e-4, atol=1e-6
    )
    assert list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"pipeline_stages": 2}, "pipeline_stages=2"),
        (
            {"tensor_parallel_size": 2, "task_type": "causal_lm"},
            "tensor_parallel_size=2",
        ),
        ({"engine": "deepspeed"}, "engine=deepspeed"),
        (
            {"lora_r": 4, "tasks_per_pass": "2"},
            "tasks_per_pass=2",
        ),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True"),
        ({"packing": True, "task_type": "causal_lm"}, "packing=True"),
    ],
)
def test_conflicting_settings_are_refused(settings, setting):
    check_message(refusal(Config, compile=True, **settings), "compile=True", setting, "leave one out")


def test_missing_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = Config(compile=True, outer_steps=1, eval_episodes=0, output_dir=str(tmp_path / "run"))
    check_message(
        refusal(MetaTrainer(config).train),
        "compile=True",
        "CXX=no-such-compiler",
        "install one, or leave it out",
    )
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither g++ nor clang++ is there" in refusal(forward_options.check_compiler, "cpu")
