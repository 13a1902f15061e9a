"""Process groups; the only module that imports torch.distributed.

Each worker group is its own default world, so that DeepSpeed and transformers see only the ranks that share
its model (docs/explanation/design.md). There are three communicators (collectives.py):

    world   all processes; gloo; control only: agreement, small byte strings, barriers
    group   the ranks that hold one model; the default process group of each of them
    cross   the ranks of equal group_rank in all groups; reduces meta-gradient shards; theta at the start

With --elastic a launch is one group: `world` contains its ranks, and `cross` connects groups that join and
leave (elastic/communicator.py). `all_groups` contains all processes of all groups in both cases.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import undo_later
from fmmeta.common.progress import LOGGER, STDERR
from fmmeta.config.algorithms import bf16_by_default
from fmmeta.config.settings import Config
from fmmeta.parallel import network
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.costs import second_order_by_autograd
from fmmeta.parallel.layout import Launch, Layout, Nodes, differentiates_twice
from fmmeta.parallel.network import SharedStore, agree_on_generation

TIMEOUT = timedelta(minutes=30)
MARGIN_S = 60.0  # that ranks wait for another node longer than ranks of that node
LOG_S = 10.0  # between two lines about a rank that waits for another one
T = TypeVar("T")
PendingWork = dist.Work
"""A pending communication; a caller that needs its result calls `wait` on it, DeepSpeed too."""


@dataclass
class ProcessGroups:
    """The communicators of one process.

    background: the ranks of the first group once more, for the threads that write checkpoints; None in other
    groups. all_groups: all processes of all groups that take part; `world` unless the run is elastic.
    store: key-value store of all groups of the launch, for the thread that runs the outer loop.
    """

    layout: Layout
    world: Communicator
    group: Communicator
    cross: Communicator
    all_groups: Communicator
    device: torch.device
    background: Communicator | None = None
    store: Any = None

    @property
    def first(self) -> bool:
        """Whether this process logs and writes for all."""
        return self.layout.launch.global_rank == 0

    def with_keys_under(self, name: str) -> "ProcessGroups":
        """The same communicators, and the store under a prefix. Local."""
        return replace(self, store=dist.PrefixStore(name, self.store))


class World:
    """All processes of a launch: creates `comm`, then the groups (`split`). Collective: world."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch, self.device = launch, device
        os.environ["FMMETA_GLOBAL_RANK"] = str(launch.global_rank)  # RANK will be the group's
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        self.warnings = idle_accelerator()  # of the device and the network, logged by rank 0
        self.store: Any = dist.HashStore()
        self.communicators: list[Communicator] = []
        if launch.world_size > 1:
            network.raise_file_limit(launch)
            self.store = connect_store(launch)
            self.warnings += network.check_and_choose_interface(self.store, launch)
        self.comm = self._connect("world", launch.global_rank, launch.world_size, torch.device("cpu"))
        if launch.world_size > 1 and device.type == "cuda":
            refuse_shared_gpus(self.comm, str(torch.cuda.get_device_properties(device).uuid))
        self.prepared = 0  # number of calls of run_on_first_rank_of_node
        self.secret = self.comm.broadcast_bytes(os.urandom(32))  # by gloo, so that it is never in the store
        self.nodes = Nodes.of(self.comm, launch)

    def _connect(self, name: str, rank: int, size: int, device: torch.device) -> Communicator:
        """A communicator of `size` ranks: NCCL on GPUs, gloo on CPUs. Collective: these ranks."""
        backend = None
        if size > 1:
            make: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
            backend = make(dist.PrefixStore(name, self.store), rank, size, TIMEOUT)
        return self._communicator(name, backend, rank, size, device)

    def _communicator(
        self, name: str, backend: Any, rank: int, size: int, device: torch.device
    ) -> Communicator:
        """A communicator that `close` closes. On GPUs it has a gloo communicator too. Collective: its
        ranks.
        """
        on_host = None
        if device.type == "cuda":
            on_host = self._connect(f"{name}_host", rank, size, torch.device("cpu"))
        self.communicators.append(Communicator(backend, rank, size, device, on_host))
        return self.communicators[-1]

    def run_on_first_rank_of_node(self, doing: str, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` on the first rank of every node and, when it has ended there, on the other ranks, which
        find its files prepared. Collective: world.

        An error of one rank is raised on all ranks. A rank that has waited for the first rank of its node for
        `timeout_s` raises `UsageError` at once. The second rank of a node logs that it waits.
        """
        rank = self.launch.global_rank
        first = self.nodes.first(rank)
        self.prepared += 1
        shared, key = SharedStore(self.store, self.secret), f"first_on_node/{self.prepared}/{first}"
        outcome, result = "failed", None
        if rank != first:
            outcome = self._wait_for(shared, key, f"rank {first} on {platform.node()} ({doing})", timeout_s)
        # ranks of a node that is done wait here for the first ranks of other nodes
        self.comm.set_timeout(max(TIMEOUT.total_seconds(), timeout_s + MARGIN_S))
        with self.comm.raise_on_all(doing):
            try:
                if rank == first or outcome == "done":  # if it failed there, every rank raises that error
                    result = work()
                    outcome = "done"
            finally:
                if rank == first:
                    shared.set(key, outcome)
        self.comm.set_timeout(TIMEOUT.total_seconds())
        return cast("T", result)

    def _wait_for(self, shared: SharedStore, key: str, peer: str, timeout_s: float) -> str:
        """The value of `key`, once `peer` has set it."""
        began, logged, rank = time.monotonic(), 0.0, self.launch.global_rank
        while not (outcome := shared.get(key)):
            waited = time.monotonic() - began
            if waited > timeout_s:
                text = (
                    f"prepare_timeout={timeout_s:g}: rank {rank} has waited {waited:.0f} s for {peer}; raise"
                    " it, or look there"
                )
                self._log_on_second_rank(f"error: {text}")
                raise UsageError(text)
            if waited - logged >= LOG_S:
                logged = waited
                self._log_on_second_rank(
                    f"rank {rank} waits for {peer}: {waited:.0f} s so far, {timeout_s:g} s at most"
                )
            time.sleep(0.05)
        return outcome

    def _log_on_second_rank(self, text: str) -> None:
        """Log a line on one waiting rank of each node."""
        if self.nodes.is_second(self.launch.global_rank):
            LOGGER.warning("%s", text, extra=STDERR)

    def split(self, group_size: int, default_group: bool = True) -> ProcessGroups:
        """Make groups of `group_size`; with `default_group` each becomes the default world of its processes.

        Sets RANK and WORLD_SIZE to the group's values and LOCAL_RANK to the number of the GPU, which
        DeepSpeed and transformers read. Collective: world.
        """
        layout, gpu = Layout(self.launch, group_size), self.device.index
        os.environ.update(
            RANK=str(layout.group_rank),
            WORLD_SIZE=str(group_size),
            LOCAL_RANK=str(self.launch.local_rank if gpu is None else gpu),
        )
        backend = background = None
        name = f"group{layout.group_index}"
        if default_group or group_size > 1:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(name, self.store),
                rank=layout.group_rank,
                world_size=group_size,
                timeout=TIMEOUT,
            )
            backend = dist.group.WORLD
        group = self._communicator(name, backend, layout.group_rank, group_size, self.device)
        cross = self._connect(f"cross{layout.group_rank}", layout.group_index, layout.num_groups, self.device)
        if layout.group_index == 0:
            background = self._connect("background", layout.group_rank, group_size, torch.device("cpu"))
        store = dist.PrefixStore("claims", self.store)
        return ProcessGroups(layout, self.comm, group, cross, self.comm, self.device, background, store)

    def shared_store(self) -> SharedStore | None:
        """A store that all processes share, for one thread; None for a process that is alone."""
        if self.launch.world_size == 1 or self.store is None:
            return None
        return SharedStore(dist.PrefixStore("board", self.store.clone()), self.secret)

    def close(self) -> None:
        """Close the process groups of this process. Local, so that it also serves after a failure.

        Their threads end here: threads that live until the interpreter exits can abort the process (exit code
        134). DeepSpeed's own call also clears the module globals in which it keeps groups and `mpu`.
        """
        for communicator in self.communicators:
            on_gpu = communicator.device.type == "cuda"
            if on_gpu and communicator.backend not in (None, dist.group.WORLD):
                # torch does not know the communicators that were made directly: NCCL would keep their memory
                with suppress(RuntimeError):  # another rank has ended
                    (communicator.backend.abort if sys.exc_info()[0] else communicator.backend.shutdown)()
        deepspeed = sys.modules.get("deepspeed.comm")
        owner: Any = deepspeed if deepspeed and deepspeed.is_initialized() else dist
        if dist.is_initialized():
            owner.destroy_process_group()
        for communicator in self.communicators:
            communicator.backend = None
        self.store = None


def refuse_shared_gpus(comm: Communicator, uuid: str) -> None:
    """Raise `UsageError` on all ranks if two of them have the GPU `uuid`. NCCL would notice it only where
    both are in one communicator. Collective: comm (world).
    """
    found: dict[tuple[str, str], int] = {}
    for rank, (gpu, node) in enumerate(comm.gather([uuid, platform.node()])):
        first = found.setdefault((gpu, node), rank)
        if first != rank:
            raise UsageError(
                f"world_size={comm.size}: ranks {first} and {rank} have the same GPU of"
                f" {node}; start as many ranks per node as it has GPUs, and show each all of"
                " them or its own one (srun --gpus-per-task=1)"
            )


def subgroup(group: Communicator, ranks: Sequence[int]) -> Communicator | None:
    """A communicator of some ranks of the default group; None on its other ranks. Collective: group."""
    backend = dist.new_group(list(ranks))
    if group.rank not in ranks:
        return None
    return Communicator(backend, list(ranks).index(group.rank), len(ranks), group.device)


_stores: dict[Launch, dist.Store] = {}
"""Kept for the next run of this process: the rank that hosts the store may be in its earlier run still."""


def connect_store(launch: Launch) -> dist.Store:
    """The key-value store of a launch of several ranks, under a prefix that no earlier attempt or run has
    used.

    Raises `UsageError`. Collective: world.
    """
    store = _stores[launch] = _stores.get(launch) or open_store(launch)
    generation = agree_on_generation(store, launch.global_rank, launch.world_size, TIMEOUT.total_seconds())
    return dist.PrefixStore(generation, store)


def open_store(launch: Launch) -> dist.Store:
    """Host or join the store of a launch. Raises `UsageError`. Collective: world."""
    os.environ.update(
        MASTER_ADDR=launch.master_addr,
        MASTER_PORT=str(launch.master_port),
        RANK=str(launch.global_rank),
        WORLD_SIZE=str(launch.world_size),
    )
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun is the store host
    store: dist.Store | None = None
    try:
        if launch.global_rank == 0 and not has_agent_store and network.is_loopback(launch.master_addr):
            # torch's own store listens on all interfaces; where the port is in use, torch raises below
            with suppress(OSError):
                store = listening_store(launch.master_addr, launch.master_port)
        return store or next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UsageError(
            f"master_port={launch.master_port} is in use on {platform.node()}; give the launch"
            f" another, such as {launch.how_to_give('MASTER_PORT', launch.master_port + 1)}"
        ) from None


def listening_store(host: str, port: int) -> dist.TCPStore:
    """A store that this process hosts on the address `host` alone; port 0: any. Raises `OSError`."""
    listener = network.listen(host, port)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        multi_tenant=port > 0,
        master_listen_fd=listener.detach(),
    )


def connect_to_store(address: str, name: str, timeout: timedelta) -> Any:
    """A client of the store at `address`, under the prefix `name`. Raises `RuntimeError`."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(name, store)


def connect_gloo(address: str, name: str, rank: int, size: int, timeout: timedelta, own_address: str) -> Any:
    """A gloo backend of `size` ranks that meet at the store of `address`, under a name that is used once.

    own_address: the address that gloo listens on, unless the user names an interface. Raises `RuntimeError`
    if one of the ranks does not come. Collective: these ranks.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, interfaces = timeout, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces in ("", network.loopback_interface()):  # the second is set for the ranks of one launch
        options._devices = [gloo.create_device(hostname=own_address)]
    else:
        options._devices = [gloo.create_device(interface=one) for one in interfaces.split(",")]
    return gloo(connect_to_store(address, name, timeout), rank, size, options)


def backends() -> tuple[bool, bool]:
    """Whether this torch has gloo, and NCCL."""
    return dist.is_gloo_available(), dist.is_nccl_available()


def idle_accelerator() -> list[str]:
    """A line if this machine has an accelerator that fmmeta does not use."""
    found = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cuda"
    line = f"the accelerator {found} of this machine is not used: fmmeta computes on CUDA devices or the CPU"
    return [line] if found != "cuda" else []


def chosen_bf16(config: Config, zero_stage: int, comm: Communicator, device: torch.device) -> bool:
    """Whether the weights are in bf16, unless the DeepSpeed file says it: as set, else where the GPU of every
    rank has it. Raises `UsageError`. Collective: comm (world).
    """
    if config.bf16 is not None:
        return config.bf16
    with comm.raise_on_all("choosing the precision"):
        here = has_bf16(device) and suits_bf16(config, zero_stage)
    return all(comm.gather(here))


def suits_bf16(config: Config, zero_stage: int) -> bool:
    """Whether bf16 is the default on GPUs for these settings. Raises `UsageError`."""
    twice = differentiates_twice(zero_stage, config.pipeline_stages, config.tensor_parallel_size)
    return bf16_by_default(config.algorithm, bool(config.lora_r) and second_order_by_autograd(config, twice))


def has_bf16(device: torch.device) -> bool:
    """Whether this is a GPU that computes in bf16; such GPUs have TF32 too."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def set_matmul_precision(config: Config) -> None:
    """Set torch's precision of fp32 matrix products, until `restored_process` ends, if one is given."""
    if config.float32_matmul_precision is None:
        return
    undo_later(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision(config.float32_matmul_precision)


def pick_device(launch: Launch, small: bool = False) -> torch.device:
    """The GPU of this local rank, or the CPU with its cores shared out over the ranks of the node.

    A scheduler may show each rank its own GPU alone, which is then number 0 everywhere.

    small: a model for which one core is as fast as several. More threads would wait for each other in every
    operation, and for any program that keeps one of their cores busy.
    """
    if torch.cuda.is_available():
        gpu = launch.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        return torch.device("cuda", gpu)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = 1 if small else (os.cpu_count() or 1) // launch.local_world_size
        torch.set_num_threads(max(1, cores))
    return torch.device("cpu")
