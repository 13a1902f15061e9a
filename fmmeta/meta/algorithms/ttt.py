"""Test-time training from end to end: the inner loop learns a stream chunk by chunk, and is scored by its own
losses.

    phi_{k+1} = phi_k - alpha_k g_{k+1}(phi_k)           k = 0 .. K-1;  g_{k+1} = grad L_{k+1}
    L = mean over k of L_{k+1}(phi_k)                    the loss of each chunk before the step on it

Tandon et al., "End-to-End Test-Time Training for Long Context", 2025 (arXiv 2512.23675), section 2. There is
no query pass: the inner gradient of a chunk is its outer gradient. The backward recursion (unrolled.py):

    v = g_K(phi_{K-1}) / K, and for k = K-2 .. 0:
        dL/dalpha_k = -v g_{k+1}(phi_k)                  where rates are learned
        v <- v + g_{k+1}(phi_k) / K + H_{k+1}(phi_k) (-alpha_k v)

With `--inner_max_grad_norm c` a step takes clip_k g, clip_k = min(1, c / |g|), whose derivative is
clip_k (I - g g' / |g|^2) where it clips (inner_optimizers.py): the paper's setting is a norm of 1.

With `--first_order_steps` of the whole run the products are left out, and v is the mean of the gradients:
Reptile's direction, with a chunk for each inner step. `--truncate_steps T`: of order 2 for the last T steps.

Cost per task: K forward and backward passes, and K - 1 products of exact rules; K shards of trajectory and K
of gradients (of first order one vector, whatever K is, unless rates are learned).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import reference
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel import costs
from fmmeta.parallel.costs import Passes
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import Episode, batches_of_step


def ttt(task: TaskRun) -> TaskResult:
    order = 1 if task.outer_step < task.config.first_order_steps else 2
    task.adapt(task.trajectory(order, task.inner.steps, online=True))
    return task.backward_online(order)


@dataclass(frozen=True)
class OnlineLoop(InnerLoop):
    """The inner loop of streams, which evaluation scores by the loss of each chunk before the step on it.

    A variant with steps has one for each chunk, or none.
    """

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """Mean losses over all chunks at theta, and each before its step. Collective: group."""
        before = worker.forward(episode.query)
        passes = self.scores_by_chunk(worker, theta, episode) if self.steps else [before]
        return before, PassStats.mean(passes)

    def scores_by_chunk(
        self, worker: Worker, theta: Tensor, episode: Episode, learns: bool = True
    ) -> list[PassStats]:
        """Of each chunk before the step on it, or without steps. Collective: group."""
        if learns:
            return self.adapt(worker, theta, episode.support).passes
        return [worker.forward(batches_of_step(episode.support, k)) for k in range(self.steps)]

    def variant(
        self, learned: Tensor | None = None, scale: float = 1.0, steps: int | None = None
    ) -> InnerLoop:
        return super().variant(learned, scale, steps and self.steps)

    def scores_after_each_step(self, worker: Worker, theta: Tensor, episode: Episode) -> list[PassStats]:
        """As `score`: the second one after the last step, the first one before."""
        before, after = self.score(worker, theta, episode)
        return [*[before] * self.steps, after]


def passes(config: Config, forwards: int, by_autograd: bool = False) -> Passes:
    """A pass is over one chunk. No product is needed for the last step; from differences each has a probe."""
    k, exact = config.inner_steps, config.first_order_steps < config.outer_steps
    back = k if config.truncate_steps is None else min(k, config.truncate_steps)
    products = max(0, back - 1) if exact else 0
    if by_autograd:
        return Passes(k, 0, 0, 0, products + 1, products)
    return Passes(k + 4 * products, 0, 0, 0, 4 * products + 1)


def conflicts(config: Config) -> Iterator[str]:
    if config.inner_optimizer != "sgd":
        yield (
            f"inner_optimizer={config.inner_optimizer} with algorithm={config.algorithm}, whose outer"
            " gradient is the direction of plain SGD; leave it out"
        )


TTT = AlgorithmSpec(
    "ttt",
    ttt,
    reference.online,
    order=2,
    needs="ordered",
    supports=frozenset(
        {
            "first_order_steps",
            "inner_lr_learned",
            "inner_parameters",
            "outer_parameters",
            "second_order",
            "trajectory_memory_gib",
            "truncate_steps",
        }
    ),
    conflicts=conflicts,
    passes=passes,
    work_shards=costs.WORK,
)
