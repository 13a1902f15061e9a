"""Claims of tasks (--task_schedule dynamic): which group runs a task is decided when a group is free.

    queue: tasks of the outer step, largest first     a pure function of (seed, outer step)
    counter of the outer step, in a store of all groups
      --add 1--> first rank of a group --broadcast--> its other ranks: the next unclaimed task

Every task of the queue is claimed once, by one group. A counter is removed when the next one is used: the
store does not grow. If a group stops, it closes the counter: no group gets another task of this step.
The loader prepares the tasks that this group may claim next.

Elastic groups: the counters are in the store of the first group of the quorum. If a group is lost, the claims
of the attempt end with its quorum. The sums of the tasks that the other groups have finished are kept; the
next quorum claims the remaining tasks, those of the lost group among them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch

from fmmeta.common.errors import PeerLost
from fmmeta.parallel.collectives import Communicator
from fmmeta.tasks.schedule.meta_batches import Task, claim_order
from fmmeta.training.episodes import TrainingEpisodes
from fmmeta.training.step_metrics import StepMetrics

CLOSED = 2**40  # added to a counter that is closed: more than all tasks of an outer step


def first_decides(group: Communicator, decide: Callable[[], int]) -> int:
    """The number that the first rank of a group decides on, on all of its ranks. Collective: group."""
    number = torch.tensor([decide() if group.rank == 0 else 0], dtype=torch.int64)
    return int(group.broadcast_(number))


class TaskClaims:
    """Numbers 0, 1, ... of an outer step, each for one of the groups that share `store`.

    group: the ranks of this group; its first rank uses the store. store: a key-value store of torch.
    answer_of: returns what a request of the store returns, or raises `TimeoutError` (default: it waits).
    """

    def __init__(
        self,
        group: Communicator,
        store: Any,
        answer_of: Callable[[Callable[[], int]], int] = lambda request: request(),
    ) -> None:
        self.group, self.store, self.answer_of = group, store, answer_of
        self.name = ""  # of the counter in use; counters of an abandoned attempt stay: others may use them

    def begin(self, name: str) -> None:
        """Begin the outer step `name`. All groups have finished the one before: its counter is removed.

        Local.
        """
        before, self.name = self.name, name
        if before and before != name and self.group.rank == 0:
            self._request(lambda: self.store.delete_key(before))

    def next(self) -> int:
        """The next number that no group has got. Raises `PeerLost`. Collective: group."""
        count = first_decides(self.group, lambda: self._request(lambda: self.store.add(self.name, 1)))
        if count == 0:
            raise PeerLost("a claim: the store of the first group does not answer")
        return count - 1

    def close(self) -> None:
        """Let all groups end this outer step after the tasks that they run now. Local."""
        if self.group.rank == 0:
            self._request(lambda: self.store.add(self.name, CLOSED))

    def _request(self, ask: Callable[[], int]) -> int:
        """The answer of the store; 0 if it fails or takes too long. Local."""
        try:
            return int(self.answer_of(ask))
        except (RuntimeError, TimeoutError):  # the first is the type of all errors of torch's stores
            return 0


class ClaimedEpisodes(TrainingEpisodes):
    """The training tasks that this group claims.

    claims: of an outer step. finished_before: slots that all groups have finished in attempts that were
    abandoned (--elastic). head, stride: last position that this group has claimed, and from claim to claim.
    """

    claims: TaskClaims
    keeps_finished = True
    finished_before: Set[int] = frozenset()
    head = stride = 0.0

    @property
    def claiming_groups(self) -> int:
        return max(1, self.cross.size // self.schedule.nodes)

    @property
    def part(self) -> int:
        """The node whose tasks this group claims; 0 unless nodes share the tasks (--task_sharding node)."""
        return self.cross.rank // self.claiming_groups

    def task_stream(self, task: Task) -> Iterable[Task]:
        """`task`, then tasks of the queue after those that are claimed when the loader asks for another.

        Of G equally fast groups each claims every G-th position. Where the loader prepares fewer episodes
        than G at a time, they are those around the position that this group will claim by its last claims.
        """
        schedule = copy.copy(self.schedule)  # a separate reader: it runs ahead of the loop
        yield task
        ahead = self.loader.num_workers * self.loader.prefetch_factor
        for outer_step in range(task.seed[2], self.config.outer_steps):
            for index, one in enumerate(schedule.queue(outer_step, self.part)):
                expected = self.head + max(1.0, self.stride - ahead // 2)
                if claim_order(one) > claim_order(task) and self._position(outer_step, index) >= expected:
                    yield one

    def _position(self, outer_step: int, index: int) -> int:
        """Position in the endless queue of this group's part of the tasks."""
        return outer_step * self.schedule.per_node + index

    def _asked(self, outer_step: int, size: int) -> Iterator[Sequence[Task]]:
        queue = self.schedule.queue(outer_step, self.part)
        left = [index for index, task in enumerate(queue) if task.seed[-1] not in self.finished_before]
        self.claims.begin(f"{self.part}/{outer_step}")
        while (begin := size * self.claims.next()) < len(left):
            self.note_claim(self._position(outer_step, left[begin]))
            yield [queue[index] for index in left[begin : begin + size]]

    def note_claim(self, position: int) -> None:
        """Follow where in the queue this group is, and how far its claims are from each other."""
        gap, self.head = position - self.head, float(position)
        if self.stride:
            self.stride += (gap - self.stride) / 4
        else:
            self.stride = float(self.loader.claiming_groups)

    def describe(self, metrics: StepMetrics) -> None:
        metrics.values["tasks_by_group"] = metrics.tasks_by_group

    def abandon(self) -> None:
        self.claims.close()

    def complete_step(self) -> None:
        super().complete_step()
        self.finished_before = frozenset()
