"""Exact meta-gradients of adapters: the recursion against autograd through the whole inner loop."""

import copy
from collections import defaultdict
from dataclasses import replace
from statistics import mean

import pytest
import torch

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.forward_options import checkpoint_layers
from fmmeta.learners.lora import inject
from fmmeta.meta.gradient_check import check
from fmmeta.parallel.costs import passes, second_order_by_autograd
from tests.support.learners import (
    RuleOn,
    against_oracle,
    batches_of,
    bert,
    by_name,
    compared,
    config_of,
    cosine_and_error,
    episode_of,
    identity,
    llama,
    meta_parameters,
    oracle_gradient,
    rule_gradient,
    rule_on,
    setup_of,
    task_gradient,
)
from tests.support.messages import check_message, refusal

MAML = {"algorithm": "maml", "lora_r": 2, "inner_steps": 5}
ADAMW = {"inner_optimizer": "adamw", "inner_lr": 0.01, "inner_weight_decay": 0.1}
OWN = "tests.support.inner_optimizer"
OPTIMIZERS = [{}, {"inner_optimizer": "momentum"}, ADAMW]


def with_adapters(learner: Learner, fresh: bool = False) -> Learner:
    """A copy with adapters on all linear layers; `fresh`: B is zero, as at the start of a training."""
    model = copy.deepcopy(learner)
    inject(model, config_of(model, lora_r=2, lora_target_modules=["all-linear"]))
    draw = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_B" in name and not fresh:
            param.data.copy_(0.3 * torch.randn(param.shape, generator=draw))
    return model


BERT, LLAMA = bert(), llama()
ADAPTED = {"bert": with_adapters(BERT), "llama": with_adapters(LLAMA)}


@pytest.fixture
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {**optimizer, **extra}
            for extra in ({"inner_steps": 1}, {}, {"inner_lr_learned": "element"})
            for optimizer in OPTIMIZERS
        ),
        {"inner_lr_learned": "layer", **ADAMW},
        {"multi_step_loss_steps": 9, **ADAMW},
        {"truncate_steps": 2, **OPTIMIZERS[1]},
        {"truncate_steps": 2, "multi_step_loss_steps": 9, **ADAMW},
        {"head_init": "learned", **ADAMW},
        # graphs that are computed again
        *({**one, "inner_lr": 0.005, "inner_steps": 20} for one in OPTIMIZERS),
        *(
            pytest.param({**one, "inner_lr": 0.005, "inner_steps": 50}, marks=pytest.mark.slow)
            for one in OPTIMIZERS
        ),
        {"algorithm": "proto_maml", "prototype_gradient": True, "inner_lr": 0.02},
        {"algorithm": "imaml", "proximal_weight": 20.0, "inner_lr": 0.02},
        {"algorithm": "boil"},
    ],
    ids=identity,
)
def test_in_fp64_the_recursion_is_autograd_through_the_inner_loop(fp64, settings):
    learner = copy.deepcopy(ADAPTED["bert"]).double()
    config, episode = config_of(learner, **{**MAML, **settings}), episode_of(learner)
    found, worker = rule_gradient(learner, config, episode)
    wanted, of_rates = oracle_gradient(learner, config, episode)
    assert compared(learner, config, worker, found.gradient, wanted)[1] < 1e-9
    if settings.get("inner_lr_learned") == "element":
        rates = by_name(worker, found.extra["rates"])
        mine, theirs = (torch.cat([of[name].reshape(-1) for name in of_rates]) for of in (rates, of_rates))
        assert cosine_and_error(mine, theirs)[1] < 1e-9


def test_an_optimizer_of_the_user_is_differentiated():
    """One that does what momentum does gives momentum's meta-gradient."""
    learner, episode = ADAPTED["bert"], episode_of(ADAPTED["bert"])
    both = ({"inner_optimizer": "momentum", "inner_momentum": 0.5}, {"inner_optimizer": f"{OWN}:smooth"})
    one, other = (
        rule_gradient(learner, config_of(learner, **MAML, **of), episode)[0].gradient for of in both
    )
    assert float((one - other).norm() / one.norm()) < 1e-6


FULL = {"algorithm": "maml", "inner_steps": 3, "second_order": "autograd"}


