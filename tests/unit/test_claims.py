"""Claims of tasks: largest first, each once, without keys that stay in the store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from fmmeta.common.errors import PeerLost
from fmmeta.config.settings import Config
from fmmeta.elastic.controller import ElasticSchedule
from fmmeta.elastic.lighthouse import in_thread
from fmmeta.parallel.collectives import Communicator
from fmmeta.tasks.batching import Episode, MicroBatch
from fmmeta.tasks.loader import LoadResult
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule
from fmmeta.training.claims import ClaimedEpisodes, TaskClaims
from fmmeta.training.step_metrics import StepMetrics
from tests.support.helpers import one_rank

ALONE = Communicator(None, 0, 1, torch.device("cpu"))


def two_groups(step: str = "", **settings):
    """The claims of two groups over one store, which have begun a step, and the store."""
    store = dist.HashStore()
    groups = [TaskClaims(ALONE, store, **settings) for _ in range(2)]
    for claims in groups if step else []:
        claims.begin(step)
    return groups, store


def test_every_number_is_claimed_once_by_groups_that_claim_at_the_same_time():
    groups, _ = two_groups()

    def claim(claims: TaskClaims) -> list[int]:
        claims.begin("0/0")
        return [*takewhile(lambda number: number < 500, iter(claims.next, None))]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(claim, groups)
    assert sorted(first + second) == list(range(500))
    assert (first, second) == (sorted(first), sorted(second))


def test_counters_of_earlier_steps_are_removed():
    groups, store = two_groups()
    for step in range(20):
        for claims in groups:
            claims.begin(f"0/{step}")
        assert [claims.next() for claims in groups for _ in range(2)] == [0, 1, 2, 3]
        assert not any(store.check([f"0/{before}"]) for before in range(step))


def test_a_closed_counter_gives_no_further_task_to_any_group():
    (first, second), _ = two_groups("0/3")
    assert first.next() == 0
    second.close()
    assert first.next() > 10**9


@pytest.mark.parametrize(
    ("answer", "limits"),
    [
        (Mock(side_effect=RuntimeError("Connection reset by peer")), []),
        (lambda *_: threading.Event().wait(), [lambda ask: in_thread(ask).result(0.1)]),
    ],
    ids=["raises", "hangs"],
)
def test_a_store_that_does_not_answer_is_a_lost_group(answer, limits):
    store: Any = SimpleNamespace(add=answer, delete_key=answer)
    claims = TaskClaims(ALONE, store, *limits)
    claims.begin("0/0")
    with pytest.raises(PeerLost, match="the store of the first group does not answer"):
        claims.next()


SIZES = [30, 10, 70, 50, 20, 60, 40, 80]


def feeds(groups: int = 2, nodes: int = 1) -> list[ClaimedEpisodes]:
    """What provides the episodes of groups over one store; an episode has the tokens of its task."""
    store, nothing = dist.HashStore(), torch.zeros(1)
    items = Items.of(Item(f"t{number}", "s", size) for number, size in enumerate(SIZES))
    config, ranks = Config(task_schedule="dynamic", num_workers="0"), one_rank()
    made = [
        ClaimedEpisodes(
            Schedule(items, len(SIZES), 0, nodes=nodes),
            lambda task: LoadResult(
                task, Episode([MicroBatch({}, nothing, nothing, tokens=task.tokens)], [])
            ),
            0,
            {"seen": 0, "bad": 0},
            replace(ranks, store=store, cross=Communicator(None, group, groups, torch.device("cpu"))),
            config,
            lambda text: None,
        )
        for group in range(groups)
    ]
    for feed in made:
        feed.claims = TaskClaims(ALONE, store)
    return made


def passes(feed: ClaimedEpisodes, most: int = 1):
    """The tokens of the episodes of each pass of the first outer step."""
    return ([one.tokens for _, one in some] for some in feed.passes(0, StepMetrics(), most))


def test_the_group_that_is_free_gets_the_largest_unclaimed_task():
    first, second = feeds()
    one, other = map(passes, (first, second))
    taken = [next(group) for group in (one, other, other, other, other, one, other, other)]
    assert taken == [[80], [70], [60], [50], [40], [30], [20], [10]]
    assert list(one) == list(other) == []
    assert [len(feed.finished) for feed in (first, second)] == [2, 6]


def test_a_claim_takes_all_tasks_of_a_pass():
    one, other = (passes(feed, 3) for feed in feeds())
    assert [next(group) for group in (one, other, one)] == [[80, 70, 60], [50, 40, 30], [20, 10]]
    assert list(one) == list(other) == []


def test_groups_claim_tasks_of_their_node():
    steps = [[tokens for (tokens,) in passes(feed)] for feed in feeds(2, nodes=2)]
    tasks = [task.tokens for task in feeds(2, nodes=2)[0].schedule.meta_batch(0)]
    assert steps == [sorted(part, reverse=True) for part in (tasks[:4], tasks[4:])]


def exchange(rank: int, others: list[list[int]]) -> Any:
    """`cross` of a group among others that have finished `others`."""
    return SimpleNamespace(
        rank=rank,
        own=ALONE,
        counters=dist.HashStore,
        gather=lambda mine: [*others[:rank], mine, *others[rank:]],
    )


def schedule_of(cross: Any, lines: list[str]) -> Any:
    schedule: Any = object.__new__(ElasticSchedule)
    schedule.cross, schedule.log, schedule.forget_tasks = cross, lines.append, Mock()
    schedule.run = SimpleNamespace(state=SimpleNamespace(outer_step=0))
    return schedule


def test_finished_tasks_are_kept_and_only_the_others_are_claimed_again():
    (feed, _), lines = feeds(), []
    slots = {task.tokens: task.seed[-1] for task in feed.schedule.meta_batch(0)}
    feed.finished = [slots[80], slots[50]]
    schedule = schedule_of(exchange(1, [[slots[70]]]), lines)
    schedule.share_finished_tasks(feed)
    schedule.forget_tasks.assert_not_called()
    assert lines == ["outer step 1: 3 of its tasks are finished, and are kept"]
    assert [*passes(feed)] == [[60], [40], [30], [20], [10]]
    feed.complete_step()
    assert (feed.finished, feed.finished_before) == ([], set())


@pytest.mark.parametrize(("rank", "kept"), [(0, {3, 4}), (1, {4, 5})])
def test_of_two_groups_that_finished_the_same_task_the_second_one_drops_its_sum(rank, kept):
    (feed, _) = feeds()
    feed.finished = [3, 4]
    schedule = schedule_of(exchange(rank, [[4, 5]]), [])
    schedule.share_finished_tasks(feed)
    assert schedule.forget_tasks.called == (rank == 1)
    assert feed.finished_before == kept
