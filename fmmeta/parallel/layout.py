"""Assigns ranks to groups and nodes, and decides how a run is spread over them. Arithmetic only.

    LAUNCHERS          the variables that launchers set
    UNREAD             settings of `accelerate launch` that fmmeta does not read
    Launch             what a launcher put into the environment
    Layout             groups of consecutive ranks
    GroupCoordinates   pipeline stage, tensor rank and data rank inside a group
    ParallelPlan       group size, engine and precision; `training/build.py` decides it once
    Nodes              groups inside a node, and the printed map of links

A group communicates in every pass, groups with each other once per outer step: a group belongs on one node
wherever it fits.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, counted
from fmmeta.config.settings import Config
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings


class RankVariables(NamedTuple):
    """The environment variables by which a launcher tells each process its place.

    Of local_rank, local_size and node the first that is set counts; nodes: the number of nodes. given: how
    the user gives all ranks a variable.
    """

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: str = ""
    given: str = "export {name}={value}"

    @classmethod
    def of_prefix(cls, launcher: str, prefix: str, given: str = "export {name}={value}") -> "RankVariables":
        """Names such as PREFIX_RANK and PREFIX_LOCAL_SIZE."""
        rank, size, local = f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL"
        return cls(launcher, rank, size, (f"{local}_RANK",), (f"{local}_SIZE",), given=given)


DIRECT = RankVariables(
    "torchrun, deepspeed or accelerate launch",
    "RANK",
    "WORLD_SIZE",
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    ("GROUP_RANK", "CROSS_RANK"),  # of torchrun, of deepspeed
    given="--{flag} {value}",
)
SRUN = RankVariables(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is also set in the shell of a batch script, which is one process
    ("SLURM_LOCALID",),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ("SLURM_NODEID",),
)
LAUNCHERS = (  # the first that is complete counts: a launcher that another one starts is listed before it
    DIRECT,
    RankVariables.of_prefix("Open MPI", "OMPI_COMM_WORLD", "mpirun -x {name}={value}"),
    RankVariables.of_prefix("MVAPICH", "MV2_COMM_WORLD"),
    RankVariables.of_prefix("MVAPICH", "MVP_COMM_WORLD"),
    RankVariables.of_prefix("jsrun", "JSM_NAMESPACE"),
    RankVariables.of_prefix("horovodrun", "HOROVOD"),
    RankVariables(
        "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",), nodes="FLUX_JOB_NNODES"
    ),
    RankVariables(
        "PALS", "PALS_RANKID", "PMI_SIZE", ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    ),
    RankVariables(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        given="mpiexec -genv {name} {value}",
    ),
    SRUN,
    RankVariables.of_prefix("PMIx", "PMIX"),
)


NOTHING = "nothing: a group does not split sequences over ranks"
UNREAD = {  # accelerate/utils/launch.py; torchrun and deepspeed pass on no settings of the training
    # variable: the value that chooses nothing, the flag that is given instead, what to use
    "ACCELERATE_MIXED_PRECISION": ("no", "bf16", "--bf16, the only lower precision"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "compile", "--compile"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "deepspeed", "--deepspeed FILE"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("none", "deepspeed", "--deepspeed {}"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("0", "deepspeed", "--deepspeed zero{}"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "deepspeed", "--deepspeed zero3_offload"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "deepspeed", "--deepspeed zero3_offload"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "micro_batch_size", "--micro_batch_size"),
    "ACCELERATE_GRADIENT_CLIPPING": ("1.0", "max_grad_norm", "--max_grad_norm {}"),
    "ACCELERATE_USE_FSDP": ("false", "deepspeed", "--deepspeed zero3 and --group_size (for FSDP_* too)"),
    "ACCELERATE_USE_MEGATRON_LM": (
        "false",
        "tensor_parallel_size",
        "--tensor_parallel_size and --pipeline_stages",
    ),
    "ACCELERATE_CPU_AFFINITY": ("0", "", "`deepspeed --bind_cores_to_rank` or `srun --cpu-bind`"),
    "ACCELERATE_USE_CPU": ("false", "", "CUDA_VISIBLE_DEVICES="),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("1", "group_size", "--group_size"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("1", "group_size", "--group_size {}"),
    "PARALLELISM_CONFIG_TP_SIZE": ("1", "tensor_parallel_size", "--tensor_parallel_size {}"),
    "PARALLELISM_CONFIG_CP_SIZE": ("1", "", NOTHING),
    "PARALLELISM_CONFIG_SP_SIZE": ("1", "", NOTHING),
}


def unread_settings(env: Mapping[str, str], config: Config, on_gpu: bool) -> Iterator[str]:
    """A line for each setting of the launcher that is not read, and for which the user gives no flag."""
    for name, (quiet, flag, instead) in UNREAD.items():
        value = env.get(name, "")
        says_nothing = value.lower() in ("", quiet) or (name == "ACCELERATE_USE_CPU" and not on_gpu)
        if not says_nothing and not (flag and getattr(config, flag) != getattr(Config, flag)):
            yield f"{name}={value} (accelerate launch) is not read; use {instead.format(value)}"


@dataclass(frozen=True)
class Launch:
    """The rank of this process among all processes and on its node, as the launcher set it.

    node: the launcher's number of the node; empty if it gives none. variables: from which it was read.
    """

    global_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node: str = ""
    variables: RankVariables = DIRECT

    def how_to_give(self, name: str, value: object) -> str:
        """How the user gives all ranks MASTER_ADDR or MASTER_PORT."""
        return self.variables.given.format(name=name, flag=name.lower(), value=value)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Launch":
        """Read the variables of the launcher that has started this process; one process if there is none.

        Raises `UsageError` for a rank of a launch of unknown size, and where two launchers contradict each
        other: each process would train the whole run.
        """
        complete = [one for one in LAUNCHERS if one.rank in env and env.get(one.size)]
        if not complete:
            refuse_half(env)
            return cls()
        launch = cls._of(complete[0], env)
        for other in complete[1:]:
            refuse_contradiction(launch, other, env)
        return launch

    @classmethod
    def _of(cls, names: RankVariables, env: Mapping[str, str]) -> "Launch":
        """The launch by the variables of one launcher; RANK without any LOCAL_ variable is that of a pod of
        one rank. Raises `UsageError`.
        """
        rank, size = number(env, names.rank), number(env, names.size)
        if not 0 <= rank < size:
            raise UsageError(f"{names.rank}={rank} is not below {names.size}={size}; check the launcher")
        launch = cls(rank, size, number(env, *names.local_rank, default=0), variables=names)
        if size == 1:
            return launch
        if names is SRUN and "SLURM_PTY_PORT" in env and os.isatty(0):
            raise UsageError(
                f"{names.size}={size} in a shell of `srun --pty`, whose other {size - 1} tasks start nothing;"
                f" run `srun -n {size} fmmeta ...` in it, or `env -u SLURM_PROCID fmmeta ...` for one process"
            )
        on_this_node = size if names is DIRECT and env.get("LOCAL_RANK") else 1
        if names.nodes and env.get(names.nodes):
            on_this_node = -(-size // max(1, number(env, names.nodes)))
        # SLURM: 4(x2),3 are the tasks of each node
        per_node = {name: re.split("[(,]", env.get(name, ""))[0] for name in names.local_size}
        local_size = number(per_node, *names.local_size, default=on_this_node)
        if not 1 <= local_size <= size or (launch.local_rank >= local_size and any(per_node.values())):
            raise UsageError(
                f"{any_of(names.local_size)} of {local_size} ranks on this node does not fit"
                f" {any_of(names.local_rank)} {launch.local_rank} and {names.size}={size}; check the launcher"
            )
        launch = replace(
            launch,
            local_world_size=local_size,
            node=next(filter(None, map(env.get, names.node)), ""),
        )
        # torch's port; with SLURM one for each job, below those that the kernel gives to connections
        port = 10000 + number(env, "SLURM_JOB_ID", default=0) % 20000 if names is SRUN else 29500
        port = number(env, "MASTER_PORT", default=port)
        if not 0 < port < 2**16:
            raise UsageError(f"MASTER_PORT={port} is no port; use one from 1024 to 65535 in all ranks")
        return replace(launch, master_addr=launch._address(env), master_port=port)

    def _address(self, env: Mapping[str, str]) -> str:
        """The host of the store: with SLURM, by default, the first node of the step. Raises `UsageError`."""
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        if address := env.get("MASTER_ADDR"):
            return address
        if self.variables is SRUN and nodes:
            return first_host(nodes)
        if self.local_world_size == self.world_size:
            return "127.0.0.1"
        raise UsageError(
            f"MASTER_ADDR is not set, and not all {self.world_size} ranks of {self.variables.launcher} are"
            f" known to be on this node; give it the name of rank 0's node, such as"
            f" `{self.how_to_give('MASTER_ADDR', platform.node())}`"
        )


def refuse_half(env: Mapping[str, str]) -> None:
    """Raise `UsageError` for a process that knows its rank, its local rank or the number of ranks alone."""
    for names in LAUNCHERS:
        rank, size = env.get(names.rank), env.get(names.size)
        alone = rank is None and (names is not DIRECT or size in (None, "", "1"))
        if names is SRUN:  # SLURM sets 0 in a batch script too
            alone = rank in (None, "", "0")
        local = next((name for name in names.local_rank if env.get(name, "0").strip() not in ("", "0")), None)
        if not alone or local:
            known, missing = (names.rank, names.size) if rank is not None else (names.size, names.rank)
            known, missing = (known, missing) if known in env else (local or known, names.rank)
            raise UsageError(
                f"{known}={env[known]} without {missing}: which of how many ranks of {names.launcher} this"
                f" process is cannot be known; set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in each, or"
                f" unset {known} for one process"
            )


def refuse_contradiction(launch: Launch, other: RankVariables, env: Mapping[str, str]) -> None:
    """Raise `UsageError` where another launcher has started more processes than `launch` has ranks, or given
    them other ranks.
    """
    names, rank, size = launch.variables, number(env, other.rank), number(env, other.size)
    # a separate launcher on each node, such as torchrun, numbers the ranks in its own order
    same = (
        names is not DIRECT
        or any(map(env.get, ("TORCHELASTIC_RUN_ID", *DIRECT.node)))
        or rank == launch.global_rank
    )
    if size > launch.world_size or (size == launch.world_size and not same):
        raise UsageError(
            f"{names.rank}={launch.global_rank} of {names.size}={launch.world_size} contradicts"
            f" {other.rank}={rank} of {other.size}={size}: processes of {other.launcher} would repeat the"
            f" work of others; unset {names.rank} and {names.size} for one run of {size} ranks, or"
            f" {other.rank} for separate runs"
        )


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of launchers, for processes that get other ranks."""
    names = {name for one in LAUNCHERS for name in (one.rank, one.size, *one.local_rank, *one.local_size)}
    return {name: value for name, value in env.items() if name not in names}


