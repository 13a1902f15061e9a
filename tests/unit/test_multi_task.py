"""--tasks_per_pass: several tasks in one pass give what each gives alone, against the oracle; nothing else is
changed by it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fmmeta import Config, MetaTrainer
from fmmeta.config.algorithms import find
from fmmeta.learners.lora import inject
from fmmeta.learners.task_axis import TaskAxis, per_task
from fmmeta.meta.multi_task import AdapterMultiTaskRule, multi_task_rule, tasks_per_pass
from fmmeta.meta.parameters import MetaGradient
from tests.support.learners import (
    RuleOn,
    batches_of,
    bert,
    compared,
    config_of,
    episode_of,
    llama,
    oracle_gradient,
    rule_on,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message, refusal
from tests.support.short_runs import theta_of

RARE = (
    (9, 6),
    (6, 6),
    (3, 9),
)  # support and query rows of three tasks: some have fewer micro-batches than others


def adapted(kind: str, **settings):
    """A learner with adapters that do something, and a Config for it."""
    learner = llama(tied=kind == "llama") if kind in ("llama", "untied") else bert(kind)
    config = config_of(learner, lora_r=3, tasks_per_pass="3", **settings)
    inject(learner, config)
    with torch.no_grad():
        for name, param in learner.named_parameters():
            if "lora_B" in name:
                param.copy_(
                    0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    return learner, config


def episodes_of(learner):
    """An episode for each entry of RARE."""
    return [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]


def results_of(learner, config, episodes, poison: int | None = None):
    worker = worker_of(learner, config)
    theta = worker.read()
    setup = setup_of(worker, config)
    batched = RuleOn(multi_task_rule(config, worker, setup.inner), setup)
    cut = [batches_of(episode) for episode in episodes]
    if poison is not None:
        cut[poison].support[0].weights *= float("inf")
    directions = each_gradient(batched, worker, cut)
    assert torch.equal(worker.read(), theta)
    return directions, worker, cut


def each_gradient(rule, worker, episodes) -> list[SimpleNamespace]:
    """The result of each task, and its meta-gradient: the sums are cleared as soon as a task is added."""
    into, results_of = MetaGradient(worker.read()), []
    for result in rule.rule([rule.task(worker, episode, into) for episode in episodes]):
        results_of.append(SimpleNamespace(**vars(result), gradient=into.sum.clone()))
        into.clear()
    return results_of


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"algorithm": "fomaml"}),
        ("untied", {"algorithm": "fomaml", "lora_target_modules": ["q_proj", "lm_head"]}),
        (
            "llama",
            {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_epsilon": 0.03, "inner_lr": 0.03},
        ),
        ("mean", {"algorithm": "fomaml", "head_init": "learned", "inner_optimizer": "momentum"}),
        ("mean", {"algorithm": "fomaml", "head_init": "prototype"}),
        ("model", {"algorithm": "reptile", "head_init": "zero"}),
        ("mean", {"algorithm": "maml", "head_init": "learned"}),
        ("mean", {"algorithm": "maml", "head_init": "learned", "truncate_steps": 1}),
        ("model", {"algorithm": "maml", "head_init": "zero", "inner_optimizer": "momentum"}),
        (
            "llama",
            {"algorithm": "maml", "inner_optimizer": "adamw", "inner_epsilon": 0.03, "inner_lr": 0.03},
        ),
        ("mean", {"algorithm": "proto_maml"}),
        ("mean", {"algorithm": "boil"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_each_task_gets_the_meta_gradient_of_the_oracle_and_the_metrics_that_it_has_alone(kind, settings):
    learner, config = adapted(kind, **settings)
    episodes = episodes_of(learner)
    directions, worker, cut = results_of(learner, config, episodes)
    rule = RuleOn(find(config.algorithm).rule, setup_of(worker, config))
    for episode, own, direction in zip(episodes, cut, directions, strict=True):
        wanted, _ = oracle_gradient(learner, config, episode)
        assert compared(learner, config, worker, direction.gradient, wanted)[1] < 1e-5
        assert direction.finite
        assert_same_passes(direction, task_gradient(rule, worker, own))


def assert_same_passes(found, wanted) -> None:
    for mine, theirs in ((found.support, wanted.support), (found.query, wanted.query)):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.stats[1:].tolist() == theirs.stats[1:].tolist()  # right rows, rows


@pytest.mark.parametrize("algorithm", ["fomaml", "maml"])
def test_a_nonfinite_task_does_not_change_the_others(algorithm):
    learner, config = adapted("mean", algorithm=algorithm)
    episodes = episodes_of(learner)
    clean, *_ = results_of(learner, config, episodes)
    directions, *_ = results_of(learner, config, episodes, poison=1)
    assert [direction.finite for direction in directions] == [True, False, True]
    for task in (0, 2):
        assert torch.equal(directions[task].gradient, clean[task].gradient)


def test_every_layer_of_the_base_is_called_once_per_pass():
    learner, config = adapted("llama", algorithm="fomaml")
    worker, calls = worker_of(learner, config), {"base": 0, "lora": 0}
    modules = dict(worker.model.named_modules())
    layers = [name for name in modules if name.endswith("base_layer")]
    adapters = [name for name in modules if ".lora_" in name and isinstance(modules[name], nn.Linear)]
    for kind, names in (("base", layers), ("lora", adapters)):
        for name in names:
            modules[name].register_forward_hook(lambda *_, kind=kind: calls.update({kind: calls[kind] + 1}))
    setup = setup_of(worker, config)
    rule = RuleOn(multi_task_rule(config, worker, setup.inner), setup)
    each_gradient(rule, worker, [batches_of(episode_of(learner, 4, 4, seed=seed)) for seed in range(3)])
    assert calls == {"base": len(layers) * (config.inner_steps + 1), "lora": 0}


def test_bf16_rounds_as_the_worker_does():
    learner, config = adapted("llama", algorithm="fomaml", bf16=True)
    worker = worker_of(learner, config, bf16=True)
    cut = [batches_of(episode_of(learner, 4, 4, seed=seed)) for seed in range(2)]
    setup = setup_of(worker, config, True)
    batched, alone = (
        RuleOn(one, setup) for one in (multi_task_rule(config, worker, setup.inner), find("fomaml").rule)
    )
    for direction, own in zip(each_gradient(batched, worker, cut), cut, strict=True):
        wanted = task_gradient(alone, worker, own).gradient
        assert float((direction.gradient - wanted).norm() / wanted.norm()) < 0.05


def test_auto_takes_as_many_as_fit_a_micro_batch():
    learner, config = adapted("mean", algorithm="fomaml")
    worker = worker_of(learner, config)

    auto = {"tasks_per_pass": "auto", "micro_batch_size": 32}
    for shots, settings, most in (
        (1, auto, 6),
        (5, auto, 1),
        (5, {"tasks_per_pass": "8"}, 8),
        (1, {"tasks_per_pass": "1"}, 1),
        (1, {**auto, "algorithm": "anil"}, 2),  # activations of 5 + 10 rows each
    ):
        assert tasks_per_pass(replace(config, n_way=5, k_shot=shots, num_query=2, **settings)) == most
    single = replace(config, tasks_per_pass="1")
    assert multi_task_rule(single, worker, setup_of(worker, config).inner) is None


@pytest.fixture
def train(bert, classes, tmp_path):
    """train(**settings): a short run; its folder."""

    def run(**settings):
        short = {"outer_steps": 1, "n_way": 2, "k_shot": 1, "num_query": 1, "num_workers": "0"}
        folder = tmp_path / settings["tasks_per_pass"]
        inputs = {"model_name_or_path": str(bert), "dataset": [str(classes)], "output_dir": str(folder)}
        MetaTrainer(Config(**{**short, **inputs, "eval_episodes": 0, "save_steps": 0, **settings})).train()
        return folder

    return run


@pytest.mark.parametrize(("rows", "tasks"), [(32, 8), (6, 1)])
def test_auto_logs_the_number_of_tasks(rows, tasks, train, capsys):
    train(algorithm="anil", tasks_per_pass="auto", micro_batch_size=rows, meta_batch_size=2)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "tasks_per_pass auto" in line]
    check_message(line, f"{tasks} task(s) in a pass", f"micro_batch_size={rows}")


def test_forward_functions_are_restored():
    learner, _ = adapted("mean", algorithm="fomaml")
    axis = TaskAxis(learner)
    values = {name: learner.get_parameter(name).detach()[None] for name in axis.names}
    ids = torch.ones(2, 4, dtype=torch.long)
    _, before = learner(input_ids=ids, attention_mask=ids)
    with axis.of(values):
        assert torch.allclose(learner(input_ids=ids, attention_mask=ids)[1], before, atol=1e-6)
    with axis.of({name: value + 1 for name, value in values.items()}), pytest.raises(IndexError):
        learner(input_ids=ids + 10**6, attention_mask=ids)
    assert all("forward" not in vars(module) for module in learner.modules())
    assert torch.equal(learner(input_ids=ids, attention_mask=ids)[1], before)


def test_per_task_products():
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=draw) for shape in ((6, 4, 5), (3, 7, 5), (3, 7)))
    for bias in (torch.zeros(3, 7), b):
        wanted = [nn.functional.linear(x[2 * t : 2 * t + 2], w[t], bias[t]) for t in range(3)]
        assert torch.allclose(per_task(x, w, bias if bias is b else None), torch.cat(wanted), atol=1e-5)


def test_a_trained_layer_of_another_kind_is_refused_by_name():
    learner, config = adapted("mean", algorithm="fomaml")
    learner.hf.embeddings.LayerNorm.weight.requires_grad_(True)
    worker = worker_of(learner, config)
    check_message(
        refusal(multi_task_rule, config, worker, setup_of(worker, config).inner),
        "tasks_per_pass",
        "use --tasks_per_pass 1",
    )


def test_exact_passes_of_several_tasks_need_the_whole_model_on_a_rank():
    learner, config = adapted("mean", algorithm="maml")
    worker = worker_of(learner, config)
    inner, worker.differentiates_twice = setup_of(worker, config).inner, False
    check_message(
        refusal(multi_task_rule, config, worker, inner),
        "tasks_per_pass=3",
        "algorithm=maml",
        "or --tasks_per_pass 1",
    )


def test_annealing_begins_with_first_order():
    """first_order_steps: the first outer steps are those of FOMAML, also for several tasks in a pass."""
    learner, config = adapted("mean", algorithm="maml", first_order_steps=1)
    episodes = episodes_of(learner)
    annealed, *_ = results_of(learner, config, episodes)
    plain, *_ = results_of(learner, config_of(learner, lora_r=3, tasks_per_pass="3"), episodes)
    for one, other in zip(annealed, plain, strict=True):
        assert torch.equal(one.gradient, other.gradient)


POOLED = [
    {"algorithm": "anil", "head_init": "learned"},
    {
        "algorithm": "anil",
        "head_init": "prototype",
        "prototype_gradient": True,
        "inner_optimizer": "momentum",
    },
    {"algorithm": "anil", "first_order_steps": 9},
    {"algorithm": "anil", "micro_batch_size": 4},  # the support set is not kept
    {"algorithm": "protonet"},
]


def pooled(settings):
    """A worker, its rule, and episodes of which some have fewer micro-batches than others."""
    learner = bert("mean")
    given = {"tasks_per_pass": "3", "micro_batch_size": 32, "k_shot": 3, "num_query": 3, **settings}
    rule, worker = rule_on(learner, **given)
    return learner, config_of(learner, **given), worker, rule, episodes_of(learner)


def several(rule, worker, episodes, into):
    """The results of pooled tasks, added to `into`."""
    spec = find(rule.setup.config.algorithm)
    return spec.several([rule.task(worker, episode, into) for episode in episodes])


@pytest.mark.parametrize("settings", POOLED, ids=lambda each: "-".join(map(str, each.values())))
def test_pooled_tasks_get_the_meta_gradients_of_the_oracle(settings):
    learner, config, worker, rule, episodes = pooled(settings)
    theta = worker.read()
    into = MetaGradient(theta)
    cut = [batches_of(episode) for episode in episodes]
    results_of = several(rule, worker, cut, into)
    assert into.weight == len(episodes)
    assert torch.equal(worker.read(), theta)
    wanted: dict = {}
    for episode in episodes:
        for name, value in oracle_gradient(learner, config, episode)[0].items():
            wanted[name] = wanted.get(name, 0) + value
    assert compared(learner, config, worker, into.sum, wanted)[1] < 1e-5
    for direction, own in zip(results_of, cut, strict=True):
        assert direction.finite
        assert_same_passes(direction, task_gradient(rule, worker, own))


@pytest.mark.parametrize("settings", POOLED, ids=lambda each: "-".join(map(str, each.values())))
def test_a_nonfinite_pooled_task_does_not_change_the_others(settings):
    *_, worker, rule, episodes = pooled(settings)
    theta = worker.read()
    into, wanted = MetaGradient(theta), MetaGradient(theta)
    into.sum.fill_(1)
    wanted.sum.fill_(1)
    cut = [batches_of(episode) for episode in episodes]
    for own in (cut[0], cut[2]):
        task_gradient(rule, worker, own, wanted)
    cut[1].query[0].weights *= float("inf")
    results_of = several(rule, worker, cut, into)
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
    size = rule.setup.config.micro_batch_size
    cut = [batches_of(episode, size) for episode in episodes]
    several(rule, worker, cut, MetaGradient(worker.read()))
    assert len(seen) == calls


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {},
            ["tasks_per_pass=4", "lora_r=0"],
        ),
        (
            {"lora_r": 4, "algorithm": "imaml"},
            ["tasks_per_pass=4", "algorithm=imaml"],
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
        (
            {"lora_r": 4, "algorithm": "maml", "second_order": "differences"},
            ["tasks_per_pass=4", "second_order=differences"],
        ),
        (
            {"lora_r": 4, "algorithm": "maml", "check_meta_gradient": True},
            ["tasks_per_pass=4", "check_meta_gradient=True"],
        ),
    ],
)
def test_conflicting_settings_are_refused(settings, text):
    check_message(
        refusal(Config, tasks_per_pass="4", **settings), *text, "leave it out, or use --tasks_per_pass 1"
    )


def test_tasks_per_pass_must_be_auto_or_a_number():
    check_message(refusal(Config, tasks_per_pass="many", lora_r=2), "tasks_per_pass=many", "use auto")


def test_a_run_takes_several_tasks_per_pass(train, monkeypatch):
    """5 tasks, 2 at a time: 2 + 2 + 1."""
    seen = []
    original = AdapterMultiTaskRule.__call__

    def counting(self, tasks):
        seen.append(len(tasks))
        return original(self, tasks)

    monkeypatch.setattr(AdapterMultiTaskRule, "__call__", counting)
    train(lora_r=2, tasks_per_pass="2", meta_batch_size=5, inner_steps=1)
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("settings", [{}, {"n_way_max": 3}], ids=["plain", "ways"])
def test_a_run_of_pooled_tasks_ends_at_the_theta_of_single_tasks(settings, train, bert):
    own = {"algorithm": "anil", "meta_batch_size": 5, "outer_steps": 2, **settings}
    one, other = (
        theta_of(train(tasks_per_pass=at_once, outer_optimizer="sgd", outer_lr=0.5, **own))
        for at_once in ("1", "3")
    )
    began = load_file(bert / "model.safetensors")
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert any(not torch.equal(other[name], value) for name, value in began.items() if name in other)
