"""What the fork server of the loader processes imports. It ends when its trainer does, and each loader process when it does.

    trainer --> fork server --> loader processes        the kernel kills each when its parent ends (Linux)

Without this the fork server would end after the loader processes, and they after it. Import this nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)

import fmmeta.tasks.loader  # noqa: E402, F401  # which takes seconds
