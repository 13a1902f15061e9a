"""Which tasks may begin and be counted with bounded staleness, for groups of any speed."""

from __future__ import annotations

import heapq
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from transformers import BertConfig

from fmmeta.config.settings import Config
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.planning.memory import estimate, rank_sizes
from fmmeta.training.bounded_staleness import Bound, Ledger, SharedLedger
from tests.support.helpers import refusal
from tests.support.messages import check_message


def simulated(bound: Bound, seconds: list[list[float]]) -> tuple[list[list[int]], int]:
    """Staleness of the gradients of each outer step, and how many were dropped.

    seconds: of the tasks of each group, in turn. A group enters a reduction when its task ends; the ledger
    does not know of the difference.
    """
    ledger, versions = Ledger(), [0] * len(seconds)
    steps, dropped = [[] for _ in range(bound.steps)], 0
    turn = [0] * len(seconds)
    events = [(0.0, group, -1) for group in range(len(seconds))]  # time, group, version of its task
    looks = 0
    while events and ledger.counted < bound.tasks * bound.steps:
        now, group, began = heapq.heappop(events)
        looks += 1
        assert looks < 100_000, "all groups wait"
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


@given(SECONDS, st.integers(1, 5), st.integers(0, 3))
def test_every_step_has_its_tasks_and_none_is_too_old(seconds, tasks, staleness):
    steps, dropped = simulated(Bound(tasks, staleness, steps=6), seconds)
    assert [len(ages) for ages in steps] == [tasks] * 6
    assert max(map(max, steps)) <= staleness
    assert dropped == 0


@given(SECONDS, st.integers(1, 5), st.integers(0, 3))
def test_old_gradients_are_dropped_where_nothing_waits(seconds, tasks, staleness):
    steps, _ = simulated(Bound(tasks, staleness, steps=6, drops=True), seconds)
    assert [len(ages) for ages in steps] == [tasks] * 6
    assert max(map(max, steps)) <= staleness


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


def test_plan_counts_a_copy_of_theta_and_the_gradient_of_the_task():
    zero2, hf_config = DeepSpeedSettings(2, False, False), BertConfig()
    begun, ahead = (
        sum(
            estimate(
                rank_sizes(Config(max_staleness=bound), hf_config, (4000, 0), False), zero2, 2
            ).peak.values()
        )
        for bound in (0, 2)
    )
    assert ahead - begun == 2 * 4 * 4000 // 2  # two vectors of this rank's half


def test_what_does_not_go_with_it():
    for setting, value, parts in (
        ("algorithm", "maml", ("algorithm=maml", "first-order", "fomaml or reptile")),
        ("elastic", True, ("elastic=True", "elastic=False")),
        ("tasks_per_pass", "auto", ("tasks_per_pass=auto", "tasks_per_pass=1")),
        ("task_sharding", "node", ("task_sharding=node", "task_sharding=global")),
        ("gradient_noise_scale", True, ("gradient_noise_scale=True", "gradient_noise_scale=False")),
    ):
        message = refusal(Config, **{setting: value, "max_staleness": 2})
        check_message(message, "max_staleness=2", *parts)
    kept = {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_optimizer_state": "kept"}
    check_message(refusal(Config, **kept, max_staleness=2), "max_staleness=2", "inner_optimizer_state=reset")
    check_message(refusal(Config, max_staleness=-1), "max_staleness=-1", "0")
    check_message(refusal(Config, drop_stale=True), "drop_stale=True", "max_staleness")
