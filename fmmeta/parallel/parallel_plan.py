"""How a run is spread over its ranks. `training/build.py` decides it once; everything after that takes the
`ParallelPlan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import GroupCoordinates


@dataclass(frozen=True)
class ParallelPlan:
    """Ranks, engine and precision of a group."""

    group_size: int
    engine: str  # deepspeed, or plain (PyTorch; a group of one)
    deepspeed: DeepSpeedSettings
    stages: int = 1
    tensor: int = 1
    layer_costs: Sequence[float] | None = None  # seconds of each layer, if stages are balanced by time
    reason: str = ""  # how --group_size auto chose; empty for a size that the user gave

    @classmethod
    def of(
        cls,
        config: Config,
        deepspeed: DeepSpeedSettings,
        group_size: int,
        device_type: str,
        layer_costs: Sequence[float] | None = None,
        reason: str = "",
    ) -> "ParallelPlan":
        """The plan of groups of `group_size`. Raises `UsageError` if a setting needs another size.

        A group of one has nothing to shard. Plain PyTorch does the same there for less, unless DeepSpeed
        offloads from a GPU.
        """
        stages, tensor, engine = config.pipeline_stages, config.tensor_parallel_size, config.engine
        if engine == "plain" and group_size > 1:
            raise UsageError(
                f"engine=plain holds a whole model on one rank, but group_size={group_size}; use engine=auto"
            )
        if engine == "auto":
            offloads = deepspeed.offload and device_type != "cpu"
            engine = "deepspeed" if group_size > 1 or offloads else "plain"
        if config.compile and engine != "plain":
            raise UsageError(
                "compile=True compiles a model that one rank holds in plain PyTorch, and DeepSpeed runs this"
                f" group of {group_size}: it hooks into modules; leave it out, or use --group_size 1"
            )
        plan = cls(group_size, engine, deepspeed, stages, tensor, layer_costs, reason)
        plan.coordinates(0)
        return plan

    @property
    def data(self) -> int:
        """Data-parallel ranks of a group."""
        return self.group_size // (self.stages * self.tensor)

    def coordinates(self, group_rank: int) -> GroupCoordinates:
        return GroupCoordinates(group_rank, self.group_size, self.stages, self.tensor)

    def __str__(self) -> str:
        engine = f"DeepSpeed ZeRO {self.deepspeed.zero_stage}"
        parts = [engine if self.engine == "deepspeed" else "plain PyTorch, nothing to shard"]
        parts += [f"{self.stages} pipeline stages"] if self.stages > 1 else []
        parts += [f"{self.tensor} tensor ranks"] if self.tensor > 1 else []
        return f"{', '.join(parts)}; {self.deepspeed.precision}"
