"""slow_group.yaml: useful time of a group at half speed."""

import os
from typing import Any

import numpy as np

from experiments.padded import TIMES
from fmmeta import Callback


class Times(Callback):
    """Begin and end of the tasks of every rank: [rank][outer step][task]."""

    def on_train_end(self, run: Any) -> None:
        self.times = run.ranks.world.gather([*TIMES.values()])


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Useful share of the time of an outer step; the first one warms up."""
    os.environ["PADDED_SECONDS"], times = "0.5,1", Times()
    study.trained(cell, callbacks=[times])
    ranks = [rank[1:] for rank in times.times]
    rates = [1 / np.mean([end - began for step in rank for began, end in step]) for rank in ranks]
    steps = [np.array([task for tasks in step for task in tasks]) for step in zip(*ranks, strict=True)]
    shares = [float(len(step) / (sum(rates) * (step[:, 1].max() - step[:, 0].min()))) for step in steps]
    return {
        "useful": float(np.mean(shares)),
        "by_step": shares,
        "tasks_per_second": [float(r) for r in rates],
    }
