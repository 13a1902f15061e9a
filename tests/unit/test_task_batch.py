"""--task_batch: several tasks in one pass give what each gives alone, against the oracle; nothing else is changed by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fmmeta import Config, MetaTrainer
from fmmeta.meta.algorithms import RULES
from fmmeta.meta.together import Together, together
from fmmeta.models.lora import inject
from fmmeta.models.task_axis import TaskAxis, per_task
from tests.models import save_bert, write_classes
from tests.unit.helpers import refusal
from tests.unit.learners import (
    batches_of,
    bert,
    by_name,
    config_of,
    cosine_and_error,
    episode_of,
    llama,
    meta_parameters,
    setup_of,
    told_by_oracle,
    worker_of,
)

RARE = ((9, 6), (6, 6), (3, 9))  # support and query rows of three tasks: some have fewer micro-batches than others


def adapted(kind: str, **settings):
    """A learner with adapters that do something, and a Config for it."""
    learner = llama() if kind == "llama" else bert(kind)
    config = config_of(learner, lora_r=3, task_batch="3", **settings)
    inject(learner, config)
    with torch.no_grad():
        for name, param in learner.named_parameters():
            if "lora_B" in name:
                param.copy_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))))
    return learner, config


def found(learner, config, episodes, poison: int | None = None):
    worker = worker_of(learner, config)
    theta = worker.read()
    batched = together(config, worker, setup_of(worker, config).inner, 4)
    assert batched is not None
    cut = [batches_of(episode) for episode in episodes]
    if poison is not None:
        cut[poison].support[0].weights *= float("inf")
    directions = batched.directions(worker, theta, cut)
    assert torch.equal(worker.read(), theta)
    return directions, worker, cut


@pytest.mark.parametrize(("kind", "settings"), [
    ("llama", {"algorithm": "fomaml"}),
    ("llama", {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_epsilon": 0.03, "inner_lr": 0.03}),
    ("mean", {"algorithm": "fomaml", "head_init": "learned", "inner_optimizer": "momentum"}),
    ("mean", {"algorithm": "fomaml", "head_init": "prototype", "inner_lr_schedule": "linear"}),
    ("model", {"algorithm": "reptile", "head_init": "zero"}),
], ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())))  # fmt: skip
def test_each_task_gets_the_oracles_meta_gradient(kind, settings):
    learner, config = adapted(kind, **settings)
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    directions, worker, _ = found(learner, config, episodes)
    for episode, direction in zip(episodes, directions, strict=True):
        wanted, _ = told_by_oracle(learner, config, episode)
        here = meta_parameters(learner, config, by_name(worker, direction.shards))
        _, error = cosine_and_error(here, meta_parameters(learner, config, wanted))
        assert error < 1e-5
        assert direction.finite


def test_metrics_are_those_of_each_task_alone():
    learner, config = adapted("mean", algorithm="fomaml")
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    directions, worker, cut = found(learner, config, episodes)
    alone = RULES["fomaml"](setup_of(worker, config), 0)
    for direction, own in zip(directions, cut, strict=True):
        wanted = alone.direction(worker, worker.read(), own)
        for mine, theirs in ((direction.support, wanted.support), (direction.query, wanted.query)):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert mine.stats[1:3].tolist() == theirs.stats[1:3].tolist()  # right rows, rows


def test_a_task_that_is_not_finite_leaves_the_others_alone():
    learner, config = adapted("mean", algorithm="fomaml")
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    clean, *_ = found(learner, config, episodes)
    directions, *_ = found(learner, config, episodes, poison=1)
    assert [direction.finite for direction in directions] == [True, False, True]
    for task in (0, 2):
        assert torch.equal(directions[task].shards, clean[task].shards)


def test_every_layer_of_the_base_is_called_once_per_pass():
    learner, config = adapted("llama", algorithm="fomaml")
    episodes = [episode_of(learner, 4, 4, seed=seed) for seed in range(3)]
    counts = dict.fromkeys(["base", "lora"], 0)
    worker = worker_of(learner, config)
    for name, module in worker.model.named_modules():
        kind = "lora" if ".lora_" in name and isinstance(module, nn.Linear) else "base" if name.endswith("base_layer") else None
        if kind:
            module.register_forward_hook(lambda *_, kind=kind: counts.update({kind: counts[kind] + 1}))
    layers = sum(name.endswith("base_layer") for name, _ in worker.model.named_modules())
    batched = together(config, worker, setup_of(worker, config).inner, 4)
    assert batched is not None
    batched.directions(worker, worker.read(), [batches_of(episode) for episode in episodes])
    assert counts == {"base": layers * (config.inner_steps + 1), "lora": 0}


def test_bf16_rounds_as_the_worker_does():
    learner, config = adapted("llama", algorithm="fomaml", bf16=True)
    episodes = [episode_of(learner, 4, 4, seed=seed) for seed in range(2)]
    worker = worker_of(learner, config, bf16=True)
    theta, cut = worker.read(), [batches_of(episode) for episode in episodes]
    batched = together(config, worker, setup_of(worker, config, True).inner, 4)
    assert batched is not None
    rule = RULES["fomaml"](setup_of(worker, config, True), 0)
    for direction, own in zip(batched.directions(worker, theta, cut), cut, strict=True):
        wanted = rule.direction(worker, theta, own).shards
        assert float((direction.shards - wanted).norm() / wanted.norm()) < 0.05


def test_auto_takes_as_many_as_fit_a_micro_batch():
    learner, config = adapted("mean", algorithm="fomaml")
    worker = worker_of(learner, config)

    def most(rows, **settings):
        made = together(replace(config, **settings), worker, setup_of(worker, config).inner, rows)
        return made.most if made else 1

    assert most(5, task_batch="auto", micro_batch_size=32) == 6
    assert most(25, task_batch="auto", micro_batch_size=32) == 1
    assert most(25, task_batch="8") == 8
    assert most(5, task_batch="1") == 1


def test_the_forward_functions_come_back():
    learner, _ = adapted("mean", algorithm="fomaml")
    axis = TaskAxis(learner)
    values = {name: learner.get_parameter(name).detach()[None] for name in axis.names}
    ids = torch.ones(2, 4, dtype=torch.long)
    before = learner(ids, ids)
    with axis.of(values):
        assert torch.allclose(learner(ids, ids), before, atol=1e-6)
    with axis.of({name: value + 1 for name, value in values.items()}), pytest.raises(IndexError):
        learner(ids + 10**6, ids)
    assert all("forward" not in vars(module) for module in learner.modules())
    assert torch.equal(learner(ids, ids), before)


def test_per_task_products():
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=draw) for shape in ((6, 4, 5), (3, 7, 5), (3, 7)))
    for bias in (None, b):
        wanted = torch.cat([nn.functional.linear(x[2 * t : 2 * t + 2], w[t], None if bias is None else b[t]) for t in range(3)])
        assert torch.allclose(per_task(x, w, bias), wanted, atol=1e-5)


def test_a_trained_layer_of_another_kind_is_refused_by_name():
    learner, config = adapted("mean", algorithm="fomaml")
    learner.hf.embeddings.LayerNorm.weight.requires_grad_(True)
    worker = worker_of(learner, config)
    text = refusal(together, config, worker, setup_of(worker, config).inner, 4)
    assert text == ("task_batch: hf.embeddings.LayerNorm.weight is trained, and belongs to no linear layer nor to an adapter of "
                    "one; use --task_batch 1")  # fmt: skip


@pytest.mark.parametrize(("settings", "text"), [
    ({}, "task_batch=4 is not implemented with lora_r=0, whose tasks need a whole model each"),
    ({"lora_r": 4, "algorithm": "maml"}, "task_batch=4 is not implemented with algorithm=maml, which is no rule of first order"),
    ({"lora_r": 4, "n_way_max": 7},
     "task_batch=4 is not implemented with n_way_max=7, where tasks have heads of different sizes"),
    ({"lora_r": 4, "pipeline_stages": 2}, "task_batch=4 is not implemented with pipeline_stages=2"),
    ({"lora_r": 4, "packing": True, "task_type": "causal_lm"}, "task_batch=4 is not implemented with packing=True"),
    ({"lora_r": 4, "inner_lr_learned": "layer"}, "task_batch=4 is not implemented with inner_lr_learned=layer"),
    ({"lora_r": 4, "inner_lr_groups": ["head=10"]}, "task_batch=4 is not implemented with inner_lr_groups=head=10"),
    ({"lora_r": 4, "multi_step_loss_steps": 3}, "task_batch=4 is not implemented with multi_step_loss_steps=3"),
    ({"lora_r": 4, "offload_outer": True}, "task_batch=4 is not implemented with offload_outer=True"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_refused(settings, text):
    assert refusal(Config, task_batch="4", **settings) == f"{text}; leave it out, or use --task_batch 1"


def test_a_number_is_asked_for():
    text = "task_batch=many is neither a positive number nor auto; use auto, 1, 8, ..."
    assert refusal(Config, task_batch="many", lora_r=2) == text


def test_a_run_uses_it(tmp_path, monkeypatch):
    """5 tasks, 2 at a time: 2 + 2 + 1."""
    seen = []
    original = Together.directions

    def counting(self, worker, theta, episodes):
        seen.append(len(episodes))
        return original(self, worker, theta, episodes)

    monkeypatch.setattr(Together, "directions", counting)
    data = write_classes(tmp_path / "rows.jsonl")
    MetaTrainer(Config(model_name_or_path=str(save_bert(tmp_path / "bert")), dataset=[str(data)], lora_r=2,
                       task_batch="2", meta_batch_size=5, outer_steps=1, inner_steps=1, eval_episodes=0, save_steps=0,
                       k_shot=1, num_query=1, num_workers="0", output_dir=str(tmp_path / "out"))).train()  # fmt: skip
    assert seen == [2, 2, 1]
