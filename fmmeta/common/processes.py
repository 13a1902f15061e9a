"""This process: the host memory that it may still allocate, and its end with the process that started it."""

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

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
