"""Numbers of one outer step, told by the groups to each other: the metrics of a line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.parallel.process_groups import ProcessGroups


class StepMetrics:
    """What the tasks of one outer step gave: this group's numbers, then (after `agree`) everybody's in
    `values`.
    """

    def __init__(self, numbers: Sequence[str] = ()) -> None:
        """`numbers`: names of what this algorithm's directions tell besides."""
        self.began, self.names = time.monotonic(), tuple(numbers)
        self.numbers = [0.0] * len(self.names)
        self.weight, self.skipped, self.tokens, self.tasks = 0.0, 0, 0, 0
        self.support_loss = self.query_loss = self.accuracy = 0.0
        self.data_seconds, self.failures = 0.0, 0
        self.values: dict[str, Any] = {}

    def add(self, direction: TaskGradient, tokens: int) -> None:
        self.tokens += tokens
        self.tasks += 1
        if not direction.finite:
            self.skipped += 1
            return
        self.weight += direction.weight
        self.support_loss += direction.weight * direction.support.loss
        self.query_loss += direction.weight * direction.query.loss
        self.accuracy += direction.weight * direction.query.accuracy
        self.numbers = [
            total + direction.weight * direction.numbers[name]
            for total, name in zip(self.numbers, self.names, strict=True)
        ]

    def missed(self, tasks: int, failures: int, data_seconds: float) -> None:
        """Tasks of the group without an episode, how many of them this rank could not load, and its wait for
        data.
        """
        self.skipped += tasks
        self.tasks += tasks
        self.failures, self.data_seconds = failures, data_seconds

    def agree(self, ranks: ProcessGroups) -> float:
        """Sum over all groups; return the summed weight of the finite tasks.

        `tasks` then counts those of all groups, with or without an episode. Collective: everyone.
        """
        waiting = time.monotonic()
        mine = torch.tensor(
            [
                self.weight,
                self.support_loss,
                self.query_loss,
                self.accuracy,
                self.skipped,
                self.tasks,
                self.tokens,
                self.data_seconds,
                self.failures,
                *self.numbers,
            ],
            dtype=torch.float64,
        )
        layout = ranks.layout
        if layout.group_rank != 0:  # one voice per group; the others are each rank's own
            mine[:6] = 0
            mine[9:] = 0
        ranks.all_groups.sum_(mine)
        times = torch.zeros(
            2, ranks.cross.size, dtype=torch.float64
        )  # busy, waiting: mean over the ranks of a group
        times[:, ranks.cross.rank] = (
            torch.tensor([waiting - self.began, time.monotonic() - waiting]) / layout.group_size
        )
        busy, waits = ranks.all_groups.sum_(times)
        weight, support, query, accuracy, skipped, tasks, tokens, data_seconds, self.failures, *numbers = (
            mine.tolist()
        )
        self.tasks = int(tasks)
        means = {
            "support_loss": support,
            "query_loss": query,
            "accuracy": accuracy,
            **dict(zip(self.names, numbers, strict=True)),
        }
        self.values = {
            "tokens": int(tokens),
            **{name: value / weight if weight else math.nan for name, value in means.items()},
            "skipped_tasks": int(skipped),
            "data_seconds": data_seconds / ranks.all_groups.size,
            "wait_seconds": float(waits.mean()),
            "wait_seconds_by_group": [round(float(wait), 6) for wait in waits],
            "imbalance": float(busy.max() / busy.mean()) - 1,
        }
        return weight
