"""Which tasks may begin and be counted with bounded staleness, for groups of any speed."""

import heapq
import json
import os
import signal
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import HashStore
from transformers import BertConfig

from fmmeta import Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.memory import Counts, estimate, rank_sizes
from fmmeta.training.bounded_staleness import Bound, Ledger, SharedLedger, StaleSchedule
from tests.support.helpers import one_rank


def simulated(bound: Bound, seconds: list[list[float]]) -> tuple[list[list[int]], int]:
    """Staleness of the gradients of each outer step, and how many were dropped.

    seconds: of the tasks of each group, in turn. A group enters a reduction when its task ends; the ledger
    does not know of the difference.
    """
    ledger, versions = Ledger(), [0] * len(seconds)
    steps, dropped = [[] for _ in range(bound.steps)], 0
    turn = [0] * len(seconds)
    events = [(0.0, group, -1) for group in range(len(seconds))]  # time, group, version of its task
    while events and ledger.counted < bound.tasks * bound.steps:
        now, group, began = heapq.heappop(events)
        if began >= 0:
            step = bound.count(ledger, began)
            if step is None:
                heapq.heappush(events, (now + 0.1, group, began))
                continue
            if step < 0:
                dropped += 1
            else:
                steps[step].append(step - began)
        versions[group] = ledger.counted // bound.tasks
        if bound.claim(ledger, versions[group]) is None:
            heapq.heappush(events, (now + 0.1, group, -1))
        else:
            length = seconds[group][turn[group] % len(seconds[group])]
            turn[group] += 1
            heapq.heappush(events, (now + length, group, versions[group]))
    return steps, dropped


SECONDS = st.lists(st.lists(st.floats(0.1, 30), min_size=1, max_size=4), min_size=1, max_size=9)


@given(SECONDS, st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_every_step_has_its_tasks_and_none_is_too_old(seconds, tasks, staleness, drops):
    """Old gradients are dropped only where nothing waits."""
    steps, dropped = simulated(Bound(tasks, staleness, steps=6, drops=drops), seconds)
    assert [len(ages) for ages in steps] == [tasks] * 6
    assert max(map(max, steps)) <= staleness
    assert drops or dropped == 0


def test_a_slow_group_is_waited_for_or_its_gradients_are_dropped():
    """Two groups, one ten times slower, two tasks a step, at most one step old."""
    seconds = [[1.0], [10.0]]
    waiting, none = simulated(Bound(2, 1, steps=20), seconds)
    dropping, some = simulated(Bound(2, 1, steps=20, drops=True), seconds)
    assert none == 0
    assert sum(ages.count(1) for ages in waiting) >= 8
    assert some >= 2
    assert sum(map(sum, dropping)) < 5


def test_equal_changes_of_two_groups_are_both_made():
    store = HashStore()
    first, second = (
        SharedLedger(store, Communicator(None, 0, 1, torch.device("cpu")), group) for group in (0, 1)
    )
    first.begin(Ledger(counted=4))
    bound = Bound(2, 1, steps=9)

    def claim_after_another(ledger: Ledger) -> int | None:
        if not ledger.claimed:
            first.change(lambda ledger: bound.claim(ledger, 2))
        return bound.claim(ledger, 2)

    assert second.change(claim_after_another) == 1
    assert second.read() == Ledger(2, 4, Counter({2: 2}))


def test_one_group_that_was_stopped_in_a_task_ends_where_a_synchronous_run_ends(
    tmp_path, monkeypatch, bert, classes
):
    """The three tasks of the open outer step begin again."""
    settings = {
        "model_name_or_path": str(bert),
        "dataset": [str(classes)],
        "n_way": 2,
        "k_shot": 1,
        "num_query": 1,
        "meta_batch_size": 4,
        "inner_steps": 2,
        "inner_lr": 0.1,
        "outer_steps": 3,
        "outer_optimizer": "sgd",
        "outer_lr": 0.5,
        "eval_episodes": 0,
        "num_workers": "0",
    }
    whole = MetaTrainer(Config(**settings, output_dir=str(tmp_path / "whole"))).train()
    begun, begin_task = [], StaleSchedule._begin_task

    def run_or_stop(self, number):
        begun.append(number)
        if len(begun) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin_task(self, number)

    monkeypatch.setattr(StaleSchedule, "_begin_task", run_or_stop)
    trainer = MetaTrainer(Config(**settings, max_staleness=1, output_dir=str(tmp_path / "run")))
    with pytest.raises(Stopped):
        trainer.train()
    queue = json.loads((tmp_path / "run" / "checkpoint-1" / "state.json").read_text())["queue"]
    assert (queue["claimed"], queue["again"]) == (7, [4, 5, 6])
    resumed = trainer.train()
    assert begun == [*range(7), *range(8)]
    theta, wanted = (
        load_file(result.output_dir / "model" / "model.safetensors") for result in (resumed, whole)
    )
    assert max(float((theta[name] - value).abs().max()) for name, value in wanted.items()) < 1e-6


@pytest.mark.parametrize(
    ("begun", "in_sum", "current", "claimed", "again"),
    [
        (0, [], None, 9, [3, 6, 8]),
        (1, [], 3, 9, [3, 6, 8]),
        (2, [], 6, 9, [6, 8]),  # the first is in theta
        (2, [6], None, 9, [6, 8]),
        (3, [], None, 9, []),
        (5, [8, 9], 10, 11, [8, 9, 10]),  # two that no process began before
    ],
)
def test_a_second_stop_leaves_the_tasks_that_were_not_begun_again(begun, in_sum, current, claimed, again):
    steps, ranks = object.__new__(StaleSchedule), one_rank()
    steps.run = SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
    steps.ledger = SharedLedger(HashStore(), ranks.group, 0)
    steps.ledger.begin(Ledger())
    for number in range(begun):
        assert steps.ledger.change(partial(Bound(9, 1, 9).claim, version=0)) == number
    steps.again, steps.claimed_before = [3, 6, 8], 9
    steps.in_sum, steps.current = [(position, 0) for position in in_sum], current
    steps.counted, steps.dropped = Counter(), Counter()
    left = steps.unfinished()
    assert (left["claimed"], left["again"]) == (claimed, again)


def test_plan_counts_a_copy_of_theta_and_the_gradient_of_the_task():
    zero2, hf_config = DeepSpeedSettings(2, False, False), BertConfig()
    begun, ahead = (
        sum(
            estimate(
                rank_sizes(Config(max_staleness=bound), hf_config, Counts(params=4000), False), zero2, 2
            ).peak.values()
        )
        for bound in (0, 2)
    )
    assert ahead - begun == 2 * 4 * 4000 // 2  # two vectors of this rank's half
