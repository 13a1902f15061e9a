"""Reptile: move theta towards the weights that each task's training reaches.

    g = theta - phi_K,  phi_K = K inner steps from theta

Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018 (arXiv 1803.02999), section 2,
batched version: outer SGD with learning rate epsilon is theta <- theta + epsilon * mean(phi_K - theta). The
query set is only evaluated. The authors' inner optimizer is Adam without first moment, its state kept from
task to task; here the state starts with zeros. Cost per task: K forward and backward passes and one forward;
with Adam two shards of moments.
"""

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel.costs import Passes


def reptile(task: TaskRun) -> TaskResult:
    task.adapt()
    return task.add_displacement()


def passes(config: Config, forwards: int) -> Passes:
    return Passes(config.inner_steps, 0, forwards, 1, 1)


spec = AlgorithmSpec(
    "reptile",
    reptile,
    reference.displacement,
    multi_task="displacement",
    supports=frozenset({"offload_outer"}),
    passes=passes,
    adds_directly=lambda config: True,
)
