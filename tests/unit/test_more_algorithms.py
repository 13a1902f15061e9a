"""ANIL, BOIL, Proto-MAML, Meta-SGD, iMAML and the baselines against the oracle; iMAML against a dense solve;
what they cost.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch

from fmmeta.config.algorithms import find
from fmmeta.meta.algorithms import imaml
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.reference import set_gradient, set_loss
from fmmeta.models.learner import PooledClassifier
from fmmeta.tasks.batching import collate
from fmmeta.training import comparison
from fmmeta.training.run_log import StepMetrics
from tests.support import learners
from tests.support.algorithms import LEARNERS, PROTOTYPE, identity, passes_of
from tests.support.helpers import one_rank, refusal
from tests.support.learners import (
    against_oracle,
    batches_of,
    by_name,
    config_of,
    episode_of,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message

PROTOTYPE_HEAD = {"head_init": "prototype"}
THROUGH = {**PROTOTYPE, "prototype_gradient": True}
HEADS = [{}, {"head_init": "learned"}, PROTOTYPE, THROUGH]


@pytest.mark.parametrize("model", ["bert", "classifier"])
@pytest.mark.parametrize("head", HEADS, ids=identity)
@pytest.mark.parametrize(
    "extra",
    [{}, {"first_order_steps": 5}, {"inner_optimizer": "momentum"}, {"inner_lr_schedule": "linear"}],
    ids=identity,
)
def test_anil_gradient_is_autograd_through_the_head(model, head, extra):
    """To rounding: nothing is approximated."""
    cosine, error = against_oracle(LEARNERS[model], algorithm="anil", **head, **extra)
    assert cosine > 1 - 1e-9
    assert error < 1e-5


@pytest.mark.parametrize(
    "settings", [{}, THROUGH, {"first_order_steps": 5}, {"inner_optimizer": "momentum"}], ids=identity
)
def test_class_weights_count_in_the_inner_loop_on_the_head(settings):
    """A weight of 2 is the same loss as every row of the class twice, which the oracle gets."""
    learner, weights = LEARNERS["bert"], (1, 3, 2)
    config, episode = config_of(learner, algorithm="anil", **settings), episode_of(learner)
    worker = worker_of(learner, config)
    rule = find("anil").rule(setup_of(worker, config), 0)
    found = task_gradient(rule, worker, batches_of(episode, class_weights=weights))
    support, query = (
        [row for row in rows for _ in range(weights[row.labels])] for rows in (episode.support, episode.query)
    )
    repeated = dataclasses.replace(episode, support=support, query=query)
    wanted, _ = learners.oracle_gradient(learner, config, repeated)
    _, error = learners.cosine_and_error(
        learners.meta_parameters(learner, config, by_name(worker, found.gradient)),
        learners.meta_parameters(learner, config, wanted),
    )
    assert error < 1e-5


@pytest.mark.parametrize("model", ["bert", "classifier"])
def test_anil_evaluation_and_training_reach_the_same_head(model):
    """Evaluation runs the ordinary inner loop with rates of zero on the body; both reach the same head and
    first loss.
    """
    learner = LEARNERS[model]
    config, episode = config_of(learner, algorithm="anil", head_init="learned"), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    inner = setup_of(worker, config).inner
    adapted = inner.adapt(worker, worker.read(), batches_of(episode).support)
    assert found.support.loss == pytest.approx(adapted.passes[0].loss, rel=1e-6)
    assert found.support.accuracy == adapted.passes[0].accuracy
    assert found.query.loss == pytest.approx(worker.forward(batches_of(episode).query).loss, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"algorithm": "anil"}, 2 + 3),
        ({"algorithm": "anil", **PROTOTYPE_HEAD}, 2 + 3),
        ({"algorithm": "fomaml", **PROTOTYPE_HEAD}, 3 + 4 * 2 + 3 * 3),
        ({"algorithm": "imaml"}, 4 * 2 + 3 * 3),
    ],
    ids=identity,
)
def test_scores_after_each_step_are_those_of_the_query_set(settings, calls):
    """9 + 6 rows in micro-batches of 4: 3 and 2. Where the body stays, each goes through it once."""
    learner = LEARNERS["bert"]
    config, episode = config_of(learner, **settings), batches_of(episode_of(learner), class_weights=(1, 4, 2))
    worker = worker_of(learner, config)
    inner, theta, seen = setup_of(worker, config).inner, worker.read(), list[int]()
    hook = worker.learner.hf.register_forward_hook(lambda *_: seen.append(1))
    found = inner.scores_after_each_step(worker, theta, episode)
    assert len(seen) == calls
    hook.remove()
    end = worker.read()
    for steps, one in enumerate(found):
        worker.write(theta)
        dataclasses.replace(inner, steps=steps).adapt(worker, theta, episode.support)
        assert one.stats.tolist() == pytest.approx(worker.forward(episode.query).stats.tolist(), rel=1e-6)
    torch.testing.assert_close(worker.read(), end)
    assert len({one.loss for one in found}) == len(found) == 4


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_anil_passes_do_not_depend_on_the_number_of_steps(steps, monkeypatch):
    bert = LEARNERS["bert"]
    assert passes_of(bert, monkeypatch, algorithm="anil", inner_steps=steps) == (2, 0)
    assert passes_of(bert, monkeypatch, algorithm="anil", inner_steps=steps, first_order_steps=9) == (1, 1)
    assert passes_of(bert, monkeypatch, algorithm="anil", inner_steps=steps, micro_batch_size=29) == (
        2,
        1,
    )  # of 15 + 15 rows


@pytest.mark.parametrize(
    "settings", [{}, {"head_init": "learned"}, THROUGH, {"first_order_steps": 5}], ids=identity
)
def test_anil_adds_the_same_gradient_to_any_sum(settings):
    learner = LEARNERS["bert"]
    config, episode = config_of(learner, algorithm="anil", **settings), batches_of(episode_of(learner))
    worker = worker_of(learner, config)
    rule, theta = find("anil").rule(setup_of(worker, config), 0), worker.read()
    into = MetaGradient(theta)
    into.sum.fill_(1)
    assert task_gradient(rule, worker, episode, into).finite
    alone = task_gradient(rule, worker, episode).gradient
    torch.testing.assert_close(into.sum - 1, alone, rtol=1e-4, atol=1e-6)
    before = into.sum.clone()
    for batch in episode.query:
        batch.weights *= math.inf
    assert not task_gradient(rule, worker, episode, into).finite
    assert torch.equal(into.sum, before)
    assert into.weight == 1
    assert torch.equal(worker.read(), theta)


@pytest.mark.parametrize("settings", [{}, THROUGH, {"first_order_steps": 5}], ids=identity)
def test_anil_recomputes_the_support_set_with_gradient_checkpointing(settings):
    cosine, error = against_oracle(LEARNERS["classifier"], algorithm="anil", micro_batch_size=4, **settings)
    assert cosine > 1 - 1e-9
    assert error < 1e-5


@pytest.mark.parametrize("settings", [{}, PROTOTYPE], ids=identity)
def test_anil_of_fewer_classes_than_the_head_has(settings):
    """The head's other outputs take no part."""
    learner = learners.bert(classes=learners.CLASSES + 2)
    episode = episode_of(learner)
    narrow, wide = [], []
    for found, classes in ((narrow, learners.CLASSES), (wide, learners.CLASSES + 2)):
        model = learners.bert(classes=classes)
        model.hf.load_state_dict(learner.hf.state_dict())
        config = config_of(model, algorithm="anil", n_way=classes, **settings)
        worker = worker_of(model, config)
        rule = find("anil").rule(rules.setup(config, worker, model.head_names, classes, False), 0)
        batches = batches_of(episode)
        for batch in [*batches.support, *batches.query]:
            batch.classes = learners.CLASSES
        result = task_gradient(rule, worker, batches)
        found += [
            by_name(worker, result.gradient)["hf.embeddings.word_embeddings.weight"],
            torch.tensor(result.query.loss),
        ]
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "anil"},
        {"algorithm": "anil", **PROTOTYPE, "inner_optimizer": "momentum"},
        {
            "algorithm": "fomaml",
            "inner_lr_groups": ["head=1", "*=0"],
            "inner_optimizer": "adamw",
            "head_init": "learned",
            "inner_lr_schedule": "linear",
        },
        {
            "algorithm": "fomaml",
            "inner_lr_groups": ["head=1", "*=0"],
            "inner_optimizer": "tests.support.inner_optimizer:same_dtype",
        },
        {"algorithm": "anil", "inner_optimizer": "tests.support.inner_optimizer:same_dtype_smooth"},
    ],
    ids=identity,
)
def test_head_only_steps_run_one_body_forward(settings, monkeypatch):
    """The same phi, losses and accuracies as steps of the whole model at rates of zero on the body; one
    forward for all.
    """
    learner = LEARNERS["bert"]
    config, episode = config_of(learner, **settings), batches_of(episode_of(learner), class_weights=(1, 4, 2))

    def learned(whole: bool):
        worker = worker_of(learner, config)
        inner, calls, call = setup_of(worker, config).inner, [], worker._call
        assert inner.changes_head_only
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_call", lambda *a, **k: calls.append(0) or call(*a, **k))
            patch.setattr(type(inner), "changes_head_only", property(lambda self: not whole))
            passes = inner.adapt(worker, worker.read(), episode.support).passes
        return worker.read(), [p.loss for p in passes], [p.accuracy for p in passes], len(calls)

    (phi, losses, right, few), (wanted, loss, others, many) = learned(False), learned(True)
    torch.testing.assert_close(phi, wanted, rtol=1e-5, atol=1e-6)
    assert losses == pytest.approx(loss, rel=1e-5)
    assert right == others
    means = 1 if settings.get("head_init") == "prototype" else 0  # of several micro-batches: a separate pass
    assert (few, many) == (len(episode.support), (3 + means) * len(episode.support))


