"""--tasks_per_pass: several tasks in one pass give what each gives alone, against the oracle; nothing else is
changed by it.
"""

from collections import Counter
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

# support and query rows of three tasks: some have fewer micro-batches than others
RARE = ((9, 6), (6, 6), (3, 9))


def adapted(kind: str, **settings):
    """A learner with adapters that do something, and a Config for it."""
    learner = llama(tied=kind == "llama") if kind in ("llama", "untied") else bert(kind)
    config = config_of(learner, lora_r=3, tasks_per_pass="3", **settings)
    inject(learner, config)
    with torch.no_grad():
        for name, param in learner.named_parameters():
            if "lora_B" in name:
                rng = torch.Generator().manual_seed(len(name))
                param.copy_(0.1 * torch.randn(param.shape, generator=rng))
    return learner, config


def episodes_of(learner):
    """An episode for each entry of RARE."""
    return [episode_of(learner, *rows, seed=seed) for seed, rows in enumerate(RARE)]


def multi_rule_on(learner, config, bf16: bool = False):
    """The rule for several tasks at once, and a worker over a copy of the model."""
    worker = worker_of(learner, config, bf16)
    setup = setup_of(worker, config, bf16)
    return RuleOn(multi_task_rule(config, worker, setup.inner), setup), worker


def results_of(learner, config, poison: int | None = None):
    """The result of each task of RARE, the worker and the batches; those of one have an infinite loss."""
    rule, worker = multi_rule_on(learner, config)
    theta, cut = worker.read(), [batches_of(episode) for episode in episodes_of(learner)]
    if poison is not None:
        cut[poison].support[0].weights *= float("inf")
    found = each_gradient(rule, worker, cut)
    assert torch.equal(worker.read(), theta)
    return found, worker, cut


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
        ("mean", {"algorithm": "maml", "first_order_steps": 1}),  # the first outer steps are FOMAML's
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
    found, worker, cut = results_of(learner, config)
    rule = RuleOn(find(config.algorithm).rule, setup_of(worker, config))
    for episode, own, one in zip(episodes_of(learner), cut, found, strict=True):
        wanted, _ = oracle_gradient(learner, config, episode)
        assert compared(learner, config, worker, one.gradient, wanted)[1] < 1e-5
        assert one.finite
        assert_same_passes(one, task_gradient(rule, worker, own))


def assert_same_passes(found, wanted) -> None:
    for mine, theirs in ((found.support, wanted.support), (found.query, wanted.query)):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.stats[1:].tolist() == theirs.stats[1:].tolist()  # right rows, rows


@pytest.mark.parametrize("algorithm", ["fomaml", "maml"])
def test_a_nonfinite_task_does_not_change_the_others(algorithm):
    learner, config = adapted("mean", algorithm=algorithm)
    clean, *_ = results_of(learner, config)
    found, *_ = results_of(learner, config, poison=1)
    assert [one.finite for one in found] == [True, False, True]
    for task in (0, 2):
        assert torch.equal(found[task].gradient, clean[task].gradient)


def test_every_layer_of_the_base_is_called_once_per_pass():
    learner, config = adapted("llama", algorithm="fomaml")
    rule, worker = multi_rule_on(learner, config)
    calls, modules = Counter[str](), dict(worker.model.named_modules())
    layers = [name for name in modules if name.endswith("base_layer")]
    adapters = [name for name in modules if ".lora_" in name and isinstance(modules[name], nn.Linear)]
    for name in [*layers, *adapters]:
        kind = "base" if name in layers else "lora"
        modules[name].register_forward_hook(lambda *_, kind=kind: calls.update([kind]))
    each_gradient(rule, worker, [batches_of(episode_of(learner, 4, 4, seed=seed)) for seed in range(3)])
    assert adapters
    assert calls == {"base": len(layers) * (config.inner_steps + 1)}


def test_bf16_rounds_as_the_worker_does():
    learner, config = adapted("llama", algorithm="fomaml", bf16=True)
    rule, worker = multi_rule_on(learner, config, bf16=True)
    cut = [batches_of(episode_of(learner, 4, 4, seed=seed)) for seed in range(2)]
    alone = RuleOn(find("fomaml").rule, rule.setup)
    for one, own in zip(each_gradient(rule, worker, cut), cut, strict=True):
        wanted = task_gradient(alone, worker, own).gradient
        assert float((one.gradient - wanted).norm() / wanted.norm()) < 0.05


