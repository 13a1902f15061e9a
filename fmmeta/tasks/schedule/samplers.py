"""Samplers for torch's DataLoader: tasks of a schedule, and rows of labelled data.

Endless ones run through virtual epochs and never drop or repeat anything to end on a whole batch; finite ones
say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.schedule.order import StratifiedOrder


class TaskSampler(Sampler[Task]):
    """The tasks of one group, outer step after outer step, without end.

    `first`: the outer step to begin with.
    """

    def __init__(self, schedule: Schedule, num_groups: int = 1, group_index: int = 0, first: int = 0) -> None:
        self.schedule, self.num_groups, self.group_index, self.first = (
            schedule,
            num_groups,
            group_index,
            first,
        )

    def __iter__(self) -> Iterator[Task]:
        outer_step = self.first
        while True:
            yield from self.schedule.share(outer_step, self.num_groups, self.group_index)
            outer_step += 1


class EveryClassBatches(Sampler[list[int]]):
    """Batches of row numbers that hold every class equally often (within one), without end.

    Rare classes come round more often; a class's rows are all seen before one of them comes again. O(1)
    restart: `first` is the number of the batch to begin with. Raises `ValueError` if a batch has no room for
    every class.
    """

    def __init__(self, labels: Sequence[int], batch_size: int, seed: int = 0, first: int = 0) -> None:
        names, codes = np.unique(np.asarray(labels), return_inverse=True)
        if batch_size < len(names):
            raise ValueError(
                f"batch_size={batch_size} is below the {len(names)} classes; use {len(names)} or more"
            )
        rows = [np.flatnonzero(codes == code) for code in range(len(names))]
        self.orders = [
            StratifiedOrder(own, np.zeros(len(own), dtype=np.int32), (seed, code))
            for code, own in enumerate(rows)
        ]
        self.batch_size, self.first = batch_size, first

    def __iter__(self) -> Iterator[list[int]]:
        batch = self.first
        while True:
            places = range(
                batch * self.batch_size, (batch + 1) * self.batch_size
            )  # round after round through the classes
            yield [self.orders[place % len(self.orders)].at(place // len(self.orders)) for place in places]
            batch += 1


class SequentialTasks(Sampler[Task]):
    """For evaluation: `episodes` tasks in listed order, strata interleaved, never shuffled; then it ends."""

    def __init__(self, schedule: Schedule, episodes: int) -> None:
        if any(order.shuffle for order in schedule.orders):
            raise ValueError("the schedule shuffles; make it with shuffle=False")
        self.schedule, self.episodes = schedule, episodes

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[Task]:
        per_step = self.schedule.tasks_per_step
        for number in range(self.episodes):
            yield self.schedule.meta_batch(number // per_step)[number % per_step]
