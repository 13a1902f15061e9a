"""The stage that the main thread of a rank is in, and how long it may take."""

import time
from collections.abc import Sequence

from fmmeta.parallel.process_groups import Communicator

FIRST_S, FLOOR_S, TIMES = 1800.0, 300.0, 10.0
MARGIN_S = 60.0  # that communicators wait longer than the watchdog


class WatchdogStage:
    """A stage has one bound: an outer step, a save, an episode of an evaluation. Its phase is for messages.

    An outer step may take `step_timeout` seconds; without it TIMES the slowest so far, FLOOR_S at least, and
    FIRST_S before one was measured. Any other stage may take FIRST_S, TIMES the slowest step or step_timeout,
    whichever is longest. communicators: those that wait for other groups; they wait MARGIN_S longer.
    """

    def __init__(self, step_timeout: float | None, communicators: Sequence[Communicator] = ()) -> None:
        self.step_timeout, self.communicators = step_timeout, communicators
        self.slowest_step_s = 0.0
        self.began = time.monotonic()
        self.name, self.phase, self.is_step = "starting", "", False

    def begin(self, name: str, is_step: bool = False) -> None:
        """Begin a stage. is_step: whether the bound of an outer step holds."""
        self.began, self.name, self.phase, self.is_step = time.monotonic(), name, "", is_step
        for communicator in self.communicators:
            communicator.set_timeout(self.bound_s + MARGIN_S)

    def record_step(self) -> None:
        """Record how long the outer step that is this stage has taken."""
        self.slowest_step_s = max(self.slowest_step_s, self.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def bound_s(self) -> float:
        slowest = TIMES * self.slowest_step_s
        if not self.is_step:
            return max(FIRST_S, slowest, self.step_timeout or 0)
        return self.step_timeout or (max(FLOOR_S, slowest) if slowest else FIRST_S)

    @property
    def is_overdue(self) -> bool:
        return self.elapsed_s > self.bound_s

    @property
    def text(self) -> str:
        return f"{self.name}, {self.phase}" if self.phase else self.name
