"""Functions that tests name by `module:name`: transforms that hang, and strata of rows."""

import signal
import time
from contextlib import suppress

NOT_A_FUNCTION = 3


def hang_once(episode, rng):
    """A transform: the second task of the third outer step sleeps for ever."""
    if episode.task.seed[2:] == (2, 1):
        time.sleep(10**6)
    return episode


def hang(episode, rng):
    """A transform that catches all errors and returns after 30 seconds, too late for the limits of tests."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(Exception):
            time.sleep(1)
    return episode


def deaf(episode, rng):
    """As `hang_once`, in a process that no longer reacts to alarms."""
    if episode.task.seed[2:] == (2, 1):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    return hang_once(episode, rng)


def label_number(row):
    """A stratum: whether the number of the class is odd."""
    return int(row["label"][1:]) % 2


def no_such_column(row):
    return row["topic"]


def several(row):
    return [row["label"]]


def none(row):
    return None
