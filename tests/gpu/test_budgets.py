"""Waits, kernels, copies and collectives of layouts are those of budgets.json; planted errors are noticed."""

import json
import signal
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fmmeta.config.settings import Config
from fmmeta.learners.base import on_device
from harness.fork_server import environment, places, shared
from tests.gpu import budgets, planted
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


def train_with(name, layout, folder, words=""):
    """Output and numbers of a run with a planted error, which is ended once it has printed `words`."""
    file = folder / "numbers.json"
    command = ["-m", "tests.gpu.planted", str(file), name]
    ranks = [
        shared().start(command, folder / f"rank-{place['RANK']}.log", environment(**place))
        for place in places(max(1, -budgets.LAYOUTS[layout][0]))
    ]
    deadline = time.monotonic() + 200
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        shared().poll(1.0)
        if words and any(words in rank.text for rank in ranks):
            break
    for rank in ranks:
        shared().signal(rank, signal.SIGKILL)
    return "".join(rank.text for rank in ranks), json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("name", planted.ERRORS)
def test_a_planted_error_ends_the_run(name, tmp_path):
    layout, _, words = planted.ERRORS[name]
    assert words in train_with(name, layout, tmp_path, words)[0]


@pytest.mark.parametrize("name", planted.COUNTED)
def test_a_planted_wait_is_counted(name, table, tmp_path):
    layout, _, step, kind, text = planted.COUNTED[name]
    numbers = train_with(name, layout, tmp_path)[1]
    more = {key: n for key, n in numbers[step][kind].items() if n > table[layout][step][kind].get(key, 0)}
    assert any(key.startswith(text) for key in more)


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
