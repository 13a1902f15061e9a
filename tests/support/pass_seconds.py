"""In a rank: the passes of every task take one second by the clock of goodput, whatever the machine does."""

import os
import time

from fmmeta import train
from fmmeta.report.goodput import PassClock

START_S = 100_000.0


def one_each() -> None:
    PassClock.of_a_task = lambda self: 1.0


def one_each_in_a_session() -> None:
    """And the start of every group has taken START_S, by that clock."""
    os.setsid()
    one_each()
    train.began_at = lambda owns_process: time.time() - START_S
