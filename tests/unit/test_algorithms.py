"""Meta-gradients of each rule against the oracle (autograd in fp64), and how many passes each rule takes."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fmmeta.config.algorithms import find
from fmmeta.meta.algorithms.unrolled import step_loss_weights
from fmmeta.meta.hessian import Check, DifferenceHessian, HvpOptions, check
from fmmeta.meta.inner_loop import Trajectory
from fmmeta.meta.inner_optimizers import InnerState
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.reference import reference_gradient, set_gradient, set_loss
from fmmeta.meta.rule import TaskResult
from fmmeta.models.learner import Learner
from fmmeta.parallel.workers.base import PassStats
from tests.support import learners
from tests.support.algorithms import LEARNERS, PROTOTYPE, identity, passes_of
from tests.support.learners import (
    against_oracle,
    batches_of,
    by_name,
    config_of,
    episode_of,
    gradient_of,
    setup_of,
    task_gradient,
    worker_of,
)

# cosine at least, relative error at most; fp32 differences of gradients leave 1e-3 after 7 inner steps, more
# or less by the processor's kernels, where the others leave less than 5e-4
FIRST, EXACT = (1 - 1e-9, 1e-5), (0.9999, 2e-3)
CASES = [
    ("llama", {}),
    ("bert", {}),
    ("bert", {"head_init": "learned"}),
    ("classifier", {"head_init": "learned"}),
    ("bert", PROTOTYPE),
    ("bert", {**PROTOTYPE, "prototype_gradient": True}),
    ("classifier", {**PROTOTYPE, "prototype_gradient": True}),
    ("llama", {"inner_lr": 0.3}),
    ("bert", {"inner_lr": 0.3}),
    ("llama", {"inner_steps": 1}),
    ("llama", {"inner_steps": 7}),
    ("llama", {"inner_lr_schedule": "linear"}),
    ("bert", {"inner_lr_schedule": "cosine", "head_init": "learned"}),
    ("llama", {"inner_lr_groups": ["*layers.1=3", "*embed*=0"]}),
    ("bert", {"inner_lr_groups": ["head=4"]}),
    ("llama", {"multi_step_loss_steps": 10}),
    ("bert", {**PROTOTYPE, "multi_step_loss_steps": 10, "prototype_gradient": True}),
    ("llama", {"inner_optimizer": "momentum"}),
    ("bert", {"inner_optimizer": "momentum", "inner_momentum": 0.5}),
]


@pytest.mark.parametrize(("model", "settings"), CASES, ids=identity)
@pytest.mark.parametrize("algorithm", ["fomaml", "maml"])
def test_meta_gradient_equals_autograd(model, settings, algorithm):
    """And the first order is far from the exact gradient: else second derivatives would not be tested."""
    learner = LEARNERS[model]
    config, episode = config_of(learner, algorithm=algorithm, **settings), episode_of(learner)

    def gradient(config):
        found, worker = learners.rule_gradient(learner, config, episode)
        assert found.finite
        return learners.meta_parameters(learner, config, by_name(worker, found.gradient))

    found, (wanted, _) = gradient(config), learners.oracle_gradient(learner, config, episode)
    cosine, error = learners.cosine_and_error(found, learners.meta_parameters(learner, config, wanted))
    at_least, at_most = FIRST if algorithm == "fomaml" else EXACT
    assert cosine > at_least
    assert error < at_most
    if algorithm == "maml":
        first = gradient(config_of(learner, algorithm="fomaml", **settings))
        assert (found - first).norm() > 0.02 * found.norm()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**PROTOTYPE, "prototype_gradient": True},
        {"inner_optimizer": "momentum"},
        {"multi_step_loss_steps": 10},
    ],
    ids=identity,
)
def test_oracle_equals_finite_differences_of_the_adapted_loss(settings):
    """In fp64: the adaptation is repeated at two values of theta along a line."""
    learner = copy.deepcopy(LEARNERS["bert"]).double()
    config, episode = config_of(learner, algorithm="maml", **settings), episode_of(learner)
    names = [name for name, param in learner.named_parameters() if param.requires_grad]
    theta = {name: learner.get_parameter(name).detach().clone() for name in names}
    if config.head_init != "learned":
        theta = {name: 0 * value if name in learner.head_names else value for name, value in theta.items()}
    rng = torch.Generator().manual_seed(3)
    along = {
        name: torch.randn(value.shape, generator=rng, dtype=value.dtype) for name, value in theta.items()
    }
    wanted, *_ = reference_gradient(learner, theta, episode, config, False)
    slope = sum(float((wanted[name] * along[name]).sum()) for name in names)

    def loss(step: float) -> float:
        return adapted_loss(
            learner, {name: theta[name] + step * along[name] for name in names}, episode, config
        )

    h = 1e-5
    assert slope == pytest.approx((loss(h) - loss(-h)) / (2 * h), rel=1e-5)


def adapted_loss(learner: Learner, theta, episode, config) -> float:
    """Initialise the head, take SGD steps with momentum on the support set, weigh the query losses."""
    phi, velocity, total = dict(theta), {name: 0 * value for name, value in theta.items()}, 0.0
    if config.head_init == "prototype":
        model = copy.deepcopy(learner)
        for name, value in theta.items():
            model.get_parameter(name).data.copy_(value)
        rows = [
            (
                row.labels,
                model(input_ids=ids, attention_mask=torch.ones_like(ids), want="features")[0].detach(),
            )
            for row in episode.support
            for ids in [torch.tensor([row.input_ids])]
            for inputs in [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
        ]
        means = torch.stack(
            [torch.stack([f for label, f in rows if label == c]).mean(0) for c in range(learners.CLASSES)]
        )
        phi[learner.head_names[0]], phi[learner.head_names[1]] = 2 * means, -means.square().sum(1)
    mu = config.inner_momentum if config.inner_optimizer == "momentum" else 0.0
    for k in range(config.inner_steps):
        gradient = set_gradient(learner, phi, episode.support, False)
        velocity = {name: mu * velocity[name] + gradient[name] for name in phi}
        phi = {name: phi[name] - config.inner_lr * velocity[name] for name in phi}
        share = 1 / config.inner_steps if config.multi_step_loss_steps else float(k == config.inner_steps - 1)
        total += share * float(set_loss(learner, phi, episode.query, False)) if share else 0.0
    return total


@pytest.mark.parametrize("model", ["bert", "llama"])
@pytest.mark.parametrize("algorithm", ["fomaml", "maml"])
@pytest.mark.parametrize("learned", ["layer", "element"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"inner_optimizer": "momentum", "inner_momentum": 0.5}, {"multi_step_loss_steps": 4}],
    ids=identity,
)
def test_gradient_of_learned_rates_equals_autograd(model, algorithm, learned, extra):
    learner = LEARNERS[model]
    settings = {
        "inner_lr_learned": learned,
        "inner_lr_groups": ["*0*=2"],
        **extra,
    }  # rates differ from the start
    config, episode = config_of(learner, algorithm=algorithm, **settings), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    wanted, (of_rates, _) = learners.oracle_gradient(learner, config, episode)
    at_most = 1e-5 if algorithm == "fomaml" else 1e-3
    _, error = learners.cosine_and_error(
        *(learners.meta_parameters(learner, config, w) for w in (by_name(worker, found.gradient), wanted))
    )
    assert error < at_most
    if learned == "element":
        mine = by_name(worker, found.extra["rates"])
        pairs = [(mine[name].double(), of_rates[name]) for name in of_rates]
    else:
        names = setup_of(worker, config).inner.rates.layers.names
        exact = {
            ("head" if name in learner.head_names else layer(name)): value for name, value in of_rates.items()
        }
        assert sorted(exact) == sorted(names)
        pairs = [(found.extra["rates"][:, i], exact[name]) for i, name in enumerate(names)]
    a, b = (torch.cat([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    assert learners.cosine_and_error(a, b)[1] < at_most


def layer(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


@pytest.mark.parametrize(("outer_step", "order"), [(0, 1), (3, 1), (4, 2), (9, 2)])
def test_derivative_order_is_annealed(outer_step, order):
    _, error = against_oracle(LEARNERS["llama"], outer_step, algorithm="maml", first_order_steps=4)
    assert error < (1e-5 if order == 1 else 1e-3)
    assert error > (0 if order == 1 else 1e-6)


def test_multi_step_weights():
    assert step_loss_weights(4, 0, 8) == (0.25, 0.25, 0.25, 0.25)
    assert step_loss_weights(4, 4, 8) == (0.125, 0.125, 0.125, 0.625)
    assert [step_loss_weights(4, step, 8) for step in (8, 9)] == [(), ()]
    assert step_loss_weights(4, 0, 0) == ()
    assert all(sum(step_loss_weights(5, step, 30)) == pytest.approx(1) for step in range(30))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {"algorithm": "fomaml"}),
        ("llama", {"algorithm": "reptile"}),
        ("llama", {"algorithm": "maml", "multi_step_loss_steps": 9}),
        ("llama", {"algorithm": "imaml", "cg_steps": 2, "proximal_weight": 50.0}),
        ("llama", {"algorithm": "joint"}),
        ("llama", {"algorithm": "meta_icl", "inner_steps": None}),
        ("bert", {"algorithm": "proto_maml", "head_init": "prototype", "prototype_gradient": True}),
        ("bert", {"algorithm": "anil", "first_order_steps": 9}),
        ("bert", {"algorithm": "protonet", "head_init": "prototype", "inner_steps": 0}),
    ],
)
def test_a_rule_calls_its_hook_between_any_two_passes(model, settings, monkeypatch):
    """Before the n-th pass of a task the hook was called n - 1 times."""
    learner = LEARNERS[model]
    config = config_of(learner, **{"inner_steps": 3, **settings})
    worker, episode = worker_of(learner, config), batches_of(episode_of(learner), micro_batch_size=32)
    rule = find(config.algorithm).rule(setup_of(worker, config), 0)
    hooks, seen, call = list[None](), list[int](), worker._call

    def recording(batch, want="logits"):
        seen.append(len(hooks))
        return call(batch, want)

    monkeypatch.setattr(worker, "_call", recording)
    meta = MetaParameters.of(worker.read(), rule.inner)
    into = MetaGradient(meta.theta, meta.extra)
    rule.task_gradient(worker, meta, episode, into, lambda: hooks.append(None))
    assert seen == list(range(len(seen)))


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_number_of_passes_per_task(steps, monkeypatch):
    """The numbers of the docstrings and of docs/algorithms.md."""
    llama = LEARNERS["llama"]
    first = passes_of(llama, monkeypatch, algorithm="fomaml", inner_steps=steps)
    assert first == (steps + 1, 0)
    assert passes_of(llama, monkeypatch, algorithm="reptile", inner_steps=steps) == (steps, 1)
    exact = passes_of(llama, monkeypatch, algorithm="maml", inner_steps=steps)
    assert exact == (3 * steps + 3, 0)
    assert exact[0] < 3.2 * first[0]
    learned = passes_of(llama, monkeypatch, algorithm="fomaml", inner_steps=steps, inner_lr_learned="layer")
    assert learned == first
    multi = passes_of(llama, monkeypatch, algorithm="fomaml", inner_steps=steps, multi_step_loss_steps=9)
    assert multi == (2 * steps, 0)


@pytest.mark.parametrize("settings", [{}, {"inner_lr_learned": "element"}], ids=identity)
def test_trajectory_in_host_memory_gives_the_same_gradient(settings):
    config = config_of(LEARNERS["llama"], algorithm="maml", **settings)
    worker = worker_of(LEARNERS["llama"], config)
    episode = batches_of(episode_of(LEARNERS["llama"]))
    rule = find("maml").rule(setup_of(worker, config), 0)
    one = 4 * worker.params.numel
    for budget in (0, one, 2 * one):
        found = task_gradient(replace(rule, budget_bytes=budget), worker, episode)
        assert torch.equal(found.gradient, task_gradient(rule, worker, episode).gradient)


class Holding:
    """A worker that holds a vector."""

    storage_device = torch.device("cpu")

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector

    def read(self) -> Tensor:
        return self.vector.clone()


def stored_steps(path: Trajectory, steps: int) -> None:
    """Store phi_k = k, and u_k = -1 - k and a state of 10 k where they are kept."""
    for k in range(steps):
        worker: Any = Holding(torch.full((10,), float(k)))
        path.before_step(k, worker, torch.zeros(10), InnerState({"phi": torch.full((10,), 10.0 * k)}))
        path.after_step(k, torch.full((10,), -1.0 - k) if path.keeps_directions else None)


def test_trajectory_respects_its_memory_budget():
    path = Trajectory(budget_bytes=100, keeps_directions=True)
    stored_steps(path, 3)
    assert path.left == 100 - 2 * 40  # two of five fit
    assert [float(path.phi(k)[0]) for k in range(3)] == [0, 1, 2]
    assert [float(path.take_direction(k)[0]) for k in range(3)] == [-1, -2, -3]
    path.drop(1)
    with pytest.raises(KeyError):
        path.phi(1)


def test_trajectory_stores_the_optimizers_state_of_the_steps_that_are_differentiated():
    path = Trajectory(budget_bytes=1000, keeps_directions=False, keeps_states=True, first=2)
    stored_steps(path, 4)
    assert [len(step) for step in path.steps] == [1, 0, 2, 2]
    assert [float(path.state(k)["phi"][0]) for k in (2, 3)] == [20, 30]
    # phi_k itself, although a state vector has the same name, which is the user's choice
    assert [float(path.phi(k)[0]) for k in (2, 3)] == [2, 3]


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_hessian_vector_products(model):
    """Products with directions of any length equal autograd in fp64; the product with zero is zero."""
    learner = LEARNERS[model]
    config, episode = (
        config_of(learner, head_init="learned" if model == "bert" else "zero"),
        episode_of(learner),
    )
    worker = worker_of(learner, config)
    phi, support = worker.read(), batches_of(episode).support
    exact = copy.deepcopy(learner).double()
    weights = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    gradient = set_gradient(exact, weights, episode.support, False, create_graph=True)
    rng = torch.Generator().manual_seed(0)
    for d in (
        gradient_of(worker, support),
        1e4 * gradient_of(worker, support),
        torch.randn(phi.shape, generator=rng),
    ):
        along = by_name(worker, d)
        product = sum((gradient[name] * along[name].double()).sum() for name in weights)
        wanted = torch.autograd.grad(product, list(weights.values()), retain_graph=True)
        found = by_name(worker, DifferenceHessian(HvpOptions(), worker, support).times(phi, d))
        a, b = (
            torch.cat([x.double().reshape(-1) for x in side])
            for side in ([found[name] for name in weights], wanted)
        )
        assert (a - b).norm() < 5e-4 * b.norm()
        worker.write(phi)
    assert not DifferenceHessian(HvpOptions(), worker, support).times(phi, torch.zeros_like(phi)).any()
    assert (
        DifferenceHessian(HvpOptions(), worker, support)
        .times(phi, torch.full_like(phi, torch.nan))
        .isnan()
        .all()
    )


def test_self_check_trusts_fp32_and_warns_of_bf16():
    learner = LEARNERS["llama"]
    config, episode = config_of(learner, algorithm="maml"), batches_of(episode_of(learner))
    found = {}
    for precision in ("fp32", "bf16"):
        worker = worker_of(learner, config, bf16=precision == "bf16")
        rule = find("maml").rule(setup_of(worker, config, precision == "bf16"), 0)
        found[precision] = check(rule, worker, MetaParameters(worker.read()), episode, precision)
    good, bad = found["fp32"], found["bf16"]
    assert good.cosine > 0.99999
    assert 0 < good.relative < 1e-3
    assert good.text.startswith("check_meta_gradient: ")
    assert f"by {good.relative:.1e} of its length (cosine {good.cosine:.6f})" in good.text
    assert good.text.endswith("can be trusted")
    assert bad.relative > 0.02
    assert "WARNING: gradients rounded to bf16" in bad.text
    assert "set bf16 to false" in bad.text
    assert "WARNING: the loss bends too sharply" in Check(0.9, 0.4, "fp32").text
    assert "WARNING" in Check(float("nan"), float("nan"), "fp32").text


def test_self_check_warns_of_a_too_long_difference_step(monkeypatch):
    import fmmeta.meta.hessian as curvature

    learner = LEARNERS["llama"]
    config, episode = config_of(learner, algorithm="maml", inner_lr=0.3), batches_of(episode_of(learner))
    monkeypatch.setitem(curvature.CHANGE, "fp32", 1.0)
    worker = worker_of(learner, config)
    found = check(
        find("maml").rule(setup_of(worker, config), 0), worker, MetaParameters(worker.read()), episode, "fp32"
    )
    assert found.relative > 0.02
    assert "WARNING: the loss bends too sharply" in found.text


class FakeRule:
    """A rule that adds given vectors: the first for the full step; None makes the task non-finite."""

    hvp = HvpOptions()

    def __init__(self, *vectors):
        self.vectors = vectors

    def to_check(self):
        return tuple(map(FakeRule, self.vectors))

    def task_gradient(self, worker, meta, episode, into):
        vector, fine = self.vectors[0], PassStats(torch.zeros(4, dtype=torch.float64))
        if vector is not None:
            into.add(vector)
        return TaskResult(1.0, vector is not None, fine, fine)


@pytest.mark.parametrize(("half_finite", "relative"), [(True, 0.25), (False, math.nan)])
def test_self_check_compares_meta_parameters_at_both_steps(half_finite, relative):
    """The head of a task may differ; a non-finite pass at half the step gives nan."""
    learner = LEARNERS["bert"]
    worker = worker_of(learner, config_of(learner, algorithm="maml"))
    full = torch.zeros(worker.params.numel)
    full[0] = 4.0
    half = full.clone()
    half[0] = 3.0
    half[worker.params.groups["head"]] = 100.0
    rule: Any = FakeRule(full, half if half_finite else None)
    found = check(rule, worker, MetaParameters(full), batches_of(episode_of(learner)), "fp32")
    assert found.relative == pytest.approx(relative, nan_ok=True)
    assert found.cosine == pytest.approx(1.0 if half_finite else math.nan, nan_ok=True)


def test_difference_step_is_bounded_by_the_norm_of_the_weights(monkeypatch):
    learner = LEARNERS["llama"]
    worker = worker_of(learner, config_of(learner))
    phi, hessian = (
        worker.read(),
        DifferenceHessian(HvpOptions(), worker, batches_of(episode_of(learner)).support),
    )
    steps = []
    monkeypatch.setattr(
        type(hessian), "_difference", lambda self, phi, d, h, length: steps.append(h * length) or d
    )
    for bend in (1e-9, 1.0):  # a loss that is as good as flat; one that curves
        hessian.relative_curvature = bend
        hessian.times(phi, torch.ones_like(phi))
    assert steps == pytest.approx([0.05 * float(phi.norm()), 0.004], rel=1e-5)


@pytest.mark.parametrize("bad", [0, 1])
def test_nonfinite_side_of_a_difference_is_reported(bad, monkeypatch):
    learner = LEARNERS["llama"]
    worker = worker_of(learner, config_of(learner))
    phi, support = worker.read(), batches_of(episode_of(learner)).support
    d, count, gradient = gradient_of(worker, support), itertools.count(), worker.gradient

    def spoiled(batches, into, weight=1.0, restore=None):
        result = gradient(batches, into, weight, restore)
        if next(count) == 2 + bad:  # the first two are the probe
            result.stats[3] = 1
        return result

    monkeypatch.setattr(worker, "gradient", spoiled)
    hessian = DifferenceHessian(HvpOptions(), worker, support)
    hessian.times(phi, d)
    assert [step.finite for step in hessian.passes] == [True, True, bad != 0, bad != 1]


def test_a_task_whose_meta_gradient_overflows_between_finite_passes_adds_nothing(monkeypatch):
    learner = LEARNERS["llama"]
    config = config_of(learner, algorithm="maml")
    worker, times = worker_of(learner, config), DifferenceHessian.times
    monkeypatch.setattr(DifferenceHessian, "times", lambda self, phi, d: times(self, phi, d).mul_(1e38))
    theta, rule = worker.read(), find("maml").rule(setup_of(worker, config), 0)
    found = task_gradient(rule, worker, batches_of(episode_of(learner)))
    assert not found.finite
    assert not found.gradient.any()
    assert torch.equal(worker.read(), theta)


def test_trajectory_uses_its_whole_memory_budget():
    path = Trajectory(budget_bytes=40, keeps_directions=False)
    stored_steps(path, 2)
    assert path.left == 0
    stored_steps(path, 3)
    assert path.left == 0


def test_trajectory_does_not_store_the_last_phi():
    """No gradient is computed there again, so that storing it would waste a shard."""
    learner = LEARNERS["llama"]
    config = config_of(learner, inner_steps=3)
    worker = worker_of(learner, config)
    theta = worker.read()
    path = Trajectory(2**40, keeps_directions=False)
    setup_of(worker, config).inner.adapt(worker, theta, batches_of(episode_of(learner)).support, path)
    assert [sorted(step) for step in path.steps] == [["phi"]] * 3
