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


def two_groups(**settings):
    """The claims of two groups over one store, and the store."""
    store = dist.HashStore()
    return [TaskClaims(ALONE, store, **settings) for _ in range(2)], store


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
        assert [store.check([f"0/{before}"]) for before in range(step)] == [False] * step


def test_a_closed_counter_gives_no_further_task_to_any_group():
    (first, second), _ = two_groups()
    for claims in (first, second):
        claims.begin("0/3")
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


def sizes(some) -> list[int]:
    return [episode.tokens for _, episode in some]


def test_the_group_that_is_free_gets_the_largest_unclaimed_task():
    first, second = feeds()
    one, other = (feed.passes(0, StepMetrics(), 1) for feed in (first, second))
    assert sizes(next(one)) == [80]
    assert sizes(next(other)) == [70]
    assert [sizes(next(other)) for _ in range(3)] == [[60], [50], [40]]
    assert sizes(next(one)) == [30]
    assert [sizes(some) for some in other] == [[20], [10]]
    assert list(one) == []
    assert len(first.finished) == 2
    assert len(second.finished) == 6


def test_a_claim_takes_all_tasks_of_a_pass():
    first, second = feeds()
    one, other = (feed.passes(0, StepMetrics(), 3) for feed in (first, second))
    assert sizes(next(one)) == [80, 70, 60]
    assert sizes(next(other)) == [50, 40, 30]
    assert sizes(next(one)) == [20, 10]
    assert list(one) == list(other) == []


def test_groups_claim_tasks_of_their_node():
    steps = [[sizes(some)[0] for some in feed.passes(0, StepMetrics(), 1)] for feed in feeds(2, nodes=2)]
    schedule = feeds(2, nodes=2)[0].schedule
    parts = [sorted(task.tokens for task in schedule.meta_batch(0)[4 * n : 4 * n + 4]) for n in range(2)]
    assert [sorted(found, reverse=True) for found in steps] == steps
    assert [sorted(found) for found in steps] == parts


def exchange(rank: int, others: list[bytes]) -> Any:
    """`cross` of a group among others that have finished `others`."""
    return SimpleNamespace(
        rank=rank,
        own=ALONE,
        counters=dist.HashStore,
        gather_bytes=lambda payload: [*others[:rank], payload, *others[rank:]],
    )


def schedule_of(cross: Any, lines: list[str]) -> Any:
    """A schedule that counts how often it drops its finished tasks (`dropped`)."""
    schedule: Any = object.__new__(ElasticSchedule)
    schedule.cross, schedule.log, schedule.dropped = cross, lines.append, 0
    schedule.run = SimpleNamespace(state=SimpleNamespace(outer_step=0))

    def forget() -> None:
        schedule.dropped += 1

    schedule.forget_tasks = forget
    return schedule


def test_finished_tasks_are_kept_and_only_the_others_are_claimed_again():
    (feed, _), lines = feeds(), []
    slots = {task.tokens: task.seed[-1] for task in feed.schedule.meta_batch(0)}
    feed.finished = [slots[80], slots[50]]
    schedule = schedule_of(exchange(1, [f"[{slots[70]}]".encode()]), lines)
    schedule.share_finished_tasks(feed)
    assert not schedule.dropped
    assert lines == ["outer step 1: 3 of its tasks are finished, and are kept"]
    assert [sizes(some) for some in feed.passes(0, StepMetrics(), 1)] == [[60], [40], [30], [20], [10]]
    feed.complete_step()
    assert (feed.finished, feed.finished_before) == ([], set())


@pytest.mark.parametrize(("rank", "drops"), [(0, False), (1, True)])
def test_of_two_groups_that_finished_the_same_task_the_second_one_drops_its_sum(rank, drops):
    (feed, _) = feeds()
    feed.finished = [3, 4]
    schedule = schedule_of(exchange(rank, [b"[4, 5]"]), [])
    schedule.share_finished_tasks(feed)
    assert bool(schedule.dropped) == drops
    assert feed.finished_before == ({3, 4} if rank == 0 else {4, 5})
