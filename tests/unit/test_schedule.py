"""The task schedule: a pure function of (seed, outer_step), stratified, assigned to groups without
communication; epochs that are complete, shares that are kept, parts of nodes, and a million tasks.
"""

import time
import tracemalloc
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.tasks.loader import TaskSampler
from fmmeta.tasks.schedule.meta_batches import (
    VIRTUAL,
    Item,
    Items,
    Schedule,
    StratifiedOrder,
    Task,
    assign_to_groups,
    epoch_quotas,
    node_parts,
    splitmix64,
)
from tests.support.messages import check_message, refusal

STRATA = st.lists(st.integers(1, 12), min_size=1, max_size=6)  # items per stratum
SEEDS = st.integers(0, 2**31)
TOKENS = st.lists(st.integers(1, 500), max_size=24)


def items_of(sizes: list[int], equal: bool = False) -> Items:
    """Items of strata. equal: with equally many tokens."""
    return Items.of(
        Item(f"{s}-{i}", f"s{s}", 100 if equal else 10 + s + i)
        for s, size in enumerate(sizes)
        for i in range(size)
    )


def tasks_of(tokens: list[int], strata: str = "") -> list[Task]:
    return [
        Task(i, f"t{i}", strata[i] if strata else f"s{i % 3}", n, (0, 0, 0, i)) for i, n in enumerate(tokens)
    ]


def stream(schedule: Schedule, steps: int) -> list[Task]:
    return [task for step in range(steps) for task in schedule.meta_batch(step)]


@given(STRATA, st.integers(1, 16), SEEDS, st.integers(0, 10_000), st.integers(1, 5))
def test_meta_batch_depends_on_seed_and_step_alone(sizes, per_step, seed, step, num_groups):
    """So do the shares of groups."""
    used, fresh = (Schedule(items_of(sizes), per_step, seed) for _ in range(2))
    for other in (step + 1, 0, 3):
        used.share(other, num_groups, 0)
    batch = used.meta_batch(step)
    assert batch == fresh.meta_batch(step)  # a resumed run: no history
    shares = [fresh.share(step, num_groups, g) for g in range(num_groups)]
    assert shares == [used.share(step, num_groups, g) for g in range(num_groups)]
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
    begin, end = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
    stretch = Counter(task.stratum for task in stream(Schedule(items_of(sizes), 1, seed), n)[begin:end])
    for stratum, size in enumerate(sizes):
        share = size / n
        assert abs(stretch[f"s{stratum}"] - (end - begin) * share) <= 1 + share * (len(sizes) - 2) + 1e-9


def test_meta_batches_of_equal_strata_hold_them_equally():
    schedule = Schedule(items_of([15] * 10), 20, seed=7)
    for step in range(7):
        assert set(Counter(task.stratum for task in schedule.meta_batch(step)).values()) == {2}


DIFFERENT = [({"seed": 1}, 0), ({"seed": 1}, 1), ({"seed": 2}, 0), ({"seed": 1, "stream": 2}, 0)]


def test_epochs_seeds_streams_and_slots_differ():
    items = items_of([20, 20])
    schedules = [(Schedule(items, 40, **given), step) for given, step in DIFFERENT]
    orders = [[task.item for task in schedule.meta_batch(step)] for schedule, step in schedules]
    assert len({*map(tuple, orders)}) == len(DIFFERENT)
    tasks = [task for n in (0, 1) for task in stream(Schedule(items_of([3]), 4, seed=1, stream=n), 50)]
    assert len({task.seed for task in tasks}) == 400


def loads(shares: list[list[Task]]) -> list[int]:
    return sorted(sum(task.tokens for task in share) for share in shares)


