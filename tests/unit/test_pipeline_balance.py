"""Stages balanced by measured time: what is measured, on what, and what comes of it."""

import re

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.learners import stages
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe
from fmmeta.learners.stages import layer_seconds, plan_stages
from tests.support.messages import check_message, refusal
from tests.support.models import DECODERS, ENCODERS, save, save_family, tiny


def stream_of(folder, **settings):
    config = Config(model_name_or_path=str(folder), **settings)
    return open_lazy_model(config, describe(config)).learner


def test_a_large_head_takes_time_and_a_large_embedding_does_not(tmp_path):
    """Both have 8000 x 64 parameters: equal parts of parameters are not equal parts of time."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 96, "vocab_size": 8000}
    model = tiny("llama", **sizes, num_key_value_heads=4, tie_word_embeddings=False)
    learner = stream_of(save(model, tmp_path), task_type="causal_lm")
    seconds = layer_seconds(learner, 8, 64, torch.device("cpu"), bf16=False)
    assert len(seconds) == 8
    assert seconds[-1] > 3 * max(seconds[:-1])
    assert seconds[1:7] == [seconds[1]] * 6  # one kind, tried once
    assert all(param.is_meta for param in learner.parameters())
    by_parameters, by_time = plan_stages(learner, 2), plan_stages(learner, 2, seconds)
    assert by_parameters.bounds == (0, 4, 8)
    assert by_time.bounds[1] > 4
    assert sum(by_time.sizes) == sum(by_parameters.sizes) == sum(p.numel() for p in learner.parameters())


def test_the_cut_follows_the_costs(tmp_path):
    learner = stream_of(save_family(tmp_path, "llama", layers=3), task_type="causal_lm")
    assert plan_stages(learner, 2, [1.0, 1.0, 3.0]).bounds == (0, 2, 3)
    assert plan_stages(learner, 2, [3.0, 1.0, 1.0]).bounds == (0, 1, 3)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_every_family_is_measured_layer_by_layer(tmp_path, monkeypatch, family):
    """Four stages: without layers, first, middle, last; Gemma 2's middle layers differ in how far they look,
    so that both are measured.
    """
    held = []
    ordinary = stages.with_random_weights
    monkeypatch.setattr(
        stages,
        "with_random_weights",
        lambda stage, *rest: held.append(len(layers_of(stage))) or ordinary(stage, *rest),
    )
    settings = {"task_type": "causal_lm"} if family in DECODERS else {"n_way": 3}
    lora = {"lora_r": 2, "lora_target_modules": ["all-linear"]}
    learner = stream_of(
        save_family(tmp_path, family, layers=4), gradient_checkpointing=family == "bert", **lora, **settings
    )
    seconds = layer_seconds(learner, 2, 16, torch.device("cpu"), bf16=family == "gpt2")
    assert held == ([0, 1, 1, 1, 1] if family == "gemma2" else [0, 1, 1, 1])
    assert len(seconds) == 4
    assert all(value > 0 for value in seconds)


def layers_of(stage) -> set[str]:
    """Names of the transformer layers that a stage holds: those with a parameter in them."""
    names = " ".join(name for name, _ in stage.body.named_parameters())
    return set(re.findall(r"\b(?:layers|h|layer)\.\d+\b", names))


def test_layers_with_different_attention_windows_are_two_kinds(tmp_path):
    learner = stream_of(save_family(tmp_path, "qwen2", layers=4), task_type="causal_lm")
    layers = learner.hf.model.layers
    kinds = [stages.kind_of(learner, layer, number) for number, layer in enumerate(layers)]
    assert kinds[0] != kinds[1]
    assert kinds[1] == kinds[2] == kinds[3]


def test_pipeline_balance_without_stages_is_refused():
    check_message(
        refusal(Config, pipeline_balance="time"), "pipeline_balance=time", "pipeline_stages=1", "leave it out"
    )
    assert Config(pipeline_balance="time", pipeline_stages=2).pipeline_balance == "time"