def test_the_first_step_reuses_the_forward_of_the_class_means(monkeypatch):
    """Of one micro-batch; phi is that of a pass more."""
    learner = LEARNERS["bert"]
    config, found = config_of(learner, **PROTOTYPE), []
    for kept in (True, False):
        worker, calls = worker_of(learner, config), []
        support, call = batches_of(episode_of(learner), 32).support, worker._call
        monkeypatch.setattr(
            worker, "_call", lambda *a, calls=calls, call=call, **k: calls.append(0) or call(*a, **k)
        )
        monkeypatch.setattr(worker, "can_defer_backward", kept)
        setup_of(worker, config).inner.adapt(worker, worker.read(), support)
        found.append((worker.read(), len(calls)))
    (phi, few), (wanted, many) = found
    assert (few, many) == (3, 4)
    torch.testing.assert_close(phi, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("algorithm", "model", "settings", "at_most"),
    [
        ("boil", "bert", {}, 1e-3),
        ("boil", "classifier", {"inner_lr": 0.3}, 1e-3),
        ("boil", "bert", {"first_order_steps": 9}, 1e-5),
        ("proto_maml", "bert", {"inner_lr": 0.02}, 1e-3),
        ("proto_maml", "classifier", {"inner_lr": 0.02, "prototype_gradient": True}, 1e-3),
        ("proto_maml", "bert", {"inner_lr": 0.02, "prototype_gradient": True, "first_order_steps": 9}, 1e-5),
        ("meta_sgd", "llama", {}, 1e-3),
        ("meta_sgd", "bert", {}, 1e-3),
        ("meta_sgd", "llama", {"first_order_steps": 9}, 1e-5),
        ("protonet", "bert", {}, 1e-5),
        ("protonet", "classifier", {}, 1e-5),
        ("protonet", "bert", {"inner_steps": 0}, 1e-5),
        ("joint", "llama", {}, 1e-5),
        ("meta_icl", "llama", {}, 1e-5),
        ("meta_icl", "llama", {"loss_on_support": True}, 1e-5),
        ("imaml", "llama", {"proximal_weight": 300.0, "inner_lr": 0.003}, 1e-3),
        (
            "imaml",
            "bert",
            {"proximal_weight": 10.0, "inner_lr": 0.05, "head_init": "learned", "cg_damping": 0.5},
            1e-3,
        ),
        ("imaml", "bert", {**THROUGH, "proximal_weight": 400.0, "inner_lr": 0.002}, 1e-3),
    ],
    ids=identity,
)
def test_meta_gradient_is_that_of_the_oracle(algorithm, model, settings, at_most):
    cosine, error = against_oracle(LEARNERS[model], algorithm=algorithm, **settings)
    assert cosine > 0.9999
    assert error < at_most


