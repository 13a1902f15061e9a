"""Claims of tasks (--task_schedule dynamic): which group runs a task is decided when a group is free.

    queue: tasks of the outer step, largest first     a pure function of (seed, outer step)
    counter of the outer step, in a store of all groups
      --add 1--> first rank of a group --broadcast--> its other ranks: the next unclaimed task

Every task of the queue is claimed once, by one group. A counter is removed when the next one is used: the
store does not grow. If a group stops, it closes the counter: no group gets another task of this step.

Elastic groups: the counters are in the store of the first group of the quorum. If a group is lost, the claims
of the attempt end with its quorum. The sums of the tasks that the other groups have finished are kept; the
next quorum claims the remaining tasks, those of the lost group among them.
"""

from collections.abc import Callable
from typing import Any

import torch

from fmmeta.common.errors import PeerLost
from fmmeta.parallel.collectives import Communicator

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
