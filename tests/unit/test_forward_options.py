"""Attention implementations, checkpointed layers and --compile: same numbers, and conflicts are refused."""

import json
import shutil
from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import BloomConfig, CTRLConfig, CTRLLMHeadModel

from fmmeta.common.processes import restored_process
from fmmeta.config.settings import Config
from fmmeta.learners import forward_options
from fmmeta.learners.forward_options import bf16_slowdown, check_attention
from fmmeta.learners.load import describe, load_learner
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, set_matmul_precision
from fmmeta.train import MetaTrainer
from fmmeta.training import build
from fmmeta.training.build import plan_parallel, precision_text, read_inputs
from tests.support.learners import batches_of, bert, episode_of, rule_on, task_gradient
from tests.support.messages import check_message, refusal
from tests.support.models import save, write_pairs

IDS = torch.randint(3, 250, (4, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)


@pytest.fixture
def sources(bert, llama):
    return {"bert": str(bert), "llama": str(llama)}


def learner_of(source: str, **settings):
    config = Config(model_name_or_path=source, head_init="prototype", **settings)
    return load_learner(config, describe(config))


def one_pass(learner) -> tuple[torch.Tensor, dict[str, torch.Tensor], int, Counter]:
    """Loss, gradients, bytes stored for the backward pass, and how often each layer ran."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in learner.parameters()}
    layers = next(module for module in learner.modules() if isinstance(module, torch.nn.ModuleList))
    runs = Counter[int]()
    for number, layer in enumerate(layers):
        # transformers checkpoints inside the layer's own call, so that a part of it counts
        next(layer.children()).register_forward_pre_hook(lambda *_, number=number: runs.update([number]))

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = learner.logits(learner(input_ids=IDS, attention_mask=MASK)).float().logsumexp(-1).mean()
    held = sum(size for place, size in kept.items() if place not in weights)
    loss.backward()
    return loss, {name: p.grad for name, p in learner.named_parameters() if p.requires_grad}, held, runs


@pytest.mark.parametrize("lora", [{}, {"lora_r": 4}])
@pytest.mark.parametrize(
    ("base", "settings"), [("llama", {"task_type": "causal_lm"}), ("bert", {"pooling": "mean"})]
)
def test_checkpointed_layers_save_memory_and_give_equal_gradients(sources, base, settings, lora):
    (loss, gradients, held, runs), (again_loss, again, again_held, again_runs) = (
        one_pass(learner_of(sources[base], gradient_checkpointing=checkpointing, **settings, **lora))
        for checkpointing in (False, True)
    )
    assert (runs, again_runs) == ({0: 1, 1: 1}, {0: 2, 1: 2})
    assert again_held < 0.5 * held
    assert torch.equal(loss, again_loss)
    torch.testing.assert_close(again, gradients, rtol=1e-6, atol=1e-8)


def test_a_model_without_checkpointing_is_refused(tmp_path):
    save(CTRLLMHeadModel(CTRLConfig(vocab_size=259, n_embd=8, dff=8, n_layer=1, n_head=2)), tmp_path)
    check_message(
        refusal(learner_of, str(tmp_path), task_type="causal_lm", gradient_checkpointing=True),
        "gradient_checkpointing=True",
        "leave it out, or lower --micro_batch_size",
    )


def test_chosen_attention_is_used(sources):
    eager, sdpa = (
        learner_of(sources["llama"], task_type="causal_lm", attn_implementation=name)
        for name in ("eager", "sdpa")
    )
    assert [learner.hf.config._attn_implementation for learner in (eager, sdpa)] == ["eager", "sdpa"]
    with torch.no_grad():
        torch.testing.assert_close(
            *(model(input_ids=IDS, attention_mask=MASK) for model in (eager, sdpa)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "bf16", "device", "parts"),
    [
        ("flash_attention_2", True, "cpu", ("needs a GPU", "use sdpa or eager")),
        ("kernels-community/flash-attn2", True, "cpu", ("needs a GPU", "use sdpa or eager")),
        ("flash_attention_2", False, "cuda", ("in fp32", "add --bf16, or use sdpa or eager")),
        ("flex_attention", True, "cpu", ("no backward pass on CPUs", "use sdpa or eager")),
        ("paged|eager", True, "cuda", ("needs the cache", "use sdpa or eager")),
        (None, False, "cpu", ()),
        ("sdpa", False, "cpu", ()),
        ("eager", True, "cpu", ()),
        ("flash_attention_2", True, "cuda", ()),
        ("flex_attention", False, "cuda", ()),
    ],
)
def test_attention_that_cannot_train_is_refused(name, bf16, device, parts):
    config = Config(attn_implementation=name)
    if parts:
        message = refusal(check_attention, config, bf16, device)
        check_message(message, f"attn_implementation={name} ", *parts)
    else:
        check_attention(config, bf16, device)


def plan_lines(config: Config) -> list[str]:
    """What a run says of its plan."""
    world, lines = World(Launch(), torch.device("cpu")), list[str]()
    plan_parallel(config, read_inputs(config, world, print), world, lines.append)
    return lines


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("sdpa", "BloomForCausalLM does not support"),
        ("nonsense", '`attn_implementation="nonsense"`'),
        ("flex_attention", "no backward pass on CPUs"),
    ],
)
def test_unsupported_attention_is_refused_before_weights_are_read(tmp_path, name, cause):
    BloomConfig(vocab_size=259, hidden_size=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    inputs = {"model_name_or_path": str(tmp_path), "dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))]}
    message = refusal(plan_lines, Config(**inputs, task_type="causal_lm", attn_implementation=name))
    assert message.startswith(f"attn_implementation={name} ")
    assert cause in message
    assert message.endswith(("; use eager, or leave it out", "; use sdpa or eager"))


def test_the_price_of_bf16_is_measured(monkeypatch):
    """By a clock that the products move: the first product of a dtype is slow, and is not the fastest."""
    clock, seen = [0.0], Counter()

    def product(rows, weights):
        clock[0] += {torch.bfloat16: 0.02, torch.float32: 0.004}[rows.dtype] * (1 if seen[rows.dtype] else 9)
        seen[rows.dtype] += 1

    monkeypatch.setattr(forward_options.F, "linear", product)
    monkeypatch.setattr(forward_options, "process_time", lambda: clock[0])
    assert bf16_slowdown.__wrapped__() == pytest.approx(5)  # without its cache
    assert seen == {torch.bfloat16: 5, torch.float32: 5}


@pytest.mark.parametrize(
    ("times", "of_file", "wanted"),
    [
        (8.2, "auto", "takes 8 times as long as in fp32; use --bf16 false"),
        (8.2, True, 'takes 8 times as long as in fp32; use "bf16": {"enabled": false} in '),
        (1.2, True, ""),
    ],
)
def test_bf16_on_a_cpu_without_bf16_instructions_is_warned_of(
    sources, tmp_path, monkeypatch, times, of_file, wanted
):
    monkeypatch.setattr(build, "bf16_slowdown", lambda: times)
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"bf16": {"enabled": of_file}}))
    config = Config(
        model_name_or_path=sources["llama"],
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        task_type="causal_lm",
        deepspeed=str(ds),
        bf16=True,
    )
    lines = plan_lines(config)
    found = [line for line in lines if line.startswith("bf16 on this CPU: ")]
    assert found if wanted else not found
    assert all(wanted in line for line in found)
    assert "precision: bf16 weights and activations over fp32 shards" in lines


@pytest.mark.parametrize(
    ("settings", "bf16", "native", "wanted"),
    [
        ({}, True, True, "bf16 weights and activations over fp32 shards"),
        ({}, False, True, "fp32 without TF32: matrix products run at about 1/9 of bf16's rate on an H100;"),
        ({}, False, True, "; use --bf16 or --float32_matmul_precision high"),
        ({"algorithm": "imaml"}, False, True, "; the finite differences of algorithm=imaml need it"),
        (
            {"algorithm": "maml", "lora_r": 2},
            False,
            True,
            "; the finite differences of algorithm=maml need it",
        ),
        ({"float32_matmul_precision": "high"}, False, True, "fp32, float32_matmul_precision=high"),
        ({}, False, False, "fp32, float32_matmul_precision=highest"),
    ],
)
def test_the_precision_is_named_with_its_price(monkeypatch, settings, bf16, native, wanted):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    config, deepspeed = Config(**settings), DeepSpeedSettings(3, bf16, False)
    with restored_process():
        set_matmul_precision(config)
        assert wanted in precision_text(config, deepspeed, torch.device("cuda"))


@pytest.mark.parametrize(("kind", "lines"), [("xpu", 1), ("mps", 1), ("cuda", 0), (None, 0)])
def test_an_accelerator_that_is_not_used_is_named(monkeypatch, kind, lines):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    said = plan_lines(Config())
    found = [line for line in said if f"accelerator {kind} of this machine is not used" in line]
    assert len(found) == lines
    assert not [line for line in said if "precision: " in line]  # of fp32 on CPUs


def gradient_of(learner, algorithm, compiles: bool):
    """The meta-gradient of an episode with micro-batches of different lengths."""
    rule, worker = rule_on(learner, algorithm=algorithm)
    if compiles:
        forward_options.compile_model(worker.model, torch.device("cpu"))
    return task_gradient(rule, worker, batches_of(episode_of(learner))).gradient


@pytest.mark.parametrize("algorithm", ["fomaml", pytest.param("anil", marks=pytest.mark.slow)])
def test_the_meta_gradient_of_a_compiled_model_is_that_of_the_plain_one(algorithm, monkeypatch):
    """The model is traced, differentiated and run as graphs, without a C++ compiler."""
    calls = []

    def backend(graph, inputs):
        from functorch.compile import aot_module_simplified, nop

        calls.append(graph)
        return aot_module_simplified(graph, inputs, fw_compiler=nop)

    monkeypatch.setattr(forward_options, "BACKEND", backend)
    torch._dynamo.reset()
    found = gradient_of(bert(), algorithm, True)
    # with and without gradients; the first size may get a separate graph, but not every length
    assert 1 <= len(calls) <= 4
    torch.testing.assert_close(found, gradient_of(bert(), algorithm, False), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_inductor_gives_the_same_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    one, other = (gradient_of(bert(), "fomaml", compiles) for compiles in (True, False))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert list(tmp_path.rglob("*.so"))


def test_missing_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = MetaTrainer(Config(compile=True, outer_steps=1, eval_episodes=0, output_dir=str(tmp_path / "run")))
    parts = ("CXX=no-such-compiler", "install one, or leave it out")
    check_message(refusal(run.train), "compile=True", *parts)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither g++ nor clang++ is there" in refusal(forward_options.check_compiler, "cpu")
