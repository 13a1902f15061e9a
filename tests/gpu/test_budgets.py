"""Waits, kernels, copies and collectives of layouts are those of budgets.json."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fmmeta.config.settings import Config
from fmmeta.learners.base import on_device
from tests.gpu import budgets
from tests.support.pretended_cuda import skip
from tests.support.ranks import built, first_episode, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("pretended"),
]
REPAIR = "python -m tests.gpu.budgets --write"


@pytest.fixture(scope="module")
def table():
    found = budgets.table()
    if found["versions"] != budgets.versions():
        skip(f"the numbers are of {found['versions']}; {REPAIR}")
    return found["layouts"]


def test_the_table_has_every_layout(table):
    assert list(table) == list(budgets.LAYOUTS)


@pytest.mark.parametrize("name", budgets.LAYOUTS)
def test_a_layout_keeps_its_budget(name, table):
    assert budgets.measured([name])[name] == table[name], REPAIR


def by_hand(worker, batches, update):
    """An inner step of plain bf16 as one would write it: fp32 weights, bf16 copies of them, SGD."""
    learner = worker.learner
    copies = [param for param, _, _ in worker.working]
    masters = [theta for _, theta, _ in worker.working]
    for batch in batches:
        outputs = learner(**batch.inputs)
        losses = F.cross_entropy(outputs[1].float(), batch.targets["labels"], reduction="none")
        (losses * batch.weights).sum().backward()
    grads = [copy.grad.float() for copy in copies]
    torch._foreach_add_(masters, grads, alpha=-0.1)
    with torch.no_grad():
        torch._foreach_copy_(copies, masters)
    for copy in copies:
        copy.grad = None


@on_ranks(1)
def kernels(world):
    """Of an inner step of the plain worker in bf16, and of one by hand on the same rows."""
    from tests.support.pretended_cuda.events import count

    config = Config(bf16=True, group_size="1", num_workers="0", n_way=5, k_shot=5)
    inputs, ranks, parts = built(world, config)
    worker, episode = parts.worker, first_episode(config, inputs, ranks, parts)
    found = []
    for step in (worker.step, partial(by_hand, worker)):
        batches = [on_device(batch, worker.learner, worker.device) for batch in episode.support]
        with count() as counted:
            step(batches, lambda shard, grad, where: shard.sub_(grad, alpha=0.1))
        found.append(counted.kernels)
    return found


def test_an_inner_step_launches_few_kernels_more_than_one_by_hand():
    ((worker, hand),) = kernels()
    print(f"kernels of an inner step: {worker}, by hand {hand}")
    assert hand > 100
    assert worker <= 1.3 * hand
