"""The task schedule: a pure function of (seed, outer_step), stratified, assigned to groups without
communication.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule, Task, assign_to_groups

STRATA = st.lists(st.integers(1, 12), min_size=1, max_size=6)  # items per stratum
TOKENS = st.lists(st.integers(1, 500), max_size=24)


def items_of(sizes: list[int]) -> Items:
    return Items.of(
        Item(f"{s}-{i}", f"s{s}", 10 + s + i) for s, size in enumerate(sizes) for i in range(size)
    )


def tasks_of(tokens: list[int], strata: str = "") -> list[Task]:
    return [
        Task(i, f"t{i}", strata[i] if strata else f"s{i % 3}", n, (0, 0, 0, i)) for i, n in enumerate(tokens)
    ]


def stream(schedule: Schedule, steps: int) -> list[Task]:
    return [task for step in range(steps) for task in schedule.meta_batch(step)]


@given(STRATA, st.integers(1, 9), st.integers(0, 2**31), st.integers(0, 10_000), st.integers(1, 5))
def test_meta_batch_depends_on_seed_and_step_alone(sizes, per_step, seed, step, num_groups):
    used = Schedule(items_of(sizes), per_step, seed)
    for other in (step + 1, 0, 3):
        used.meta_batch(other)
    batch = used.meta_batch(step)
    fresh = Schedule(items_of(sizes), per_step, seed)  # a resumed run: no history
    assert batch == fresh.meta_batch(step)
    shares = [fresh.share(step, num_groups, g) for g in range(num_groups)]
    assert sorted((task for share in shares for task in share), key=batch.index) == batch


@given(STRATA, st.integers(1, 9), st.integers(0, 99))
def test_each_epoch_holds_each_item_once(sizes, per_step, seed):
    n = sum(sizes)
    drawn = stream(Schedule(items_of(sizes), per_step, seed), -(-3 * n // per_step))
    for epoch in range(3):
        assert sorted(task.item for task in drawn[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(STRATA, st.integers(0, 99), st.data())
def test_every_interval_of_an_epoch_is_stratified(sizes, seed, data):
    """Off from its share by 1 - f + f (S - 1) at most, for a stratum with a share f of the items, among S
    strata.
    """
    n = sum(sizes)
    end = data.draw(st.integers(1, n))
    begin = data.draw(st.integers(0, end - 1))
    stretch = Counter(task.stratum for task in stream(Schedule(items_of(sizes), 1, seed), n)[begin:end])
    for stratum, size in enumerate(sizes):
        share = size / n
        assert abs(stretch[f"s{stratum}"] - (end - begin) * share) <= 1 + share * (len(sizes) - 2) + 1e-9


def test_meta_batches_of_equal_strata_hold_them_equally():
    schedule = Schedule(items_of([15] * 10), 20, seed=7)
    for step in range(7):
        assert set(Counter(task.stratum for task in schedule.meta_batch(step)).values()) == {2}


def test_epochs_seeds_and_streams_differ():
    items = items_of([20, 20])
    base = [task.item for task in stream(Schedule(items, 40, seed=1), 1)]
    second = [task.item for task in Schedule(items, 40, seed=1).meta_batch(1)]
    other_seed = [task.item for task in Schedule(items, 40, seed=2).meta_batch(0)]
    other_stream = [task.item for task in Schedule(items, 40, seed=1, stream=2).meta_batch(0)]
    assert len({tuple(order) for order in (base, second, other_seed, other_stream)}) == 4


def test_every_slot_has_a_distinct_seed():
    tasks = stream(Schedule(items_of([3]), 4, seed=1), 50) + stream(
        Schedule(items_of([3]), 4, seed=1, stream=1), 50
    )
    assert len({task.seed for task in tasks}) == 400


@given(TOKENS, st.integers(1, 6))
def test_shares_are_disjoint_complete_and_in_order(tokens, num_groups):
    tasks = tasks_of(tokens)
    shares = assign_to_groups(tasks, num_groups)
    assert len(shares) == num_groups
    assert sorted((t for share in shares for t in share), key=lambda t: t.item) == tasks
    assert all(share == sorted(share, key=lambda t: t.item) for share in shares)
    assert shares == assign_to_groups(tasks, num_groups)


@given(TOKENS, st.integers(1, 6))
def test_shares_are_balanced_in_tokens(tokens, num_groups):
    """Largest first, to a group within 5 % of the mean of the least loaded: no two groups differ by more than
    this.
    """
    loads = [sum(task.tokens for task in share) for share in assign_to_groups(tasks_of(tokens), num_groups)]
    assert max(loads) - min(loads) <= max(tokens, default=0) + 0.05 * sum(tokens) / num_groups


@pytest.mark.parametrize(
    ("tokens", "num_groups", "loads"),
    [
        (
            [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10],
            2,
            [100, 100],
        ),  # one large task against ten small ones
        ([10, 20, 30, 40, 50, 60], 3, [70, 70, 70]),
        ([70], 3, [0, 0, 70]),
    ],
)
def test_largest_first(tokens, num_groups, loads):
    assert (
        sorted(sum(task.tokens for task in share) for share in assign_to_groups(tasks_of(tokens), num_groups))
        == loads
    )


@pytest.mark.parametrize("strata", ["ABABABAB", "AAAABBBB", "ABBABAAB"])
def test_strata_are_split_evenly_where_tokens_allow(strata):
    for share in assign_to_groups(tasks_of([30] * 8, strata), 2):
        assert Counter(task.stratum for task in share) == {"A": 2, "B": 2}


def test_equal_tasks_are_split_evenly():
    tokens = [100 + i % 3 for i in range(22)]
    assert sorted(len(share) for share in assign_to_groups(tasks_of(tokens), 4)) == [5, 5, 6, 6]
