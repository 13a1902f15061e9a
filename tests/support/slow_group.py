"""Algorithms whose tasks take longer on every group but the first: each pass is followed by a pause."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from fmmeta.config.algorithms import AlgorithmSpec, find


@dataclass(frozen=True)
class SlowRule:
    """pauses_s: seconds after each pass of the first group, and of the others."""

    rule: Any
    pauses_s: tuple[float, float]

    @property
    def inner(self):
        return self.rule.inner

    def task_gradient(self, worker, meta, episode, into, between_passes):
        pause_s = self.pauses_s[int(os.environ["FMMETA_GLOBAL_RANK"]) >= worker.group.size]

        def pause():
            time.sleep(pause_s)
            between_passes()

        return self.rule.task_gradient(worker, meta, episode, into, pause)


def slow(name: str, pauses_s: tuple[float, float] = (0, 0.3)) -> AlgorithmSpec:
    spec = find(name)

    def rule(setup, outer_step):
        return SlowRule(spec.rule(setup, outer_step), pauses_s)

    return replace(spec, name=f"slow_{name}", rule=rule)


FOMAML, REPTILE = slow("fomaml"), slow("reptile")
TEN_TIMES_SLOWER = slow("fomaml", (0.05, 0.5))
"""Twenty tasks of the first group take longer than one of the others, and two do not, on any machine."""