def test_boil_does_not_change_the_head():
    learner = LEARNERS["bert"]
    config = config_of(learner, algorithm="boil")
    worker = worker_of(learner, config)
    began = copy.deepcopy(worker.model.state_dict())
    setup_of(worker, config).inner.adapt(worker, worker.read(), batches_of(episode_of(learner)).support)
    still = {name for name, value in worker.model.state_dict().items() if torch.equal(value, began[name])}
    assert still - {f"hf.pooler.dense.{part}" for part in ("weight", "bias")} == set(learner.head_names)


@pytest.mark.parametrize(
    "algorithm", ["anil", "boil", "proto_maml", "meta_sgd", "imaml", "protonet", "joint", "meta_icl"]
)
@pytest.mark.parametrize("poison", ["support", "query"])
def test_a_nonfinite_task_is_reported_and_theta_is_unchanged(algorithm, poison):
    learner = LEARNERS["llama" if algorithm in ("joint", "meta_icl") else "bert"]
    settings = {} if algorithm == "meta_icl" else {"inner_lr": 0.01}
    config = config_of(learner, algorithm=algorithm, **settings)
    worker, episode = worker_of(learner, config), batches_of(episode_of(learner))
    theta, rule = worker.read(), find(algorithm).rule(setup_of(worker, config), 0)
    if algorithm == "meta_icl" and poison == "support":
        pytest.skip("the support set is a part of the prompts")
    for batch in getattr(episode, "prompted" if algorithm == "meta_icl" else poison):
        batch.weights *= math.inf
    bad = task_gradient(rule, worker, episode)
    assert not bad.finite
    assert not bad.gradient.any()
    assert torch.equal(worker.read(), theta)
    clean = task_gradient(rule, worker, batches_of(episode_of(learner)))
    assert clean.finite
    assert clean.gradient.isfinite().all()


