"""Joint training, a baseline: multi-task fine-tuning on the same tasks, without an inner loop.

    g = (grad L_support(theta) + grad L_query(theta)) / 2

The baseline that meta-learning has to beat (for language models: instruction tuning). Caruana, "Multitask
Learning", Machine Learning 28, 1997, section 2. In training a classifier has one head over the classes of all
training tasks (GlobalLabelSource), zero at first and trained like the body. Evaluation drops it and adapts
with the inner loop, from a head that the task initialises. Cost per task: 2 forward and backward passes, one
shard of work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.costs import Passes
from fmmeta.meta.rule import InnerLoop, MetaGradient, MetaParameters, TaskResult, no_poll
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode


@dataclass(frozen=True)
class Joint:
    inner: InnerLoop

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        mean = worker.zeros()
        support = worker.gradient(episode.support, mean, 0.5)
        between_passes()
        query = worker.gradient(episode.query, mean, 0.5)
        finite = support.finite and query.finite
        if finite:
            into.add(mean)
        return TaskResult(1.0, finite, support, query)


def conflicts(config: Config) -> Iterator[str]:
    if config.head_init == "learned":
        yield (
            f"head_init=learned with algorithm={config.algorithm}: its head is that of the training classes"
            " and no start for others; use zero or prototype"
        )


spec = AlgorithmSpec(
    "joint",
    lambda setup, outer_step: Joint(setup.inner),
    reference.joint,
    all_classes=True,
    conflicts=conflicts,
    passes=lambda config, forwards: Passes(1, 1),
    work_shards=1,
)
