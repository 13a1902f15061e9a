"""Algorithms whose tasks take longer on every group but the first: each pass is followed by a sleep."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from fmmeta.config.algorithms import AlgorithmSpec, find

PAUSE_S = 0.3


@dataclass(frozen=True)
class SlowRule:
    rule: Any

    @property
    def inner(self):
        return self.rule.inner

    def task_gradient(self, worker, meta, episode, into, between_passes):
        slow = int(os.environ["FMMETA_GLOBAL_RANK"]) >= worker.group.size

        def pause():
            time.sleep(PAUSE_S * slow)
            between_passes()

        return self.rule.task_gradient(worker, meta, episode, into, pause)


def slow(name: str) -> AlgorithmSpec:
    spec = find(name)
    return replace(
        spec, name=f"slow_{name}", rule=lambda setup, outer_step: SlowRule(spec.rule(setup, outer_step))
    )


FOMAML, REPTILE = slow("fomaml"), slow("reptile")
