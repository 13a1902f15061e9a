"""The tasks of a schedule as a sampler for torch's DataLoader."""

import itertools
from collections.abc import Iterator

from torch.utils.data import Sampler

from fmmeta.tasks.schedule.meta_batches import Schedule, Task


class TaskSampler(Sampler[Task]):
    """The tasks of one group, outer step after outer step, endless.

    first: the outer step to begin with.
    """

    def __init__(self, schedule: Schedule, num_groups: int = 1, group_index: int = 0, first: int = 0) -> None:
        self.schedule, self.first = schedule, first
        self.num_groups, self.group_index = num_groups, group_index

    def __iter__(self) -> Iterator[Task]:
        for outer_step in itertools.count(self.first):
            yield from self.schedule.share(outer_step, self.num_groups, self.group_index)
