"""Limits of open files of rank 0, set before it connects to the other ranks."""

import os
import resource
from pathlib import Path

FEW = 12  # rank 0 opens about 25 for 4 ranks


def soft() -> None:
    """A soft limit that a launch of some ranks exceeds."""
    if os.environ["RANK"] == "0":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + FEW, hard))


def hard() -> None:
    """A hard limit that has room for the start, and not for a run."""
    if os.environ["RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
