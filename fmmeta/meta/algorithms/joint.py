"""Joint training, a baseline: multi-task fine-tuning on the same tasks, without an inner loop.

    g = (grad L_support(theta) + grad L_query(theta)) / 2

What meta-learning has to beat (for language models: instruction tuning; Caruana 1997). A classifier has one
head over the classes of all training tasks meanwhile (GlobalLabelSource), zero at first and trained
like the body. It ends with training: evaluation adapts with the inner loop, from a head as the task starts
it. Cost per task: 2 forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
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
class Joint:
    inner: InnerLoop

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        of_support, support = worker.gradient(episode.support)
        of_query, query = worker.gradient(episode.query, restore=theta)
        finite = support.finite and query.finite
        if not finite:
            worker.write(theta)
        return TaskGradient(of_support.add_(of_query).div_(2), 1.0, finite, support, query)


def rule(setup: Setup, outer_step: int) -> Rule:
    return Joint(setup.inner)


def passes(config: Config, forwards: int) -> Passes:
    return Passes(1, 1)


def conflicts(config: Config) -> Iterator[str]:
    if config.head_init == "learned":
        yield (
            f"head_init=learned with algorithm={config.algorithm}: its head is that of the training classes"
            " and no start for others; use zero or prototype"
        )


spec = AlgorithmSpec(
    "joint", rule, reference.joint, all_classes=True, conflicts=conflicts, passes=passes, work_shards=1
)
