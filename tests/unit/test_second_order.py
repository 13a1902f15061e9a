"""Hessian-vector products, the stored trajectory, the check of a meta-gradient, and iMAML's linear system."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import fmmeta.meta.hessian as curvature
from fmmeta import Config, MetaTrainer
from fmmeta.meta.algorithms import imaml
from fmmeta.meta.gradient_check import Check, check
from fmmeta.meta.hessian import DifferenceHessian, HvpOptions
from fmmeta.meta.inner_loop import Trajectory
from fmmeta.meta.inner_optimizers import InnerState
from fmmeta.meta.parameters import MetaParameters
from fmmeta.meta.reference import set_gradient
from fmmeta.meta.task import TaskResult
from fmmeta.parallel.workers.base import PassStats
from fmmeta.training.step_metrics import StepMetrics
from tests.support import learners
from tests.support.helpers import one_rank
from tests.support.learners import (
    LEARNERS,
    batches_of,
    by_name,
    config_of,
    episode_of,
    gradient_of,
    identity,
    norm,
    rule_on,
    task_gradient,
)
from tests.support.messages import check_message
from tests.support.short_runs import metrics_of

LLAMA = LEARNERS["llama"]


@pytest.mark.parametrize("settings", [{}, {"inner_lr_learned": "element"}], ids=identity)
def test_trajectory_in_host_memory_gives_the_same_gradient(settings):
    rule, worker = rule_on(LLAMA, algorithm="maml", **settings)
    episode, one = batches_of(episode_of(LLAMA)), 4 * worker.params.numel
    wanted = task_gradient(rule, worker, episode).gradient
    for budget in (0, one, 2 * one):
        found = task_gradient(rule.but(trajectory_memory_gib=budget / 2**30), worker, episode)
        assert torch.equal(found.gradient, wanted)


def stored_steps(path: Trajectory, steps: int) -> None:
    """Store phi_k = k, and u_k = -1 - k and a state of 10 k where they are kept."""
    for k in range(steps):
        phi = torch.full((10,), float(k))
        worker = SimpleNamespace(storage_device=torch.device("cpu"), read=phi.clone)
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
    whole = Trajectory(budget_bytes=40, keeps_directions=False)
    for steps in (2, 3):
        stored_steps(whole, steps)
        assert whole.left == 0


def test_trajectory_stores_the_optimizers_state_of_the_steps_that_are_differentiated():
    """And phi_k itself, although a state vector has the same name, which is the user's choice."""
    path = Trajectory(budget_bytes=1000, keeps_directions=False, keeps_states=True, first=2)
    stored_steps(path, 4)
    assert [len(step) for step in path.steps] == [1, 0, 2, 2]
    assert [float(path.state(k)["phi"][0]) for k in (2, 3)] == [20, 30]
    assert [float(path.phi(k)[0]) for k in (2, 3)] == [2, 3]


def test_trajectory_does_not_store_the_last_phi():
    """No gradient is computed there again, so that storing it would waste a shard."""
    rule, worker = rule_on(LLAMA, inner_steps=3)
    path = Trajectory(2**40, keeps_directions=False)
    rule.inner.adapt(worker, worker.read(), batches_of(episode_of(LLAMA)).support, path)
    assert [sorted(step) for step in path.steps] == [["phi"]] * 3


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_hessian_vector_products(model):
    """Products with directions of any length equal autograd in fp64; the product with zero is zero."""
    learner, episode = LEARNERS[model], episode_of(LEARNERS[model])
    _, worker = rule_on(learner, head_init="learned" if model == "bert" else "zero")
    phi, support = worker.read(), batches_of(episode).support
    exact = copy.deepcopy(learner).double()
    weights = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    gradient = set_gradient(exact, weights, episode.support, False, create_graph=True)
    drawn = torch.randn(phi.shape, generator=torch.Generator().manual_seed(0))
    for d in (gradient_of(worker, support), 1e4 * gradient_of(worker, support), drawn):
        along = by_name(worker, d)
        product = sum((gradient[name] * along[name].double()).sum() for name in weights)
        wanted = torch.autograd.grad(product, list(weights.values()), retain_graph=True)
        found = by_name(worker, DifferenceHessian(HvpOptions(), worker, support).times(phi, d))
        off = {name: found[name].double() - value for name, value in zip(weights, wanted, strict=True)}
        assert norm(off) < 5e-4 * norm(dict(zip(weights, wanted, strict=True)))
        worker.write(phi)
    zero, nan = (
        DifferenceHessian(HvpOptions(), worker, support).times(phi, torch.full_like(phi, value))
        for value in (0.0, math.nan)
    )
    assert not zero.any()
    assert nan.isnan().all()


