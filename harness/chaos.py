"""In the ranks of benchmarks/chaos.py: a rule whose passes take time, and a disk that may be slow.

FMMETA_CHAOS names a folder. Its file `task_seconds` stands for the computation of a larger model: each task
sleeps so long between its passes. While there is a file `fsync_seconds`, every fsync takes so long.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmmeta.config.algorithms import find

FOLDER = Path(os.environ.get("FMMETA_CHAOS", "/nonexistent"))
fsync = os.fsync


def pause(name: str) -> None:
    """Sleep as the file says; it may be removed meanwhile."""
    try:
        seconds = float((FOLDER / name).read_text() or 0)
    except OSError:
        return
    time.sleep(seconds)


def slow_fsync(file: Any) -> None:
    pause("fsync_seconds")
    fsync(file)


if FOLDER.is_dir():
    os.fsync = slow_fsync


def rule(task: Any) -> Any:
    """FOMAML, with a pause between its inner loop and the query pass."""
    task.adapt()
    pause("task_seconds")
    return task.backward()


SLOW = replace(find("fomaml"), name="slow_fomaml", rule=rule)