AUTO = {"tasks_per_pass": "auto", "micro_batch_size": 32}


@pytest.mark.parametrize(
    ("shots", "settings", "most"),
    [
        (1, AUTO, 6),
        (5, AUTO, 1),
        (5, {"tasks_per_pass": "8"}, 8),
        (1, {"tasks_per_pass": "1"}, 1),
        (1, {**AUTO, "algorithm": "anil"}, 2),  # activations of 5 + 10 rows each
    ],
)
def test_auto_takes_as_many_as_fit_a_micro_batch(shots, settings, most):
    learner, config = adapted("mean", algorithm="fomaml")
    config = replace(config, n_way=5, k_shot=shots, num_query=2, **settings)
    assert tasks_per_pass(config) == most
    if settings["tasks_per_pass"] == "1":
        assert multi_rule_on(learner, config)[0].rule is None


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
    check_message(refusal(multi_rule_on, learner, config), "tasks_per_pass", "use --tasks_per_pass 1")


def test_exact_passes_of_several_tasks_need_the_whole_model_on_a_rank():
    learner, config = adapted("mean", algorithm="maml")
    rule, worker = multi_rule_on(learner, config)
    worker.differentiates_twice = False
    message = refusal(multi_task_rule, config, worker, rule.inner)
    check_message(message, "tasks_per_pass=3", "algorithm=maml", "or --tasks_per_pass 1")


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
    """Also where one of them is not finite."""
    learner, config, worker, rule, episodes = pooled(settings)
    theta, cut = worker.read(), [batches_of(episode) for episode in episodes]
    into = MetaGradient(theta)
    found = several(rule, worker, cut, into)
    assert into.weight == len(episodes)
    assert torch.equal(worker.read(), theta)
    oracles = [oracle_gradient(learner, config, episode)[0] for episode in episodes]
    wanted = {name: sum(one[name] for one in oracles) for name in oracles[0]}
    assert compared(learner, config, worker, into.sum, wanted)[1] < 1e-5
    alone = [task_gradient(rule, worker, own) for own in cut]
    for one, other in zip(found, alone, strict=True):
        assert one.finite
        assert_same_passes(one, other)
    cut[1].query[0].weights *= float("inf")
    into.clear()
    assert [one.finite for one in several(rule, worker, cut, into)] == [True, False, True]
    assert torch.equal(into.sum, alone[0].gradient + alone[2].gradient)
    assert into.weight == 2


@pytest.mark.parametrize(
    ("settings", "calls"),
    [(POOLED[0], 2), (POOLED[3], 3 + 3 + 3), (POOLED[2], 2)],
    ids=["kept", "again", "first"],
)
def test_the_body_is_called_once_for_all_of_its_tasks(settings, calls):
    *_, worker, rule, episodes = pooled(settings)
    seen, size = [], rule.setup.config.micro_batch_size
    worker.learner.hf.register_forward_hook(lambda *_: seen.append(1))
    several(rule, worker, [batches_of(one, size) for one in episodes], MetaGradient(worker.read()))
    assert len(seen) == calls


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"lora_r": 0}, "lora_r=0"),
        ({"algorithm": "imaml"}, "algorithm=imaml"),
        ({"n_way_max": 7}, "n_way_max=7"),
        ({"pipeline_stages": 2}, "pipeline_stages=2"),
        ({"packing": True, "task_type": "causal_lm"}, "packing=True"),
        ({"inner_lr_learned": "layer"}, "inner_lr_learned=layer"),
        ({"inner_lr_groups": ["head=10"]}, "inner_lr_groups=head=10"),
        ({"multi_step_loss_steps": 3}, "multi_step_loss_steps=3"),
        ({"offload_outer": True}, "offload_outer=True"),
        ({"algorithm": "maml", "second_order": "differences"}, "second_order=differences"),
        ({"algorithm": "maml", "check_meta_gradient": True}, "check_meta_gradient=True"),
        ({"tasks_per_pass": "many"}, "tasks_per_pass=many"),
    ],
)
def test_conflicting_settings_are_refused(settings, part):
    message = refusal(Config, **{"lora_r": 4, "tasks_per_pass": "4", **settings})
    remedy = "use auto" if "many" in part else "leave it out, or use --tasks_per_pass 1"
    check_message(message, "tasks_per_pass=", part, remedy)


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
