"""The numbers of an outer step: sums over the tasks of a group, then of all groups."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.meta.noise_scale import TaskSquares
from fmmeta.meta.task import TaskResult
from fmmeta.parallel.process_groups import ProcessGroups


class StepMetrics:
    """Numbers of this group's tasks in one outer step; `all_reduce` sets `values` from those of all groups.

    names: further numbers of the algorithm's task gradients. replicated: whether each rank of a group holds
    the whole model. counts: further sums over tasks, by name. waited: seconds that this group has waited for
    others so far. squares: of the tasks of all groups, after `all_reduce`. is_partial: whether a loop, or an
    own schedule, has left out tasks.
    """

    def __init__(
        self, names: Sequence[str] = (), replicated: bool = True, counts: Sequence[str] = ()
    ) -> None:
        self.counts, self.waited = dict.fromkeys(counts, 0.0), 0.0
        self.replicated, self.squares = replicated, TaskSquares(0.0, 0.0, 0.0)
        self.began = time.monotonic()
        self.weight = self.weight_squared = self.data_seconds = self.useful_seconds = 0.0
        self.square = 0.0  # this rank's part of the sum of w |g|^2 (meta/noise_scale.py)
        self.skipped = self.tokens = self.tasks = self.failures = 0
        self.is_partial = False
        # sums over the finite tasks, each times its weight
        self.sums = dict.fromkeys(("support_loss", "query_loss", "accuracy", *names), 0.0)
        self.values: dict[str, Any] = {}
        self.tasks_by_group: list[int] = []  # with or without an episode

    def add(self, task: TaskResult, tokens: int, square: float = 0.0, seconds: float = 0.0) -> None:
        """Count a task. square: this rank's part of |w g|^2, w its weight and g its meta-gradient, if
        measured. seconds: of its passes.
        """
        self.tokens += tokens
        self.tasks += 1
        if not task.finite:
            self.skipped += 1
            return
        self.useful_seconds += seconds
        self.weight += task.weight
        self.weight_squared += task.weight**2
        self.square += square / task.weight if task.weight else 0.0
        found = {
            "support_loss": task.support.loss,
            "query_loss": task.query.loss,
            "accuracy": task.query.accuracy,
            **task.numbers,
        }
        if missing := self.sums.keys() - found.keys():
            raise UsageError(
                f"TaskResult.numbers has no {min(missing)!r}, which AlgorithmSpec.numbers names; return it"
                " from the rule, or leave it out of the spec"
            )
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
            "tasks": self.tasks,
            "is_partial": self.is_partial,
            "weight_squared": self.weight_squared,
            **self.sums,
            **self.counts,
        }
        mine = {
            **{name: value if counts_group else 0.0 for name, value in of_group.items()},
            "tokens": self.tokens,
            "data_seconds": self.data_seconds,
            "useful_seconds": self.useful_seconds,
            "failures": self.failures,
            "square": 0.0 if self.replicated and not counts_group else self.square,
        }
        sums = ranks.all_groups.sum_(torch.tensor(list(mine.values()), dtype=torch.float64))
        total = dict(zip(mine, sums.tolist(), strict=True))
        # [3, groups]: busy, waiting and tasks, each a mean over the ranks of a group
        of_groups = torch.zeros(3, ranks.cross.size, dtype=torch.float64)
        of_groups[:, ranks.cross.rank] = (
            torch.tensor(
                [
                    waiting - self.began - self.waited,
                    time.monotonic() - waiting + self.waited,
                    float(self.tasks),
                ]
            )
            / ranks.layout.group_size
        )
        busy, waits, tasks = ranks.all_groups.sum_(of_groups)
        self.tasks_by_group = [round(count) for count in tasks.tolist()]
        weight = total["weight"]
        self.squares = TaskSquares(weight, total["weight_squared"], total["square"])
        self.tasks, self.failures = int(total["tasks"]), int(total["failures"])
        self.useful_seconds = total["useful_seconds"]
        self.is_partial = total["is_partial"] > 0
        self.counts = {name: total[name] for name in self.counts}
        self.values = {
            "tokens": int(total["tokens"]),
            **{name: total[name] / weight if weight else math.nan for name in self.sums},
            "skipped_tasks": int(total["skipped"]),
            "data_seconds": total["data_seconds"] / ranks.all_groups.size,
            "wait_seconds": float(waits.mean()),
            "wait_seconds_by_group": [round(float(wait), 6) for wait in waits],
            "imbalance": float(busy.max() / busy.mean()) - 1,
        }
        if weight and math.isnan(self.values["accuracy"]):  # no answer is right or wrong
            del self.values["accuracy"]
        return weight
