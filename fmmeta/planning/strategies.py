"""Every way to shard a model over groups of GPUs that the flags of a run can choose."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import divisors
from fmmeta.planning.settings import LORA_R, PlanConfig


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

    def deepspeed(self) -> dict[str, Any]:
        """The contents of `deepspeed_file`."""
        zero: dict[str, Any] = {"stage": self.zero_stage}
        if self.offload:
            zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        return {"zero_optimization": zero}

    @property
    def deepspeed_file(self) -> str:
        """The shipped DeepSpeed file."""
        return f"ds_configs/zero{self.zero_stage}{'_offload' if self.offload else ''}.json"

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
    sizes = [size for size in divisors(plan.gpus) if per_node % size == 0 or size % per_node == 0]
    if plan.group_size != "auto":
        sizes = [int(plan.group_size)]
        if plan.gpus % sizes[0]:
            use = ", ".join(map(str, divisors(plan.gpus)))
            raise UsageError(f"group_size={sizes[0]} does not divide gpus={plan.gpus}; use {use}")
    ranks = [0, LORA_R] if plan.lora_r is None else [plan.lora_r]
    for size in sizes:
        for stages, tensor in model_splits(plan, size, per_node):
            for (stage, offload), lora_r, outer, checkpointing in product(
                zero_options(plan, size, stages * tensor),
                ranks,
                option_values(plan.offload_outer),
                option_values(plan.gradient_checkpointing),
            ):
                if not (outer and offload and plan.offload_outer is None):  # DeepSpeed's offload moves it too
                    yield Strategy(size, stage, stages, tensor, lora_r, offload, outer, checkpointing)


def option_values(given: bool | None) -> tuple[bool, ...]:
    return (False, True) if given is None else (given,)


def model_splits(plan: PlanConfig, size: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Pipeline stages and tensor ranks of a group; tensor ranks stay inside a node."""
    for count in divisors(size):
        for stages, tensor in dict.fromkeys([(count, 1), (1, count)]):
            fits = plan.pipeline_stages in (None, stages) and plan.tensor_parallel_size in (None, tensor)
            if fits and tensor <= per_node:
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
