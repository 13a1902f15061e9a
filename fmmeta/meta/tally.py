"""Numbers of one outer step, told by the groups to each other: the metrics of a line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from fmmeta.meta.direction import Direction
from fmmeta.parallel.communicator import Ranks


class Tally:
    """What the tasks of one outer step gave: this group's numbers, then (after `agree`) everybody's in `values`."""

    def __init__(self, numbers: Sequence[str] = ()) -> None:
        """`numbers`: names of what this algorithm's directions tell besides."""
        self.began, self.names = time.monotonic(), tuple(numbers)
        self.numbers = [0.0] * len(self.names)
        self.weight, self.skipped, self.tokens = 0.0, 0, 0
        self.support_loss = self.query_loss = self.accuracy = 0.0
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
        self.numbers = [total + direction.weight * direction.numbers[name]
                        for total, name in zip(self.numbers, self.names, strict=True)]  # fmt: skip

    def agree(self, ranks: Ranks) -> float:
        """Sum over all groups; return the summed weight of the finite tasks. Collective: world."""
        waiting = time.monotonic()
        mine = torch.tensor([self.weight, self.support_loss, self.query_loss, self.accuracy, self.skipped,
                             self.tokens, *self.numbers], dtype=torch.float64)  # fmt: skip
        if ranks.layout.group_rank != 0:  # one voice per group; tokens are each rank's own
            mine[:5] = 0
            mine[6:] = 0
        ranks.world.sum_(mine)
        wait = torch.tensor([time.monotonic() - waiting], dtype=torch.float64)
        ranks.world.sum_(wait)
        weight, support, query, accuracy, skipped, tokens, *numbers = mine.tolist()
        means = {"support_loss": support, "query_loss": query, "accuracy": accuracy,
                 **dict(zip(self.names, numbers, strict=True))}  # fmt: skip
        self.values = {
            "tokens": int(tokens),
            **{name: value / weight if weight else math.nan for name, value in means.items()},
            "skipped_tasks": int(skipped),
            "wait_seconds": float(wait) / ranks.world.size,
        }
        return weight
