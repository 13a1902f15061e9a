"""Reptile: move theta towards the weights that each task's training reaches.

    g = theta - phi_K,  phi_K = K inner steps from theta

Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018 (arXiv 1803.02999), section 2,
batched version: outer SGD with learning rate epsilon is theta <- theta + epsilon * mean(phi_K - theta). The
query set is only evaluated. The authors' inner optimizer is Adam without first moment, its state kept from
task to task: `--inner_optimizer adamw --inner_beta1 0 --inner_optimizer_state kept`. Here all tasks of a
meta-batch start with the same moments, and the mean of their final moments is kept. Cost per task: K forward
and backward passes and one forward; with Adam two shards of moments, four where they are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.costs import Passes
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.rule import InnerLoop, TaskResult, no_poll
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode


@dataclass(frozen=True)
class Reptile:
    inner: InnerLoop

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        adapted = self.inner.adapt(worker, meta.theta, episode.support, between_passes=between_passes)
        query = worker.forward(episode.query)
        finite = all([step.finite for step in [*adapted.passes, query]])
        if finite:
            worker.displacement(meta.theta, into.sum)
            into.count(extra=adapted.state.vectors)
        worker.write(meta.theta)
        return TaskResult(1.0, finite, adapted.passes[0], query)


def passes(config: Config, forwards: int) -> Passes:
    return Passes(config.inner_steps, 0, forwards, 1, 1)


spec = AlgorithmSpec(
    "reptile",
    lambda setup, outer_step: Reptile(setup.inner),
    reference.displacement,
    multi_task="displacement",
    supports=frozenset({"inner_optimizer_state", "offload_outer"}),
    passes=passes,
    adds_directly=lambda config: True,
)
