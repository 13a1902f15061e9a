"""The simulator against closed forms, and its batcher against the one of a run."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.planning import simulate
from fmmeta.planning.simulate import (
    SimulatedCluster,
    SimulationResult,
    assign_steps,
    claimed_times,
    group_times,
    outcome,
)
from fmmeta.tasks.schedule.meta_batches import Task, assign_to_groups


@given(
    st.integers(1, 9), st.lists(st.lists(st.integers(1, 400), min_size=7, max_size=7), min_size=1, max_size=4)
)
def test_batched_assignment_equals_the_assignment_of_a_run(groups, rows):
    found = assign_steps(np.array(rows), groups)
    for row, owner in zip(rows, found, strict=True):
        tasks = [Task(i, f"t{i}", "s", tokens, (i,)) for i, tokens in enumerate(row)]
        shares = assign_to_groups(tasks, groups)
        assert [[task.item for task in share] for share in shares] == [
            np.flatnonzero(owner == g).tolist() for g in range(groups)
        ]


@pytest.mark.parametrize("groups", [8, 64])
def test_many_tasks_are_assigned_as_in_a_run(groups, monkeypatch):
    tokens = np.random.default_rng(0).lognormal(6, 1, (5, 6 * groups)).astype(np.int64) + 1
    monkeypatch.setattr(simulate, "CHUNK", 2 * groups)  # in parts
    found = assign_steps(tokens, groups)
    for row, owner in zip(tokens.tolist(), found, strict=True):
        shares = assign_to_groups([Task(i, f"t{i}", "s", size, (i,)) for i, size in enumerate(row)], groups)
        assert [[task.item for task in share] for share in shares] == [
            np.flatnonzero(owner == g).tolist() for g in range(groups)
        ]


@pytest.mark.parametrize("groups", [1, 8, 1024])
def test_equal_tasks_without_failures_have_no_idle_time(groups):
    found = simulate.simulate(SimulatedCluster(groups, 2 * groups), steps=3)
    assert found.efficiency == 1
    assert (found.waiting, found.failing, found.fixed, found.step) == (0, 0, 0, 2)


def test_groups_without_a_task_wait():
    assert simulate.simulate(SimulatedCluster(8, 9), steps=2).efficiency == pytest.approx(9 / 16)


@pytest.mark.parametrize("groups", [8, 64])
def test_one_exponential_task_each_is_a_harmonic_number(groups):
    """E max of G exponentials of mean 1 is 1 + 1/2 + ... + 1/G, and what is useful is 1."""
    rng = np.random.default_rng(1)
    taken = rng.exponential(size=(20_000, groups))
    found = outcome(
        SimulatedCluster(groups, groups), group_times(np.ones_like(taken), taken, groups), taken, rng
    )
    harmonic = sum(1 / k for k in range(1, groups + 1))
    assert found.step == pytest.approx(harmonic, rel=0.01)
    assert found.efficiency == pytest.approx(1 / harmonic, rel=0.01)
    assert found.efficiency + found.waiting == pytest.approx(1)


def test_stragglers_slow_every_step():
    assert simulate.simulate(SimulatedCluster(8, 8, slow_share=1, slow_by=1.5)).efficiency == pytest.approx(
        1 / 1.5
    )
    some = simulate.simulate(SimulatedCluster(16, 16, slow_share=0.01, slow_by=3), steps=20_000)
    at_least_one = 1 - 0.99**16
    assert some.step == pytest.approx(1 + 2 * at_least_one, rel=0.01)


def test_claimed_tasks_run_on_the_group_that_is_free_first():
    """A group at half speed gets a third of equal tasks: 22 instead of 32 units of time for 32 tasks."""
    ones, slow = np.ones((1, 32)), np.array([[1.0, 2.0]])
    assert claimed_times(ones, ones, slow).tolist() == [[21.0, 22.0]]
    assert (group_times(ones, ones, 2) * slow).tolist() == [[16.0, 32.0]]
    sizes = np.array([[1.0, 3.0, 2.0, 2.0]])  # 3 | 2, then 2 on the second, 1 on the first
    assert claimed_times(sizes, sizes, np.ones((1, 2))).tolist() == [[4.0, 4.0]]


def test_claimed_tasks_wait_less_where_sizes_are_unknown_or_groups_are_slow():
    for unequal in ({"spread": 0.5, "noise": 0.2}, {"slow_share": 0.1, "slow_by": 2.0}):
        static, dynamic = (
            simulate.simulate(SimulatedCluster(16, 256, claimed=claimed, **unequal), seed=3)
            for claimed in (False, True)
        )
        assert static.efficiency + 0.05 < dynamic.efficiency < 1
    even = simulate.simulate(SimulatedCluster(8, 16, claimed=True, fixed=1.0))
    assert (even.efficiency, even.waiting, even.step) == (pytest.approx(2 / 3), 0, 3)


def test_fixed_time_is_reported():
    found = simulate.simulate(SimulatedCluster(4, 8, fixed=2.0))
    assert (found.efficiency, found.fixed, found.step) == (0.5, 0.5, 4)


def even(world: SimulatedCluster, steps: int, seed: int) -> SimulationResult:
    """Steps of one equal task per group."""
    ones = np.ones((steps, world.groups))
    return outcome(world, ones, ones, np.random.default_rng(seed))


def test_a_static_failure_costs_a_restart_and_half_an_interval():
    """Renewal: of 1 unit of work, G lambda fail, each costs away + interval / 2."""
    world = SimulatedCluster(32, 32, failure_rate=1e-4, away=20, interval=50)
    found = even(world, 20_000, 3)
    assert found.efficiency == pytest.approx(1 / (1 + 32e-4 * (20 + 25)), rel=0.01)


def test_an_elastic_failure_costs_a_step_and_a_smaller_world():
    """In a step of length 1 some group fails with G lambda, costs the step, and G / (G - 1) for the steps
    away.
    """
    world = SimulatedCluster(32, 32, failure_rate=1e-4, elastic=True, away=20)
    found = even(world, 20_000, 4)
    assert found.failing / (1 - found.failing) == pytest.approx(32e-4 * (1 + 21 / 31), rel=0.1)
    stops = even(SimulatedCluster(32, 32, failure_rate=1e-4, away=20, interval=50), 20_000, 4)
    assert found.efficiency > stops.efficiency


def test_known_sizes_are_balanced_and_unknown_ones_are_not():
    known = simulate.simulate(SimulatedCluster(16, 128, spread=0.5), seed=2)
    unknown = simulate.simulate(SimulatedCluster(16, 128, noise=0.5), seed=2)
    assert known.efficiency > 0.95
    assert 0.6 < unknown.efficiency < 0.85
    assert simulate.simulate(SimulatedCluster(16, 128, noise=0.5), seed=2) == unknown  # the same seed


@pytest.mark.timeout(60)
def test_a_thousand_groups_take_seconds():
    began = time.process_time()
    assert (
        0.6
        < simulate.simulate(SimulatedCluster(1024, 4096, spread=0.5, noise=0.1), steps=20).efficiency
        < 0.75
    )
    assert time.process_time() - began < 20