def test_difference_step_is_bounded_by_the_norm_of_the_weights(monkeypatch):
    _, worker = rule_on(LLAMA)
    phi, steps = worker.read(), []
    hessian = DifferenceHessian(HvpOptions(), worker, batches_of(episode_of(LLAMA)).support)
    monkeypatch.setattr(
        type(hessian), "_difference", lambda self, phi, d, h, length: steps.append(h * length) or d
    )
    for bend in (1e-9, 1.0):  # a loss that is as good as flat; one that curves
        hessian.relative_curvature = bend
        hessian.times(phi, torch.ones_like(phi))
    assert steps == pytest.approx([0.05 * float(phi.norm()), 0.004], rel=1e-5)


@pytest.mark.parametrize("bad", [0, 1])
def test_nonfinite_side_of_a_difference_is_reported(bad, monkeypatch):
    _, worker = rule_on(LLAMA)
    phi, support = worker.read(), batches_of(episode_of(LLAMA)).support
    d, count, gradient = gradient_of(worker, support), itertools.count(), worker.gradient

    def spoiled(batches, into, weight=1.0, restore=None):
        result = gradient(batches, into, weight, restore)
        if next(count) == 2 + bad:  # the first two are the probe
            return PassStats(result.stats + torch.tensor([0, 0, 0, 1]))
        return result

    monkeypatch.setattr(worker, "gradient", spoiled)
    hessian = DifferenceHessian(HvpOptions(), worker, support)
    hessian.times(phi, d)
    assert [step.finite for step in hessian.passes] == [True, True, bad != 0, bad != 1]


def test_a_task_whose_meta_gradient_overflows_between_finite_passes_adds_nothing(monkeypatch):
    rule, worker = rule_on(LLAMA, algorithm="maml")
    times, theta = DifferenceHessian.times, worker.read()
    monkeypatch.setattr(DifferenceHessian, "times", lambda self, phi, d: times(self, phi, d).mul_(1e38))
    found = task_gradient(rule, worker, batches_of(episode_of(LLAMA)))
    assert not found.finite
    assert not found.gradient.any()
    assert torch.equal(worker.read(), theta)


def checked(precision: str = "fp32", **settings) -> Check:
    rule, worker = rule_on(LLAMA, bf16=precision == "bf16", algorithm="maml", **settings)
    return check(rule.rule, rule.task(worker, batches_of(episode_of(LLAMA))), precision)


def test_self_check_trusts_fp32_and_warns_of_bf16_and_of_too_long_steps(monkeypatch):
    good, bad = checked("fp32"), checked("bf16")
    assert good.cosine > 0.99999
    assert 0 < good.relative < 1e-3
    numbers = f"by {good.relative:.1e} of its length (cosine {good.cosine:.6f})"
    check_message(good.text, "check_meta_gradient: ", numbers, "can be trusted")
    assert bad.relative > 0.02
    check_message(bad.text, "WARNING: gradients rounded to bf16", "set bf16 to false")
    assert "WARNING" in Check(math.nan, math.nan, "fp32").text
    monkeypatch.setitem(curvature.CHANGE, "fp32", 1.0)
    found = checked(inner_lr=0.3)
    assert found.relative > 0.02
    assert "WARNING: the loss bends too sharply" in found.text


