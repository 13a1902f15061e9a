"""An outer step follows the recursion by hand, on a quadratic; what a checkpoint keeps of it."""

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.meta.noise_scale import TaskSquares
from fmmeta.meta.outer_step import OuterOptimizer, OuterUpdate
from fmmeta.meta.parameters import MetaParameters, StateDict
from fmmeta.parallel.collectives import Communicator
from tests.support.learners import CPU, bert, worker_over

STEPS, LR, WITHOUT = 12, 0.2, 5


def updates_of(**settings) -> OuterUpdate:
    """On a theta of a small model; the learning rate falls linearly."""
    fixed = {
        "outer_optimizer": "sgd",
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    worker = worker_over(bert("mean"))
    config = Config(**{**fixed, "outer_lr": LR, "outer_steps": STEPS, **settings})
    theta = worker.read()
    theta.copy_(torch.linspace(-1, 1, len(theta)))
    outer = OuterOptimizer(MetaParameters(theta), worker, config)
    return OuterUpdate(outer, Communicator(None, 0, 1, CPU), config)


def test_theta_follows_the_recursion():
    """Two tasks that weigh 3 together; one meta-batch has no finite task."""
    updates = updates_of()
    theta = updates.outer.meta_params.theta
    wanted, start = theta.double(), theta.clone()
    for step in range(STEPS):
        is_empty, rate = step == WITHOUT, LR * (1 - step / STEPS)
        if not is_empty:
            updates.meta.sum.add_(theta, alpha=3)
            wanted = wanted - rate * wanted
        result = updates.step(0.0 if is_empty else 3.0, step)
        assert result.lr == pytest.approx(rate)
        assert result.applied == (not is_empty)
        assert not updates.meta.sum.any()
    assert (theta - wanted).norm() < 1e-6 * (start - wanted).norm()


def test_reduce_dtype_bf16_sets_the_comm_dtype():
    assert updates_of(reduce_dtype="bf16").comm_dtype == torch.bfloat16
    assert updates_of().comm_dtype == torch.float32


def test_the_noise_scale_continues_from_a_checkpoint():
    updates, later = updates_of(), updates_of()
    updates.meta.sum.add_(updates.outer.meta_params.theta)
    updates.step(3.0, 0, squares=TaskSquares(3.0, 3.0, 10.0))
    updates.add_state(kept := StateDict())
    later.load_state(kept)
    assert later.noise_scale.state == updates.noise_scale.state
    assert later.noise_scale.count == 1
