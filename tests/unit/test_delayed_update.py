"""When a meta-gradient moves theta: the delayed recursion by hand, on quadratics, and what a checkpoint keeps
of it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.noise_scale import TaskSquares
from fmmeta.meta.outer_step import PREFIX, DelayedUpdate, OuterOptimizer
from fmmeta.meta.parameters import MetaParameters, StateDict
from fmmeta.parallel.collectives import Communicator
from tests.support.learners import bert, worker_over

CPU = torch.device("cpu")
STEPS, LR = 12, 0.2


def updates_of(delay: int, lr: float = LR, **settings) -> DelayedUpdate:
    """On a theta of a small model; the learning rate falls linearly, so that a gradient of another step
    shows.
    """
    fixed = {
        "outer_optimizer": "sgd",
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    worker = worker_over(bert("mean"))
    config = Config(**{**fixed, "outer_lr": lr, "outer_steps": STEPS, "outer_delay": delay, **settings})
    theta = worker.read()
    theta.copy_(torch.linspace(-1, 1, len(theta)))
    outer = OuterOptimizer(MetaParameters(theta), worker, config)
    return DelayedUpdate(outer, Communicator(None, 0, 1, CPU), config)


def run(updates: DelayedUpdate, first: int = 0, last: int = STEPS, curvature: float = 1.0) -> list:
    """Outer steps on curvature |theta|^2 / 2, of two tasks that weigh 3 together; one meta-batch has no
    finite task.
    """
    results = []
    for step in range(first, last):
        if step != 5:
            updates.meta.sum.add_(updates.outer.meta_params.theta, alpha=3 * curvature)
        results.append(
            updates.step(0.0 if step == 5 else 3.0, step, no_data=step == 5, last=step + 1 == STEPS)
        )
    return results


def expected_theta(start: Tensor, delay: int, lr: float = LR, curvature: float = 1.0) -> Tensor:
    """theta after all steps: gradients wait in a line of `delay`."""
    theta, line = start.double(), []
    for step in range(STEPS):
        line.append((step, None if step == 5 else curvature * theta))
        while len(line) > (0 if step + 1 == STEPS else delay):
            due, gradient = line.pop(0)
            if gradient is not None:
                theta = theta - lr * (1 - due / STEPS) * gradient
    return theta


@pytest.mark.parametrize("delay", [0, 1])
def test_theta_follows_the_delayed_recursion(delay):
    updates = updates_of(delay)
    start = updates.outer.meta_params.theta.clone()
    results = run(updates)
    wanted = expected_theta(start, delay)
    assert (updates.outer.meta_params.theta - wanted).norm() < 1e-6 * (start - wanted).norm()
    assert (expected_theta(start, 0) - expected_theta(start, 1)).norm() > 1e-3 * (start - wanted).norm()
    assert [one is None for one in results] == [bool(delay)] + [False] * (STEPS - 1)
    rates = [LR * (1 - step / STEPS) for step in range(STEPS)]
    assert [one.lr for one in results[delay:]] == pytest.approx(
        rates if not delay else [*rates[: STEPS - 2], rates[-1]]
    )
    without = [number for number, one in enumerate(results) if one is not None and not one.applied]
    assert without == [5 + delay]
    assert results[5 + delay].no_data
    assert updates.pending is None


def test_the_last_step_reports_that_the_pending_meta_gradient_moved_theta():
    """The last step applies two meta-gradients; here only the first of them is finite."""
    updates = updates_of(1)
    theta = updates.outer.meta_params.theta
    updates.meta.sum.add_(1.0)
    updates.step(1.0, STEPS - 2, no_data=False, last=False)
    before = theta.clone()
    updates.meta.sum.fill_(torch.nan)
    assert updates.step(1.0, STEPS - 1, no_data=False, last=True).applied
    assert not torch.equal(theta, before)
    assert torch.isfinite(theta).all()


@pytest.mark.parametrize("at", [1, 5, 6, 11])
def test_pending_gradients_resume_bit_for_bit_from_a_checkpoint(at):
    whole, part = updates_of(1), updates_of(1)
    run(whole)
    run(part, 0, at)
    kept = StateDict()
    part.add_state(kept)
    assert kept.facts["pending"] == {"outer_step": at - 1, "unread": at == 6, "finite": at != 6}
    assert list(kept.vectors) == ([f"{PREFIX}theta"] if at != 6 else [])
    assert {name: value.shape for name, value in part.vectors_to_save().items()} == {
        f"{PREFIX}theta": whole.outer.meta_params.theta.shape
    }
    resumed = updates_of(1)
    resumed.outer.meta_params.theta.copy_(part.outer.meta_params.theta)
    resumed.load_state(copy.deepcopy(kept))
    for one in (resumed, part):  # that it was saved changes nothing
        run(one, at)
        assert torch.equal(one.outer.meta_params.theta, whole.outer.meta_params.theta)


@pytest.mark.parametrize(
    ("delay", "rate", "settles"), [(0, 1.9, True), (0, 2.1, False), (1, 0.9, True), (1, 1.1, False)]
)
def test_a_delayed_run_is_stable_at_half_the_rate(delay, rate, settles):
    """docs/delay.md: rate x curvature must be below 2 without delay, below 1 with it."""
    updates = updates_of(delay, rate, lr_scheduler_type="constant", outer_steps=STEPS)
    start = float(updates.outer.meta_params.theta.norm())
    for step in range(200):
        updates.meta.sum.add_(updates.outer.meta_params.theta, alpha=1.0)
        updates.step(1.0, step, no_data=False, last=False)
    assert (float(updates.outer.meta_params.theta.norm()) < start / 10) == settles


def test_reduce_dtype_bf16_sets_the_comm_dtype():
    assert updates_of(0, reduce_dtype="bf16").comm_dtype == torch.bfloat16
    assert updates_of(0).comm_dtype == torch.float32


def test_the_squares_of_a_pending_step_are_counted_after_a_resume():
    part, later = updates_of(1), updates_of(1)
    part.meta.sum.add_(part.outer.meta_params.theta)
    part.step(3.0, 0, no_data=False, last=False, squares=TaskSquares(3.0, 3.0, 10.0))
    kept = StateDict()
    part.add_state(kept)
    assert part.noise_scale.count == 0
    later.load_state(kept)
    later.flush()
    part.flush()
    assert later.noise_scale.state == part.noise_scale.state
    assert later.noise_scale.count == 1


def test_a_pending_gradient_of_other_rates_is_left_out():
    """Settings of rates may change at a resume (--accept_changed_settings)."""
    updates = updates_of(1)
    run(updates, 0, 2)
    updates.add_state(state := StateDict())
    state.vectors[f"{PREFIX}rates"] = torch.ones(3)
    resumed = updates_of(1)
    resumed.load_state(state)
    assert resumed.pending.outer_step == 1
