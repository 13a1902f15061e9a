"""Mixtures of experts: loading by parameter, markers, and what is refused."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

import fmmeta
from fmmeta import MetaTrainer
from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.experts import frozen_names, fused_experts, release_weights, router_names
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe, load_learner
from fmmeta.meta.algorithms.setup import layer_factors, refuse_jumps
from fmmeta.meta.hessian import HvpOptions
from tests.support import learners
from tests.support.exports import exported
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import MIXTURES, save, save_family, tiny


def config_of(folder, **settings) -> Config:
    return Config(model_name_or_path=str(folder), task_type="causal_lm", dataset=["-"], **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return {family: save_family(root / family, family) for family in MIXTURES}


@pytest.mark.parametrize("family", MIXTURES)
def test_weights_read_by_parameter_are_those_of_transformers(folders, family):
    """Of 12 experts: the order of the names of their tensors is not that of the experts."""
    config = config_of(folders[family])
    wanted, lazy = load_learner(config, describe(config)), open_lazy_model(config, describe(config))
    assert len(fused_experts(wanted)) == (2 if "first_k_dense_replace" in vars(wanted.hf.config) else 3)
    lazy.materialize([name for name, _ in lazy.learner.named_parameters()])
    torch.testing.assert_close(lazy.learner.state_dict(), wanted.state_dict(), rtol=0, atol=0)


def test_a_missing_expert_is_named(folders, tmp_path):
    folder = save_family(tmp_path / "damaged", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = config_of(folder)
    check_message(
        refusal(open_lazy_model, config, describe(config)),
        "model.layers.1.mlp.experts.down_proj of shape [11, 32, 16]",
        "its configuration says [12, 32, 16]",
        "fix config.json or the weights",
    )


@pytest.mark.parametrize("back_end", ["eager", "grouped_mm"])
def test_the_backward_pass_keeps_no_view_of_weights_that_were_released(back_end):
    torch.manual_seed(0)
    model = tiny("mixtral")
    model.config._experts_implementation = back_end
    experts = next(iter(fused_experts(model).values()))
    inputs = torch.randn(5, 32), torch.randint(12, (5, 2)), torch.rand(5, 2)
    params = [*experts.parameters()]
    wanted = torch.autograd.grad(experts(*inputs).square().sum(), params)
    release_weights(experts)
    loss = experts(*inputs).square().sum()
    kept = [param.detach().clone() for param in params]
    before = [StorageWeakRef(param.untyped_storage()) for param in params]
    for param, values in zip(params, kept, strict=True):
        param.data = torch.empty(0)  # as ZeRO 3 does after the forward pass
        param.data = values  # and before the backward pass
    assert all(one.expired() for one in before)
    torch.testing.assert_close(torch.autograd.grad(loss, params), wanted)


@pytest.mark.parametrize("targets", ["target_parameters", "all-linear"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_those_of_peft(folders, tmp_path, family, targets):
    """Written, loaded by peft, merged by transformers, and loaded again to be trained further."""
    options = {"r": 2, "target_modules": targets}  # peft adapts experts too in some families, at another rank
    if targets != "all-linear":
        named = ["experts.gate_up_proj", "experts.down_proj"]
        options = {"r": 2, "alpha_pattern": {"down_proj": 3}, "target_parameters": named}
    given, source = {"lora_r": 2, "peft_config": json.dumps(options)}, folders[family]
    _, worker = exported(source, tmp_path / "model", task_type="causal_lm", lora_merge=True, **given)
    batch = {"input_ids": torch.arange(3, 15)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    base, again = AutoModelForCausalLM.from_pretrained(source), config_of(tmp_path / "model", **given)
    with torch.no_grad():
        wanted, without = worker.learner(**batch), base(**batch).logits
        found = PeftModel.from_pretrained(base, tmp_path / "model")(**batch).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**batch).logits
        further = load_learner(again, describe(again))(**batch)
    assert float((wanted - without).abs().max()) > 1e-3
    for logits in (found, merged, further):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_not_there_are_refused(folders):
    options = {"r": 2, "target_parameters": ["experts.gate_proj"]}
    config = config_of(folders["qwen3_moe"], peft_config=json.dumps(options))
    check_message(
        refusal(load_learner, config, describe(config)),
        "target_parameters experts.gate_proj fits no parameter of Qwen3MoeForCausalLM",
        "such as mlp.experts.gate_up_proj (down_proj, gate_up_proj)",
    )


def test_routers_are_frozen_by_default(folders):
    """By rules of gradients with all weights, unless names are given; one that fits nothing is refused."""
    learner = load_learner(config_of(folders["gpt_oss"]), describe(config_of(folders["gpt_oss"])))
    routers = router_names(learner)
    assert [name.split(".")[-1] for name in routers] == ["weight", "bias"] * 3
    for settings, wanted in (
        ({}, len(routers)),
        ({"algorithm": "maml"}, len(routers)),
        ({"algorithm": "reptile"}, 0),
        ({"lora_r": 2}, 0),
        ({"inner_lr_learned": "layer"}, 0),
        ({"freeze": ["none"]}, 0),
        ({"freeze": ["*.sinks"]}, 1),
    ):
        assert len(frozen_names(config_of(folders["gpt_oss"], **settings), routers)) == wanted
    names = ("hf.model.layers.0", "frozen *.sinks")
    assert layer_factors(config_of(folders["gpt_oss"], freeze=["*.sinks"]), names) == [1.0, 0.0]
    with pytest.raises(UsageError, match=r"freeze=.*lm_hat fits no trained parameter"):
        layer_factors(config_of(folders["gpt_oss"], freeze=["*.lm_hat"]), names)


@pytest.mark.parametrize("freeze", [[], ["none"], ["*.mlp.gate.weight", "*norm.weight"]], ids=" ".join)
def test_a_trained_mixture_is_adapted_with_what_its_inner_loop_froze(folders, tmp_path, freeze):
    """The commands that adapt a model run without the rule of its training."""
    one = {"inner_steps": 1, "inner_lr": 1.0, "outer_steps": 1, "eval_episodes": 0, "num_workers": 0}
    source, few = str(folders["qwen3_moe"]), {"meta_batch_size": 1, "k_shot": 2, "num_query": 2}
    settings = {"task_type": "causal_lm", "output_dir": str(tmp_path), "freeze": freeze, **one, **few}
    MetaTrainer(Config(model_name_or_path=source, dataset=["words"], **settings)).train()
    pairs = [{"input": "one", "output": "two"}, {"input": "three", "output": "four"}]
    fmmeta.adapt(tmp_path / "model", pairs, output_dir=tmp_path / "adapted", early_stopping=False)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "adapted"))
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    norms = {name for name in before if name.endswith("norm.weight")}
    assert same & (routers | norms) == (set() if "none" in freeze else routers | (norms if freeze else set()))
    assert len(same) < len(before) / 2


@pytest.mark.parametrize(
    ("family", "settings", "most"),
    [
        ("qwen3_moe", {"second_order": "autograd"}, 1e-4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt_oss", {"second_order": "autograd", "freeze": ["none"]}, 1e-4),
                ("deepseek_v3", {"second_order": "differences"}, 2e-3),
            )
        ),
    ],
)
def test_exact_meta_gradients_equal_autograd_in_fp64(family, settings, most):
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "n_routed_experts": 4, "tie_word_embeddings": False}
    learner = CausalLearner(tiny(family, **sizes)).train()
    config = learners.config_of(learner, algorithm="maml", inner_steps=2, **settings)
    episode = learners.episode_of(learner, support=4, query=2)
    found, worker = learners.rule_gradient(learner, config, episode)
    learner.hf.config._experts_implementation = "eager"  # the others know no fp64
    exact, first = (
        learners.oracle_gradient(learner, given, episode)[0]
        for given in (config, learners.config_of(learner, inner_steps=2, freeze=config.freeze))
    )
    assert learners.compared(learner, config, worker, found.gradient, exact)[1] < most
    assert learners.compared(learner, config, worker, found.gradient, first)[1] > 20 * most
    routers = [name for name in worker.routers if "bias" not in name]
    assert all(exact[name].abs().max() > 0 for name in routers)  # they are trained in the outer loop


def test_differences_are_taken_only_where_they_are_asked_for():
    learner = CausalLearner(tiny("mixtral")).train()
    config = learners.config_of(learner, algorithm="maml")
    worker, by_differences = learners.worker_of(learner, config), HvpOptions("fp32")
    check_message(
        refusal(refuse_jumps, config, worker, by_differences),
        "algorithm=maml and second_order=auto take differences",
        "use --second_order autograd",
    )
    for settings in ({"second_order": "differences"}, {"algorithm": "fomaml"}):
        config = learners.config_of(learner, **{"algorithm": "maml", **settings})
        refuse_jumps(config, worker, by_differences)


def test_the_loss_of_routers_is_refused(tmp_path):
    folder = save(tiny("mixtral", output_router_logits=True), tmp_path)
    check_message(refusal(describe, config_of(folder)), "output_router_logits", "set it to false")
