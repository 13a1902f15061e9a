"""Reptile: from theta towards what the task's own training reaches.

    g = theta - phi_K,  phi_K = K inner steps from theta

Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018 (arXiv 1803.02999), section 2, batched version:
outer SGD with learning rate epsilon is theta <- theta + epsilon * mean(phi_K - theta). The query set is only looked at.
Cost per task: K forward and backward passes and one forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmmeta.meta.algorithms import Direction
from fmmeta.meta.inner import InnerLoop
from fmmeta.parallel.worker import Worker
from fmmeta.tasks.batch import Batches


@dataclass(frozen=True)
class Reptile:
    inner: InnerLoop

    def direction(self, worker: Worker, theta: Tensor, episode: Batches) -> Direction:
        passes = self.inner.adapt(worker, theta, episode.support)
        query = worker.forward(episode.query)
        towards = theta - worker.read()
        worker.write(theta)
        finite = all([step.finite for step in [*passes, query]])
        return Direction(towards, 1.0, finite, passes[0], query)
