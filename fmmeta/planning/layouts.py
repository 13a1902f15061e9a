"""What each way to spread a model needs, and how long its outer step takes: memory, work and machine brought
together.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.models.learner import Learner
from fmmeta.models.load import describe, empty_learner
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.workers.tensor_parallel import tensor_parallel_block
from fmmeta.planning.auto_group_size import at_size
from fmmeta.planning.compute import MatmulCounts, Wire, count_matmuls, needed_flops, refresh, task_work
from fmmeta.planning.machines import Profile
from fmmeta.planning.memory import GIB, HEADROOM, Estimate, Sizes, estimate, rank_sizes
from fmmeta.planning.settings import ROWS, PlanConfig
from fmmeta.planning.simulate import SimulatedCluster, simulate
from fmmeta.planning.sizes import largest_part
from fmmeta.planning.strategies import Strategy, deepspeed_of, strategies
from fmmeta.planning.time import Seconds, Topology, step_seconds, task_seconds

YEAR_S = 365.25 * 86400
INTERVAL_S = 1800  # between checkpoints, where failures are simulated


@dataclass(frozen=True)
class PlannedLayout:
    """A way and what comes of it on the GPUs that are planned for."""

    strategy: Strategy
    groups: int
    rows: int  # of the largest micro-batch
    memory: Estimate
    lacking: float  # bytes; 0 where it fits
    host_bytes: int  # of a node
    wire: Wire  # of a rank and outer step, inside the group
    cross_bytes: int  # the same across groups
    task: Seconds  # of a mean task
    step: Seconds  # of an outer step of equal tasks, without stragglers and failures
    step_seconds: float  # with them
    efficiency: float  # the flops that the tasks need, at the profile's rate, over the time of all GPUs


class Planner:
    """Plans for one PlanConfig. A model is built without storage, once with adapters and once without."""

    def __init__(self, plan: PlanConfig, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        self.given = plan.run_settings()
        self.base = Config(**self.given)
        self.description = describe(self.base)
        self.learner = lru_cache(maxsize=4)(self._learner)
        self.matmuls = lru_cache(maxsize=256)(self._matmuls)
        self.counted = lru_cache(maxsize=256)(self._counted)
        self.refused: dict[str, int] = {}  # why ways were left out, and how many

    def layouts(self) -> list[PlannedLayout]:
        """All of them: those that fit first, the fastest first; then those that lack least."""
        found = [layout for strategy in strategies(self.plan) if (layout := self._largest(strategy))]
        return sorted(
            found, key=lambda one: (one.lacking, one.step_seconds if not one.lacking else 0, one.memory.total)
        )

    def _largest(self, strategy: Strategy) -> PlannedLayout | None:
        """With the most rows of a micro-batch that fit; None where the settings do not go together."""
        plan, ranks = self.plan, min(self.plan.gpus, self.plan.gpus_per_node)
        try:
            config, precision = self.config_of(strategy), self.precision_of(strategy)
            counted = self.counted(strategy.lora_r, strategy.stages, strategy.tensor)
        except UsageError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + 1
            return None
        for rows in ROWS if plan.micro_batch_size is None else (plan.micro_batch_size,):
            config = copy(config)
            config.micro_batch_size = rows
            sizes = rank_sizes(
                config, self.description.hf_config, counted, self.profile.device == "cpu", strategy.data
            )
            needed = estimate(sizes, precision, strategy.data)
            lacking = max(0.0, needed.total - self.gpu_bytes, needed.host * ranks - self.host_limit)
            if not lacking:
                break
        return self._layout(
            replace(strategy, micro_batch_size=rows), config, precision, sizes, needed, lacking
        )

    def _layout(
        self,
        strategy: Strategy,
        config: Config,
        precision: DeepSpeedSettings,
        sizes: Sizes,
        needed: Estimate,
        lacking: float,
    ) -> PlannedLayout:
        """What a way comes to."""
        plan, ranks = self.plan, min(self.plan.gpus, self.plan.gpus_per_node)
        topology = Topology(
            strategy.data,
            strategy.group_size,
            plan.gpus // strategy.group_size,
            strategy.group_size <= ranks,
            plan.gpus <= ranks,
        )
        matmuls, tokens = (
            self.matmuls(strategy.lora_r, strategy.stages, strategy.tensor),
            plan.row_tokens or plan.max_length,
        )
        task = task_work(config, precision, sizes, matmuls, strategy.data, tokens)
        one = task_seconds(task, sizes, precision, topology, self.profile)
        most = -(-plan.tasks // topology.groups)
        step = step_seconds(one, most, sizes, precision, topology, self.profile)
        outcome = simulate(
            self._world(topology, one, step.total - most * one.total), plan.simulate_steps, plan.seed
        )
        seconds = outcome.step * one.total / (1 - outcome.failing)
        useful = (
            plan.tasks
            * needed_flops(config, self.matmuls(strategy.lora_r, 1, 1), tokens)
            / self.profile.matmul(precision.bf16)
        )
        wire = task.wire * most + refresh(precision, sizes, strategy.data)  # the last: of the outer step
        cross = (
            sizes.crossing * (sizes.params // (strategy.data if precision.zero_stage else 1))
            if topology.groups > 1
            else 0
        )
        return PlannedLayout(
            strategy,
            topology.groups,
            sizes.rows,
            needed,
            lacking,
            needed.host * ranks,
            wire,
            cross,
            one,
            step,
            seconds,
            useful / (plan.gpus * seconds),
        )

    def _world(self, topology: Topology, one: Seconds, fixed_s: float) -> SimulatedCluster:
        """What is simulated; its unit of time is a mean task's."""
        plan = self.plan
        rate = plan.failures_per_gpu_year * topology.size * one.total / YEAR_S
        away = 60 * plan.restart_minutes / one.total
        return SimulatedCluster(
            topology.groups,
            plan.tasks,
            plan.task_spread,
            plan.task_noise,
            plan.slow_share,
            plan.slow_by,
            fixed_s / one.total,
            rate,
            plan.on_failure == "elastic",
            away,
            INTERVAL_S / one.total,
        )

    @property
    def gpu_bytes(self) -> float:
        return HEADROOM * self.plan.gpu_memory_gib * GIB

    @property
    def host_limit(self) -> float:
        return (
            float("inf") if self.plan.host_memory_gib is None else HEADROOM * self.plan.host_memory_gib * GIB
        )

    def config_of(self, strategy: Strategy) -> Config:
        """The run's settings; its own checks refuse what does not go together."""
        return self._config(**strategy.settings(self.plan.bf16_planned))

    def _config(self, **changes: Any) -> Config:
        given = {**self.given, **changes}
        if not given.get("lora_r"):  # what belongs to adapters goes with them
            given = {name: value for name, value in given.items() if not name.startswith("lora_")}
        return Config(**given)

    def precision_of(self, strategy: Strategy) -> DeepSpeedSettings:
        if self.plan.deepspeed is None:
            given = deepspeed_config.check(deepspeed_of(strategy), "the plan's file", self.plan.bf16_planned)
        else:
            given = deepspeed_config.read(self.plan.deepspeed, self.plan.bf16_planned)
        settings = deepspeed_config.with_model_ranks(given, strategy.stages, strategy.tensor)
        if strategy.tensor > 1:
            tensor_parallel_block(self.description.hf_config, strategy.tensor)
        return at_size(settings, strategy.group_size)

    def _learner(self, lora_r: int) -> Learner:
        alone = {"pipeline_stages": 1, "tensor_parallel_size": 1, "gradient_checkpointing": False}
        return empty_learner(self._config(lora_r=lora_r, **alone), self.description)

    def _counted(self, lora_r: int, stages: int, tensor: int) -> tuple[int, int]:
        config = self._config(lora_r=lora_r, pipeline_stages=stages, tensor_parallel_size=tensor)
        return largest_part(config, self.learner(lora_r), self.description.hf_config)

    def _matmuls(self, lora_r: int, stages: int, tensor: int) -> MatmulCounts:
        config = self._config(lora_r=lora_r, pipeline_stages=stages, tensor_parallel_size=tensor)
        return count_matmuls(self.learner(lora_r), config)