@given(TOKENS, st.integers(1, 6))
def test_shares_are_complete_in_order_and_balanced_in_tokens(tokens, num_groups):
    """Largest first, to a group within 5 % of the mean of the least loaded: no two groups differ by more than
    this.
    """
    tasks = tasks_of(tokens)
    shares = assign_to_groups(tasks, num_groups)
    assert len(shares) == num_groups
    assert sorted((t for share in shares for t in share), key=lambda t: t.item) == tasks
    assert all(share == sorted(share, key=lambda t: t.item) for share in shares)
    assert shares == assign_to_groups(tasks, num_groups)
    least, most = loads(shares)[0], loads(shares)[-1]
    assert most - least <= max(tokens, default=0) + 0.05 * sum(tokens) / num_groups


@pytest.mark.parametrize(
    ("tokens", "num_groups", "wanted"),
    [
        ([100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2, [100, 100]),  # one large task, ten small ones
        ([10, 20, 30, 40, 50, 60], 3, [70, 70, 70]),
        ([70], 3, [0, 0, 70]),
    ],
)
def test_largest_first(tokens, num_groups, wanted):
    assert loads(assign_to_groups(tasks_of(tokens), num_groups)) == wanted


@pytest.mark.parametrize("strata", ["ABABABAB", "AAAABBBB", "ABBABAAB"])
def test_strata_are_split_evenly_where_tokens_allow(strata):
    for share in assign_to_groups(tasks_of([30] * 8, strata), 2):
        assert Counter(task.stratum for task in share) == {"A": 2, "B": 2}


def test_equal_tasks_are_split_evenly():
    shares = assign_to_groups(tasks_of([100 + i % 3 for i in range(22)]), 4)
    assert sorted(map(len, shares)) == [5, 5, 6, 6]


def codes_of(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


def order_of(sizes: list[int], seed: int, wanted=None, shuffle: bool = True) -> StratifiedOrder:
    codes = codes_of(sizes)
    return StratifiedOrder(np.arange(len(codes)), codes, (seed, 0), wanted, shuffle)


@given(STRATA.filter(lambda sizes: len(sizes) > 1), SEEDS, st.integers(0, 50), st.data())
def test_virtual_epochs_keep_the_shares_and_exhaust_a_stratum_before_repeating(sizes, seed, epoch, data):
    weights = np.array(data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes))))
    order, codes = order_of(sizes, seed, weights / weights.sum()), codes_of(sizes)
    drawn = Counter(codes[order.epoch(epoch)].tolist())
    total = sum(drawn.values())
    assert total >= VIRTUAL * len(sizes)
    for code, weight in enumerate(weights / weights.sum()):
        assert abs(drawn[code] - weight * total) <= 1 + len(sizes) * 0.5
    stream = np.concatenate([order.epoch(e) for e in range(3)])
    for code, size in enumerate(sizes):
        own = stream[codes[stream] == code]
        for turn in range(0, len(own) - size + 1, size):
            assert len(set(own[turn : turn + size].tolist())) == size


@given(STRATA, SEEDS)
def test_without_shuffling_every_epoch_and_seed_is_the_listed_order(sizes, seed):
    first, other = (order_of(sizes, number, shuffle=False) for number in (seed, seed + 1))
    listed, codes = first.epoch(0).tolist(), codes_of(sizes)
    assert listed == first.epoch(3).tolist() == other.epoch(0).tolist()
    for code in range(len(sizes)):
        own = [member for member in listed if codes[member] == code]
        assert own == sorted(own)


def test_every_member_is_first_equally_often():
    """A biased shuffle would show: 5 members, 4000 epochs, each first 800 times give or take 5 standard
    deviations.
    """
    order = order_of([5], 3)
    first = Counter(int(order.epoch(epoch)[0]) for epoch in range(4000))
    assert all(abs(count - 800) < 5 * (4000 * 0.2 * 0.8) ** 0.5 for count in first.values())


