"""Child processes that must not outlive the process that started them."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however it ends (Linux;
    elsewhere nothing).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG; a process that it forks does not inherit it
