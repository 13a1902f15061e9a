"""The cost of each algorithm per task: passes over its sets and shards that it stores, counted.

The table of docs/algorithms.md as functions of a Config. Tests count the passes of the real rules.
"""

from __future__ import annotations

from typing import NamedTuple

from fmmeta.config.conflicts import FROZEN_BODY
from fmmeta.config.settings import Config

MOMENTS = {
    "adamw": 2,
    "sgd": 0,
    "nesterov": 1,
    "adagrad": 1,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
}
"""Vectors that each outer optimizer keeps."""
WORK = 5  # vectors that a Hessian-vector product and the backward recursion need beside the direction
UNROLLED = ("maml", "boil", "proto_maml", "meta_sgd")


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
    k, through = config.inner_steps, int(config.prototype_gradient)
    every = k if config.multi_step_loss_steps else 1  # the query loss counts after every step
    means = int(
        config.head_init == "prototype" and not (keeps and keeps_means(config, data))
    )  # a forward of the support set
    match config.algorithm:
        case "fomaml":
            return Passes(k + through, every, means)
        case "reptile":
            return Passes(k, 0, means, 1, 1)
        case "maml" | "boil" | "proto_maml" | "meta_sgd":
            return Passes(3 * k + 2 + through, every, means, 0, 2 * k + 2 + every)
        case "imaml":
            return Passes(k + 2 * config.cg_steps + 2 + through, 1, means, 0, 2 * config.cg_steps + 3)
        case "anil" | "protonet":
            return Passes(1, 1, int(not (keeps and keeps_support(config, data))))
        case "joint":
            return Passes(1, 1)
    return Passes(0, 0)


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
    plain = (
        config.inner_lr_learned == "no" and not config.multi_step_loss_steps and not config.prototype_gradient
    )
    unbounded = config.max_task_loss is None and config.max_task_norm is None
    fomaml = config.algorithm == "fomaml" and plain and config.tensor_parallel_size == 1
    pulled = (
        config.algorithm in FROZEN_BODY and config.pipeline_stages == 1 and config.tensor_parallel_size == 1
    )
    return unbounded and (fomaml or pulled or config.algorithm in ("reptile", "none"))


def shards(config: Config) -> ShardCounts:
    k = config.inner_steps
    work = {"momentum": 1, "adamw": 2}.get(config.inner_optimizer, 0)
    work += 4 if config.inner_optimizer_state == "kept" else 0
    trajectory = 0
    if config.algorithm in UNROLLED:
        work += WORK
        trajectory = k if config.algorithm == "proto_maml" else k - 1
    elif config.algorithm in ("imaml", "joint"):
        work += WORK if config.algorithm == "imaml" else 1
    elif config.multi_step_loss_steps:
        trajectory = k - 1
    if config.inner_lr_learned != "no":
        trajectory += k  # the directions of the steps
    if config.inner_lr_learned == "element":
        work += 2 + MOMENTS[config.outer_optimizer]  # rates, their gradient, its moments
    return ShardCounts(work, trajectory)
