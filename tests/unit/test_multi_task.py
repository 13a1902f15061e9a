"""--tasks_per_pass: several tasks in one pass give what each gives alone, against the oracle; nothing else is
changed by it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fmmeta import Config, MetaTrainer
from fmmeta.config.algorithms import find
from fmmeta.meta.multi_task import AdapterMultiTaskRule, adapter_multi_task_rule, tasks_per_pass
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.models.lora import inject
from fmmeta.models.task_axis import TaskAxis, per_task
from tests.support.helpers import refusal
from tests.support.learners import (
    batches_of,
    bert,
    by_name,
    config_of,
    cosine_and_error,
    episode_of,
    llama,
    meta_parameters,
    oracle_gradient,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message
from tests.support.models import save_bert, write_classes

RARE = (
    (9, 6),
    (6, 6),
    (3, 9),
)  # support and query rows of three tasks: some have fewer micro-batches than others


def adapted(kind: str, **settings):
    """A learner with adapters that do something, and a Config for it."""
    learner = llama() if kind == "llama" else bert(kind)
    config = config_of(learner, lora_r=3, tasks_per_pass="3", **settings)
    inject(learner, config)
    with torch.no_grad():
        for name, param in learner.named_parameters():
            if "lora_B" in name:
                param.copy_(
                    0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    return learner, config


def results_of(learner, config, episodes, poison: int | None = None):
    worker = worker_of(learner, config)
    theta = worker.read()
    batched = adapter_multi_task_rule(config, worker, setup_of(worker, config).inner)
    assert batched is not None
    cut = [batches_of(episode) for episode in episodes]
    if poison is not None:
        cut[poison].support[0].weights *= float("inf")
    directions = each_gradient(batched, worker, cut)
    assert torch.equal(worker.read(), theta)
    return directions, worker, cut


def each_gradient(rule, worker, episodes) -> list[SimpleNamespace]:
    """The result of each task, and its meta-gradient: the sums are cleared as soon as a task is added."""
    meta, into = MetaParameters(worker.read()), MetaGradient(worker.read())
    results_of = []
    for result in rule.task_gradients(worker, meta, episodes, into):
        results_of.append(SimpleNamespace(**vars(result), gradient=into.sum.clone()))
        into.clear()
    return results_of


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"algorithm": "fomaml"}),
        (
            "llama",
            {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_epsilon": 0.03, "inner_lr": 0.03},
        ),
        ("mean", {"algorithm": "fomaml", "head_init": "learned", "inner_optimizer": "momentum"}),
        ("mean", {"algorithm": "fomaml", "head_init": "prototype", "inner_lr_schedule": "linear"}),
        ("model", {"algorithm": "reptile", "head_init": "zero"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_each_task_gets_the_meta_gradient_of_the_oracle(kind, settings):
    learner, config = adapted(kind, **settings)
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    directions, worker, _ = results_of(learner, config, episodes)
    for episode, direction in zip(episodes, directions, strict=True):
        wanted, _ = oracle_gradient(learner, config, episode)
        here = meta_parameters(learner, config, by_name(worker, direction.gradient))
        _, error = cosine_and_error(here, meta_parameters(learner, config, wanted))
        assert error < 1e-5
        assert direction.finite


def test_metrics_are_those_of_each_task_alone():
    learner, config = adapted("mean", algorithm="fomaml")
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    directions, worker, cut = results_of(learner, config, episodes)
    alone = find("fomaml").rule(setup_of(worker, config), 0)
    for direction, own in zip(directions, cut, strict=True):
        wanted = task_gradient(alone, worker, own)
        for mine, theirs in ((direction.support, wanted.support), (direction.query, wanted.query)):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert mine.stats[1:3].tolist() == theirs.stats[1:3].tolist()  # right rows, rows


def test_a_nonfinite_task_does_not_change_the_others():
    learner, config = adapted("mean", algorithm="fomaml")
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]
    clean, *_ = results_of(learner, config, episodes)
    directions, *_ = results_of(learner, config, episodes, poison=1)
    assert [direction.finite for direction in directions] == [True, False, True]
    for task in (0, 2):
        assert torch.equal(directions[task].gradient, clean[task].gradient)


def test_every_layer_of_the_base_is_called_once_per_pass():
    learner, config = adapted("llama", algorithm="fomaml")
    episodes = [episode_of(learner, 4, 4, seed=seed) for seed in range(3)]
    counts = dict.fromkeys(["base", "lora"], 0)
    worker = worker_of(learner, config)
    for name, module in worker.model.named_modules():
        kind = (
            "lora"
            if ".lora_" in name and isinstance(module, nn.Linear)
            else "base"
            if name.endswith("base_layer")
            else None
        )
        if kind:
            module.register_forward_hook(lambda *_, kind=kind: counts.update({kind: counts[kind] + 1}))
    layers = sum(name.endswith("base_layer") for name, _ in worker.model.named_modules())
    batched = adapter_multi_task_rule(config, worker, setup_of(worker, config).inner)
    assert batched is not None
    each_gradient(batched, worker, [batches_of(episode) for episode in episodes])
    assert counts == {"base": layers * (config.inner_steps + 1), "lora": 0}


def test_bf16_rounds_as_the_worker_does():
    learner, config = adapted("llama", algorithm="fomaml", bf16=True)
    episodes = [episode_of(learner, 4, 4, seed=seed) for seed in range(2)]
    worker, cut = worker_of(learner, config, bf16=True), [batches_of(episode) for episode in episodes]
    batched = adapter_multi_task_rule(config, worker, setup_of(worker, config, True).inner)
    assert batched is not None
    rule = find("fomaml").rule(setup_of(worker, config, True), 0)
    for direction, own in zip(each_gradient(batched, worker, cut), cut, strict=True):
        wanted = task_gradient(rule, worker, own).gradient
        assert float((direction.gradient - wanted).norm() / wanted.norm()) < 0.05


def test_auto_takes_as_many_as_fit_a_micro_batch():
    learner, config = adapted("mean", algorithm="fomaml")
    worker = worker_of(learner, config)

    def most(shots, **settings):
        return tasks_per_pass(replace(config, n_way=5, k_shot=shots, num_query=2, **settings))

    assert most(1, tasks_per_pass="auto", micro_batch_size=32) == 6
    assert most(5, tasks_per_pass="auto", micro_batch_size=32) == 1
    assert most(5, tasks_per_pass="8") == 8
    assert most(1, tasks_per_pass="1") == 1
    assert (
        most(1, tasks_per_pass="auto", micro_batch_size=32, algorithm="anil") == 2
    )  # activations of 5 + 10 rows each
    assert (
        adapter_multi_task_rule(replace(config, tasks_per_pass="1"), worker, setup_of(worker, config).inner)
        is None
    )


@pytest.mark.parametrize(("rows", "tasks"), [(32, 8), (6, 1)])
def test_auto_logs_the_number_of_tasks(rows, tasks, tmp_path, capsys):
    data, model = write_classes(tmp_path / "rows.jsonl"), save_bert(tmp_path / "bert")
    MetaTrainer(
        Config(
            model_name_or_path=str(model),
            dataset=[str(data)],
            algorithm="anil",
            tasks_per_pass="auto",
            n_way=2,
            k_shot=1,
            num_query=1,
            micro_batch_size=rows,
            meta_batch_size=2,
            outer_steps=1,
            eval_episodes=0,
            save_steps=0,
            num_workers="0",
            output_dir=str(tmp_path / "out"),
        )
    ).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "tasks_per_pass auto" in line]
    assert len(lines) == 1
    check_message(lines[0], f"{tasks} task(s) in a pass", f"micro_batch_size={rows}")


def test_forward_functions_are_restored():
    learner, _ = adapted("mean", algorithm="fomaml")
    axis = TaskAxis(learner)
    values = {name: learner.get_parameter(name).detach()[None] for name in axis.names}
    ids = torch.ones(2, 4, dtype=torch.long)
    before = learner(input_ids=ids, attention_mask=ids)
    with axis.of(values):
        assert torch.allclose(learner(input_ids=ids, attention_mask=ids), before, atol=1e-6)
    with axis.of({name: value + 1 for name, value in values.items()}), pytest.raises(IndexError):
        learner(input_ids=ids + 10**6, attention_mask=ids)
    assert all("forward" not in vars(module) for module in learner.modules())
    assert torch.equal(learner(input_ids=ids, attention_mask=ids), before)


def test_per_task_products():
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=draw) for shape in ((6, 4, 5), (3, 7, 5), (3, 7)))
    for bias in (None, b):
        wanted = torch.cat(
            [
                nn.functional.linear(x[2 * t : 2 * t + 2], w[t], None if bias is None else b[t])
                for t in range(3)
            ]
        )
        assert torch.allclose(per_task(x, w, bias), wanted, atol=1e-5)


def test_a_trained_layer_of_another_kind_is_refused_by_name():
    learner, config = adapted("mean", algorithm="fomaml")
    learner.hf.embeddings.LayerNorm.weight.requires_grad_(True)
    worker = worker_of(learner, config)
    text = refusal(adapter_multi_task_rule, config, worker, setup_of(worker, config).inner)
    check_message(text, "tasks_per_pass", "use --tasks_per_pass 1")


POOLED = [
    {"algorithm": "anil", "head_init": "learned"},
    {
        "algorithm": "anil",
        "head_init": "prototype",
        "prototype_gradient": True,
        "inner_optimizer": "momentum",
    },
    {"algorithm": "anil", "first_order_steps": 9, "inner_lr_schedule": "linear"},
    {"algorithm": "anil", "micro_batch_size": 4},  # the support set is not kept
    {"algorithm": "protonet"},
]


def pooled(settings, count: int = 3):
    """A worker, its rule, and episodes of which some have fewer micro-batches than others."""
    learner = bert("mean")
    config = config_of(
        learner, tasks_per_pass="3", **{"micro_batch_size": 32, "k_shot": 3, "num_query": 3, **settings}
    )
    worker = worker_of(learner, config)
    episodes = [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE[:count])]
    return learner, config, worker, find(config.algorithm).rule(setup_of(worker, config), 0), episodes


@pytest.mark.parametrize("settings", POOLED, ids=lambda each: "-".join(map(str, each.values())))
def test_pooled_tasks_get_the_meta_gradients_of_the_oracle(settings):
    learner, config, worker, rule, episodes = pooled(settings)
    theta = worker.read()
    into = MetaGradient(theta)
    cut = [batches_of(episode) for episode in episodes]
    results_of = rule.task_gradients(worker, MetaParameters(theta), cut, into)
    assert into.weight == len(episodes)
    assert torch.equal(worker.read(), theta)
    wanted: dict = {}
    for episode in episodes:
        for name, value in oracle_gradient(learner, config, episode)[0].items():
            wanted[name] = wanted.get(name, 0) + value
    here = meta_parameters(learner, config, by_name(worker, into.sum))
    assert cosine_and_error(here, meta_parameters(learner, config, wanted))[1] < 1e-5
    for direction, own in zip(results_of, cut, strict=True):
        alone = task_gradient(rule, worker, own)
        assert direction.finite
        for mine, theirs in ((direction.support, alone.support), (direction.query, alone.query)):
            assert mine.stats.tolist() == pytest.approx(theirs.stats.tolist(), rel=1e-6)


@pytest.mark.parametrize("settings", POOLED, ids=lambda each: "-".join(map(str, each.values())))
def test_a_nonfinite_pooled_task_does_not_change_the_others(settings):
    *_, worker, rule, episodes = pooled(settings)
    theta = worker.read()
    into, wanted = MetaGradient(theta), MetaGradient(theta)
    for each in (into, wanted):
        each.sum.fill_(1)
    cut = [batches_of(episode) for episode in episodes]
    for own in (cut[0], cut[2]):
        task_gradient(rule, worker, own, wanted)
    cut[1].query[0].weights *= float("inf")
    results_of = rule.task_gradients(worker, MetaParameters(theta), cut, into)
    assert [direction.finite for direction in results_of] == [True, False, True]
    assert torch.equal(into.sum, wanted.sum)
    assert into.weight == wanted.weight == 2


@pytest.mark.parametrize(
    ("settings", "calls"),
    [(POOLED[0], 2), (POOLED[3], 3 + 3 + 3), (POOLED[2], 2)],
    ids=["kept", "again", "first"],
)
def test_the_body_is_called_once_for_all_of_its_tasks(settings, calls):
    *_, worker, rule, episodes = pooled(settings)
    seen = []
    worker.learner.hf.register_forward_hook(lambda *_: seen.append(1))
    size = rule.config.micro_batch_size
    cut = [batches_of(episode, size) for episode in episodes]
    rule.task_gradients(worker, MetaParameters(worker.read()), cut, MetaGradient(worker.read()))
    assert len(seen) == calls


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {},
            ["tasks_per_pass=4", "lora_r=0"],
        ),
        (
            {"lora_r": 4, "algorithm": "maml"},
            ["tasks_per_pass=4", "algorithm=maml"],
        ),
        (
            {"algorithm": "anil", "max_task_norm": 3.0},
            ["tasks_per_pass=4", "max_task_norm=3.0"],
        ),
        (
            {"algorithm": "protonet", "max_task_loss": 3.0},
            ["tasks_per_pass=4", "max_task_loss=3.0"],
        ),
        (
            {"lora_r": 4, "n_way_max": 7},
            ["tasks_per_pass=4", "n_way_max=7"],
        ),
        ({"lora_r": 4, "pipeline_stages": 2}, ["tasks_per_pass=4", "pipeline_stages=2"]),
        (
            {"lora_r": 4, "packing": True, "task_type": "causal_lm"},
            ["tasks_per_pass=4", "packing=True"],
        ),
        (
            {"lora_r": 4, "inner_lr_learned": "layer"},
            ["tasks_per_pass=4", "inner_lr_learned=layer"],
        ),
        (
            {"lora_r": 4, "inner_lr_groups": ["head=10"]},
            ["tasks_per_pass=4", "inner_lr_groups=head=10"],
        ),
        (
            {"lora_r": 4, "multi_step_loss_steps": 3},
            ["tasks_per_pass=4", "multi_step_loss_steps=3"],
        ),
        ({"lora_r": 4, "offload_outer": True}, ["tasks_per_pass=4", "offload_outer=True"]),
    ],
)
def test_conflicting_settings_are_refused(settings, text):
    check_message(
        refusal(Config, tasks_per_pass="4", **settings), *text, "leave it out, or use --tasks_per_pass 1"
    )


def test_tasks_per_pass_must_be_auto_or_a_number():
    check_message(refusal(Config, tasks_per_pass="many", lora_r=2), "tasks_per_pass=many", "use auto")


def test_a_run_takes_several_tasks_per_pass(tmp_path, monkeypatch):
    """5 tasks, 2 at a time: 2 + 2 + 1."""
    seen = []
    original = AdapterMultiTaskRule.task_gradients

    def counting(self, worker, meta, episodes, *rest):
        seen.append(len(episodes))
        return original(self, worker, meta, episodes, *rest)

    monkeypatch.setattr(AdapterMultiTaskRule, "task_gradients", counting)
    data = write_classes(tmp_path / "rows.jsonl")
    MetaTrainer(
        Config(
            model_name_or_path=str(save_bert(tmp_path / "bert")),
            dataset=[str(data)],
            lora_r=2,
            tasks_per_pass="2",
            meta_batch_size=5,
            outer_steps=1,
            inner_steps=1,
            eval_episodes=0,
            save_steps=0,
            k_shot=1,
            num_query=1,
            num_workers="0",
            output_dir=str(tmp_path / "out"),
        )
    ).train()
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("settings", [{}, {"n_way_max": 3}], ids=["plain", "ways"])
def test_a_run_of_pooled_tasks_ends_at_the_theta_of_single_tasks(settings, tmp_path):
    data, model, ends = write_classes(tmp_path / "rows.jsonl"), save_bert(tmp_path / "bert"), []
    for at_once in ("1", "3"):
        folder = tmp_path / at_once
        MetaTrainer(
            Config(
                model_name_or_path=str(model),
                dataset=[str(data)],
                algorithm="anil",
                tasks_per_pass=at_once,
                meta_batch_size=5,
                outer_steps=2,
                n_way=2,
                outer_optimizer="sgd",
                outer_lr=0.5,
                eval_episodes=0,
                save_steps=0,
                k_shot=1,
                num_query=1,
                num_workers="0",
                output_dir=str(folder),
                **settings,
            )
        ).train()
        ends.append(load_file(folder / "model" / "model.safetensors"))
    began = load_file(model / "model.safetensors")
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-5)
    assert any(not torch.equal(ends[1][name], value) for name, value in began.items() if name in ends[1])
