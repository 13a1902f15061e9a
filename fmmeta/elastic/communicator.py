"""Communicator across groups that join and leave: collectives among the groups of the next outer step.

    form            ask the lighthouse (lighthouse_client.py) for the live groups and connect to them
    a collective    fails on all ranks of a group if it fails on one (`PeerLost`);
                    the group then abandons the step and forms again
    leave           tell the lighthouse that this group has finished

Tensors are reduced by gloo in host memory on every device type: a NCCL communicator that has lost a rank
cannot be closed without ending the process. Each quorum has its own communicator, connected through the
store of its first member.

This module does not handle theta: membership.py decides which groups need the state of another one, and
state_transfer.py sends it. Messages are JSON, never pickles.
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
    """The `cross` communicator of groups that join and leave.

    `own`: the ranks of this group, gloo. Raises `UsageError` without a lighthouse.
    """

    def __init__(self, own: Communicator, lighthouse: str, name: str) -> None:
        super().__init__(None, 0, 1, torch.device("cpu"))
        self.own, self.mark, self.secret = own, "", b""
        mine = f"{name}:{uuid.uuid4().hex[:8]}"  # a restarted group gets a new name
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
        """Wait for the other groups of this outer step and connect to them.

        Raises `PeerLost` if a group dies meanwhile, and `MachineFault` if the lighthouse does not answer for
        `patience_s`. Collective: all groups.
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
        """The quorum: its number, a unique name, its members, and the number of other groups listed."""
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
        """A member of the quorum; None if it does not know the secret of the run."""
        data = dict(one.data or {})
        known = is_proof(
            data.pop("proof", None), self.secret, one.replica_id, one.store_address, one.step, data
        )
        return (
            {"name": one.replica_id, "venue": one.store_address, "step": one.step, **data} if known else None
        )

    def _meet(self, members: tuple[GroupInfo, ...], name: str) -> None:
        """Connect to the members. Raises `RuntimeError` if one fails; at once if its process has ended."""
        if self.size == 1:
            return
        for member in members:
            if member.name != self.name and not is_reachable(member.venue, KNOCK_S):
                raise RuntimeError(f"group {member.name.rpartition(':')[0]} has ended")
        self.backend = connect_gloo(
            members[0].venue, name, self.rank, self.size, timedelta(seconds=MEET_S), self.host
        )

    def _attempt(self, act: Callable[[], Any], doing: str) -> None:
        """Communicate with other groups; a failure on one rank of this group raises `PeerLost` on all.

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
        """Leave the elastic run; the other groups detect it at once."""
        self.backend = None
        if self.line is not None:
            self.line.stop_beating()


class AllGroups(Communicator):
    """All ranks of all groups: reduces inside each group, then across groups."""

    def __init__(self, own: Communicator, crew: ElasticCommunicator) -> None:
        self.own, self.crew, self.backend, self.device, self.bytes_sent = own, crew, None, own.device, 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.crew.rank * self.own.size + self.own.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.crew.size * self.own.size

    def begin_sum_(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> Iterator[slice]:
        """As the base; it has ended when this returns. Raises `PeerLost`. Collective: all groups."""
        sent = self.crew.bytes_sent
        self.crew.sum_(self.own.sum_(tensor, wire), wire)
        self.crew.bytes_sent = sent  # those of meta-gradients are counted, as without a crew
        return iter([slice(0, tensor.numel())])

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """As the base: groups in the order of their names, then ranks.

        Raises `PeerLost`. Collective: all groups.
        """
        sent = self.crew.bytes_sent
        mine = json.dumps([part.hex() for part in self.own.gather_bytes(payload)]).encode()
        told = self.crew.gather_bytes(mine)
        self.crew.bytes_sent = sent
        return [bytes.fromhex(part) for group in told for part in json.loads(group)]

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        raise NotImplementedError("not used across groups")

    def set_timeout(self, seconds: float) -> None:
        """Both communicators have separate timeouts."""
