"""Assigns ranks to groups from a launcher's environment. Arithmetic only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of

SLURM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True)
class Launch:
    """The rank of this process among all processes and on its node, as the launcher set it.

    node: the launcher's number of the node; empty if it gives none.
    """

    global_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Launch":
        """Read the variables of deepspeed, torchrun and accelerate, else those of srun, else one process.

        Raises `UsageError`.
        """
        launch = cls()
        if "RANK" in env and "WORLD_SIZE" in env:
            world_size = number(env, "WORLD_SIZE")
            launch = cls(
                number(env, "RANK"),
                world_size,
                number(env, "LOCAL_RANK", default=0),
                number(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=world_size),
                env.get("MASTER_ADDR", "127.0.0.1"),
                number(env, "MASTER_PORT", default=29500),
                env.get("GROUP_RANK") or env.get("CROSS_RANK") or "",  # of torchrun, of deepspeed
            )
        elif "SLURM_PROCID" in env and number(env, *SLURM_TASKS, default=1) > 1:
            launch = cls.from_slurm(env)
        if not 0 <= launch.global_rank < launch.world_size:
            raise UsageError(
                f"RANK={launch.global_rank} is not below WORLD_SIZE={launch.world_size}; check the launcher"
            )
        return launch

    @classmethod
    def from_slurm(cls, env: Mapping[str, str]) -> "Launch":
        """One process per task of `srun`. Without MASTER_ADDR the first node of the step hosts the store."""
        world_size = number(env, *SLURM_TASKS)
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world_size)
        tasks = re.match(r"\d+", per_node)
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        return cls(
            global_rank=number(env, "SLURM_PROCID"),
            world_size=world_size,
            local_rank=number(env, "SLURM_LOCALID", default=0),
            local_world_size=int(tasks[0]) if tasks else world_size,
            master_addr=env.get("MASTER_ADDR") or (first_host(nodes) if nodes else "127.0.0.1"),
            master_port=number(
                env, "MASTER_PORT", default=20000 + number(env, "SLURM_JOB_ID", default=0) % 20000
            ),
            node=env.get("SLURM_NODEID", ""),
        )


def number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set, else `default`. Raises `UsageError`."""
    name = next(filter(env.get, names), names[-1])
    value = env.get(name) or default
    if value is None or not re.fullmatch(r"\s*[+-]?\d+\s*", str(value)):
        raise UsageError(f"environment variable {name}={env.get(name)} is not a number; check the launcher")
    return int(value)


def first_host(nodelist: str) -> str:
    """First name of a SLURM node list: `gpu[03-05,09],cpu1` -> `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise UsageError(f"SLURM node list {nodelist!r} has no host in it; set MASTER_ADDR")
    prefix, first, suffix = match.groups()
    return prefix + (first or "") + (suffix or "")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism: world_size = num_groups x group_size, groups being runs of consecutive ranks.

    Consecutive ranks keep a group inside a node wherever it fits into one.
    """

    launch: Launch
    group_size: int

    def __post_init__(self) -> None:
        world_size = self.launch.world_size
        if self.group_size < 1 or world_size % self.group_size:
            sizes = [str(d) for d in divisors(world_size)]
            raise UsageError(
                f"group_size={self.group_size} does not divide world_size={world_size}; use {any_of(sizes)}"
            )

    @property
    def num_groups(self) -> int:
        return self.launch.world_size // self.group_size

    @property
    def group_index(self) -> int:
        return self.launch.global_rank // self.group_size

    @property
    def group_rank(self) -> int:
        return self.launch.global_rank % self.group_size

    def __str__(self) -> str:
        ranks = "rank" if self.group_size == 1 else "ranks"
        groups = "group" if self.num_groups == 1 else "groups"
        return f"{self.num_groups} {groups} of {self.group_size} {ranks}"


@dataclass(frozen=True)
class GroupCoordinates:
    """Coordinates of a rank inside its group: group_size = pipeline stages x tensor ranks x data ranks.

    In the order of DeepSpeed: tensor ranks are neighbours, then data ranks, then stages.
    """

    group_rank: int
    group_size: int
    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in (("pipeline_stages", self.stages), ("tensor_parallel_size", self.tensor)):
            if self.group_size % size:
                raise UsageError(
                    f"group_size={self.group_size} is not a multiple of {name}={size}; use {size} or"
                    f" {2 * size}"
                )

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, which share the rows of each set of examples."""
        return self.group_size // (self.stages * self.tensor)

    @property
    def stage(self) -> int:
        return self.group_rank // (self.data * self.tensor)

    @property
    def data_rank(self) -> int:
        return self.group_rank // self.tensor % self.data

    @property
    def tensor_rank(self) -> int:
        return self.group_rank % self.tensor


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
