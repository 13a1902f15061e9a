"""Who learns what, when: a stratified stream of tasks, cut into meta-batches, dealt to the groups.

    items in strata --(seed, epoch)--> one order per epoch --> meta-batch of an outer step --> shares of the groups

The meta-batch is a pure function of (seed, outer_step): it does not depend on the number of groups, on what was drawn
before, or on who asks. Groups only divide it up. Nothing here communicates, and a position is restored by arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Item:
    """Something that tasks are drawn from: a named task, or a class that leads an N-way episode."""

    name: str
    stratum: str
    tokens: int  # expected tokens of one episode, support and query


@dataclass(frozen=True)
class Task:
    """One slot of a meta-batch. `seed` is all that drawing its episode depends on."""

    item: int
    name: str
    stratum: str
    tokens: int
    seed: tuple[int, ...]


class Schedule:
    """`tasks_per_step` tasks for every outer step. `stream` keeps train, valid and test apart."""

    def __init__(self, items: Sequence[Item], tasks_per_step: int, seed: int, stream: int = 0) -> None:
        self.items, self.tasks_per_step, self.seed, self.stream = items, tasks_per_step, seed, stream
        strata = {stratum: code for code, stratum in enumerate(sorted({item.stratum for item in items}))}
        self.strata = np.array([strata[item.stratum] for item in items])
        self.epoch_order = lru_cache(maxsize=2)(self._epoch_order)

    def meta_batch(self, outer_step: int) -> list[Task]:
        """All tasks of an outer step, over all groups."""
        first = outer_step * self.tasks_per_step
        return [self._task(outer_step, slot, first + slot) for slot in range(self.tasks_per_step)]

    def share(self, outer_step: int, num_groups: int, group_index: int) -> list[Task]:
        """The tasks of an outer step that one group runs; shares may be of unequal length, or empty."""
        return deal(self.meta_batch(outer_step), num_groups)[group_index]

    def _task(self, outer_step: int, slot: int, position: int) -> Task:
        epoch, index = divmod(position, len(self.items))
        number = int(self.epoch_order(epoch)[index])
        item = self.items[number]
        return Task(number, item.name, item.stratum, item.tokens, (self.seed, self.stream, outer_step, slot))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Every item once, shuffled inside its stratum, the strata interleaved in proportion to their sizes.

        The j-th item of a stratum of n is put at (j + u) / n, u in [0, 1) drawn per stratum: every stretch of the
        order holds each stratum within about one of its share.
        """
        rng = np.random.default_rng([self.seed, self.stream, epoch])
        shuffled = rng.permutation(len(self.items))
        codes = self.strata[shuffled]
        by_stratum = np.argsort(codes, kind="stable")
        sizes = np.bincount(codes)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rank_in_stratum = np.empty(len(codes))
        rank_in_stratum[by_stratum] = np.arange(len(codes)) - np.repeat(starts, sizes)
        place = (rank_in_stratum + rng.random(len(sizes))[codes]) / sizes[codes]
        return shuffled[np.argsort(place, kind="stable")]


def deal(tasks: Sequence[Task], num_groups: int) -> list[list[Task]]:
    """Deal tasks to groups, largest first, each to the least loaded group.

    Among groups within 5 % of the mean load of the least, the one with fewest tasks, then with fewest of the
    stratum, is preferred. (Graham's LPT rule: at most 4/3 of the best makespan.)
    """
    shares: list[list[tuple[int, Task]]] = [[] for _ in range(num_groups)]
    load, seen = [0] * num_groups, [Counter[str]() for _ in range(num_groups)]
    slack = 0.05 * sum(task.tokens for task in tasks) / num_groups
    for slot, task in sorted(enumerate(tasks), key=lambda entry: (-entry[1].tokens, entry[0])):
        near = [g for g in range(num_groups) if load[g] <= min(load) + slack]
        g = min(near, key=lambda g: (len(shares[g]), seen[g][task.stratum], load[g], g))
        shares[g].append((slot, task))
        load[g] += task.tokens
        seen[g][task.stratum] += 1
    return [[task for _, task in sorted(share, key=lambda entry: entry[0])] for share in shares]
