"""The order of tasks: epochs that are complete, shares that are kept, positions without history, and a
million tasks.
"""

import time
import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.tasks.loader import TaskSampler
from fmmeta.tasks.schedule.meta_batches import (
    VIRTUAL,
    Item,
    Items,
    Schedule,
    StratifiedOrder,
    epoch_quotas,
    node_parts,
    splitmix64,
)
from tests.support.messages import check_message, refusal

STRATA = st.lists(st.integers(1, 12), min_size=1, max_size=6)  # members per stratum
SEEDS = st.integers(0, 2**31)


def codes_of(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


def items_of(sizes: list[int]) -> Items:
    return Items.of(Item(f"{s}-{i}", f"s{s}", 100) for s, size in enumerate(sizes) for i in range(size))


def order_of(
    sizes: list[int], seed: int, wanted: np.ndarray | None = None, shuffle: bool = True
) -> StratifiedOrder:
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
    first, codes = order_of(sizes, seed, shuffle=False), codes_of(sizes)
    assert (
        first.epoch(0).tolist()
        == first.epoch(3).tolist()
        == order_of(sizes, seed + 1, shuffle=False).epoch(0).tolist()
    )
    for code in range(len(sizes)):
        own = [member for member in first.epoch(0).tolist() if codes[member] == code]
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
    seconds = time.process_time() - began
    tracemalloc.start()
    again = Schedule(Items(names, strata, range(10**6)), 256, 1).share(9_999, 64, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert share == again
    assert seconds < 2
    assert peak < 200e6


def test_quotas_add_up_and_no_stratum_gets_zero():
    made = epoch_quotas(np.array([0.5, 0.3, 0.2 - 1e-6, 1e-6]), np.array([1, 1, 1, 1]))
    assert made.tolist()[:3] == [200, 120, 80]
    assert made[3] == 1


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


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=10),
    SEEDS,
    st.integers(1, 16),
    st.sampled_from([2, 3, 4]),
    st.integers(0, 200),
)
def test_shares_of_groups_do_not_depend_on_earlier_calls(sizes, seed, per_step, num_groups, step):
    fresh, used = (Schedule(items_of(sizes), per_step, seed) for _ in range(2))
    for before in range(max(0, step - 3), step):
        used.share(before, num_groups, 0)
    for group in range(num_groups):
        assert used.share(step, num_groups, group) == fresh.share(step, num_groups, group)


@given(SEEDS, st.sampled_from([2, 4]), st.sampled_from([4, 8, 10, 16]))
def test_strata_of_equal_tasks_reach_every_group_equally(seed, num_groups, per_step):
    """Ten strata of 15, as in CLINC150: over an epoch no group is further than about one task from its share
    of a stratum.
    """
    schedule = Schedule(items_of([15] * 10), per_step, seed)
    seen = [
        Counter(t.stratum for step in range(-(-150 // per_step)) for t in schedule.share(step, num_groups, g))
        for g in range(num_groups)
    ]
    whole = sum(seen, Counter())
    assert max(abs(own[stratum] - whole[stratum] / num_groups) for own in seen for stratum in whole) <= 1


def test_task_sampler_starts_at_the_given_step():
    schedule = Schedule(items_of([5, 5]), 4, 1)
    stream, later = iter(TaskSampler(schedule, 2, 1)), iter(TaskSampler(schedule, 2, 1, first=3))
    tasks = [next(stream) for _ in range(20)]
    begin = next(i for i, task in enumerate(tasks) if task.seed[2] == 3)
    assert [next(later) for _ in range(5)] == tasks[begin : begin + 5]


def test_epoch_and_index_of_an_outer_step():
    schedule = Schedule(items_of([5, 5]), 4, 1)
    assert [schedule.position(step) for step in (0, 2, 3, 5)] == [(0, 0), (0, 8), (1, 2), (2, 0)]