@pytest.mark.parametrize(("half_finite", "relative"), [(True, 0.25), (False, math.nan)])
def test_self_check_compares_meta_parameters_at_both_steps(half_finite, relative):
    """The head of a task may differ; a non-finite pass at half the step gives nan."""
    learner = LEARNERS["bert"]
    rule, worker = rule_on(learner, algorithm="maml")
    full, half = torch.zeros(2, worker.params.numel)
    full[0] = 4.0
    half[0] = 3.0
    half[worker.params.groups["inner_only"]] = 100.0

    def adds(task):
        """The first vector for the whole step; without one at half of it, the task is not finite."""
        fine, is_half = PassStats(torch.zeros(4, dtype=torch.float64)), task.setup.hvp.scale == 0.5
        finite = half_finite or not is_half
        if finite:
            task.into.add(half if is_half else full)
        return TaskResult(1.0, finite, fine, fine)

    found = check(adds, rule.task(worker, batches_of(episode_of(learner)), meta=MetaParameters(full)), "fp32")
    assert found.relative == pytest.approx(relative, nan_ok=True)
    assert found.cosine == pytest.approx(1.0 if half_finite else math.nan, nan_ok=True)


DENSE = {
    "algorithm": "imaml",
    "head_init": "learned",
    "proximal_weight": 8.0,
    "inner_lr": 0.05,
    "inner_steps": 20,
    "cg_steps": 12,
}


def test_imaml_is_the_dense_solution():
    """At the phi that the worker reaches: with the whole Hessian in fp64, and the query gradient."""
    learner = learners.bert(**learners.SMALL)
    episode, (rule, worker) = episode_of(learner), rule_on(learner, **DENSE)
    rule.inner.adapt(worker, worker.read(), batches_of(episode).support)
    phi = {name: value.double().requires_grad_() for name, value in by_name(worker, worker.read()).items()}
    exact = copy.deepcopy(learner).double()
    support, b = (
        torch.cat([x.reshape(-1) for x in set_gradient(exact, phi, rows, False, create_graph=True).values()])
        for rows in (episode.support, episode.query)
    )
    eye = torch.eye(len(b), dtype=b.dtype)
    rows = torch.autograd.grad(support, [*phi.values()], eye, is_grads_batched=True, materialize_grads=True)
    hessian = torch.cat([of.reshape(len(b), -1) for of in rows], 1)
    torch.testing.assert_close(hessian, hessian.T)
    assert 8.0 + float(torch.linalg.eigvalsh(hessian)[0]) > 0  # the system is positive definite
    wanted = torch.linalg.solve(eye + hessian / 8.0, b)
    found, worker = learners.rule_gradient(learner, config_of(learner, **DENSE), episode)
    assert found.numbers["too_little_proximal_weight"] == 0
    solved = torch.cat([x.double().reshape(-1) for x in by_name(worker, found.gradient).values()])
    assert (solved - wanted).norm() < 1e-2 * wanted.norm()
    assert (b - wanted).norm() > 0.1 * wanted.norm()  # the query gradient is no solution
    residual = solved + hessian @ solved / 8.0 - b
    assert found.numbers["cg_residual"] == pytest.approx(float(residual.norm() / b.norm()), abs=1e-3)


def test_imaml_warns_about_negative_curvature():
    tally = StepMetrics(imaml.spec.numbers)
    for settings in ({"proximal_weight": 0.05}, {"proximal_weight": 300.0, "inner_lr": 0.003}):
        config = config_of(LLAMA, algorithm="imaml", **settings)
        found, _ = learners.rule_gradient(LLAMA, config, episode_of(LLAMA))
        assert found.finite
        tally.add(found, 1)
    tally.all_reduce(one_rank())
    assert tally.values["too_little_proximal_weight"] == 0.5
    config = config_of(LLAMA, algorithm="imaml", proximal_weight=0.05)
    message = imaml.spec.warning(config, tally.values)
    check_message(message, "proximal_weight=0.05", "50 %", "raise --proximal_weight")
    quiet = {"too_little_proximal_weight": 0.0, "cg_residual": 0.01}
    assert imaml.warning(config, quiet) is None
    check_message(imaml.warning(config, {**quiet, "cg_residual": 4.2}), "420 %", "raise")


@pytest.mark.timeout(120)
def test_an_imaml_run_logs_its_metrics(tmp_path, capsys):
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
    assert set(imaml.spec.numbers) <= set(metrics_of(tmp_path / "run")[0])
    assert "proximal_weight=0.001 is too small" in capsys.readouterr().out
