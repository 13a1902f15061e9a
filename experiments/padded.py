"""FOMAML whose tasks take as long as asked, on each group: `--algorithm experiments.padded:FOMAML`.

    PADDED_SECONDS=0.4,0.4,1.6    seconds of a task on each group; times a seeded factor within 2 %

The gradients are computed as they are; after each pass the rule sleeps until its share of the time has gone,
so that contention of the machine matters little. `TIMES` collects begin and end of the tasks of this rank by
outer step.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from fmmeta.config.algorithms import find

TIMES = defaultdict[int, list[tuple[float, float]]](list)
BASE: Any = find("fomaml")


def padded(task: Any) -> Any:
    """A task of a given length, each of whose passes is followed by a sleep."""
    rank, passes = int(os.environ["FMMETA_GLOBAL_RANK"]), task.config.inner_steps + 1
    seconds = [float(each) for each in os.environ["PADDED_SECONDS"].split(",")]
    rng = np.random.default_rng((task.outer_step, rank, len(TIMES[task.outer_step])))
    length = seconds[rank // task.worker.group.size] * rng.uniform(0.98, 1.02)
    began, done, waited = time.monotonic(), 0, 0.0

    def pad(count: int) -> None:
        """Sleep until so many passes may have ended; time in the task's own hook does not count."""
        time.sleep(max(0.0, began + waited + length * count / passes - time.monotonic()))

    def after_pass() -> None:
        nonlocal done, waited
        done += 1
        pad(min(done, passes - 1))
        asked = time.monotonic()
        task.between_passes()
        waited += time.monotonic() - asked

    result = BASE.rule(replace(task, between_passes=after_pass))
    pad(passes)
    TIMES[task.outer_step].append((began, time.monotonic()))
    return result


FOMAML = replace(BASE, name="padded_fomaml", rule=padded)
