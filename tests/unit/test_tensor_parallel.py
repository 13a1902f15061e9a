"""Plans of tensor parallelism: what is split, what is refused, and derivatives of the split layers.

That every kind of split gives the numbers of the whole model is shown by the parity matrix.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, empty_learner
from fmmeta.learners.stages import plan_stages
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.memory import largest_part
from fmmeta.parallel.tensor_parallel import (
    SplitLinear,
    check_layers,
    copy_of,
    plan_of,
    sharing_ranks,
    split_layers,
)
from tests.support.messages import check_message, refusal
from tests.support.models import TENSOR_FAMILIES, save_family


def ranks_of_one(rank: int = 0, size: int = 1) -> Communicator:
    """A communicator that cuts as one of `size` ranks and sends nothing."""
    return Communicator(None, rank, size, torch.device("cpu"))


def learner_of(folder, family: str, **settings):
    save_family(folder, family)
    config = Config(model_name_or_path=str(folder), task_type="causal_lm", **settings)
    return empty_learner(config, describe(config)), config


@pytest.mark.parametrize(
    "lora", [{}, {"lora_r": 2, "lora_target_modules": ["all-linear"]}], ids=["full", "lora"]
)
@pytest.mark.parametrize("family", TENSOR_FAMILIES)
def test_the_planned_sizes_are_those_of_the_split_model(tmp_path, family, lora):
    learner, _ = learner_of(tmp_path, family, **lora)
    before = {name: param.numel() for name, param in learner.named_parameters()}
    shared_by = sharing_ranks(learner.hf.config, 2)
    split_layers(learner.hf.base_model, ranks_of_one(1, 2))
    after = {name: param.numel() for name, param in learner.named_parameters()}
    assert after == {name: size // shared_by(name) for name, size in before.items()}
    assert sum(after.values()) < sum(before.values())
    if lora:
        assert {shared_by(name) for name in before if ".lora_A." in name} == {1, 2}
        assert 2 in {shared_by(name) for name in before if ".lora_B." in name}


def test_stages_of_tensor_ranks_are_counted(tmp_path):
    learner, _ = learner_of(tmp_path, "llama")
    one = plan_stages(learner, 2, shared_by=sharing_ranks(learner.hf.config, 2))
    config = Config(
        model_name_or_path=str(tmp_path), task_type="causal_lm", pipeline_stages=2, tensor_parallel_size=2
    )
    counted = largest_part(config, learner, learner.hf.config)
    assert (counted.params, counted.frozen) == (max(one.trained), 0)
    assert max(one.sizes) < max(plan_stages(learner, 2).sizes)


@pytest.mark.parametrize(
    ("family", "settings", "size", "parts"),
    [
        ("gpt2", {}, 2, ("tensor_parallel_size=2", "model_type=gpt2", "pipeline stages or ZeRO 3")),
        ("mixtral", {}, 2, ("tensor_parallel_size=2", "model_type=mixtral", "of kind", "ZeRO 3")),
        ("llama", {"num_key_value_heads": 1}, 2, ("num_key_value_heads=1", "use a divisor")),
        ("llama", {"intermediate_size": 50}, 4, ("intermediate_size=50", "use a divisor")),
    ],
)
def test_models_that_cannot_be_split_are_refused(family, settings, size, parts):
    check_message(refusal(plan_of, AutoConfig.for_model(family, **settings), size), *parts)


def test_an_embedding_that_the_plan_splits_stays_complete():
    """GPT-NeoX has such a plan since transformers 5.24."""
    config = AutoConfig.for_model("llama")
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert "embed_tokens" not in plan_of(config, 2)
    shared_by = sharing_ranks(config, 2)
    assert shared_by("hf.model.embed_tokens.weight") == 1
    assert shared_by("hf.model.layers.0.mlp.up_proj.weight") == 2


def test_parameters_beside_split_layers_need_a_plan():
    """Phi's optional norms of queries and keys are applied to some heads of a rank; no plan names them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model("phi", vocab_size=50, qk_layernorm=True, **sizes)
    check_message(
        refusal(check_layers, AutoModelForCausalLM.from_config(config).base_model, 2),
        "tensor_parallel_size=2",
        "q_layernorm",
        "use ZeRO 3",
    )


def test_only_linear_layers_are_split():
    class Model(nn.Module):
        config = SimpleNamespace(model_type="own", base_model_tp_plan={"layers.*": "colwise"})

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(4, 4)])

    check_message(
        refusal(check_layers, Model(), 2),
        "tensor_parallel_size=2",
        "layers.0 is not linear (Embedding)",
        "use ZeRO 3",
    )


@pytest.mark.parametrize("kind", ["colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"])
def test_derivatives_of_every_order_are_those_of_a_linear_layer(kind):
    """On one rank, where the four functions pass their input on: they must be differentiable twice."""
    torch.manual_seed(0)
    whole = nn.Linear(4, 6).double()
    split = SplitLinear(nn.Linear(4, 6).double(), kind, ranks_of_one())
    split.load_state_dict(whole.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(split, x)
    assert torch.autograd.gradgradcheck(lambda x: split(x).tanh(), x)
    torch.testing.assert_close(split(x), whole(x))


@pytest.mark.parametrize("kind", ["leaf", "activation", "no gradient"])
def test_inputs_of_split_layers_are_freed(kind):
    """A copy that layers share is an attribute of their input, which must not be kept alive by it."""
    x = torch.ones(3, requires_grad=kind != "no gradient")
    given = 2 * x if kind == "activation" else x
    first, second = copy_of(given, ranks_of_one()), copy_of(given, ranks_of_one())
    assert (first is second) == (kind != "leaf")
    alive = weakref.ref(given)
    del given, x, first, second
    assert alive() is None
