"""From settings and a learner without storage to what the formula of parallel/footprint.py needs: the fullest
rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta import costs as of_rules
from fmmeta.models.learner import Learner
from fmmeta.models.pipeline_split import plan_stages
from fmmeta.parallel.workers.tensor_parallel import cut_patterns
from fmmeta.planning.memory import GIB, Sizes


def held(
    config: Config, learner: Learner, hf_config: Any, costs: Sequence[float] | None = None
) -> tuple[int, int]:
    """Trained and frozen parameters of the largest rank's part. Raises `UsageError` for what cannot be cut.

    costs: of each layer, where stages are balanced by time.
    """
    depth = config.pipeline_stages
    params, frozen = counts(learner)
    if depth > 1:  # the most that a stage trains, and the most that one holds besides
        cut = plan_stages(learner, depth, costs)
        params = max(cut.trained)
        frozen = max(size - trained for size, trained in zip(cut.sizes, cut.trained, strict=True))
    elif config.tensor_parallel_size > 1:
        params -= uncut(learner, hf_config, config.tensor_parallel_size)
    return params, frozen


def part_sizes(config: Config, hf_config: Any, counted: tuple[int, int], lazy: bool, data: int = 1) -> Sizes:
    """The largest rank's part of the model, as `held` counted it, and its micro-batches.

    lazy: on CPUs, where untouched memory costs nothing. data: ranks that share the rows of a set.
    """
    params, frozen = counted
    depth = config.pipeline_stages
    sizes = Sizes.of(
        hf_config,
        params,
        frozen,
        most_rows(config, data),
        config.max_length,
        config.task_type == "causal_lm",
        config.gradient_checkpointing,
        config.offload_outer and not lazy,
    )
    kept = of_rules.shards(config)
    budget = None if config.trajectory_memory_gib is None or lazy else int(config.trajectory_memory_gib * GIB)
    return replace(
        sizes,
        layers=-(-sizes.layers // depth),
        in_flight=depth,
        lazy=lazy,
        kept=kept.work,
        sums=1 + config.outer_delay,
        crossing=2 if config.reduce_dtype == "bf16" else 4,
        directions=int(not of_rules.adds_directly(config)),
        trajectory=kept.trajectory,
        budget=budget,
        moments=of_rules.MOMENTS[config.outer_optimizer],
    )


def uncut(learner: Learner, hf_config: Any, ranks: int) -> int:
    """Parameters that a tensor rank does not hold."""
    is_cut = cut_patterns(hf_config)
    return sum(p.numel() - p.numel() // ranks for name, p in learner.named_parameters() if is_cut(name))


def counts(learner: Learner) -> tuple[int, int]:
    """Parameters that are trained, and those that are not."""
    trained = sum(param.numel() for param in learner.parameters() if param.requires_grad)
    return trained, sum(param.numel() for param in learner.parameters()) - trained


def stage_rows(config: Config, data: int = 1) -> int:
    """Most rows of a micro-batch in a pipeline, so small that every stage can work on one."""
    return min(
        config.micro_batch_size, max(1, -(-of_rules.rows_of(config)[0] // (data * config.pipeline_stages)))
    )


def most_rows(config: Config, data: int = 1) -> int:
    """Most rows of a forward pass on one of `data` ranks: a micro-batch of each of the tasks that share it."""
    most = stage_rows(config, data) if config.pipeline_stages > 1 else config.micro_batch_size
    tasks = 1 if config.tasks_per_pass == "auto" else int(config.tasks_per_pass)
    found = [micro_batches(rows, data, most)[1] for rows in of_rules.rows_of(config)]
    if find(config.algorithm).frozen_body and of_rules.keeps_support(config, data):
        return tasks * sum(found)  # the support set's activations wait for the query set
    return tasks * max(found)


def micro_batches(rows: int, data: int, most: int) -> tuple[int, int]:
    """How many a rank gets of a set that `data` ranks share, and the rows of the largest (tasks/batch.py:
    Dealer.deal).
    """
    rounds = -(-rows // (data * most))
    return rounds, max(1, -(-rows // (data * rounds)))
