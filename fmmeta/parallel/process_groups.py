"""Process groups; the only module that imports torch.distributed.

Each worker group is its own default world, so that DeepSpeed and transformers see only the ranks that share
its model (docs/design.md). There are three communicators:

    world   all processes; gloo; control only: agreement, small byte strings, barriers
    group   the ranks that hold one model; the default process group of each of them
    cross   the ranks of equal group_rank in all groups; reduces meta-gradient shards only

With --elastic a launch is one group: `world` contains its ranks, and `cross` connects groups that join and
leave (elastic/communicator.py). `all_groups` contains all processes of all groups in both cases.

A communicator can sum, broadcast, gather bytes and wait at a barrier. It sends no pickles.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fmmeta.common.errors import PeerError, UsageError
from fmmeta.common.security import disk_trouble
from fmmeta.parallel import network
from fmmeta.parallel.layout import Launch, Layout
from fmmeta.parallel.nodes import Nodes
from fmmeta.parallel.rendezvous import agree_on_generation

TIMEOUT = timedelta(minutes=30)
BUCKET = 2**23  # elements of a reduction that travel together: 32 MiB in fp32
PROOF = 64  # characters of a code (`proof`)
SAY_S = 10.0  # between two words of a rank that waits for another one
T = TypeVar("T")


def finish_reduce(part: torch.Tensor, staged: torch.Tensor, work: Any) -> None:
    """Wait for a reduction and bring the result to where it belongs."""
    work.wait()
    if staged is not part:
        part.copy_(staged)


class Communicator:
    """A set of `size` ranks, this one being `rank`. With one rank every verb returns at once."""

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device) -> None:
        self.backend, self.rank, self.size, self.device = backend, rank, size, device
        self.bytes_sent = 0  # payload handed to the reductions since it was last set to 0

    def sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> torch.Tensor:
        """Replace `tensor` by its sum over the ranks.

        `wire`: what travels and is added (default: the tensor's own dtype). Collective: this communicator.
        """
        for _ in self.begin_sum_(tensor, wire):
            pass
        return tensor

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Iterator[slice]:
        """Begin `sum_`, bucket by bucket; return an iterator of slices of the flat tensor.

        Exhaust it exactly once. Each slice is complete when it is yielded; other communicators may be used in
        between. A tensor on another device than the communicator's is copied two buckets at a time, and is
        complete when this returns. Collective: this communicator.
        """
        flat = tensor.view(-1)
        if self.size == 1:
            return iter([slice(0, flat.numel())])
        wire, away = wire or tensor.dtype, tensor.device != self.device
        under_way: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        parts = flat.split(BUCKET)
        for number, part in enumerate(parts):
            staged = part.to(self.device, wire)
            under_way.append((part, staged, self.backend.allreduce([staged])))
            while away and len(under_way) > (number + 1 < len(parts)):
                finish_reduce(*under_way.pop(0))
        self.bytes_sent += tensor.numel() * wire.itemsize
        return self._arrivals(under_way, [part.numel() for part in parts])

    @staticmethod
    def _arrivals(
        under_way: list[tuple[torch.Tensor, torch.Tensor, Any]], lengths: list[int]
    ) -> Iterator[slice]:
        begin = 0
        for length in lengths:
            if under_way:
                finish_reduce(*under_way.pop(0))
            yield slice(begin, begin + length)
            begin += length

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Replace `tensor` by the root's. Collective: this communicator."""
        if self.size > 1:
            staged = tensor.to(self.device)
            options = dist.BroadcastOptions()
            options.rootRank = root
            self.backend.broadcast([staged], options).wait()
            if staged is not tensor:
                tensor.copy_(staged)
        return tensor

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's byte string, in the order of ranks. Collective: this communicator."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.sum_(lengths)
        table = torch.zeros(self.size, max(1, int(lengths.max())), dtype=torch.uint8)
        table[self.rank, : len(payload)] = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
        )
        self.sum_(table)
        return [bytes(row[:length].tolist()) for row, length in zip(table, lengths.tolist(), strict=True)]

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some ranks of this one, which must be the default group; None on the others.

        Collective: this one.
        """
        backend = dist.new_group(list(ranks))
        if self.rank not in ranks:
            return None
        return Communicator(backend, list(ranks).index(self.rank), len(ranks), self.device)

    def set_timeout(self, seconds: float) -> None:
        """Give a verb up, with an exception, if a rank keeps the others waiting for longer than this."""
        if self.backend is not None:
            set_timeout = getattr(self.backend, "set_timeout", None) or self.backend._set_default_timeout
            set_timeout(timedelta(seconds=seconds))

    def barrier(self) -> None:
        """Wait for every rank. Collective: this communicator."""
        self.sum_(torch.zeros(1))

    @contextmanager
    def raise_on_all(self, doing: str) -> Iterator[None]:
        """Run a block without collectives on every rank; if one raises, all raise.

        A `UsageError` anywhere becomes the same `UsageError` everywhere (the lowest rank's). Any other
        exception is raised where it happened and becomes a `PeerError` elsewhere. Collective: this
        communicator.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure, trouble = error, disk_trouble(error)
            if trouble is not None:
                failure = UsageError(f"{trouble} (while {doing}); fix that, and run the same command again")
        kind = "" if failure is None else "usage:" if isinstance(failure, UsageError) else "crash:"
        answers = self.gather_bytes(f"{kind}{failure if failure else ''}".encode())
        failed = [(rank, text.decode()) for rank, text in enumerate(answers) if text]
        if failed:
            rank, text = min(failed, key=lambda item: (not item[1].startswith("crash:"), item[0]))
            if isinstance(failure, Exception) and not isinstance(failure, UsageError):
                raise failure
            if text.startswith("usage:"):
                raise UsageError(text.removeprefix("usage:")) from None
            raise PeerError(f"rank {rank} failed while {doing}: {text.removeprefix('crash:')}")


class SharedStore:
    """Notes by name, kept by one process (rank 0's, or torchrun's agent) and read without waiting for the
    writer. Each carries a code that needs the secret of this launch: a client of the store can
    remove notes, and write none that count.

    Nothing else works while a rank is stopped. If the keeper is the one that is stopped, every call waits:
    call from a thread that may. One thread per board.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        self.store, self.secret = store, secret

    def set(self, name: str, text: str) -> None:
        self.store.set(name, proof(self.secret, name, text) + text)

    def read(self, names: Sequence[str]) -> list[str]:
        """Values of keys that exist, in one request; empty where the writer was not a rank."""
        found = [note.decode(errors="replace") for note in self.store.multi_get(list(names))]
        return [
            note[PROOF:] if is_proof(note[:PROOF], self.secret, name, note[PROOF:]) else ""
            for name, note in zip(names, found, strict=True)
        ]

    def look(self, name: str) -> str:
        """A note; empty if there is none."""
        return self.read([name])[0] if self.store.check([name]) else ""


@dataclass
class ProcessGroups:
    """The communicators of one process."""

    layout: Layout
    world: Communicator
    group: Communicator
    cross: Communicator
    device: torch.device
    background: Communicator | None = (
        None  # the first group once more, for the threads that write checkpoints; None elsewhere
    )
    crew: Communicator | None = None  # with --elastic: all processes of the members

    @property
    def all_groups(self) -> Communicator:
        """All processes of all groups that take part."""
        return self.crew or self.world

    @property
    def first(self) -> bool:
        """Whether this process logs and writes for all."""
        return self.layout.launch.global_rank == 0


class World:
    """Every process of the launch, before groups exist: `join`, agree on a group size, `split`, `leave`."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch, self.device = launch, device
        os.environ["FMMETA_GLOBAL_RANK"] = str(launch.global_rank)  # RANK will be the group's
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        backend = None
        self.said: list[str] = []  # of the network, for rank 0 to say
        self.store: dist.Store | None = dist.HashStore()
        if launch.world_size > 1:
            os.environ.update(
                MASTER_ADDR=launch.master_addr,
                MASTER_PORT=str(launch.master_port),
                RANK=str(launch.global_rank),
                WORLD_SIZE=str(launch.world_size),
            )
            try:
                self.store = loopback_store(launch) or next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                raise UsageError(
                    f"master_port={launch.master_port} is in use on {platform.node()}; give the launcher"
                    f" another, such as --master_port {launch.master_port + 1}"
                ) from None
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                met = agree_on_generation(
                    cast(Any, self.store), launch.global_rank, launch.world_size, TIMEOUT.total_seconds()
                )
                self.store = dist.PrefixStore(met, self.store)
            self.said = network.check_and_choose_interface(
                cast(Any, self.store), launch, device.type == "cuda"
            )
            store = dist.PrefixStore("world", self.store)
            backend = dist.ProcessGroupGloo(store, launch.global_rank, launch.world_size, TIMEOUT)
        self.comm = Communicator(backend, launch.global_rank, launch.world_size, torch.device("cpu"))
        self.made, self.prepared = [self.comm], 0
        self.secret = self.comm.gather_bytes(os.urandom(32))[0]  # by gloo, so that it is never in the store
        self.nodes = Nodes.of(self.comm, launch)

    def run_on_first_rank_of_node(
        self, doing: str, work: Callable[[], T], timeout_s: float, say: Callable[[str], None] | None = None
    ) -> T:
        """Run `work` on the first rank of every node, and when it is done there on the others, which find it
        prepared.

        The second rank of a node says whom it waits for. What one rank raises all raise; but after
        `timeout_s` of waiting for a rank that does not answer, those that wait raise `UsageError` without it.
        Collective: world.
        """
        assert self.store is not None, "before close"
        board = SharedStore(self.store, self.secret)
        launch, say = self.launch, say or (lambda text: print(f"fmmeta: {text}", file=sys.stderr, flush=True))
        first = self.nodes.first(launch.global_rank)
        self.prepared += 1
        key, done, result = f"first_on_node/{self.prepared}/{first}", "failed", None
        prepared = launch.global_rank == first or self._wait(board, key, doing, first, timeout_s, say)
        with self.comm.raise_on_all(doing):
            try:
                if prepared:  # if not, every rank raises that rank's error
                    result = work()
                    done = "done"
            finally:
                if launch.global_rank == first:
                    board.set(key, done)
        return cast("T", result)

    def _wait(
        self,
        board: SharedStore,
        key: str,
        doing: str,
        first: int,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> bool:
        """Whether the rank `first` has done it."""
        began, told, mine = time.monotonic(), 0.0, self.launch.global_rank
        speaks, whom = self.nodes.second(mine), f"rank {first} on {platform.node()} ({doing})"
        while not (found := board.look(key)):
            waited = time.monotonic() - began
            if waited > timeout_s:
                text = (
                    f"prepare_timeout={timeout_s:g}: rank {mine} has waited {waited:.0f} s for {whom}; raise"
                    " it, or look there"
                )
                if speaks:
                    say(f"error: {text}")
                raise UsageError(text)
            if speaks and waited - told >= SAY_S:
                told = waited
                say(f"rank {mine} waits for {whom}: {waited:.0f} s so far, {timeout_s:g} s at most")
            time.sleep(0.05)
        return found == "done"

    def split(self, group_size: int, default_group: bool = True) -> ProcessGroups:
        """Make groups of `group_size`; with `default_group` each becomes the default world of its processes.

        Sets RANK and WORLD_SIZE to the group's values, which DeepSpeed and transformers read. Collective:
        world.
        """
        layout = Layout(self.launch, group_size)
        assert self.store is not None, "split before close"
        os.environ.update(
            RANK=str(layout.group_rank), WORLD_SIZE=str(group_size), LOCAL_RANK=str(self.launch.local_rank)
        )
        on_gpu = self.device.type == "cuda"
        group_backend = None
        if default_group or group_size > 1:
            store = dist.PrefixStore(f"group{layout.group_index}", self.store)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=layout.group_rank,
                world_size=group_size,
                timeout=TIMEOUT,
            )
            group_backend = dist.group.WORLD
        cross_backend = None
        if layout.num_groups > 1:
            store = dist.PrefixStore(f"cross{layout.group_rank}", self.store)
            make: Any = dist.ProcessGroupNCCL if on_gpu else dist.ProcessGroupGloo
            cross_backend = make(store, layout.group_index, layout.num_groups, TIMEOUT)
        group = Communicator(group_backend, layout.group_rank, group_size, self.device)
        cross = Communicator(cross_backend, layout.group_index, layout.num_groups, self.device)
        background = None
        if layout.group_index == 0:
            store = dist.PrefixStore("background", self.store)
            backend = (
                dist.ProcessGroupGloo(store, layout.group_rank, group_size, TIMEOUT)
                if group_size > 1
                else None
            )
            background = Communicator(backend, layout.group_rank, group_size, torch.device("cpu"))
        self.made += [group, cross, *([background] if background else [])]
        return ProcessGroups(layout, self.comm, group, cross, self.device, background)

    def board(self) -> SharedStore | None:
        """A board of notes between all processes, for one thread; None for a process that is alone."""
        if self.launch.world_size == 1 or self.store is None:
            return None
        return SharedStore(dist.PrefixStore("board", cast(Any, self.store).clone()), self.secret)

    def close(self) -> None:
        """Close the process groups of this process. Not collective, so that it also serves after a failure.

        Their threads end here: left to the interpreter's last moments they can abort the process (exit code
        134).
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        for communicator in self.made:
            communicator.backend = None
        self.store = None


def loopback_store(launch: Launch) -> dist.Store | None:
    """The store of a launch whose ranks meet at a loopback address, on rank 0 where no launcher keeps it:
    torch's own listens on all interfaces. None otherwise, also where the port is in use (torch then says so).
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.global_rank or agent or not network.is_loopback(launch.master_addr):
        return None
    try:
        return listening_store(launch.master_addr, launch.master_port)
    except OSError:
        return None


def listening_store(host: str, port: int) -> dist.TCPStore:
    """A store of this process that listens on the address `host` alone; port 0: any. Raises `OSError`."""
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


class RendezvousStore:
    """Where processes of different launches meet: notes kept by the process that opens it, at `address`
    (host:port).
    """

    def __init__(self, host: str) -> None:
        self.store = listening_store(host, 0)
        self.address = f"{host}:{self.store.port}"


def is_reachable(address: str, timeout_s: float) -> bool:
    """Whether the process that has opened a `RendezvousStore` is there: the kernel refuses for one that has
    ended.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def connect_gloo(address: str, name: str, rank: int, size: int, timeout: timedelta, here: str) -> Any:
    """A gloo backend of `size` ranks that meet at a `RendezvousStore` under a name that is used once. here:
    the own address, which gloo listens on unless the user names an interface. Raises `RuntimeError` where one
    of them does not come. Collective: these ranks.
    """
    host, _, port = address.rpartition(":")
    notes = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, named = timeout, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named in ("", network.loopback_interface()):  # the second is set for the ranks of one launch
        options._devices = [gloo.create_device(hostname=here)]
    else:
        options._devices = [gloo.create_device(interface=name) for name in named.split(",")]
    return gloo(dist.PrefixStore(name, notes), rank, size, options)


def proof(secret: bytes, *said: Any) -> str:
    """Proof that the writer knows the secret: an HMAC of PROOF hex digits."""
    return hmac.new(secret, json.dumps(said, sort_keys=True).encode(), "sha256").hexdigest()


def is_proof(found: Any, secret: bytes, *said: Any) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), proof(secret, *said).encode())


def backends() -> tuple[bool, bool]:
    """Whether this torch has gloo, and NCCL."""
    return dist.is_gloo_available(), dist.is_nccl_available()


def pending_type() -> Any:
    """A pending communication; a caller that needs its result calls `wait` on it, DeepSpeed too."""
    return dist.Work


def pick_device(launch: Launch) -> torch.device:
    """The GPU of this local rank, or the CPU with its cores shared out over the ranks of the node."""
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    return torch.device("cpu")
