"""Reptile with a trust region: one task moves theta, with its head, by at most RADIUS. From this folder:

fmmeta train --algorithm custom_rule:spec                g = d * min(1, RADIUS / |d|),  d = theta - phi_K
"""

from dataclasses import dataclass

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.meta.algorithms.reptile import Reptile, passes
from fmmeta.meta.reference import displacement
from fmmeta.meta.rule import InnerLoop, MetaGradient, no_poll

RADIUS = 0.3


@dataclass(frozen=True)
class TrustRegion:
    inner: InnerLoop

    def task_gradient(self, worker, meta, episode, into, between_passes=no_poll):
        """Add the clipped displacement of one task. Collective: group."""
        one = MetaGradient(meta.theta)  # of this task alone
        result = Reptile(self.inner).task_gradient(worker, meta, episode, one, between_passes)
        if result.finite:
            norm = worker.dot(one.sum, one.sum) ** 0.5
            into.add(one.sum.mul_(RADIUS / max(norm, RADIUS)))
        return result


def reference(task):
    """The same in plain PyTorch, by parameter name."""
    d, rates, memory = displacement(task)
    norm = sum(float(part.square().sum()) for part in d.values()) ** 0.5
    return {name: part * min(1.0, RADIUS / norm) for name, part in d.items()}, rates, memory


spec = AlgorithmSpec(
    "trust_region", lambda setup, outer_step: TrustRegion(setup.inner), reference, passes=passes
)
