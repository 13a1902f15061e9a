"""FOMAML whose tasks take as long as asked, on each group: `--algorithm benchmarks.padded:FOMAML`.

    PADDED_SECONDS=0.4,0.4,1.6    seconds of a task on each group; times a seeded factor within 2 %

The gradients are computed as they are; after each pass the rule sleeps until its share of the time has gone,
so that contention of the machine matters little. `TIMES` collects begin and end of the tasks of this rank, a
list for each outer step that its rule was asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fmmeta.config.algorithms import find

TIMES: list[list[tuple[float, float]]] = []
BASE = find("fomaml")


class PaddedRule:
    """A rule with tasks of a given length. passes: of a task, each of which is followed by a sleep."""

    def __init__(self, rule: Any, passes: int, seed: int) -> None:
        self.rule, self.passes, self.rng = rule, passes, np.random.default_rng(seed)
        TIMES.append([])

    @property
    def inner(self) -> Any:
        return self.rule.inner

    def task_gradient(self, worker: Any, meta: Any, episode: Any, into: Any, poll: Callable[[], None]) -> Any:
        rank = int(os.environ["FMMETA_GLOBAL_RANK"])
        seconds = [float(each) for each in os.environ["PADDED_SECONDS"].split(",")]
        length = seconds[rank // worker.group.size] * self.rng.uniform(0.98, 1.02)
        began, done, waited = time.monotonic(), 0, 0.0

        def pad(passes: int) -> None:
            """Sleep until so many passes may have ended; time in `poll` does not count."""
            time.sleep(max(0.0, began + waited + length * passes / self.passes - time.monotonic()))

        def after_pass() -> None:
            nonlocal done, waited
            done += 1
            pad(min(done, self.passes - 1))
            asked = time.monotonic()
            poll()
            waited += time.monotonic() - asked

        result = self.rule.task_gradient(worker, meta, episode, into, after_pass)
        pad(self.passes)
        TIMES[-1].append((began, time.monotonic()))
        return result


def padded(setup: Any, outer_step: int) -> PaddedRule:
    rank = int(os.environ["FMMETA_GLOBAL_RANK"])
    passes = setup.config.inner_steps + 1
    return PaddedRule(BASE.rule(setup, outer_step), passes, outer_step * 1000 + rank)


FOMAML = replace(BASE, name="padded_fomaml", rule=padded)
