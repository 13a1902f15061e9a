"""Which groups take part in an outer step: all of them, from the beginning to the end (without --elastic)."""

from __future__ import annotations

from typing import Any

from fmmeta.common.errors import PeerLost
from fmmeta.reliability.stop import Guard


class StaticController:
    """What the loop asks of a controller; ElasticController overrides all of it. `run`: the Run that asks.

    writes: whether this group writes the files of the run.
    """

    writes = True

    def begin_step(self, run: Any) -> None:
        """Form the groups of the next outer step. Raises `PeerLost`. Collective: all groups."""

    def form_again(self, run: Any, lost: PeerLost) -> None:
        """Prepare another attempt at an outer step that a lost group has ended. Local."""
        raise lost

    def should_leave(self, guard: Guard) -> bool:
        """Whether this group leaves its remaining tasks of the outer step to the others."""
        return False

    def check_task_count(self, tasks: int, expected: int) -> None:
        """Raises `MachineFault` where the tasks of all groups are not the meta-batch."""

    def metrics(self) -> dict[str, Any]:
        """Of the outer step that has ended, for metrics.jsonl."""
        return {}

    def finish(self, run: Any) -> None:
        """After the last outer step. Collective: all groups."""

    def leave(self) -> None:
        """End the membership of this group."""
