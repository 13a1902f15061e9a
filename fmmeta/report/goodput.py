"""Goodput: seconds of passes whose result is in theta, over the seconds of all ranks, since the run began.

    useful   on each rank the seconds of a task's passes (`PassClock`); finite tasks of an outer step that was
             applied count, over all groups
    all      ranks times the seconds since the outer step before, whatever they were spent on

Both sums are part of the state of a run. A resumed run has those of its checkpoint: work that is repeated
counts once as useful, and the seconds since the checkpoint count in full, those without any process included.
"""

import time
from typing import Any

from fmmeta.meta.parameters import StateDict


def began_at(owns_process: bool) -> float:
    """When a run begins, in seconds since 1970: now, or where it owns the process when that was started."""
    import psutil

    return psutil.Process().create_time() if owns_process else time.time()


class PassClock:
    """Seconds of the passes that one task, or several together, take on this rank."""

    def __init__(self) -> None:
        self.began, self.tasks = 0.0, 1
        self.seconds: float | None = None

    def begin(self, tasks: int) -> None:
        """The passes of so many tasks begin."""
        self.began, self.tasks, self.seconds = time.monotonic(), tasks, None

    def leave_out(self, seconds: float) -> None:
        """Count no seconds that other work has taken meanwhile."""
        self.began += seconds

    def of_a_task(self) -> float:
        """Seconds of each of the tasks, whose passes end with the first call."""
        if self.seconds is None:
            self.seconds = (time.monotonic() - self.began) / self.tasks
        return self.seconds


class Goodput:
    """The sums of a run. started: when the run began, in seconds since 1970.

    at: up to when seconds are counted. ranks: those that took part in the last outer step, of all groups
    (--elastic); a group that is lost counts to the end of the step in which it is lost, and one that joins
    from its start.
    """

    def __init__(self, started: float) -> None:
        self.restart(started)

    def restart(self, started: float) -> None:
        """Count from `started` on; what was counted before belongs to another run."""
        self.started = self.at = started
        self.useful = self.seconds = 0.0
        self.ranks = 0

    def count(self, useful: float, ranks: int, tasks: int, tokens: int, took: float) -> dict[str, float]:
        """Count an outer step that has ended; its numbers for metrics.jsonl.

        useful: seconds of its passes, over all ranks. tasks: those that it learned from. took: its seconds.
        """
        before = self.seconds
        self._count_to_now(ranks)
        self.useful, self.ranks = self.useful + useful, ranks
        return {
            "tasks_per_second": tasks / took,
            "tokens_per_second": tokens / took,
            "useful_share": useful / max(self.seconds - before, useful, 1e-9),
            "goodput_percent": self.percent,
        }

    def count_start(self, began: float, ranks: int) -> None:
        """Count the start of ranks that join (--elastic), up to when seconds are counted."""
        self.seconds += ranks * max(0.0, self.at - began)

    @property
    def percent(self) -> float:
        return 100 * self.useful / max(self.seconds, self.useful, 1e-9)

    def facts(self, ranks: int) -> dict[str, float]:
        """The entry of run.json at the end of the run."""
        self._count_to_now(ranks)
        return {"percent": self.percent, "useful_seconds": self.useful, "rank_seconds": self.seconds}

    def _count_to_now(self, ranks: int) -> None:
        now = time.time()
        self.seconds += max(ranks, self.ranks) * max(0.0, now - self.at)
        self.at = now

    def add_state(self, state: StateDict) -> None:
        """Add the sums to what a checkpoint holds."""
        state.facts["goodput"] = dict(vars(self))

    def load_state(self, state: StateDict) -> None:
        """Restore what `add_state` gave."""
        found: dict[str, Any] = state.facts.get("goodput", {})
        vars(self).update({name: found[name] for name in vars(self).keys() & found.keys()})
