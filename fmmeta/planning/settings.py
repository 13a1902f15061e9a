"""The flags of `fmmeta plan`: those of a run, and the machines. Settings of the layout that are left open are
planned with every value.
"""

from dataclasses import asdict, dataclass
from typing import Any

from fmmeta.config.algorithms import bf16_by_default, find
from fmmeta.config.fields import check_values, default_of, refuse_first, setting
from fmmeta.config.learners import usual_algorithm
from fmmeta.config.peft_options import apply_peft_options
from fmmeta.config.settings import (
    Config,
    InnerConfig,
    MetaConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
    TaskConfig,
)
from fmmeta.parallel import deepspeed_config

EVERY = " (default: every value is planned)"
LORA_R = 8  # rank of the adapters that are planned beside training all weights
ROWS = (32, 16, 8, 4, 2, 1)  # micro-batch sizes, of which the largest that fits is planned


@dataclass
class PlanConfig(ModelConfig, TaskConfig, SamplingConfig, InnerConfig, MetaConfig, ParallelConfig):
    """`fmmeta plan`. Raises `UsageError` in one line."""

    gpus: int = setting(None, "GPUs of all nodes together, one rank each", least=1)
    gpu_memory_gib: float = setting(
        None, "Memory of each GPU in GiB (default: that of the machine's profile)", positive="such as 80"
    )
    gpus_per_node: int = setting(8, "GPUs of a node", least=1)
    host_memory_gib: float = setting(
        None,
        "Host memory of a node in GiB, for what is offloaded (default: not checked)",
        positive="such as 512",
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
    gradient_checkpointing: bool = setting(None, "Store layer inputs only" + EVERY)
    offload_outer: bool = setting(None, "Store the outer state in host memory" + EVERY)
    offload: bool = setting(None, "Store DeepSpeed's shards and weights in host memory, ZeRO 3" + EVERY)
    bf16: bool = setting(
        None,
        "bf16 weights over fp32 shards (default: yes, except for algorithms with finite differences)",
    )
    machine: str = setting(
        "h100",
        "Profile of the GPUs: a100, h100, h200, or FILE.json with rates that differ from those of h100",
    )
    row_tokens: int = setting(
        None,
        "Tokens of a mean row, for the time (default: --max_length, which memory always counts with)",
        least=1,
    )
    top: int = setting(10, "Layouts to show", least=1)
    json: bool = setting(False, "Print JSON: every layout, and the missing bytes of those that do not fit")

    def __post_init__(self) -> None:
        self.dataset = [self.dataset] if isinstance(self.dataset, str) else self.dataset
        refuse_first([(self.gpus is None, "gpus is not given; give it, such as --gpus 8")])
        if self.peft_config:
            apply_peft_options(self)
        check_values(self)
        refuse_first(
            [
                *(
                    (stage not in (0, 1, 2, 3), f"zero_stage={stage} is unknown; use 0, 1, 2 or 3")
                    for stage in self.zero_stage
                ),
                (
                    self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node,
                    f"gpus={self.gpus} is not a multiple of gpus_per_node={self.gpus_per_node}; give complete"
                    " nodes",
                ),
                (
                    self.deepspeed is not None and (self.zero_stage or self.offload is not None),
                    f"deepspeed={self.deepspeed} sets the ZeRO stage and the offload; leave out zero_stage"
                    " and offload",
                ),
                (self.elastic, "elastic=True is a setting of a launch; leave it out"),
                (
                    find(self.run_algorithm).trains_nothing,
                    f"algorithm={self.algorithm} trains nothing, so that there is no outer step to plan;"
                    " use fomaml",
                ),
            ]
        )
        longest = Config(**self.run_settings()).max_length  # its checks hold here too
        above = f"row_tokens={self.row_tokens} is above max_length={longest}; use {longest} or less"
        refuse_first([((self.row_tokens or 0) > longest, above)])

    @property
    def run_algorithm(self) -> str:
        """That of the run, where none is named too."""
        usual = usual_algorithm(self.task_type) or default_of(Config.__dataclass_fields__["algorithm"])
        return self.algorithm or usual

    @property
    def bf16_planned(self) -> bool:
        """Whether the weights are in bf16; a DeepSpeed file that names a precision wins. Raises `UsageError`
        for a bad file.
        """
        bf16 = bf16_by_default(self.run_algorithm, bool(self.lora_r)) if self.bf16 is None else self.bf16
        return bf16 if self.deepspeed is None else deepspeed_config.read(self.deepspeed, bf16).bf16

    @property
    def tasks(self) -> int:
        """Tasks of an outer step."""
        return self.meta_batch_size * self.meta_accumulation_steps

    def run_settings(self) -> dict[str, Any]:
        """Settings of the run that were given."""
        run = Config.__dataclass_fields__
        return {name: value for name, value in asdict(self).items() if name in run and value is not None}
