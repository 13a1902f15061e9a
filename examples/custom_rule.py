"""Reptile with a trust region: one task moves theta by at most RADIUS. From this folder:

fmmeta train --algorithm custom_rule:spec                g = d * min(1, RADIUS / |d|),  d = theta - phi_K
"""

from dataclasses import dataclass

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.meta.algorithms.reptile import Reptile, passes
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.reference import displacement

RADIUS = 0.3


@dataclass(frozen=True)
class TrustRegion:
    inner: InnerLoop

    def direction(self, worker, theta, episode, total=None):
        """The clipped displacement of one task, this rank's shard [S]. Collective: group."""
        task = Reptile(self.inner).direction(worker, theta, episode)
        norm = worker.dot(task.shards, task.shards) ** 0.5
        if norm > RADIUS:
            task.shards.mul_(RADIUS / norm)
        return task


def reference(task):
    """The same in plain PyTorch, by parameter name."""
    d, rates, memory = displacement(task)
    norm = sum(float(part.square().sum()) for part in d.values()) ** 0.5
    return {name: part * min(1.0, RADIUS / norm) for name, part in d.items()}, rates, memory


spec = AlgorithmSpec(
    "trust_region", lambda setup, outer_step: TrustRegion(setup.inner), reference, passes=passes
)
