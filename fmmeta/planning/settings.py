"""The flags of `fmmeta plan`: those of the run, and what the machines are.

What is left open is planned in every way.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.fields import setting
from fmmeta.config.settings import (
    Config,
    InnerConfig,
    MetaConfig,
    ModelConfig,
    ParallelConfig,
    TaskConfig,
)
from fmmeta.config.validate import check_bounds

EVERY = " (default: every one is planned)"
LORA_R = 8  # the rank of adapters that is planned beside training all weights
ROWS = (32, 16, 8, 4, 2, 1)  # micro-batches, of which the largest that fits is planned
ON_FAILURE = ("restart", "elastic")
POSITIVE = "such as 80"
NOT_NEGATIVE = ("task_spread", "task_noise", "failures_per_gpu_year", "slow_share")


@dataclass
class PlanConfig(ModelConfig, TaskConfig, InnerConfig, MetaConfig, ParallelConfig):
    """`fmmeta plan`. Raises `UsageError` in one line."""

    gpus: int = setting(None, "GPUs of all nodes together, one rank each", least=1)
    gpu_memory_gib: float = setting(None, "Memory of each GPU", positive=POSITIVE)
    gpus_per_node: int = setting(8, "GPUs of a node", least=1)
    host_memory_gib: float = setting(
        None, "Memory of a node for what is offloaded (default: not looked at)", positive=POSITIVE
    )
    zero_stage: list[int] = setting([], "ZeRO stages, one or more of 0 1 2 3" + EVERY)
    pipeline_stages: int = setting(None, "Pipeline stages of a group" + EVERY)
    tensor_parallel_size: int = setting(None, "Tensor ranks of a group" + EVERY)
    micro_batch_size: int = setting(
        None, f"Most rows of a forward pass (default: the largest of {ROWS} that fits)"
    )
    lora_r: int = setting(
        None, f"Rank of LoRA adapters, 0 for all weights (default: 0 and {LORA_R} are planned)"
    )
    gradient_checkpointing: bool = setting(None, "Layer inputs only" + EVERY)
    offload_outer: bool = setting(None, "Outer state in host memory" + EVERY)
    offload: bool = setting(None, "DeepSpeed's shards and weights in host memory, ZeRO 3" + EVERY)
    bf16: bool = setting(
        None,
        "bf16 weights over fp32 shards (default: yes, but for algorithms that take differences of gradients)",
    )
    machine: str = setting(None, "What the GPUs can do: a100, h100, h200 or FILE.json (default: h100)")
    calibrate: bool = setting(
        False, "Measure this machine instead, in as many ranks as it has GPUs (two on a machine without)"
    )
    save_profile: str = setting(None, "FILE.json for what --calibrate measured")
    row_tokens: int = setting(
        None, "Tokens of a mean row, for the time; memory goes by --max_length (default: the same)", least=1
    )
    task_spread: float = setting(0.0, "Standard deviation of the logarithm of the tasks' sizes")
    task_noise: float = setting(0.0, "The same of what a task takes beyond its expected size")
    slow_share: float = setting(0.0, "How often a group is slow in an outer step")
    slow_by: float = setting(1.5, "How many times slower it is then", positive=POSITIVE)
    failures_per_gpu_year: float = setting(0.0, "How often a GPU, or what it needs, fails")
    restart_minutes: float = setting(
        10.0, "From a failure to the next outer step, checkpoints 30 minutes apart", positive=POSITIVE
    )
    on_failure: str = setting(
        "restart",
        "restart: all groups restart from a checkpoint; elastic: the others continue (fmmeta elastic)",
        ON_FAILURE,
    )
    simulate_steps: int = setting(50, "Outer steps to simulate for the efficiency", least=1)
    top: int = setting(10, "Layouts to show", least=1)
    json: bool = setting(False, "Print JSON: every layout, and what is lacking of those that do not fit")
    picture: str = setting(None, "FILE.svg: memory of the layouts shown, by kind")
    seed: int = setting(42, "Seed of the simulation")

    def __post_init__(self) -> None:
        if isinstance(self.dataset, str):
            self.dataset = [self.dataset]
        for name in ("gpus", "gpu_memory_gib"):
            if getattr(self, name) is None:
                raise UsageError(
                    f"{name} is not given; say what there is, such as --gpus 8 --gpu_memory_gib 80"
                )
        check_bounds(self)
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)} is no number from 0 on; use 0.5, say")
        for stage in self.zero_stage:
            if stage not in (0, 1, 2, 3):
                raise UsageError(f"zero_stage={stage} is unknown; use 0, 1, 2 or 3")
        self._contradictions()
        Config(**self.run_settings())  # its own checks

    def _contradictions(self) -> None:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UsageError(
                f"gpus={self.gpus} is not a multiple of gpus_per_node={self.gpus_per_node}; give whole nodes"
            )
        if self.calibrate and self.machine is not None:
            raise UsageError(
                f"machine={self.machine} and calibrate=True both say what the machine can do; leave one out"
            )
        if self.save_profile is not None and not self.calibrate:
            raise UsageError(
                f"save_profile={self.save_profile} keeps what --calibrate measures; add it, or leave this out"
            )
        if self.deepspeed is not None and (self.zero_stage or self.offload is not None):
            raise UsageError(
                f"deepspeed={self.deepspeed} sets the ZeRO stage and the offload; leave out zero_stage and"
                " offload"
            )
        if self.elastic:
            raise UsageError(
                "elastic=True is a setting of a launch; use --on_failure elastic to plan for groups that come"
                " and go"
            )
        if self.on_failure not in ON_FAILURE:
            raise UsageError(f"on_failure={self.on_failure} is unknown; use {' or '.join(ON_FAILURE)}")
        if find(self.algorithm).trains_nothing:
            raise UsageError(
                f"algorithm={self.algorithm} trains nothing, so that there is no outer step to plan; use"
                " fomaml"
            )

    @property
    def bf16_planned(self) -> bool:
        return not find(self.algorithm).takes_differences if self.bf16 is None else self.bf16

    @property
    def tasks(self) -> int:
        """Of an outer step."""
        return self.meta_batch_size * self.meta_accumulation_steps

    def run_settings(self) -> dict[str, Any]:
        """Settings of the run that were given; what is left open is left out."""
        names = {item.name for item in fields(Config)}
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}
