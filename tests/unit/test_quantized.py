"""Adapters over 4-bit and 8-bit bases: gradients, bytes, the commands that use them, and refusals.
tests/distributed/test_quantized.py has the layouts.
"""

import copy
import json
import shutil
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.learners.load import describe, empty_learner, fitted_to_model, load_learner
from fmmeta.learners.quantized import check_use
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.memory import count_params, estimate, largest_part, rank_sizes
from fmmeta.planning.layouts import Planner
from fmmeta.planning.machines import PROFILES
from fmmeta.planning.settings import PlanConfig
from tests.support.launch import ROOT
from tests.support.messages import check_message, refusal
from tests.support.models import WORDS, save, tiny, write_pairs

bitsandbytes = pytest.importorskip("bitsandbytes")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS = {
    "nf4": NF4,
    "double": {**NF4, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
SETTINGS = {"task_type": "causal_lm", "lora_r": 4, "lora_target_modules": ["all-linear"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folder of a base by kind."""
    root = tmp_path_factory.mktemp("bases")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    full = save(tiny("llama", **sizes), root / "full")
    for kind, settings in KINDS.items():
        how = transformers.BitsAndBytesConfig(**settings)
        save(transformers.AutoModelForCausalLM.from_pretrained(full, quantization_config=how), root / kind)
    return root


def learner_of(folder, **settings):
    config = Config(model_name_or_path=str(folder), **{**SETTINGS, **settings})
    return load_learner(config, describe(config)), config


def stored_bytes(learner) -> int:
    """Of quantised weights and what they are dequantised with, in memory."""
    total = 0
    for module in learner.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit) and not hasattr(module, "base_layer"):
            state = module.weight.quant_state
            parts = [module.weight, state.absmax, state.code]
            parts += [state.state2.absmax, state.state2.code] if state.nested else []
            total += sum(part.nbytes for part in parts)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt) and not hasattr(module, "base_layer"):
            total += module.weight.nbytes + module.weight.SCB.nbytes
    return total


def dequantised(learner):
    """A copy that computes with ordinary weights, made by bitsandbytes alone."""
    full = copy.deepcopy(learner)
    for module in full.modules():
        if isinstance(base := getattr(module, "base_layer", module), bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
        elif isinstance(base, bitsandbytes.nn.Linear8bitLt):
            weight = bitsandbytes.functional.int8_vectorwise_dequant(base.weight.data, base.weight.SCB)
        else:
            continue
        base.__class__, base.weight = torch.nn.Linear, torch.nn.Parameter(weight, False)
    return full


@pytest.mark.parametrize(("kind", "given"), [("full", {"load_in_4bit": True}), *((one, {}) for one in KINDS)])
def test_gradients_hessian_products_and_bytes_are_those_of_the_dequantised_base(bases, kind, given):
    learner, config = learner_of(bases / kind, **given)
    found, counted = [], count_params(empty_learner(config, describe(config)))
    for model in (learner.double(), dequantised(learner).double()):
        ids = torch.tensor([[1, 7, 9, 30, 4], [2, 5, 8, 11, 3]])
        params = [param for param in model.parameters() if param.requires_grad]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model.hf(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            gradient = torch.autograd.grad(loss, params, create_graph=True)
            product = torch.autograd.grad(sum((one**2).sum() for one in gradient), params)
        found.append([torch.cat([one.detach().flatten() for one in each]) for each in (gradient, product)])
    for one, wanted in zip(*found, strict=True):
        assert float((one - wanted).norm() / wanted.norm()) < 1e-6
    assert counted.packed_bytes == pytest.approx(stored_bytes(learner), rel=0.05)
    assert counted.packed == sum(2 * 64 * (64 + 32 + 96) + 64 * 96 for _ in range(2))


def peak_bytes(call) -> int:
    """Of the tensors that a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_pass_holds_one_dequantised_weight(tmp_path, bf16):
    """Rows are so small that it is most of what a forward or backward pass allocates."""
    folder = save(tiny("llama", hidden_size=64, intermediate_size=4096), tmp_path / "wide")
    learner, config = learner_of(folder, load_in_4bit=True)
    if bf16:
        learner = learner.bfloat16()
    counted = largest_part(config, empty_learner(config, describe(config)), learner.hf.config)
    sizes = rank_sizes(config, learner.hf.config, counted, lazy=True)
    kinds = estimate(replace(sizes, rows=1, tokens=4), DeepSpeedSettings(0, bf16, False), 1).kinds
    assert counted.unpacked == 64 * 4096
    ids, loss = torch.tensor([[1, 7, 9, 30]]), []
    forward = peak_bytes(lambda: loss.append(learner.hf(input_ids=ids, labels=ids).loss))
    saved = kinds["activations"] + kinds["logits"]
    assert forward == pytest.approx(kinds["gathered"] + saved, rel=0.15)
    assert peak_bytes(loss[0].backward) == pytest.approx(kinds["gathered"], rel=0.15)


def test_many_tasks_are_adapted_answered_and_evaluated(bases, tmp_path):
    supports = {
        f"t{number}": [(f"{word} {WORDS[number + 7]}", word) for word in WORDS[number : number + 4]]
        for number in range(6)
    }
    settings = {**SETTINGS, "inner_steps": 2, "inner_lr": 0.5, "load_in_4bit": True, "task_type": "causal_lm"}
    models = fmmeta.adapt_many(str(bases / "full"), supports, output_dir=str(tmp_path / "many"), **settings)
    alone = fmmeta.adapt(str(bases / "full"), supports["t3"], output_dir=str(tmp_path / "one"), **settings)
    many, one = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "many/t3", tmp_path / "one")
    )
    assert all(torch.allclose(many[name], value, atol=1e-5) for name, value in one.items())
    assert json.loads((tmp_path / "one" / "fmmeta.json").read_text())["load_in_4bit"]
    texts = ["river stone", "maple"]
    answers = [answer.output for answer in alone.predict(texts, 4)]
    assert [answer.output for answer in fmmeta.load(str(tmp_path / "one")).predict(texts, 4)] == answers
    assert len(models) == 6
    how = transformers.BitsAndBytesConfig(**NF4)  # in training: else bitsandbytes packs for other kernels
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "full", quantization_config=how)
    ids = torch.tensor([[1, 5, 6, 9]])
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, tmp_path / "one").train()(input_ids=ids).logits
        wanted = alone.loaded.worker.learner.hf(input_ids=ids).logits
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_run_resumes_and_its_model_is_evaluated(bases, tmp_path):
    given = {"dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))], "k_shot": 2, "num_query": 2}
    run = {**SETTINGS, **given, "inner_steps": 1, "outer_steps": 4, "save_steps": 2, "eval_episodes": 0}
    run |= {
        "model_name_or_path": str(bases / "nf4"),
        "algorithm": "maml",
        "meta_batch_size": 2,
        "max_length": 32,
    }
    MetaTrainer(Config(**run, output_dir=str(tmp_path / "whole"))).train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "from")
    again = {"output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(tmp_path / "from")}
    MetaTrainer(Config(**run, **again)).train()
    whole, resumed = (
        load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("whole", "again")
    )
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert any(float(value.abs().max()) > 0 for name, value in whole.items() if "lora_B" in name)
    found = {
        **given,
        "episodes": 4,
        "max_length": 32,
        "model_name_or_path": str(tmp_path / "whole" / "model"),
    }
    assert fmmeta.evaluate(**found, eval_split="train")["episodes"] == 4


def planned(folder, **settings):
    return Planner(PlanConfig(model_name_or_path=str(folder), gpus=2, **settings), PROFILES["h100"])


def test_plan_counts_the_bytes_and_leaves_out_what_does_not_go(bases):
    settings = {"task_type": "causal_lm", "gpu_memory_gib": 80.0, "max_length": 32, "bf16": False}
    way = {"lora_r": 4, "zero_stage": [2], "lora_target_modules": ["all-linear"]}
    by_kind = {}
    for kind in ("full", "nf4"):
        planner = planned(bases / kind, **settings, **way)
        by_kind[kind] = planner.layouts()[0].memory.kinds["weights"]
    learner, _ = learner_of(bases / "nf4")
    packed = 2 * (2 * 64 * (64 + 32 + 96) + 64 * 96)
    assert by_kind["full"] - by_kind["nf4"] == pytest.approx(4 * packed - stored_bytes(learner), rel=0.01)
    planner = planned(bases / "nf4", **settings)
    assert {(one.strategy.zero_stage, one.strategy.lora_r > 0) for one in planner.layouts()} <= {
        (stage, True) for stage in range(3)
    }
    assert any("lora_r=0" in reason for reason in planner.refused)
    assert any("ZeRO 3" in reason for reason in planner.refused)


@pytest.mark.parametrize(
    ("values", "settings", "parts"),
    [
        ({}, {"lora_r": 0}, ("lora_r=0", "give --lora_r 8")),
        ({}, {"lora_r": 4, "lora_merge": True}, ("lora_merge=True", "leave it out")),
        ({}, {"lora_r": 4, "pipeline_stages": 2}, ("pipeline_stages=2", "use ZeRO 0 to 2")),
        ({}, {"lora_r": 4, "tensor_parallel_size": 2}, ("tensor_parallel_size=2", "use ZeRO 0 to 2")),
        ({}, {"lora_r": 4, "load_in_4bit": True}, ("load_in_4bit=True", "leave it out")),
        *(
            (
                {"quant_method": method, "bits": 4},
                {"lora_r": 4},
                (f"is quantised by {method}", "--load_in_4bit"),
            )
            for method in ("gptq", "awq", "mxfp4", "gguf", "hqq")
        ),
        ({"bnb_4bit_quant_storage": "bfloat16"}, {"lora_r": 4}, ("bnb_4bit_quant_storage=bfloat16", "uint8")),
    ],
)
def test_what_cannot_be_trained_is_refused(bases, tmp_path, values, settings, parts):
    content = json.loads((bases / "nf4" / "config.json").read_text())
    content["quantization_config"] |= values
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = Config(model_name_or_path=str(tmp_path), task_type="causal_lm", **settings)
    check_message(refusal(fitted_to_model, config), *parts)


def test_refusals_of_zero_3_of_full_weights_in_commands_and_without_bitsandbytes(bases, monkeypatch):
    given = {"model_name_or_path": str(bases / "nf4"), "task_type": "causal_lm"}
    config = Config(**given, lora_r=4)
    check_message(refusal(check_use, config, describe(config).hf_config, 3), "ZeRO 3", "use ZeRO 0 to 2")
    support = [("river", "stone"), ("maple", "quiet")]
    check_message(
        refusal(fmmeta.adapt, str(bases / "nf4"), support, task_type="causal_lm"), "lora_r=0", "--lora_r 8"
    )
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    check_message(refusal(describe, config), "needs bitsandbytes", "pip install 'fmmeta[quantized]'")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_smollm2_in_nf4(tmp_path):
    """Real weights: bytes, a gradient and an outer step."""
    gguf = ROOT.parent / "shared" / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.is_file():
        pytest.skip("SmolLM2 is not here")
    from fmmeta.learners.from_gguf import as_folder

    folder = as_folder(str(gguf), print)
    learner, config = learner_of(folder, load_in_4bit=True, lora_target_modules=["q_proj", "v_proj"])
    counted = count_params(empty_learner(config, describe(config)))
    assert counted.packed == 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert counted.packed_bytes == pytest.approx(stored_bytes(learner), rel=0.001)
    ids = torch.tensor([[1, 7, 900, 30, 4]])
    found = []
    for model in (learner, dequantised(learner)):
        params = [param for param in model.parameters() if param.requires_grad]
        loss = model.hf(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        found.append(torch.cat([one.flatten() for one in torch.autograd.grad(loss, params)]))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-3
    given = {"dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))], "k_shot": 2, "num_query": 2}
    run = {"model_name_or_path": folder, "task_type": "causal_lm", "lora_r": 4, "load_in_4bit": True}
    run |= {
        **given,
        "algorithm": "maml",
        "inner_steps": 2,
        "outer_steps": 1,
        "meta_batch_size": 1,
        "eval_episodes": 0,
    }
    result = MetaTrainer(Config(**run, max_length=32, output_dir=str(tmp_path / "out"))).train()
    assert result is not None
