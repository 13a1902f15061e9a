"""--compile gives the same meta-gradient and refuses settings that conflict with it."""

import shutil

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.learners import forward_options
from fmmeta.learners.forward_options import compile_model
from fmmeta.train import MetaTrainer
from tests.support.learners import batches_of, bert, episode_of, rule_on, task_gradient
from tests.support.messages import check_message, refusal

CPU = torch.device("cpu")


def gradient_of(learner, algorithm, compiles: bool):
    """The meta-gradient of an episode with micro-batches of different lengths."""
    rule, worker = rule_on(learner, algorithm=algorithm)
    if compiles:
        compile_model(worker.model, CPU)
    return task_gradient(rule, worker, batches_of(episode_of(learner))).gradient


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
