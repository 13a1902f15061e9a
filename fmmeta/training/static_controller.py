"""Which groups take part in an outer step: without --elastic all of them, from the first to the last."""

from typing import TYPE_CHECKING, Any

from fmmeta.common.errors import PeerLost

if TYPE_CHECKING:
    from fmmeta.training.loop import Run


class StaticController:
    """What the loop calls; ElasticController overrides all of it. run: the run that calls.

    writes: whether this group writes the files of the run.
    """

    writes = True

    def begin_step(self, run: "Run") -> None:
        """Form the groups of the next outer step. Raises `PeerLost`. Collective: all groups."""

    def form_again(self, run: "Run", lost: PeerLost) -> None:
        """Prepare another attempt at an outer step during which a group was lost. Local."""
        raise lost

    def check_task_count(self, tasks: int, expected: int) -> None:
        """Raises `MachineFault` where the tasks of all groups are not the meta-batch."""

    def metrics(self) -> dict[str, Any]:
        """Values of the outer step that has ended, for metrics.jsonl."""
        return {}

    def finish(self, run: "Run") -> None:
        """After the last outer step. Collective: all groups."""

    def leave(self) -> None:
        """End the membership of this group."""
