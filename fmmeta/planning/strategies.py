"""Every way to shard a model over groups of GPUs that the flags of a run can choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import divisors
from fmmeta.planning.settings import LORA_R, PlanConfig


@dataclass(frozen=True)
class Strategy:
    """A way to spread a model over a group: what the flags of a run say of it."""

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

    def __str__(self) -> str:
        parts = [f"ZeRO {self.zero_stage}" if self.data > 1 or self.offload else ""]
        parts += [
            f"{self.stages} stages" if self.stages > 1 else "",
            f"{self.tensor} tensor" if self.tensor > 1 else "",
        ]
        parts += [f"LoRA {self.lora_r}" if self.lora_r else "", "offload" if self.offload else ""]
        parts += [
            "offload_outer" if self.offload_outer else "",
            "checkpointing" if self.checkpointing else "",
        ]
        return ", ".join(filter(None, parts)) or "whole"


def deepspeed_of(strategy: Strategy) -> dict[str, Any]:
    """What the shipped file says that `file_of` names."""
    zero: dict[str, Any] = {"stage": strategy.zero_stage}
    if strategy.offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {"zero_optimization": zero}


def file_of(strategy: Strategy) -> str:
    return f"ds_configs/zero{strategy.zero_stage}{'_offload' if strategy.offload else ''}.json"


def strategies(plan: PlanConfig) -> Iterator[Strategy]:
    """All combinations that differ; settings that were given are kept."""
    per_node = min(plan.gpus, plan.gpus_per_node)
    sizes = [size for size in divisors(plan.gpus) if per_node % size == 0 or size % per_node == 0]
    if plan.group_size != "auto":
        sizes = [int(plan.group_size)]
        if plan.gpus % sizes[0]:
            use = ", ".join(map(str, divisors(plan.gpus)))
            raise UsageError(f"group_size={sizes[0]} does not divide gpus={plan.gpus}; use {use}")
    for size in sizes:
        for stages, tensor in model_splits(plan, size, per_node):
            data = size // (stages * tensor)
            for stage, offload in zero_options(plan, size, data, stages * tensor):
                for lora_r in (0, LORA_R) if plan.lora_r is None else (plan.lora_r,):
                    for outer in option_values(plan.offload_outer, offload):
                        for checkpointing in option_values(plan.gradient_checkpointing):
                            yield Strategy(size, stage, stages, tensor, lora_r, offload, outer, checkpointing)


def option_values(given: bool | None, never: bool = False) -> tuple[bool, ...]:
    return (bool(given),) if given is not None or never else (False, True)


def model_splits(plan: PlanConfig, size: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Pipeline stages and tensor ranks of a group; tensor ranks stay inside a node."""
    for count in divisors(size):
        if count == 1 and plan.pipeline_stages in (None, 1) and plan.tensor_parallel_size in (None, 1):
            yield 1, 1
        if count > 1 and plan.pipeline_stages in (None, count) and plan.tensor_parallel_size in (None, 1):
            yield count, 1
        if (
            1 < count <= per_node
            and plan.tensor_parallel_size in (None, count)
            and plan.pipeline_stages in (None, 1)
        ):
            yield 1, count


def zero_options(plan: PlanConfig, size: int, data: int, model_ranks: int) -> Iterator[tuple[int, bool]]:
    """ZeRO stages, each with and without DeepSpeed's offload; one data rank has nothing to share."""
    if plan.deepspeed is not None:
        given = deepspeed_config.read(plan.deepspeed, plan.bf16_planned)
        yield given.zero_stage, given.offload
        return
    stages = plan.zero_stage or [0, 1, 2, 3]
    least = min(stages)
    for stage in stages:
        if (data > 1 or stage == least) and (stage < 2 or model_ranks == 1) and plan.offload is not True:
            yield stage, False
        if stage == 3 and model_ranks == 1 and plan.offload is not False:
            yield stage, True