def test_hashes_spread_over_all_bits():
    made = splitmix64(7, 0, np.arange(20000))
    ones = (made[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(0)
    assert len(set(made.tolist())) == 20000
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / 20000**0.5


def test_a_million_tasks_in_a_thousand_strata():
    """Under 2 s and 200 MB: from names to the meta-batch of a far outer step, split over 64 groups."""
    names = [f"t{i}" for i in range(10**6)]
    strata = [f"s{code}" for code in np.random.default_rng(0).integers(0, 1000, 10**6)]
    began = time.process_time()
    share = Schedule(Items(names, strata, range(10**6)), 256, 1).share(9_999, 64, 5)
    assert time.process_time() - began < 2
    tracemalloc.start()
    again = Schedule(Items(names, strata, range(10**6)), 256, 1).share(9_999, 64, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert share == again
    assert peak < 200e6


def test_quotas_add_up_and_no_stratum_gets_zero():
    made = epoch_quotas(np.array([0.5, 0.3, 0.2 - 1e-6, 1e-6]), np.array([1, 1, 1, 1]))
    assert made.tolist() == [200, 120, 80, 1]


@given(STRATA, SEEDS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 40))
def test_node_shares_are_disjoint_complete_and_proportional(sizes, seed, nodes, per_node, epoch):
    items = items_of(sizes)
    if len(items) < nodes:
        assert "are too few for" in refusal(Schedule, items, nodes * per_node, seed, nodes=nodes)
        return
    schedule = Schedule(items, nodes * per_node, seed, nodes=nodes)
    epochs = [order.epoch(epoch).tolist() for order in schedule.orders]
    assert sorted(item for own in epochs for item in own) == list(range(len(items)))
    assert max(map(len, epochs)) - min(map(len, epochs)) <= 1
    for code in range(len(sizes)):
        held = [sum(items.stratum[item] == code for item in own) for own in epochs]
        assert max(held) - min(held) <= 1


@given(STRATA.filter(lambda sizes: sum(sizes) >= 2), SEEDS, st.integers(0, 300))
def test_a_node_draws_from_its_own_part_alone(sizes, seed, step):
    items = items_of(sizes)
    schedule, parts = Schedule(items, 4, seed, nodes=2), node_parts(items.stratum, 2, seed)
    shares = [schedule.share(step, 4, group) for group in range(4)]  # two groups on each node
    for node, part in enumerate(parts):
        own = [task for share in shares[2 * node : 2 * node + 2] for task in share]
        assert len(own) == 2
        assert {task.item for task in own} <= set(part.tolist())
    assert sorted(task.seed[3] for share in shares for task in share) == [0, 1, 2, 3]


def test_tasks_that_nodes_cannot_share_are_refused():
    check_message(
        refusal(Schedule, items_of([9]), 5, 0, nodes=2),
        "task_sharding=node",
        "5 tasks",
        "2 nodes",
        "use a multiple of their number",
    )


@given(SEEDS, st.sampled_from([2, 4]), st.sampled_from([4, 8, 10, 16]))
def test_strata_of_equal_tasks_reach_every_group_equally(seed, num_groups, per_step):
    """Ten strata of 15, as in CLINC150: over an epoch no group is further than about one task from its share
    of a stratum.
    """
    schedule = Schedule(items_of([15] * 10, equal=True), per_step, seed)
    seen = [
        Counter(t.stratum for step in range(-(-150 // per_step)) for t in schedule.share(step, num_groups, g))
        for g in range(num_groups)
    ]
    whole = sum(seen, Counter())
    assert max(abs(own[stratum] - whole[stratum] / num_groups) for own in seen for stratum in whole) <= 1


def test_task_sampler_starts_at_the_given_step():
    schedule = Schedule(items_of([5, 5]), 4, 1)
    stream, later = (islice(TaskSampler(schedule, 2, 1, first=first), 20) for first in (0, 3))
    assert [*later][:5] == [task for task in stream if task.seed[2] >= 3][:5]
    assert [schedule.position(step) for step in (0, 2, 3, 5)] == [(0, 0), (0, 8), (1, 2), (2, 0)]
