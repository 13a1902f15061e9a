"""Numbers of one outer step, told by the groups to each other: the metrics of a line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from fmmeta.meta.algorithms import Direction
from fmmeta.parallel.communicator import Ranks


class Tally:
    """What the tasks of one outer step gave: this group's numbers, then (after `agree`) everybody's in `values`."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.weight, self.skipped, self.tokens = 0.0, 0, 0
        self.support_loss = self.query_loss = self.accuracy = 0.0
        self.data_seconds, self.failures = 0.0, 0
        self.values: dict[str, Any] = {}

    def add(self, direction: Direction, tokens: int) -> None:
        self.tokens += tokens
        if not direction.finite:
            self.skipped += 1
            return
        self.weight += direction.weight
        self.support_loss += direction.weight * direction.support.loss
        self.query_loss += direction.weight * direction.query.loss
        self.accuracy += direction.weight * direction.query.accuracy

    def missed(self, tasks: int, failures: int, data_seconds: float) -> None:
        """Tasks of the group without an episode, how many of them this rank could not load, and its wait for data."""
        self.skipped += tasks
        self.failures, self.data_seconds = failures, data_seconds

    def agree(self, ranks: Ranks) -> float:
        """Sum over all groups; return the summed weight of the finite tasks. Collective: world."""
        waiting = time.monotonic()
        mine = torch.tensor([self.weight, self.support_loss, self.query_loss, self.accuracy, self.skipped,
                             self.tokens, self.data_seconds, self.failures], dtype=torch.float64)  # fmt: skip
        layout = ranks.layout
        if layout.group_rank != 0:  # one voice per group; the others are each rank's own
            mine[:5] = 0
        ranks.world.sum_(mine)
        times = torch.zeros(2, layout.num_groups, dtype=torch.float64)  # busy, waiting: mean over the ranks of a group
        times[:, layout.group_index] = torch.tensor([waiting - self.began, time.monotonic() - waiting]) / layout.group_size
        busy, waits = ranks.world.sum_(times)
        weight, support, query, accuracy, skipped, tokens, data_seconds, self.failures = mine.tolist()
        means = {"support_loss": support, "query_loss": query, "accuracy": accuracy}
        self.values = {
            "tokens": int(tokens),
            **{name: value / weight if weight else math.nan for name, value in means.items()},
            "skipped_tasks": int(skipped),
            "data_seconds": data_seconds / ranks.world.size,
            "wait_seconds": float(waits.mean()),
            "wait_seconds_by_group": [round(float(wait), 6) for wait in waits],
            "imbalance": float(busy.max() / busy.mean()) - 1,
        }
        return weight
