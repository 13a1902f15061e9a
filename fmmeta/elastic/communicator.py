"""Groups that come and go: the verbs of `cross` and `everyone` among those who take part in the next outer
step.

    form        ask the lighthouse for the groups that are alive and take part in this step; connect to them
    a verb      fails on all ranks of a group if it fails on one (`PeerLost`): the group retries the step
    leave       be missed by nobody

Tensors travel by gloo in host memory on every kind of device: a NCCL communicator that has lost a rank cannot
be given up without the process. Each meeting has a communicator of its own, made at the first member's venue.

Nothing here knows theta; who has to heal from whom is told (roll.py), and elastic/healing.py does it. No
pickles: notes are JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from fmmeta.common.errors import PeerLost
from fmmeta.elastic.lighthouse_client import LighthouseClient, coordination, first_line, reachable_as
from fmmeta.elastic.membership import GroupInfo, Membership
from fmmeta.parallel.process_groups import (
    Communicator,
    RendezvousStore,
    connect_gloo,
    is_proof,
    is_reachable,
    proof,
)

MEET_S = 10.0  # that members of a quorum wait for each other to meet; gloo tries up to four times for so long
KNOCK_S = 5.0  # that a member's kernel has to answer for it before they meet


class ElasticCommunicator(Communicator):
    """`cross` of groups that come and go.

    `own`: the ranks of this group, gloo. Raises `UsageError` without a lighthouse.
    """

    def __init__(self, own: Communicator, lighthouse: str, name: str) -> None:
        super().__init__(None, 0, 1, torch.device("cpu"))
        self.own, self.mark, self.secret = own, "", b""
        mine = f"{name}:{uuid.uuid4().hex[:8]}"  # who comes again is somebody else
        self.name = own.gather_bytes(mine.encode())[0].decode()
        self.fresh, self.writes = True, False
        self.patience_s = MEET_S
        self.met = ""  # the meeting that `backend` is from
        self.line: LighthouseClient | None = None  # rank 0's
        self.venue: Any = None
        with own.raise_on_all("looking for the lighthouse"):
            self.host = reachable_as(lighthouse)
            if own.rank == 0:
                self.line = LighthouseClient(lighthouse, self.name, coordination())
                self.venue = RendezvousStore(self.line.host)

    def form(self, step: int, patience_s: float) -> Membership:
        """Wait for the others of this outer step and meet them.

        Raises `PeerLost` where one goes at this very moment, and `MachineFault` where the lighthouse is
        silent for `patience_s`. Collective: own, and everyone else's.
        """
        told = b""
        with self.own.raise_on_all("asking the lighthouse"):
            if self.line is not None:
                self.line.begin_beating(self.venue.address, self.own.size)
                told = json.dumps(self._ask(self.line, step, patience_s)).encode()
        number, created, listed, strangers = json.loads(self.own.gather_bytes(told)[0])
        members = tuple(GroupInfo(**one) for one in listed)
        here = next(n for n, member in enumerate(members) if member.name == self.name)
        anew = not self.met or len(members) != self.size or any(member.met != self.met for member in members)
        if anew:  # alike for all: those of one meeting know the same size
            self.met, self.backend = "", None
            self.rank, self.size = here, len(members)
            meeting = f"{number}/{created}"
            self._attempt(
                lambda: self._meet(members, f"crew/{meeting}/{self.own.rank}"), "meeting the other groups"
            )
            self.met = meeting
            self.set_timeout(self.patience_s)
        return Membership(members, here, anew, strangers)

    def _ask(self, line: LighthouseClient, step: int, patience_s: float) -> Any:
        """The quorum: its number, a name used once, its members, and how many others the lighthouse lists."""
        mine = {"fresh": self.fresh, "writes": self.writes, "met": self.met, "mark": self.mark}
        mine["proof"] = proof(self.secret, self.name, self.venue.address, step, mine)
        found = line.ask(
            patience_s,
            address="",
            store_address=self.venue.address,
            step=step,
            world_size=self.own.size,
            shrink_only=False,
            data=mine,
        )
        listed = list(filter(None, map(self._introduced, found.participants)))
        created = f"{found.created.seconds}.{found.created.nanos}"
        strangers = len(found.participants) - len(listed)
        return [found.quorum_id, created, sorted(listed, key=lambda one: one["name"]), strangers]

    def _introduced(self, one: Any) -> dict[str, Any] | None:
        """A member of the quorum as it presents itself; None if it does not know the secret of the run."""
        data = dict(one.data or {})
        known = is_proof(
            data.pop("proof", None), self.secret, one.replica_id, one.store_address, one.step, data
        )
        return (
            {"name": one.replica_id, "venue": one.store_address, "step": one.step, **data} if known else None
        )

    def _meet(self, members: tuple[GroupInfo, ...], name: str) -> None:
        """Raises `RuntimeError` where one of them does not come; at once where its process has ended since it
        was counted.
        """
        if self.size == 1:
            return
        for member in members:
            if member.name != self.name and not is_reachable(member.venue, KNOCK_S):
                raise RuntimeError(f"group {member.name.rpartition(':')[0]} has ended")
        self.backend = connect_gloo(
            members[0].venue, name, self.rank, self.size, timedelta(seconds=MEET_S), self.host
        )

    def _attempt(self, act: Callable[[], Any], doing: str) -> None:
        """Do something with the other groups; if it fails on one rank of this group, raise `PeerLost` on all.

        Collective: own.
        """
        failure = ""
        try:
            act()
        except RuntimeError as error:  # all that gloo and its store raise
            failure = first_line(error) or type(error).__name__
        if float(self.own.sum_(torch.tensor([float(bool(failure))]))) > 0:
            self.met, self.backend = "", None  # sockets close: the others need not wait for a timeout
            raise PeerLost(f"{doing}: {failure or 'another rank of this group has failed'}")

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Iterator[slice]:
        """As the base; it has ended when this returns.

        Raises `PeerLost`. Collective: this communicator, own.
        """
        if self.size > 1:
            self._attempt(lambda: list(Communicator.begin_sum_(self, tensor, wire)), "a sum")
        return iter([slice(0, tensor.numel())])

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """As the base. Raises `PeerLost`. Collective: this communicator, own."""
        if self.size > 1:
            self._attempt(lambda: Communicator.broadcast_(self, tensor, root), "a broadcast")
        return tensor

    def set_timeout(self, seconds: float) -> None:
        self.patience_s = seconds
        super().set_timeout(seconds)

    def leave(self) -> None:
        """Take part no longer; the others see it at once."""
        self.backend = None
        if self.line is not None:
            self.line.stop_beating()


class AllGroups(Communicator):
    """All ranks of all groups of a crew: first the group's own, then equal places across."""

    def __init__(self, own: Communicator, crew: ElasticCommunicator) -> None:
        self.own, self.crew, self.backend, self.device, self.bytes_sent = own, crew, None, own.device, 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.crew.rank * self.own.size + self.own.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.crew.size * self.own.size

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Iterator[slice]:
        """As the base; it has ended when this returns. Raises `PeerLost`. Collective: everyone."""
        sent = self.crew.bytes_sent
        self.crew.sum_(self.own.sum_(tensor, wire), wire)
        self.crew.bytes_sent = sent  # those of meta-gradients are counted, as without a crew
        return iter([slice(0, tensor.numel())])

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """As the base: groups in the order of their names, then ranks.

        Raises `PeerLost`. Collective: everyone.
        """
        sent = self.crew.bytes_sent
        mine = json.dumps([part.hex() for part in self.own.gather_bytes(payload)]).encode()
        told = self.crew.gather_bytes(mine)
        self.crew.bytes_sent = sent
        return [bytes.fromhex(part) for group in told for part in json.loads(group)]

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        raise NotImplementedError("nobody needs it")

    def set_timeout(self, seconds: float) -> None:
        """Both have their own."""
