"""Parameters and rows of the fullest rank of a group."""

from collections.abc import Sequence
from typing import Any

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta import costs
from fmmeta.models.learner import Learner
from fmmeta.models.pipeline_split import plan_stages
from fmmeta.parallel.deepspeed_config import cut_patterns


def largest_part(
    config: Config, learner: Learner, hf_config: Any, layer_costs: Sequence[float] | None = None
) -> tuple[int, int]:
    """Trained and frozen parameters of the largest rank's part.

    layer_costs: seconds of each layer, if stages are balanced by time. Raises `UsageError` for a model that
    cannot be split.
    """
    depth = config.pipeline_stages
    params, frozen = count_params(learner)
    if depth > 1:  # the most trained parameters of a stage, and the most frozen ones of a stage
        cut = plan_stages(learner, depth, layer_costs)
        params = max(cut.trained)
        frozen = max(size - trained for size, trained in zip(cut.sizes, cut.trained, strict=True))
    elif config.tensor_parallel_size > 1:
        ranks, is_cut = config.tensor_parallel_size, cut_patterns(hf_config)
        params -= sum(
            p.numel() - p.numel() // ranks for name, p in learner.named_parameters() if is_cut(name)
        )
    return params, frozen


def count_params(learner: Learner) -> tuple[int, int]:
    """Trained and frozen parameters."""
    trained = sum(param.numel() for param in learner.parameters() if param.requires_grad)
    return trained, sum(param.numel() for param in learner.parameters()) - trained


def micro_batch_rows(config: Config, data: int = 1) -> int:
    """Most rows of a micro-batch; in a pipeline so few that there is one for every stage.

    data: ranks that share the rows of a set.
    """
    if config.pipeline_stages == 1:
        return config.micro_batch_size
    share = -(-costs.rows_of(config)[0] // (data * config.pipeline_stages))
    return min(config.micro_batch_size, max(1, share))


def forward_rows(config: Config, data: int = 1) -> int:
    """Most rows of a forward pass on one of `data` ranks: a micro-batch of each task that shares it."""
    most = micro_batch_rows(config, data)
    tasks = 1 if config.tasks_per_pass == "auto" else int(config.tasks_per_pass)
    largest = [micro_batches(rows, data, most)[1] for rows in costs.rows_of(config)]
    if find(config.algorithm).frozen_body and costs.keeps_support(config, data):
        return tasks * sum(largest)  # the support set's activations wait for the query set
    return tasks * max(largest)


def micro_batches(rows: int, data: int, most: int) -> tuple[int, int]:
    """Micro-batches that a rank gets of a set that `data` ranks share, and the rows of the largest
    (tasks/batching.py).
    """
    rounds = -(-rows // (data * most))
    return rounds, max(1, -(-rows // (data * rounds)))
