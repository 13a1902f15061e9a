"""Every way to shard a model over groups of GPUs that the flags of a run can choose, what each needs, and how
long its outer step takes: combines memory, work and machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, log
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.load import describe, empty_learner, fitted
from fmmeta.learners.quantized import check_use
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.costs import second_order_by_autograd
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import differentiates_twice, divisors
from fmmeta.parallel.memory import (
    GIB,
    HEADROOM,
    Counts,
    Estimate,
    at_size,
    estimate,
    largest_part,
    rank_sizes,
)
from fmmeta.planning.compute import (
    MatmulCounts,
    Profile,
    Seconds,
    Topology,
    Wire,
    count_matmuls,
    needed_flops,
    refresh,
    shard_of,
    step_seconds,
    task_cost,
)
from fmmeta.planning.settings import LORA_R, ROWS, PlanConfig


@dataclass(frozen=True)
class Strategy:
    """A way to shard a model over a group, as flags of a run."""

    group_size: int
    zero_stage: int
    stages: int = 1
    tensor: int = 1
    lora_r: int = 0
    offload: bool = False
    offload_outer: bool = False
    checkpointing: bool = False
    micro_batch_size: int = 32

    @property
    def data(self) -> int:
        return self.group_size // (self.stages * self.tensor)

    def settings(self, bf16: bool) -> dict[str, Any]:
        return {
            "group_size": str(self.group_size),
            "pipeline_stages": self.stages,
            "tensor_parallel_size": self.tensor,
            "lora_r": self.lora_r,
            "offload_outer": self.offload_outer,
            "gradient_checkpointing": self.checkpointing,
            "micro_batch_size": self.micro_batch_size,
            "bf16": bf16,
        }

    @property
    def deepspeed_file(self) -> str:
        """Name of the shipped DeepSpeed file."""
        return f"zero{self.zero_stage}{'_offload' if self.offload else ''}"

    def __str__(self) -> str:
        parts = {
            f"ZeRO {self.zero_stage}": self.data > 1 or self.offload,
            f"{self.stages} stages": self.stages > 1,
            f"{self.tensor} tensor": self.tensor > 1,
            f"LoRA {self.lora_r}": self.lora_r > 0,
            "offload": self.offload,
            "offload_outer": self.offload_outer,
            "checkpointing": self.checkpointing,
        }
        return ", ".join(part for part, holds in parts.items() if holds) or "whole"


def strategies(plan: PlanConfig) -> Iterator[Strategy]:
    """All combinations that differ; a setting that was given keeps its value. Raises `UsageError`."""
    per_node = min(plan.gpus, plan.gpus_per_node)
    on_nodes = [size for size in divisors(plan.gpus) if per_node % size == 0 or size % per_node == 0]
    sizes = on_nodes
    if plan.group_size != "auto":
        sizes = [int(plan.group_size)]
        if plan.gpus % sizes[0]:
            raise UsageError(
                f"group_size={sizes[0]} does not divide gpus={plan.gpus}; use"
                f" {', '.join(map(str, divisors(plan.gpus)))}"
            )
        if sizes[0] < per_node and per_node % sizes[0]:  # as `Nodes.check`
            raise UsageError(
                f"group_size={sizes[0]} fits on a node of gpus_per_node={plan.gpus_per_node}, but some groups"
                f" would be on two; use {', '.join(map(str, on_nodes))}"
            )
    for size in sizes:
        for stages, tensor in model_splits(plan, size, per_node):
            for (stage, offload), lora_r, outer, checkpointing in product(
                zero_options(plan, size, stages * tensor),
                given_or_all(plan.lora_r, (0, LORA_R)),
                given_or_all(plan.offload_outer, (False, True)),
                given_or_all(plan.gradient_checkpointing, (False, True)),
            ):
                if not (outer and offload and plan.offload_outer is None):  # DeepSpeed's offload moves it too
                    yield Strategy(size, stage, stages, tensor, lora_r, offload, outer, checkpointing)


def given_or_all(given: int | None, values: tuple[int, ...]) -> tuple[Any, ...]:
    """The value of a setting that was given, else all that are planned."""
    return values if given is None else (given,)


def model_splits(plan: PlanConfig, size: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Pipeline stages and tensor ranks of a group; tensor ranks stay inside a node."""
    for count in divisors(size):
        for stages, tensor in ((stages, count // stages) for stages in divisors(count)):
            if (
                tensor <= per_node
                and plan.pipeline_stages in (None, stages)
                and plan.tensor_parallel_size in (None, tensor)
            ):
                yield stages, tensor


def zero_options(plan: PlanConfig, size: int, model_ranks: int) -> Iterator[tuple[int, bool]]:
    """ZeRO stages, each with and without DeepSpeed's offload; one data rank has nothing to share.

    model_ranks: pipeline stages x tensor ranks.
    """
    if plan.deepspeed is not None:
        given = deepspeed_config.read(plan.deepspeed, plan.bf16_planned)
        yield given.zero_stage, given.offload
        return
    stages = plan.zero_stage or [0, 1, 2, 3]
    for stage in stages:
        shares = size > model_ranks or stage == min(stages)
        if shares and (stage < 2 or model_ranks == 1) and plan.offload is not True:
            yield stage, False
        if stage == 3 and model_ranks == 1 and plan.offload is not False:
            yield stage, True


@dataclass(frozen=True)
class PlannedLayout:
    """A strategy on the GPUs that are planned for, with its memory and time."""

    strategy: Strategy
    groups: int
    idle: int  # of them, those without a task in an outer step
    rows: int  # of the largest micro-batch
    memory: Estimate
    lacking: float  # bytes; 0 if it fits
    host_bytes: int  # of a node
    wire: Wire  # of a rank and outer step, inside the group
    cross_bytes: int  # the same across groups
    step: Seconds  # of an outer step of equal tasks
    efficiency: float  # seconds of the needed flops at the profile's rate / seconds of all GPUs


class Planner:
    """Plans for one PlanConfig. Builds the model without storage, once with adapters and once without.

    base: the settings that all strategies share. Raises `UsageError` if they do not fit the model.
    """

    def __init__(self, plan: PlanConfig, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        given = Config(**plan.run_settings())
        self.description = describe(given)
        self.base = fitted(given, self.description.hf_config)
        self.given = {**plan.run_settings(), "max_length": self.base.max_length}
        self.learner = lru_cache(maxsize=4)(self._learner)
        self.counts = lru_cache(maxsize=256)(self._counts)
        self.refused: dict[str, int] = {}  # reasons why strategies were left out, and how many
        self.gpu_bytes = HEADROOM * plan.gpu_memory_gib * GIB
        self.host_bytes = HEADROOM * GIB * (inf if plan.host_memory_gib is None else plan.host_memory_gib)

    def layouts(self) -> list[PlannedLayout]:
        """All layouts: those that fit first, the fastest first, of those as fast (to about 5 %) the one with
        the smallest group; then those that lack least.
        """

        def order(one: PlannedLayout) -> tuple[float, ...]:
            seconds = 0 if one.lacking else one.step.total
            about = round(20 * log(seconds)) if seconds else 0
            return (one.lacking, about, one.strategy.group_size, seconds, one.idle, one.memory.total)

        return sorted(filter(None, map(self.largest, strategies(self.plan))), key=order)

    def largest(self, strategy: Strategy) -> PlannedLayout | None:
        """The layout with the most rows of a micro-batch that fit, and its time; None if the settings are
        refused.
        """
        plan, profile, ranks = self.plan, self.profile, min(self.plan.gpus, self.plan.gpus_per_node)
        try:
            config = self.config_of(**strategy.settings(plan.bf16_planned))
            precision = self.deepspeed_of(strategy)
            check_use(config, self.description.hf_config, precision.zero_stage)
            counted, matmuls = self.counts(strategy.lora_r, strategy.stages, strategy.tensor)
            second_order_by_autograd(
                config, differentiates_twice(precision.zero_stage, strategy.stages, strategy.tensor)
            )
        except UsageError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + 1
            return None
        for rows in given_or_all(plan.micro_batch_size, ROWS):
            config.micro_batch_size = rows
            sizes = rank_sizes(
                config, self.description.hf_config, counted, profile.device == "cpu", strategy.data
            )
            memory = estimate(sizes, precision, strategy.data)
            lacking = max(0.0, memory.total - self.gpu_bytes, memory.host * ranks - self.host_bytes)
            if not lacking:
                break
        size, tokens = strategy.group_size, plan.row_tokens or self.base.max_length
        topology = Topology(strategy.data, size, plan.gpus // size, size <= ranks, plan.gpus <= ranks)
        _, of_one_rank = self.counts(strategy.lora_r, 1, 1)
        payload, task = task_cost(config, precision, sizes, matmuls, tokens, topology, profile)
        most = -(-plan.tasks // topology.groups)  # tasks of the fullest group
        step = step_seconds(task, most, sizes, precision, topology, profile)
        return PlannedLayout(
            replace(strategy, micro_batch_size=rows),
            topology.groups,
            max(0, topology.groups - plan.tasks),
            sizes.rows,
            memory,
            lacking,
            host_bytes=memory.host * ranks,
            wire=payload * most + refresh(precision, sizes, strategy.data),  # the last: of the outer step
            cross_bytes=sizes.crossing * shard_of(sizes, precision, topology) if topology.groups > 1 else 0,
            step=step,
            efficiency=plan.tasks
            * needed_flops(config, of_one_rank, tokens, sizes.tokens)
            / profile.matmul(precision.bf16)
            / (plan.gpus * step.total),
        )

    def config_of(self, **changes: Any) -> Config:
        """The run's settings, with changes. Raises `UsageError` if they contradict each other."""
        given = {**self.given, **changes}
        if not given.get("lora_r"):  # settings of adapters are refused without them
            sets = ("inner_parameters", "outer_parameters") if self.plan.lora_r else ()
            given = {n: value for n, value in given.items() if not n.startswith(("lora_", "peft_", *sets))}
        return Config(**given)

    def deepspeed_of(self, strategy: Strategy) -> DeepSpeedSettings:
        """The DeepSpeed settings of the run. Raises `UsageError`."""
        file = self.plan.deepspeed or strategy.deepspeed_file
        read = deepspeed_config.read(file, self.plan.bf16_planned)
        return at_size(
            deepspeed_config.with_model_ranks(read, strategy.stages, strategy.tensor),
            strategy.group_size,
            self.profile.device == "cpu",
        )

    def _learner(self, lora_r: int) -> Learner:
        return empty_learner(
            self.config_of(
                lora_r=lora_r, pipeline_stages=1, tensor_parallel_size=1, gradient_checkpointing=False
            ),
            self.description,
        )

    def _counts(self, lora_r: int, stages: int, tensor: int) -> tuple[Counts, MatmulCounts]:
        """Parameters of the largest rank's part, and matrix products."""
        config = self.config_of(lora_r=lora_r, pipeline_stages=stages, tensor_parallel_size=tensor)
        learner: Any = self.learner(lora_r)
        return largest_part(config, learner, self.description.hf_config), count_matmuls(learner, config)
