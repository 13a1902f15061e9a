"""The cost of each algorithm per task: passes over its sets and shards that it stores, counted.

The table of docs/algorithms.md as functions of a Config. Tests count the passes of the real rules.
"""

from __future__ import annotations

from typing import NamedTuple

from fmmeta.config.algorithms import find
from fmmeta.config.outer_optimizers import OUTER_OPTIMIZERS
from fmmeta.config.settings import Config

WORK = 5  # vectors that a Hessian-vector product and the backward recursion need beside the direction


class Passes(NamedTuple):
    """Passes of one task: forward and backward, forward only, and whole vectors written to the worker."""

    support: int
    query: int
    support_forwards: int = 0
    query_forwards: int = 0
    writes: int = 0

    @property
    def training(self) -> int:
        return self.support + self.query


def rows_of(config: Config) -> tuple[int, int]:
    """Rows of the largest support set, and of a query set."""
    classes = config.most_classes or 1
    return config.most_shots * classes, config.num_query * classes


def keeps_means(config: Config, data: int) -> bool:
    """Whether the first inner step reuses the features of the class means: the support set is one
    micro-batch.
    """
    return config.inner_steps > 0 and -(-rows_of(config)[0] // data) <= config.micro_batch_size


def keeps_support(config: Config, data: int) -> bool:
    """Whether one of `data` ranks that share a set's rows may keep the activations of the support set while
    the query set goes through the model (PULLED): a micro-batch may have as many rows.
    """
    return sum(-(-rows // data) for rows in rows_of(config)) <= config.micro_batch_size


def passes(config: Config, data: int = 1, keeps: bool = True) -> Passes:
    """At their most: after any steps of first order (`--first_order_steps`), during those of multi-step loss.

    data: ranks that share the rows of a set. keeps: whether the worker can leave a forward pass without its
    backward pass.
    """
    spec = find(config.algorithm)
    if spec.frozen_body:
        forwards = not (keeps and keeps_support(config, data))
    else:  # for the class means
        forwards = config.head_init == "prototype" and not (keeps and keeps_means(config, data))
    if spec.trains_nothing:
        return Passes(0, 0)
    if spec.passes is None:  # as FOMAML
        return Passes(config.inner_steps, 1, int(forwards))
    return spec.passes(config, int(forwards))


class ShardCounts(NamedTuple):
    """Vectors as long as theta that a rank keeps beside theta, the sum of directions, and one direction where
    it is apart.
    """

    work: int
    trajectory: int  # steps of the inner loop, which --trajectory_memory_gib may send to host memory


def adds_directly(config: Config) -> bool:
    """Whether a task's direction needs no separate vector (Rule.direction; tensor ranks do not agree on
    what is finite).
    """
    spec = find(config.algorithm)
    unbounded = config.max_task_loss is None and config.max_task_norm is None
    return unbounded and (spec.trains_nothing or spec.adds_directly(config))


def shards(config: Config) -> ShardCounts:
    k = config.inner_steps
    work = {"momentum": 1, "adamw": 2}.get(config.inner_optimizer, 0)
    work += 4 if config.inner_optimizer_state == "kept" else 0
    spec, trajectory = find(config.algorithm), 0
    work += spec.work_shards
    if "trajectory_memory_gib" in spec.supports or config.multi_step_loss_steps:
        trajectory = k - (config.head_init != "prototype")  # else phi_0 is theta
    if config.inner_lr_learned != "no":
        trajectory += k  # the directions of the steps
    if config.inner_lr_learned == "element":
        work += 2 + len(
            OUTER_OPTIMIZERS[config.outer_optimizer].moments
        )  # rates, their gradient, its moments
    return ShardCounts(work, trajectory)
