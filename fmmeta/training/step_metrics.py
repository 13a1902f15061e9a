"""The numbers of one outer step, summed over all groups (a line of metrics.jsonl), and its outcome."""

import enum
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fmmeta.meta.outer_step import OuterStep
from fmmeta.meta.rule import TaskResult
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.process_groups import ProcessGroups


class Outcome(enum.Enum):
    """What an outer step did to theta; with --outer_delay 1, what the update applied in this step did."""

    APPLIED = "theta moved"
    SKIPPED_NONFINITE = "no task was finite, or the meta-gradient was not"
    NO_DATA = "no task was loaded"
    PENDING = "the first update of a delayed run is not due yet"
    STOP = "the step was abandoned, or the run is finished"

    @staticmethod
    def of(update: OuterStep | None) -> "Outcome":
        """update: None where none was due."""
        if update is None:
            return Outcome.PENDING
        if update.applied:
            return Outcome.APPLIED
        return Outcome.NO_DATA if update.no_data else Outcome.SKIPPED_NONFINITE


class StepMetrics:
    """Numbers of this group's tasks in one outer step; `all_reduce` sets `values` from those of all groups.

    names: further numbers of the algorithm's task gradients.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.began = time.monotonic()
        self.weight, self.skipped, self.exploded, self.tokens, self.tasks = 0.0, 0, 0, 0, 0
        # sums over the finite tasks, each times its weight
        self.sums = dict.fromkeys(("support_loss", "query_loss", "accuracy", *names), 0.0)
        self.data_seconds, self.failures = 0.0, 0
        self.values: dict[str, Any] = {}

    def add(self, task: TaskResult, tokens: int, exploded: bool = False) -> None:
        """Count a task. exploded: whether it exceeds the outlier bounds, and is skipped."""
        self.tokens += tokens
        self.tasks += 1
        self.exploded += exploded
        if exploded or not task.finite:
            self.skipped += 1
            return
        self.weight += task.weight
        found = {
            "support_loss": task.support.loss,
            "query_loss": task.query.loss,
            "accuracy": task.query.accuracy,
            **task.numbers,
        }
        for name in self.sums:
            self.sums[name] += task.weight * found[name]

    def count_missing(self, tasks: int, failures: int, data_seconds: float) -> None:
        """Count the group's tasks without an episode, this rank's failures, and its wait for data."""
        self.skipped += tasks
        self.tasks += tasks
        self.failures, self.data_seconds = failures, data_seconds

    def all_reduce(self, ranks: ProcessGroups) -> float:
        """Sum over all groups; return the summed weight of the finite tasks.

        `tasks` then counts those of all groups, with or without an episode. Collective: all groups.
        """
        waiting = time.monotonic()
        counts_group = ranks.layout.group_rank == 0  # these are equal on the ranks of a group
        of_group = {
            "weight": self.weight,
            "skipped": self.skipped,
            "exploded": self.exploded,
            "tasks": self.tasks,
            **self.sums,
        }
        of_rank = {"tokens": self.tokens, "data_seconds": self.data_seconds, "failures": self.failures}
        mine = {**{name: value if counts_group else 0.0 for name, value in of_group.items()}, **of_rank}
        total = sum_by_name(ranks.all_groups, mine)
        # [2, groups]: busy and waiting, each a mean over the ranks of a group
        seconds = torch.zeros(2, ranks.cross.size, dtype=torch.float64)
        seconds[:, ranks.cross.rank] = (
            torch.tensor([waiting - self.began, time.monotonic() - waiting]) / ranks.layout.group_size
        )
        busy, waits = ranks.all_groups.sum_(seconds)
        weight = total["weight"]
        self.tasks, self.failures = int(total["tasks"]), int(total["failures"])
        self.values = {
            "tokens": int(total["tokens"]),
            **{name: total[name] / weight if weight else math.nan for name in self.sums},
            "skipped_tasks": int(total["skipped"]),
            "data_seconds": total["data_seconds"] / ranks.all_groups.size,
            "wait_seconds": float(waits.mean()),
            "wait_seconds_by_group": [round(float(wait), 6) for wait in waits],
            "imbalance": float(busy.max() / busy.mean()) - 1,
        }
        if total["exploded"]:
            self.values["exploded_tasks"] = int(total["exploded"])
        return weight


def sum_by_name(comm: Communicator, values: Mapping[str, float]) -> dict[str, float]:
    """The sum of each value over the ranks, in float64. Collective: comm."""
    total = comm.sum_(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, total.tolist(), strict=True))
