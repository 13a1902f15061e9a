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

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from fmmeta.common.errors import PeerLost
from fmmeta.parallel.collectives import Communicator

CLOSED = 2**40  # added to a counter that is closed: more than all tasks of an outer step


class CounterStore(Protocol):
    """What claims need of a key-value store of torch."""

    def add(self, key: str, amount: int, /) -> int: ...

    def delete_key(self, key: str, /) -> bool: ...


class TaskClaims:
    """Numbers 0, 1, ... of an outer step, each for one of the groups that share `store`.

    group: the ranks of this group; its first rank uses the store. timeout_s: how long a request may take;
    None: unbounded.
    """

    def __init__(self, group: Communicator, store: CounterStore, timeout_s: float | None = None) -> None:
        self.group, self.store, self.timeout_s = group, store, timeout_s
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
        number = torch.tensor([-1], dtype=torch.int64)
        if self.group.rank == 0:
            number[0] = self._request(lambda: self.store.add(self.name, 1)) - 1
        found = int(self.group.broadcast_(number))
        if found < 0:
            raise PeerLost("a claim: the store of the first group does not answer")
        return found

    def close(self) -> None:
        """Let all groups end this outer step after the tasks that they run now. Local."""
        if self.group.rank == 0:
            self._request(lambda: self.store.add(self.name, CLOSED))

    def _request(self, ask: Callable[[], int]) -> int:
        """The answer of the store; 0 if it fails or takes longer than `timeout_s`. Local."""
        found = [0]

        def run() -> None:
            try:
                found[0] = int(ask())
            except RuntimeError:  # the type of all errors of torch's stores
                found[0] = 0

        if self.timeout_s is None:
            run()
            return found[0]
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        return found[0]