@pytest.mark.parametrize(
    ("learner", "settings", "at_most"),
    [
        (BERT, {"algorithm": "anil", "inner_steps": 5, **ADAMW}, 1e-4),
        *((learner, FULL, 1e-4) for learner in (BERT, LLAMA)),
        *((learner, {**FULL, **ADAMW}, 1e-3) for learner in (BERT, LLAMA)),
        # A of a fresh adapter has no gradient in the first step, as B is zero; AdamW divides by epsilon
        *((with_adapters(BERT, fresh=True), {**MAML, **optimizer}, 1e-3) for optimizer in OPTIMIZERS),
    ],
)
def test_heads_full_weights_and_fresh_adapters_are_differentiated_by_autograd(learner, settings, at_most):
    assert against_oracle(learner, **settings)[1] < at_most


def test_the_error_in_fp32_is_that_of_autograd_through_the_whole_loop():
    """At most twice it, on the mean over episodes; differences err more."""
    learner, errors = ADAPTED["bert"], defaultdict(list)
    config = config_of(learner, **MAML)
    for seed in range(3):
        episode = episode_of(learner, seed=seed)
        exact, _ = oracle_gradient(learner, config, episode)
        for name in ("auto", "differences"):
            found, worker = rule_gradient(learner, replace(config, second_order=name), episode)
            errors[name].append(compared(learner, config, worker, found.gradient, exact)[1])
        whole, _ = oracle_gradient(learner, config, episode, dtype=torch.float32)
        errors["whole loop"].append(
            cosine_and_error(*(meta_parameters(learner, config, one) for one in (whole, exact)))[1]
        )
    means = {name: mean(values) for name, values in errors.items()}
    assert means["auto"] <= 2 * means["whole loop"]
    assert means["differences"] > means["auto"]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [pytest.param("llama", {}, marks=pytest.mark.slow), *(("bert", one) for one in OPTIMIZERS)],
)
def test_in_bf16_the_direction_is_that_of_the_rounded_base(model, optimizer):
    """With 16 features; benchmarks/adapters.py measures MiniLM and a language model."""
    learner, settings = ADAPTED[model], {**MAML, **optimizer}
    config = config_of(learner, **settings)
    rounded = copy.deepcopy(learner)
    for param in rounded.parameters():
        if not param.requires_grad:
            param.data = param.data.bfloat16().float()
    cosines = []
    for seed in range(3):
        episode, (rule, worker) = episode_of(learner, seed=seed), rule_on(learner, bf16=True, **settings)
        found = task_gradient(rule, worker, batches_of(episode))
        wanted, _ = oracle_gradient(rounded, config, episode)
        cosines.append(compared(learner, config, worker, found.gradient, wanted)[0])
    assert mean(cosines) > 0.98


def test_micro_batches_and_recomputed_layers_change_nothing():
    learner, settings = ADAPTED["llama"], {**MAML, **ADAMW}
    config, episode = config_of(learner, **settings), episode_of(learner)
    few, worker = rule_gradient(learner, config, episode)
    rule = RuleOn(find("maml").rule, setup_of(worker, config))
    one = task_gradient(rule, worker, batches_of(episode, micro_batch_size=32))
    assert float((few.gradient - one.gradient).norm() / one.gradient.norm()) < 1e-5
    checkpointed = copy.deepcopy(learner)
    checkpoint_layers(checkpointed.hf)
    found, _ = rule_gradient(checkpointed.train(), config, episode)
    assert float((found.gradient - few.gradient).norm() / few.gradient.norm()) < 1e-5


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=identity)
def test_passes_of_a_task_are_those_of_the_cost_table(monkeypatch, steps, optimizer):
    """One support pass and one with second derivatives for each inner step, and the query pass."""
    learner, settings = ADAPTED["llama"], {**MAML, **optimizer, "inner_steps": steps}
    (rule, worker), episode = rule_on(learner, **settings), batches_of(episode_of(learner), 32)
    seen = {"hf": 0, "second": 0}
    worker.learner.hf.register_forward_hook(lambda *_: seen.update(hf=seen["hf"] + 1))
    graph = worker._gradient_graph
    monkeypatch.setattr(
        worker, "_gradient_graph", lambda *of: (seen.update(second=seen["second"] + 1), graph(*of))[1]
    )
    task_gradient(rule, worker, episode)
    counted = passes(config_of(learner, **settings))
    assert (seen["hf"] - seen["second"], seen["second"]) == (
        counted.support + counted.query,
        counted.second_order,
    )
    assert counted.second_order == steps


