"""Groups that come and go: who takes part in the next outer step, and the verbs of `cross` and `everyone` among them.

    form        ask torchft's lighthouse for a quorum: everybody who wants to take part in this step and is alive; meet them
    a verb      fails on all ranks of a group if it fails on one (`Lost`): the group then abandons the step and forms anew
    leave       be missed by nobody

torchft 0.2.0 gives the quorum (LighthouseClient) and the beats by which the dead are told from the slow (ManagerServer, in
threads that Python does not hold up). Tensors travel by gloo in host memory on every kind of device: a NCCL communicator that has
lost a rank cannot be given up without the process. Each quorum has a communicator of its own, met at the first member's venue.

Nothing here knows theta; who has to heal from whom is told (`Roll`), and attendance.py does it. No pickles: notes are JSON.
Whoever reaches the lighthouse or a venue can take part or disturb: a network of trusted machines, as for any torch launcher.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from fmmeta.config import UsageError
from fmmeta.parallel.communicator import Communicator, Venue, meet_at
from fmmeta.signals import Fault

BEAT, CONNECT = timedelta(milliseconds=250), timedelta(seconds=10)
ASK_S = 5.0  # of one question to the lighthouse
MEET_S = 20.0  # that members of a quorum wait for each other to meet


class Lost(RuntimeError):
    """A group has gone, or cannot be reached: what was being summed is worth nothing."""


@dataclass(frozen=True)
class Member:
    """A group as it presents itself for an outer step."""

    name: str
    venue: str
    step: int
    fresh: bool  # it has not taken part yet
    writes: bool
    met: str  # the meeting that its communicator is from; empty: none, or it has failed
    mark: str  # settings and layout, which all must share


@dataclass(frozen=True)
class Roll:
    """Who takes part in a step, alike for all of them; `here` is this group. Members are in the order of their names."""

    members: tuple[Member, ...]
    here: int
    anew: bool = False  # they have met for this step: what follows a change is judged by this, since each remembers other rolls

    @property
    def root(self) -> int:
        """Whom the others heal from: the first of those furthest on, those that are new coming last."""
        return min(range(len(self.members)), key=lambda n: (self.members[n].fresh, -self.members[n].step, n))

    def heals(self, number: int) -> bool:
        """Whether a member has to take its state from the root: it is new, or has missed the end of a step."""
        member, root = self.members[number], self.members[self.root]
        return number != self.root and (member.fresh or member.step != root.step)

    @property
    def writer(self) -> int:
        """The one that writes checkpoints and metrics: who did so before, else the first that need not heal."""
        return min(range(len(self.members)), key=lambda n: (not self.members[n].writes, self.heals(n), n))


class Crew(Communicator):
    """`cross` of groups that come and go. `own`: the ranks of this group, gloo. Raises `UsageError` without a lighthouse."""

    def __init__(self, own: Communicator, lighthouse: str, name: str) -> None:
        super().__init__(None, 0, 1, torch.device("cpu"))
        self.own, self.lighthouse, self.mark = own, lighthouse, ""
        mine = f"{name}:{uuid.uuid4().hex[:8]}"  # who comes again is somebody else
        self.name = own.gather_bytes(mine.encode())[0].decode()
        self.fresh, self.writes = True, False
        self.patience_s = MEET_S
        self.met = ""  # the meeting that `backend` is from
        self.client: Any = None
        self.beats: Any = None
        self.venue: Any = None
        with own.together("looking for the lighthouse"):
            if own.rank == 0:
                self._reach(coordination())

    def _reach(self, ft: Any) -> None:
        host = reachable_as(self.lighthouse)
        try:
            self.client = ft.LighthouseClient(self.lighthouse, CONNECT)
        except Exception as error:
            raise UsageError(f"lighthouse={self.lighthouse} does not answer ({first_line(error)}); start `fmmeta lighthouse` "
                             "there, or give the address that it prints") from None  # fmt: skip
        self.venue = Venue(host)
        self.beating = lambda: ft.ManagerServer(
            replica_id=self.name, lighthouse_addr=self.lighthouse, hostname=host, bind="[::]:0", store_addr=self.venue.address,
            world_size=self.own.size, heartbeat_interval=BEAT, connect_timeout=CONNECT, quorum_retries=0)  # fmt: skip

    def form(self, step: int, patience_s: float) -> Roll:
        """Wait for the others of this outer step and meet them. Raises `Lost` where one goes at this very moment, and `Fault`
        where the lighthouse is silent for `patience_s`. Collective: own, and everyone else's.
        """
        told = b""
        with self.own.together("asking the lighthouse"):
            if self.own.rank == 0:
                if self.beats is None:  # from here on the others wait for this group
                    self.beats = self.beating()
                told = json.dumps(self._ask(step, patience_s)).encode()
        number, created, listed = json.loads(self.own.gather_bytes(told)[0])
        members = tuple(Member(**one) for one in listed)
        here = next(n for n, member in enumerate(members) if member.name == self.name)
        anew = not self.met or len(members) != self.size or any(member.met != self.met for member in members)
        if anew:  # alike for all: those of one meeting know the same size
            self.met, self.backend = "", None
            self.rank, self.size = here, len(members)
            meeting = f"{number}/{created}"
            self._attempt(lambda: self._meet(members[0].venue, f"crew/{meeting}/{self.own.rank}"), "meeting the other groups")
            self.met = meeting
            self.patience(self.patience_s)
        return Roll(members, here, anew)

    def _ask(self, step: int, patience_s: float) -> Any:
        """The quorum: its number, a name used once, its members."""
        mine = {"fresh": self.fresh, "writes": self.writes, "met": self.met, "mark": self.mark}
        began = time.monotonic()
        while True:
            try:
                found = self.client.quorum(self.name, timedelta(seconds=ASK_S), address="", store_address=self.venue.address,
                                           step=step, world_size=self.own.size, shrink_only=False, data=mine)  # fmt: skip
                break
            except Exception as error:  # the same kinds while others are at work and when it is gone
                if time.monotonic() - began > patience_s:
                    raise Fault(f"lighthouse={self.lighthouse} has had no quorum for {patience_s:.0f} s ({first_line(error)}); "
                                "look whether it runs; the last checkpoint is whole") from None  # fmt: skip
                time.sleep(0.1)
        listed = [
            {"name": one.replica_id, "venue": one.store_address, "step": one.step, **one.data} for one in found.participants
        ]
        return [found.quorum_id, f"{found.created.seconds}.{found.created.nanos}", sorted(listed, key=lambda one: one["name"])]

    def _meet(self, venue: str, name: str) -> None:
        if self.size > 1:
            self.backend = meet_at(venue, name, self.rank, self.size, timedelta(seconds=MEET_S))

    def _attempt(self, act: Callable[[], Any], doing: str) -> None:
        """Do something with the other groups; if it fails on one rank of this group, raise `Lost` on all. Collective: own."""
        failure = ""
        try:
            act()
        except RuntimeError as error:  # all that gloo and its store raise
            failure = first_line(error) or type(error).__name__
        if float(self.own.sum_(torch.tensor([float(bool(failure))]))) > 0:
            self.met, self.backend = "", None  # sockets close: the others need not wait for a timeout
            raise Lost(f"{doing}: {failure or 'another rank of this group has failed'}")

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """As the base; it has ended when this returns. Raises `Lost`. Collective: this communicator, own."""
        if self.size > 1:
            self._attempt(lambda: Communicator.begin_sum_(self, tensor, wire)(), "a sum")
        return lambda: tensor

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """As the base. Raises `Lost`. Collective: this communicator, own."""
        if self.size > 1:
            self._attempt(lambda: Communicator.broadcast_(self, tensor, root), "a broadcast")
        return tensor

    def patience(self, seconds: float) -> None:
        self.patience_s = seconds
        super().patience(seconds)

    def leave(self) -> None:
        """Take part no longer; the others see it at once."""
        self.backend = None
        if self.beats is not None:
            self.beats.shutdown()
        self.beats = None


class Everyone(Communicator):
    """All ranks of all groups of a crew: first the group's own, then equal places across."""

    def __init__(self, own: Communicator, crew: Crew) -> None:
        self.own, self.crew, self.backend, self.device, self.bytes_sent = own, crew, None, own.device, 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.crew.rank * self.own.size + self.own.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.crew.size * self.own.size

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """As the base; it has ended when this returns. Raises `Lost`. Collective: everyone."""
        sent = self.crew.bytes_sent
        self.crew.sum_(self.own.sum_(tensor, wire), wire)
        self.crew.bytes_sent = sent  # those of meta-gradients are counted, as without a crew
        return lambda: tensor

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """As the base: groups in the order of their names, then ranks. Raises `Lost`. Collective: everyone."""
        sent = self.crew.bytes_sent
        mine = json.dumps([part.hex() for part in self.own.gather_bytes(payload)]).encode()
        told = self.crew.gather_bytes(mine)
        self.crew.bytes_sent = sent
        return [bytes.fromhex(part) for group in told for part in json.loads(group)]

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        raise NotImplementedError("nobody needs it")

    def patience(self, seconds: float) -> None:
        """Both have their own."""


def coordination() -> Any:
    """torchft's low-level interface. Raises `UsageError` where it is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # it tells every question otherwise
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        raise UsageError(f"elastic groups need torchft ({first_line(error)}); pip install 'fmmeta[elastic]'") from None


def reachable_as(lighthouse: str) -> str:
    """The address of this machine as the lighthouse's machine sees it. Raises `UsageError`."""
    try:
        there = urlsplit(lighthouse)
        host, port = there.hostname, there.port
        if there.scheme != "http" or not host or not port:
            raise ValueError("no http://HOST:PORT")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise UsageError(f"lighthouse={lighthouse} is no address ({error}); give http://HOST:PORT as `fmmeta lighthouse` prints "
                         "it") from None  # fmt: skip


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