def number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set, else `default`. Raises `UsageError`."""
    name = next(filter(env.get, names), "".join(names[-1:]))
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
        if world_size == 1 < self.group_size:
            raise UsageError(
                f"group_size={self.group_size} needs a launch of {self.group_size} ranks or a multiple, and"
                f" this process is alone; start `torchrun --nproc_per_node {self.group_size} -m fmmeta train"
                f" ...` or `deepspeed --num_gpus {self.group_size} --module fmmeta train ...`, or leave"
                " group_size out"
            )
        if self.group_size < 1 or world_size % self.group_size:
            raise UsageError(
                f"group_size={self.group_size} does not divide world_size={world_size}; use"
                f" {any_of(map(str, divisors(world_size)))}"
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
        return f"{counted(self.num_groups, 'group')} of {counted(self.group_size, 'rank')}"


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


@dataclass(frozen=True)
class ParallelPlan:
    """Ranks, engine and precision of a group."""

    group_size: int
    engine: str  # deepspeed, or plain (PyTorch; a group of one)
    deepspeed: DeepSpeedSettings
    stages: int = 1
    tensor: int = 1
    layer_costs: Sequence[float] | None = None  # seconds of each layer, if stages are balanced by time

    @classmethod
    def of(
        cls,
        config: Config,
        deepspeed: DeepSpeedSettings,
        group_size: int,
        device_type: str,
        layer_costs: Sequence[float] | None = None,
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
            shards = group_size > 1 or (deepspeed.offload and device_type != "cpu")
            engine = "deepspeed" if shards else "plain"
        if config.compile and engine != "plain":
            raise UsageError(
                "compile=True compiles a model that one rank holds in plain PyTorch, and DeepSpeed runs this"
                f" group of {group_size}: it hooks into modules; leave it out, or use --group_size 1"
            )
        used = deepspeed.of_engine() if engine == "deepspeed" else deepspeed
        plan = cls(group_size, engine, used, stages, tensor, layer_costs)
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


def can_defer_backward(zero_stage: int, stages: int = 1) -> bool:
    """Whether a forward pass may be left without its backward pass: ZeRO 3 follows the order of modules,
    forward and back, and a pipeline runs complete batches. zero_stage: of DeepSpeed; 0 in plain PyTorch.
    """
    return zero_stage < 3 and stages == 1


def differentiates_twice(zero_stage: int, stages: int = 1, tensor: int = 1) -> bool:
    """Whether autograd computes second derivatives: products need complete parameters, and ZeRO 3 frees a
    layer's weights before the second backward pass.
    """
    return can_defer_backward(zero_stage, stages) and tensor == 1


SHOWN = 16  # groups that a map shows one by one


@dataclass(frozen=True)
class Nodes:
    """node: the node of each rank, numbered in the order of first ranks. hosts: the name of each node."""

    node: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, comm: Any, launch: Launch) -> "Nodes":
        """Gather the node of every rank. comm: a Communicator. Collective: comm."""
        gathered = comm.gather([identity(launch), platform.node()])
        hosts = dict(reversed(gathered))
        names = list(dict.fromkeys(name for name, _ in gathered))
        return cls(tuple(names.index(name) for name, _ in gathered), tuple(hosts[name] for name in names))

    @property
    def sizes(self) -> list[int]:
        """Number of ranks of each node."""
        return [self.node.count(number) for number in range(len(self.hosts))]

    def first(self, rank: int) -> int:
        """The lowest rank of the same node."""
        return self.node.index(self.node[rank])

    def is_second(self, rank: int) -> bool:
        """Whether exactly one rank of the same node is lower."""
        return self.node[:rank].count(self.node[rank]) == 1

    def nodes_of_groups(self, group_size: int) -> list[list[int]]:
        """The nodes of each group."""
        return [
            list(dict.fromkeys(self.node[start : start + group_size]))
            for start in range(0, len(self.node), group_size)
        ]

    def are_groups_on_nodes(self, group_size: int) -> bool:
        """Whether every group is on one node."""
        return all(len(nodes) == 1 for nodes in self.nodes_of_groups(group_size))

    def check(self, group_size: int) -> str | None:
        """Refuse groups that span nodes although they fit on each; return a warning where they have to.

        Raises `UsageError`.
        """
        for group, nodes in enumerate(self.nodes_of_groups(group_size)):
            if len(nodes) == 1:
                continue
            where = f"group {group} ({ranks_of(group, group_size)}) is on {self.names(nodes)}"
            smallest = min(self.sizes)
            if group_size > smallest:
                return f"{where}: what it sends in every pass crosses the network"
            sizes = [n for n in divisors(len(self.node)) if n > smallest or self.are_groups_on_nodes(n)]
            raise UsageError(
                f"group_size={group_size} fits on a node, but {where}, and all that it sends in every pass"
                f" would cross the network; use group_size {any_of(map(str, sizes))}, or start consecutive"
                " ranks on each node (srun --distribution=block), as many as whole groups have"
            )
        return None

    def names(self, nodes: Sequence[int]) -> str:
        """Host names, with the node's number where several nodes have the same one."""
        hosts = [self.hosts[node] for node in nodes]
        labels = [
            f"{host} (node {node})" if self.hosts.count(host) > 1 else host
            for node, host in zip(nodes, hosts, strict=True)
        ]
        return " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))

    def map(self, group_size: int, inside: str, shard_bytes: float, device: str) -> list[str]:
        """Lines that show which ranks are where and what is sent on which link.

        inside: what a group sends in every pass.
        """
        of_groups = self.nodes_of_groups(group_size)
        lines = [
            f"group {group}: {ranks_of(group, group_size)} on {self.names(nodes)}"
            for group, nodes in enumerate(of_groups[:SHOWN])
        ]
        if len(of_groups) > SHOWN:
            rest = "all on one node each" if self.are_groups_on_nodes(group_size) else "alike"
            lines.append(f"and {len(of_groups) - SHOWN} more groups, {rest}")
        if group_size > 1:
            far = sum(len(nodes) > 1 for nodes in of_groups)
            link = f"between nodes in {far} of {len(of_groups)} groups" if far else "inside a node"
            lines.append(f"inside groups, {link}: {inside}, in every pass")
        if len(of_groups) > 1:
            near = all(len(set(self.node[member::group_size])) == 1 for member in range(group_size))
            name = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
            setting = f"between nodes ({name}={os.environ.get(name) or 'not set'})"
            lines.append(
                f"across groups, {'inside a node' if near else setting}: {size_of(shard_bytes)} of"
                " meta-gradient per rank, once per outer step"
            )
        link = "inside a node" if len(self.hosts) == 1 else "between nodes"
        lines.append(f"all ranks, {link}: agreement and numbers of each outer step (gloo)")
        return lines


def identity(launch: Launch) -> str:
    """What ranks of one node have in common and others do not: the launcher's number of the node, else host,
    boot and network namespace.
    """
    if launch.node:
        return f"node {launch.node}"
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([platform.node(), boot, link_of("/proc/self/ns/net")])


def link_of(path: str) -> str:
    """The target of a link; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def ranks_of(group: int, group_size: int) -> str:
    first, last = group * group_size, (group + 1) * group_size - 1
    if first == last:
        return f"rank {first}"
    return f"ranks {first} {'and' if last == first + 1 else 'to'} {last}"


def size_of(count: float) -> str:
    """Bytes for reading: 614400 -> 614 kB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