def test_a_task_that_is_not_finite_adds_nothing():
    rule, worker = rule_on(ADAPTED["llama"], **MAML)
    episode = batches_of(episode_of(ADAPTED["llama"]))
    for batch in episode.support:
        batch.weights *= float("inf")
    found = task_gradient(rule, worker, episode)
    assert not found.finite
    assert not found.gradient.any()


@pytest.mark.parametrize(
    ("settings", "whole", "only_head", "by_autograd"),
    [
        ({"lora_r": 2}, True, False, True),
        ({"lora_r": 2}, False, False, False),
        ({"lora_r": 2, "second_order": "differences"}, True, False, False),
        ({}, True, False, False),
        ({}, True, True, True),
        ({"second_order": "autograd"}, True, False, True),
        ({"lora_r": 2, "compile": True}, True, False, False),
        ({"lora_r": 2, "attn_implementation": "flex_attention"}, True, False, False),
        ({"algorithm": "fomaml", "lora_r": 2}, True, False, False),
    ],
    ids=identity,
)
def test_second_order_auto_takes_autograd_for_adapters_and_heads(settings, whole, only_head, by_autograd):
    config = Config(**{"algorithm": "maml", **settings})
    assert second_order_by_autograd(config, whole, only_head) == by_autograd


PROTO = {"algorithm": "proto_maml", "inner_optimizer": "adamw", "outer_steps": 10}


@pytest.mark.parametrize(
    ("settings", "given", "remedy"),
    [
        ({"inner_optimizer": "adamw"}, "inner_optimizer=adamw", "--lora_r"),
        (
            {"inner_optimizer": "adamw", "lora_r": 2, "second_order": "differences"},
            "second_order=differences",
            "--second_order autograd",
        ),
        ({"second_order": "autograd", "compile": True}, "compile=True", "leave one out"),
        (
            {"second_order": "autograd", "attn_implementation": "flash_attention_2"},
            "attn_implementation=flash_attention_2",
            "use sdpa or eager",
        ),
        ({"algorithm": "fomaml", "truncate_steps": 2}, "truncate_steps=2", "leave it out"),
        ({"algorithm": "reptile", "second_order": "autograd"}, "second_order=autograd", "leave it out"),
        ({"truncate_steps": 0}, "truncate_steps=0", "1"),
        ({**PROTO, "first_order_steps": 9}, "inner_optimizer=adamw", "needs autograd"),
        (
            {"lora_r": 2, "inner_optimizer": "adamw", "check_meta_gradient": True},
            "check_meta_gradient=True",
            "check with sgd",
        ),
    ],
    ids=identity,
)
def test_settings_without_second_derivatives_are_refused(settings, given, remedy):
    check_message(refusal(Config, **{"algorithm": "maml", **settings}), given, remedy)
    Config(**PROTO, first_order_steps=10)  # needs none


def test_ranks_that_hold_a_part_of_the_model_are_refused():
    for settings, given, remedy in (
        ({"second_order": "autograd"}, "second_order=autograd", "--second_order differences"),
        ({"lora_r": 2, "inner_optimizer": "adamw"}, "inner_optimizer=adamw", "use ZeRO 2"),
    ):
        message = refusal(second_order_by_autograd, Config(algorithm="maml", **settings), whole=False)
        check_message(message, given, remedy)


class WithoutSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * grad


def test_an_operation_without_a_second_derivative_is_named():
    rule, worker = rule_on(ADAPTED["llama"], **MAML)
    worker.learner.hf.model.layers[0].register_forward_hook(
        lambda module, args, output: WithoutSecondDerivative.apply(output)
    )
    check_message(
        refusal(task_gradient, rule, worker, batches_of(episode_of(ADAPTED["llama"]))),
        "second_order=autograd",
        "--second_order differences",
    )


def test_the_check_compares_autograd_with_differences(monkeypatch):
    """It finds a product that is wrong by a factor."""
    rule, worker = rule_on(ADAPTED["llama"], **MAML)
    task = rule.task(worker, batches_of(episode_of(ADAPTED["llama"])))
    good = check(rule.rule, task, "fp32")
    assert good.relative < 1e-3
    assert good.text.startswith("check_meta_gradient: with second_order=differences the meta-gradient")
    assert good.text.endswith("autograd can be trusted")
    product = worker.gradient_vjp
    monkeypatch.setattr(worker, "gradient_vjp", lambda batches, d, into: product(batches, 0.5 * d, into))
    wrong = check(rule.rule, task, "fp32")
    assert wrong.relative > 0.02
    assert "WARNING" in wrong.text
