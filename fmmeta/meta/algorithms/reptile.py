"""Reptile: from theta towards what the task's own training reaches.

    g = theta - phi_K,  phi_K = K inner steps from theta

Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018 (arXiv 1803.02999), section 2,
batched version: outer SGD with learning rate epsilon is theta <- theta + epsilon * mean(phi_K - theta). The
query set is only looked at. The authors' inner optimizer is Adam without first moment, its state kept from
task to task: `--inner_optimizer adamw --inner_beta1 0 --inner_optimizer_state kept`. Here all tasks of a
meta-batch start with the same moments, and the mean of what they end with is kept. Cost per task: K forward
and backward passes and one forward; with Adam two shards of moments, four where they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.costs import Passes
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.task_gradient import Rule, TaskGradient
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode


@dataclass(frozen=True)
class Reptile:
    inner: InnerLoop

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        adapted = self.inner.adapt(worker, theta, episode.support)
        query = worker.forward(episode.query)
        finite = all([step.finite for step in [*adapted.passes, query]])
        towards = None if total is not None else worker.displacement(theta)
        if total is not None and finite:
            worker.add_displacement(total, 1.0, theta)
        worker.write(theta)
        kept = adapted.state.vectors if self.inner.rule.kept is not None else {}
        return TaskGradient(towards, 1.0, finite, adapted.passes[0], query, dict(kept))


def rule(setup: Setup, outer_step: int) -> Rule:
    return Reptile(setup.inner)


def passes(config: Config, forwards: int) -> Passes:
    return Passes(config.inner_steps, 0, forwards, 1, 1)


spec = AlgorithmSpec(
    "reptile",
    rule,
    reference.displacement,
    multi_task="displacement",
    supports=frozenset({"inner_optimizer_state", "offload_outer"}),
    passes=passes,
    adds_directly=lambda config: True,
)
