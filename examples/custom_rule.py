"""Reptile with a trust region: one task moves theta, with its head, by at most RADIUS. From this folder:

fmmeta train --algorithm custom_rule:spec                g = d * min(1, RADIUS / |d|),  d = theta - phi_K
"""

from dataclasses import replace

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.meta.algorithms.reptile import passes, reptile
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.reference import displacement

RADIUS = 0.3


def trust_region(task):
    """Add the clipped displacement of one task. Collective: group."""
    one = MetaGradient(task.theta)  # of this task alone
    result = reptile(replace(task, into=one))
    if result.finite:
        norm = task.worker.dot(one.sum, one.sum) ** 0.5
        task.into.add(one.sum.mul_(RADIUS / max(norm, RADIUS)))
    return result


def reference(task):
    """The same in plain PyTorch, by parameter name."""
    d, rates = displacement(task)
    norm = sum(float(part.square().sum()) for part in d.values()) ** 0.5
    return {name: part * min(1.0, RADIUS / norm) for name, part in d.items()}, rates


spec = AlgorithmSpec("trust_region", trust_region, reference, passes=passes)
