"""This process: the host memory that it may still allocate, its end with the process that started it, a limit
on the time of a call, and the state of other libraries that a run changes.
"""

import ctypes
import logging
import os
import resource
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

AGAIN_S = 1.0  # between exceptions at a time limit, if code catches them

CGROUP = Path("/sys/fs/cgroup")
STATUS = Path("/proc/self/status")


def host_bytes(local_world_size: int) -> int:
    """Bytes that one of `local_world_size` equal processes of a host may allocate.

    The processes share the memory of the host and of the cgroup; resource limits hold for each.
    """
    import psutil

    found = [psutil.virtual_memory().available // local_world_size]
    room = cgroup_room()
    if room is not None:
        found.append(room // local_world_size)
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(max(0, soft - status_bytes(used)))
    return min(found)


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 without this file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def cgroup_room() -> int | None:
    """Bytes left in the memory cgroup (version 2 or 1); None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed = int((CGROUP / limit).read_text())
            return max(0, allowed - int((CGROUP / used).read_text())) if allowed < 2**60 else None
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; no effect outside Linux."""
    with suppress(AttributeError):
        # PR_SET_PDEATHSIG; forked processes do not inherit it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def output_of(command: list[str]) -> str:
    """What a short command prints; empty if it cannot be run."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""


_undo: list[Callable[[], object]] = []
"""Calls that restore other libraries, in the order of the changes."""


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore environment variables, warning filters and the verbosity of other libraries after the block."""
    environment, done = dict(os.environ), len(_undo)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        while len(_undo) > done:
            _undo.pop()()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(
            {name: value for name, value in environment.items() if os.environ.get(name) != value}
        )


def quiet_logger(name: str) -> None:
    """Let a logger of another library pass errors only, until `restored_process` ends."""
    logger = logging.getLogger(name)
    _undo.append(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.ERROR)


def hide_download_bars() -> None:
    """Hide the progress bars of transformers and the hub, until `restored_process` ends."""
    from transformers.utils import logging as transformers_log

    if transformers_log.is_progress_bar_enabled():
        _undo.append(transformers_log.enable_progress_bar)
        transformers_log.disable_progress_bar()


class TimedOut(BaseException):
    """Raised by `time_limit`; no `Exception`, so that code which catches errors does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimedOut` in the block once it has taken `seconds` (None: no limit).

    A signal interrupts Python code, sleeping and most system calls, but no library that never returns to
    Python. Signals reach the main thread only: in other threads there is no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed, began = [True], time.monotonic()

    def stop(*_: object) -> None:
        if armed:
            raise TimedOut

    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            armed.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # the timer of the caller continues
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)), interval)
