"""First-order MAML: the query gradient at phi, taken as the gradient at theta.

    g = grad L_query(phi_K),  phi_K = K inner steps from theta

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning", 2017 (arXiv 1703.03400), section 5.2: MAML without the second
derivatives. Cost per task: K + 1 forward and backward passes, no memory beyond theta and the sum of directions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmmeta.meta.algorithms import Direction
from fmmeta.meta.inner import InnerLoop
from fmmeta.parallel.worker import Worker
from fmmeta.tasks.batch import Batches


@dataclass(frozen=True)
class Fomaml:
    inner: InnerLoop

    def direction(self, worker: Worker, theta: Tensor, episode: Batches) -> Direction:
        passes = self.inner.adapt(worker, theta, episode.support)
        gradient, query = worker.gradient(episode.query, restore=theta)
        finite = all([step.finite for step in [*passes, query]])
        return Direction(gradient, 1.0, finite, passes[0], query)