@pytest.mark.parametrize("algorithm", ["anil", "protonet"])
def test_padding_rows_have_no_weight(algorithm):
    """A rank without rows runs a padding row of weight 0; here it is added to the others."""
    learner = LEARNERS["bert"]
    config, episode = (
        config_of(learner, algorithm=algorithm, inner_lr=0.05, **PROTOTYPE_HEAD),
        episode_of(learner),
    )
    worker = worker_of(learner, config)
    rule, found = find(algorithm).rule(setup_of(worker, config), 0), []
    for fillers in (0, 1):
        batches = batches_of(episode)
        for rows in [batches.support] * fillers:
            rows.append(collate(episode.query[:1], 0.0, 0))
        found.append(task_gradient(rule, worker, batches).gradient)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def small() -> PooledClassifier:
    """About a thousand parameters: its Hessian fits."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(4)
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=40,
        max_position_embeddings=8,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    return PooledClassifier(BertModel(config), learners.CLASSES, "mean")


DENSE = {
    "algorithm": "imaml",
    "head_init": "learned",
    "proximal_weight": 8.0,
    "inner_lr": 0.05,
    "inner_steps": 20,
    "cg_steps": 12,
}


@pytest.fixture(scope="module")
def dense_solution():
    """At the phi that the worker reaches: the whole Hessian in fp64, and the query gradient."""
    learner = small()
    config, episode = config_of(learner, **DENSE), episode_of(learner)
    worker = worker_of(learner, config)
    setup_of(worker, config).inner.adapt(worker, worker.read(), batches_of(episode).support)
    exact = copy.deepcopy(learner).double()
    phi = {name: value.double().requires_grad_() for name, value in by_name(worker, worker.read()).items()}
    gradient = set_gradient(exact, phi, episode.support, False, create_graph=True)
    flat = torch.cat([gradient[name].reshape(-1) for name in phi])
    rows = torch.autograd.grad(
        flat,
        list(phi.values()),
        torch.eye(len(flat), dtype=flat.dtype),
        is_grads_batched=True,
        materialize_grads=True,
    )
    hessian = torch.cat([of.reshape(len(flat), -1) for of in rows], 1)
    torch.testing.assert_close(hessian, hessian.T)
    return hessian, torch.cat(
        [x.reshape(-1) for x in set_gradient(exact, phi, episode.query, False).values()]
    )


@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_imaml_is_the_dense_solution(dense_solution, damping):
    """A linear solve; phi does not depend on the damping."""
    hessian, b = dense_solution
    learner = small()
    config, episode = config_of(learner, **DENSE, cg_damping=damping), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    assert found.numbers["too_little_proximal_weight"] == 0
    lowest = float(torch.linalg.eigvalsh(hessian)[0])
    assert 8.0 + lowest > 0  # the system is positive definite
    wanted = torch.linalg.solve((1 + damping) * torch.eye(len(b), dtype=b.dtype) + hessian / 8.0, b)
    solved = torch.cat([x.double().reshape(-1) for x in by_name(worker, found.gradient).values()])
    assert (solved - wanted).norm() < 1e-2 * wanted.norm()
    assert (b - wanted).norm() > 0.1 * wanted.norm()  # the query gradient is no solution
    residual = (1 + damping) * solved + hessian @ solved / 8.0 - b
    assert found.numbers["cg_residual"] == pytest.approx(float(residual.norm() / b.norm()), abs=1e-3)


def test_imaml_is_the_derivative_of_the_proximal_minimum():
    """Lemma 1 of the paper: theta moved, the proximal problem solved to the end again, in fp64."""
    learner = small().double()
    config = config_of(
        learner,
        algorithm="imaml",
        head_init="learned",
        proximal_weight=8.0,
        inner_lr=0.05,
        inner_steps=60,
        cg_steps=40,
    )
    episode = episode_of(learner)
    theta = {name: p.detach().clone() for name, p in learner.named_parameters() if p.requires_grad}
    from fmmeta.meta.reference import reference_gradient

    wanted, *_ = reference_gradient(learner, theta, episode, config, False)
    rng = torch.Generator().manual_seed(1)
    along = {name: torch.randn(v.shape, generator=rng, dtype=v.dtype) for name, v in theta.items()}

    def loss(step: float) -> float:
        phi = began = {name: theta[name] + step * along[name] for name in theta}
        for _ in range(60):  # each leaves 0.6 of the way
            gradient = set_gradient(learner, phi, episode.support, False)
            phi = {
                name: phi[name] - 0.05 * (gradient[name] + 8.0 * (phi[name] - began[name])) for name in phi
            }
        return float(set_loss(learner, phi, episode.query, False))

    slope = sum(float((wanted[name] * along[name]).sum()) for name in theta)
    assert slope == pytest.approx((loss(1e-4) - loss(-1e-4)) / 2e-4, rel=1e-3)


def test_a_rule_that_does_not_return_a_number_of_its_spec_is_refused():
    learner = LEARNERS["llama"]
    result, _ = learners.rule_gradient(learner, config_of(learner, algorithm="fomaml"), episode_of(learner))
    message = refusal(StepMetrics(("sharpness",)).add, result, 1)
    check_message(message, "TaskResult.numbers has no 'sharpness'", "leave it out of the spec")


def test_imaml_warns_about_negative_curvature():
    learner = LEARNERS["llama"]
    config, episode = config_of(learner, algorithm="imaml", proximal_weight=0.05), episode_of(learner)
    found, _ = learners.rule_gradient(learner, config, episode)
    assert found.numbers["too_little_proximal_weight"] == 1
    assert found.finite
    tally = StepMetrics(imaml.spec.numbers)
    tally.add(found, 1)
    tally.add(
        learners.rule_gradient(
            learner, config_of(learner, algorithm="imaml", proximal_weight=300.0, inner_lr=0.003), episode
        )[0],
        1,
    )
    tally.all_reduce(one_rank())
    assert tally.values["too_little_proximal_weight"] == 0.5
    message = imaml.spec.warning(config, tally.values)
    check_message(message, "proximal_weight=0.05", "50 %", "raise --proximal_weight")
    quiet = {"too_little_proximal_weight": 0.0, "cg_residual": 0.01}
    assert imaml.warning(config, quiet) is None
    message = imaml.warning(config, {**quiet, "cg_residual": 4.2})
    check_message(message, "420 %", "raise")


def test_imaml_cost_in_passes(monkeypatch):
    llama = LEARNERS["llama"]
    kwargs = {"algorithm": "imaml", "proximal_weight": 300.0, "inner_lr": 0.003}
    assert passes_of(llama, monkeypatch, **kwargs, inner_steps=4, cg_steps=3) == (4 + 1 + 2 * 3 + 2, 0)


def test_other_costs_in_passes(monkeypatch):
    bert, llama = LEARNERS["bert"], LEARNERS["llama"]
    assert passes_of(bert, monkeypatch, algorithm="boil", inner_steps=4) == (15, 0)
    assert passes_of(bert, monkeypatch, algorithm="meta_sgd", inner_steps=4) == (15, 0)
    assert passes_of(bert, monkeypatch, algorithm="proto_maml", inner_steps=4) == (15, 0)
    assert passes_of(bert, monkeypatch, algorithm="proto_maml", inner_steps=4, prototype_gradient=True) == (
        16,
        0,
    )
    assert passes_of(bert, monkeypatch, algorithm="protonet") == (2, 0)
    assert passes_of(llama, monkeypatch, algorithm="joint") == (2, 0)
    assert passes_of(llama, monkeypatch, algorithm="meta_icl") == (1, 0)


@pytest.mark.timeout(120)
def test_an_imaml_run_logs_its_metrics(tmp_path, capsys):
    from fmmeta import Config, MetaTrainer

    config = Config(
        algorithm="imaml",
        outer_steps=2,
        eval_episodes=0,
        meta_batch_size=2,
        output_dir=str(tmp_path / "run"),
        proximal_weight=0.001,
        cg_steps=2,
        inner_steps=2,
    )
    MetaTrainer(config).train()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert set(imaml.spec.numbers) <= set(line)
    assert "proximal_weight=0.001 is too small" in capsys.readouterr().out


def run_of(tmp_path, **settings):
    from fmmeta import Config, MetaTrainer

    fixed = {
        "eval_episodes": 3,
        "meta_batch_size": 2,
        "output_dir": str(tmp_path / "run"),
        "outer_steps": 2,
        "inner_steps": 2,
    }
    result = MetaTrainer(Config(**{**fixed, **settings})).train()
    return result, json.loads((tmp_path / "run" / "run.json").read_text())["held_out"]


@pytest.mark.timeout(120)
def test_none_trains_nothing_and_evaluates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "choose_loop", lambda *of: comparison.BaselineLoop(1.0, 2))
    result, held_out = run_of(tmp_path, algorithm="none")
    assert "algorithm=none trains nothing" in capsys.readouterr().out
    assert (
        result.after == result.after_from_start == held_out["after adaptation, meta-trained"]["accuracy"][0]
    )
    assert held_out["gain"]["loss"] == [0, 0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trained, _ = run_of(tmp_path / "other", algorithm="fomaml")
    assert trained.after_from_start == result.after  # the same episodes and inner loop


def test_in_context_prompts_hold_the_support_set():
    from fmmeta.meta.algorithms.baselines import prompted
    from fmmeta.tasks.batching import IGNORE, Example

    support = [Example([1, 10, 11], [IGNORE, IGNORE, 11]), Example([1, 20, 21, 22], [IGNORE, IGNORE, 21, 22])]
    query = Example([1, 30, 31], [IGNORE, IGNORE, 31])
    (full,) = prompted(support, [query], bos_token_id=1, positions=None)
    assert full.input_ids == [1, 10, 11, 20, 21, 22, 30, 31]
    assert full.labels == [IGNORE] * 7 + [31]
    (bare,) = prompted(support, [query], bos_token_id=None, positions=None)
    assert bare.input_ids == [1, 10, 11, 1, 20, 21, 22, 1, 30, 31]
    turns = [Example([1, 10, 1, 11], [IGNORE] * 3 + [11])]  # a token that begins each turn stays
    (chat,) = prompted(turns, [Example([1, 30, 1, 31], [IGNORE] * 3 + [31])], bos_token_id=1, positions=None)
    assert chat.input_ids == [1, 10, 1, 11, 1, 30, 1, 31]
    (short,) = prompted(support, [query], bos_token_id=1, positions=7)
    assert short.input_ids == [1, 20, 21, 22, 30, 31]
    assert prompted(support, [query], bos_token_id=1, positions=6) == [short]  # it fits to the last place
    (none,) = prompted(support, [query], bos_token_id=1, positions=5)
    assert none == query


def test_prompts_whose_support_examples_are_learned():
    """Each order once, no label on the first answer, and none on the first one that is left."""
    from fmmeta.meta.algorithms.baselines import prompted
    from fmmeta.tasks.batching import IGNORE, Example

    support = [Example([1, 10 * i, 10 * i + 1], [IGNORE, IGNORE, 10 * i + 1]) for i in (1, 2, 3)]
    query = [Example([1, 70, 71], [IGNORE, IGNORE, 71])] * 4
    found = prompted(support, query, bos_token_id=1, positions=None, learn_support=True)
    assert [row.input_ids for row in found] == [
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
        [1, 20, 21, 30, 31, 10, 11, 70, 71],
        [1, 30, 31, 10, 11, 20, 21, 70, 71],
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
    ]
    assert found[1].labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 11, IGNORE, 71]
    (short, *_) = prompted(support, query, bos_token_id=1, positions=7, learn_support=True)
    assert short.input_ids == [1, 20, 21, 30, 31, 70, 71]
    assert short.labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 71]


def test_accuracy_counts_each_answer_of_a_prompt():
    """Two answers, of which one has a wrong token; a row without an answer counts as none."""
    from fmmeta.models.learner import objective
    from fmmeta.tasks.batching import IGNORE, MicroBatch

    labels = torch.tensor([[IGNORE, 3, 4, IGNORE, 5, 6], [IGNORE] * 6, [2, 3, 4, 5, 6, 7]])
    likeliest = torch.tensor([[3, 4, 0, 5, 7, 0], [0] * 6, [3, 4, 5, 6, 7, 0]])  # of the next token
    logits = torch.nn.functional.one_hot(likeliest, 8).float()
    _, right, answers = objective(logits, MicroBatch({"input_ids": labels}, labels, torch.full((3,), 0.25)))
    assert (right.item(), answers.item()) == (2, 3)


def test_in_context_scores_the_query_with_and_without_the_support_set():
    """By hand: the mean answer loss of prompts that are put together here."""
    import torch.nn.functional as F

    from fmmeta.meta.algorithms.baselines import prompted
    from fmmeta.tasks.batching import Batcher, Episode

    learner = LEARNERS["llama"]
    config = config_of(learner, algorithm="in_context")
    episode = episode_of(learner, support=3)
    worker = worker_of(learner, config)
    batcher = Batcher(0, 4)
    query = batcher.split(episode.query)
    batches = Episode([], query, batcher.split(prompted(episode.support, episode.query, None, 32)))
    before, after = setup_of(worker, config).evaluation_method().score(worker, worker.read(), batches)
    prefix = [token for row in episode.support for token in row.input_ids]
    for found, start in ((before, []), (after, prefix)):
        total, count = 0.0, 0
        for row in episode.query:
            ids = torch.tensor([[*start, *row.input_ids]])
            logits = learner(input_ids=ids, attention_mask=torch.ones_like(ids))[0].detach()
            for place, label in enumerate(row.labels):
                if label >= 0:
                    total += float(F.cross_entropy(logits[len(start) + place - 1], torch.tensor(label)))
                    count += 1
        assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert before.loss != pytest.approx(after.loss, rel=1e-3)


@pytest.mark.timeout(120)
def test_a_run_with_in_context_evaluates(tmp_path):
    from tests.support.models import save_llama, write_pairs

    _, held_out = run_of(
        tmp_path,
        algorithm="in_context",
        task_type="causal_lm",
        k_shot=2,
        num_query=3,
        model_name_or_path=str(save_llama(tmp_path / "llama")),
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
    )
    rows = {
        name: value["loss"][0] for name, value in held_out.items() if name.startswith(("before", "after"))
    }
    assert rows["after adaptation, meta-trained"] != rows["before adaptation, meta-trained"]


@pytest.mark.timeout(120)
def test_a_meta_icl_run_lowers_the_loss_in_context_and_evaluate_uses_prompts(tmp_path):
    """The model stores its method and no inner loop; support sets have no loss."""
    import fmmeta
    from tests.support.models import save_llama, write_pairs

    data = str(write_pairs(tmp_path / "pairs.jsonl"))
    _, held_out = run_of(
        tmp_path,
        algorithm="meta_icl",
        inner_steps=None,
        task_type="causal_lm",
        k_shot=2,
        num_query=3,
        outer_steps=4,
        outer_lr=0.01,
        logging_steps=1,
        model_name_or_path=str(save_llama(tmp_path / "llama")),
        dataset=[data],
    )
    trained, start = (
        held_out[f"after adaptation, {weights}"]["loss"][0]
        for weights in ("meta-trained", "weights at the start")
    )
    assert trained < 0.95 * start
    model = tmp_path / "run/model"
    stored = json.loads((model / "fmmeta.json").read_text())
    assert stored["method"] == "in_context"
    assert "inner_steps" not in stored
    assert stored["inner_rates"] is None
    assert "| prompt | the support set precedes each query |" in (model / "README.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["support_loss"] is None and line["query_loss"] > 0 for line in lines)
    flags = {"k_shot": 2, "num_query": 3, "episodes": 3}
    assert [cell["method"] for cell in fmmeta.evaluate(str(model), data, **flags)["cells"]] == ["in_context"]
    (cell,) = fmmeta.evaluate(str(model), data, **flags, method=["finetune"])["cells"]
    assert cell["method"] == "finetune"


@pytest.mark.timeout(120)
def test_a_run_that_learns_support_examples_is_evaluated_on_queries_alone(tmp_path):
    from tests.support.models import save_llama, write_pairs

    found = []
    for learned in (False, True):
        _, held_out = run_of(
            tmp_path / str(learned),
            algorithm="meta_icl",
            loss_on_support=learned,
            inner_steps=None,
            task_type="causal_lm",
            k_shot=2,
            num_query=3,
            outer_steps=2,
            model_name_or_path=str(save_llama(tmp_path / "llama")),
            dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        )
        found.append(
            [held_out[f"after adaptation, {name}"] for name in ("weights at the start", "meta-trained")]
        )
    (start, query_alone), (same_start, every_answer) = found
    assert same_start == start
    assert every_answer != query_alone


@pytest.mark.timeout(120)
def test_protonet_evaluates_by_its_prototypes(tmp_path):
    _, held_out = run_of(tmp_path, algorithm="protonet", inner_steps=None)
    assert held_out["before adaptation, meta-trained"] == held_out["after adaptation, meta-trained"]
    assert held_out["after adaptation, meta-trained"]["accuracy"][0] > 0.2
