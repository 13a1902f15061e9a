"""Algorithms whose tasks take longer on every group but the first: each pass is followed by a pause."""

import os
import time
from dataclasses import replace
from typing import Any

from fmmeta.config.algorithms import AlgorithmSpec, find


def slow(name: str, pauses_s: tuple[float, float] = (0, 0.3)) -> AlgorithmSpec:
    """pauses_s: seconds after each pass of the first group, and of the others."""
    spec: Any = find(name)

    def rule(task):
        pause_s = pauses_s[int(os.environ["FMMETA_GLOBAL_RANK"]) >= task.worker.group.size]

        def pause():
            time.sleep(pause_s)
            task.between_passes()

        return spec.rule(replace(task, between_passes=pause))

    return replace(spec, name=f"slow_{name}", rule=rule)


FOMAML, REPTILE = slow("fomaml"), slow("reptile")
TEN_TIMES_SLOWER = slow("fomaml", (0.05, 0.5))
"""Twenty tasks of the first group take longer than one of the others, and two do not, on any machine."""
