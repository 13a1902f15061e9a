"""benchmarks/scaling.py: its tasks are assigned as in a run, and its times agree with closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.scaling import Case, assign_steps, claimed_times, group_times, useful_time
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


def test_groups_wait_for_the_longest(monkeypatch):
    monkeypatch.setattr(scaling, "FIXED", 0.0)
    assert useful_time(Case(per_group=2), 64, 3) == 1
    assert useful_time(Case(slow_share=1.0, slow_by=2.0), 8, 3) == pytest.approx(0.5)
    taken = np.random.default_rng(1).exponential(size=(20_000, 8))
    longest = group_times(np.ones_like(taken), taken, 8).max(1).mean()
    assert longest == pytest.approx(sum(1 / k for k in range(1, 9)), rel=0.01)  # E max of 8 exponentials


def test_claimed_tasks_run_on_the_group_that_is_free_first():
    """A group at half speed gets a third of equal tasks: 22 instead of 32 units of time for 32 tasks."""
    ones, slow = np.ones((1, 32)), np.array([[1.0, 2.0]])
    assert claimed_times(ones, ones, slow).tolist() == [[21.0, 22.0]]
    assert (group_times(ones, ones, 2) * slow).tolist() == [[16.0, 32.0]]
    sizes = np.array([[1.0, 3.0, 2.0, 2.0]])  # 3 | 2, then 2 on the second, 1 on the first
    assert claimed_times(sizes, sizes, np.ones((1, 2))).tolist() == [[4.0, 4.0]]
