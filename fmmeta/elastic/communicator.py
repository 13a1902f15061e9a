"""Communicator across groups that join and leave: collectives among the groups of the next outer step.

    form            request the live groups from the lighthouse (lighthouse.py) and connect to them
    meet            before each collective: gloo cannot be interrupted, and would wait for a stopped member
    a collective    fails on all ranks of a group if it fails on one (`PeerLost`);
                    the group then abandons the step and forms again
    leave           tell the lighthouse that this group has finished

Tensors are reduced by gloo in host memory on every device type: a NCCL communicator that has lost a rank
cannot be closed without ending the process. Each connection has its own gloo communicator, made through the
store of its first member.

Every group computes the same roles from the same answer of the lighthouse (`Membership`): which group sends
its state, which groups need it (controller.py transfers it), and which one writes the files. Messages are
JSON, never pickles.

A group whose process has ended is left out before its heartbeats time out:

    noticed     the kernel closes its connections: the sum of the other groups fails, and they form again
    verified    the port of its store refuses connections: no process listens there any more
    reported    the first of the other groups requests the quorum in the name of the lost group, marked as
                lost; the lighthouse then has a request of every group, and answers; all members leave out
                the marked groups

The lighthouse alone decides which groups take part in a step: a report completes the set of requests that it
waits for, and all members read the same answer. Failure cases:

    slow or stopped process, full queue of connections    its kernel still accepts: not lost
    machine that is down, cut cable, lost packets         no answer is not a refusal: not lost
    another process has taken over the port               it accepts: not lost
        in these cases the timeout of heartbeats decides
    a firewall begins to refuse connections               on one machine the kernel that refuses is the one
                                                          that ran the process. Groups on other machines are
                                                          reported if they are fewer than half of the last
                                                          members, or half of them without the first one:
                                                          if a network is cut in two, one side can report
    a live group is reported nevertheless                 it finds itself among the lost ones and requests
                                                          again, or comes a step late, or has taken the step
                                                          in another membership: it receives the state of the
                                                          other groups before it takes part
    fewer groups than --min_groups of the lighthouse      no report: the lighthouse waits for another group
    forged report                                         it needs the secret of the run, as membership does

To the lighthouse a report is a heartbeat of the lost group: while steps are shorter than the timeout it is
repeated at every step. Of more than `MAX_LOST` such groups none is reported again, and the lighthouse waits
until their heartbeats time out, once.
"""

import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from threading import Event
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import PeerLost, one_line
from fmmeta.elastic.lighthouse import (
    WAIT_S,
    LighthouseClient,
    coordination,
    heartbeats,
    in_thread,
    reachable_as,
)
from fmmeta.parallel.collectives import Communicator, Reduction
from fmmeta.parallel.network import is_proof, proof
from fmmeta.parallel.process_groups import connect_gloo, connect_to_store, listening_store


@dataclass(frozen=True)
class GroupInfo:
    """A group as a member of an outer step."""

    name: str
    store_address: str
    step: int
    fresh: bool  # it has not taken part yet
    writes: bool
    connection: str  # the quorum that its communicator was connected for; empty: it has none
    computed_by: str  # the connection of the groups that computed its state; empty: it has taken no step
    config_hash: str  # of settings and layout, which all must share
    began: float = 0.0  # when its processes were started, in seconds since 1970

    @property
    def label(self) -> str:
        return label(self.name)


@dataclass(frozen=True)
class Membership:
    """The members of a step, the same on all groups, in the order of names. here: index of this group.

    restarted: all members have connected for this step. Every member sees the same value, unlike a comparison
    with the last membership that it took part in. unknown_groups: groups listed by the lighthouse and left
    out, because they do not know the secret of the run.
    """

    members: tuple[GroupInfo, ...]
    here: int
    restarted: bool = False
    unknown_groups: int = 0

    @property
    def donor(self) -> int:
        """The group that sends its state: the first with the highest step; new groups come last."""
        return min(range(len(self.members)), key=lambda n: (self.members[n].fresh, -self.members[n].step, n))

    def needs_state(self, number: int) -> bool:
        """Whether a member needs the state of the donor: it is new, missed the end of a step, or has taken
        its last step in another membership (the sums differ by rounding).
        """
        member, donor = self.members[number], self.members[self.donor]
        same = (member.step, member.computed_by) == (donor.step, donor.computed_by)
        return member is not donor and (member.fresh or not same)

    @property
    def writer(self) -> int:
        """The group that writes checkpoints and metrics: the previous writer, else the first with state."""
        members = self.members
        return min(range(len(members)), key=lambda n: (not members[n].writes, self.needs_state(n), n))


CONNECT_S = 10.0  # timeout of members that connect to each other; gloo tries up to four times for so long
REACH_S = 5.0  # timeout of the test whether a member's process is alive
REFUSE_S = 1.0  # timeout of the test whether its port refuses connections
RENEW_S = 60.0  # between two broadcasts to the other ranks of a group while its request is pending
SILENT_S = 2.0  # at most, between two looks whether the members live, while some have not arrived
MAX_LOST = 16  # lost groups that are reported again for every step


def label(name: str) -> str:
    """The name of a group that the user gave."""
    return name.rpartition(":")[0]


def refuses(address: str) -> bool:
    """Whether no process listens at `address`: the kernel there refuses a connection. False: no answer."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REFUSE_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class ElasticCommunicator(Communicator):
    """The `cross` communicator of groups that join and leave. Raises `MachineFault` without a lighthouse.

    own: gloo communicator of the ranks of this group. `config_hash` and `secret` are set once the settings
    are known (controller.py). met: the store of the present members. meetings: how often they have met there.
    waited: called with the seconds that this rank has waited for other groups which live. began: when the
    processes of this group were started, in seconds since 1970.
    """

    began = 0.0
    met: Any = None
    meetings = 0
    lighthouse = ""
    not_listed: frozenset[str] = frozenset()  # members that the lighthouse has not named at the last look
    waited: Callable[[float], None] = staticmethod(lambda seconds: None)

    def __init__(self, own: Communicator, lighthouse: str, name: str) -> None:
        super().__init__(None, 0, 1, torch.device("cpu"))
        self.own, self.config_hash, self.secret = own, "", b""
        # a restarted group gets a new name
        self.name = own.broadcast(f"{name}:{uuid.uuid4().hex[:8]}")
        self.fresh, self.writes, self.connection, self.computed_by = True, False, "", ""
        self.attempt = (0, "")  # step and connection of the last membership
        self.listed: dict[str, tuple[str, bool]] = {}  # its groups: store address, whether they are lost
        self.timeout_s = CONNECT_S
        self.client: LighthouseClient | None = None
        self.store_address, self.store = "", None  # where the other groups connect; on rank 0
        self.host_address = ""  # the same of the first member
        self.others: list[tuple[str, str]] = []  # name and store address of the other members
        self.lighthouse = lighthouse
        with own.raise_on_all("looking for the lighthouse"):
            self.host = reachable_as(lighthouse)
            if own.rank == 0:
                self.client = LighthouseClient(lighthouse, self.name, coordination())
                self.store = listening_store(self.host, 0)
                self.store_address = f"{self.host}:{self.store.port}"

    def form(
        self, step: int, timeout_s: float, while_waiting: Callable[[], None] = lambda: None
    ) -> Membership:
        """Wait for the other groups of this outer step and connect to them. Collective: all groups.

        while_waiting: called on every rank of this group, again and again while the request is pending.
        Raises `PeerLost` if a group dies meanwhile, and `MachineFault` if the lighthouse does not answer for
        `timeout_s`.
        """
        answer = None
        if step != self.attempt[0]:  # the last membership has taken its step
            self.computed_by = self.attempt[1]
        with self.own.raise_on_all("asking the lighthouse"):
            if self.client is not None:
                try:
                    answer = self._request_quorum(self.client, step, timeout_s, while_waiting)
                finally:
                    self.own.broadcast_(torch.zeros(1))  # the request has ended
            else:
                while float(self.own.broadcast_(torch.zeros(1))):
                    while_waiting()
        quorum, listed, unknown_groups = self.own.broadcast(answer)
        members = tuple(GroupInfo(**one) for one in listed)
        names = [member.name for member in members]
        if self.name not in names:
            self.disconnect()
            raise PeerLost("the other groups could not connect to this one, and have left it out of a step")
        here = names.index(self.name)
        restarted = (  # the members of one connection know its size
            not self.connection
            or len(members) != self.size
            or any(member.connection != self.connection for member in members)
        )
        if restarted:
            self.disconnect()
            self.rank, self.size, self.host_address = here, len(members), members[0].store_address
            self.others = [(one.name, one.store_address) for one in members if one.name != self.name]
            with self._raise_peer_lost("meeting the other groups"):
                self._connect(f"{quorum}/{self.own.rank}")
            self.connection = quorum
            super().set_timeout(self.timeout_s)
        self.attempt = (step, self.connection)
        return Membership(members, here, restarted, unknown_groups)

    def _request_quorum(
        self, client: LighthouseClient, step: int, timeout_s: float, while_waiting: Callable[[], None]
    ) -> Any:
        """The quorum: a unique name, its members, and the number of other groups listed. Rank 0 of this
        group; the other ranks receive its broadcasts.
        """
        names = ("fresh", "writes", "connection", "computed_by", "config_hash", "began")
        data = {name: getattr(self, name) for name in names}
        client.read_min_groups()
        data["min_groups"] = client.min_groups  # not every group can read it (lighthouse.py)
        client.start_heartbeats(self.store_address, self.own.size)
        reported, renewed = set[str](), time.monotonic()

        def waiting() -> None:
            nonlocal renewed
            self._report_lost(client, step, reported)
            while_waiting()
            if time.monotonic() - renewed >= RENEW_S:
                renewed = time.monotonic()
                self.own.broadcast_(torch.ones(1))  # the request is pending

        quorum = client.request_quorum(
            timeout_s,
            waiting,
            **self._signed(self.name, self.store_address, step, data),
        )
        found = sorted(filter(None, map(self._verified, quorum.participants)), key=itemgetter("name"))
        members = [one for one in found if not one.get("lost")]
        known = [least for one in members if (least := one.pop("min_groups", None)) is not None]
        client.min_groups = max(known, default=None)
        self.listed = {one["name"]: (one["store_address"], bool(one.get("lost"))) for one in found}
        name = f"{quorum.quorum_id}/{quorum.created.seconds}.{quorum.created.nanos}"
        return [name, members, len(quorum.participants) - len(found)]

    def _signed(self, name: str, store_address: str, step: int, data: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a request of the lighthouse, with a proof that the sender knows the secret."""
        signed = {**data, "proof": proof(self.secret, name, store_address, step, data)}
        return {
            "address": "",
            "store_address": store_address,
            "step": step,
            "world_size": self.own.size,
            "shrink_only": False,
            "data": signed,
        }

    def _report_lost(self, client: LighthouseClient, step: int, reported: set[str]) -> None:
        """Report the groups of the last membership whose processes have ended (top of this module).

        reported: names that were reported for this request. Local; rank 0 of this group.
        """
        live = sorted(name for name, (_, lost) in self.listed.items() if not lost)
        gone, reports = list[str](), False
        for name in live:
            if name == self.name:
                reports = True
            elif refuses(self.listed[name][0]):
                gone.append(name)
            elif not reports:
                return  # an earlier group is alive: it reports
        carried = [name for name, (_, lost) in self.listed.items() if lost]
        if len(carried) <= MAX_LOST:
            gone += [name for name in carried if refuses(self.listed[name][0])]
        new = [name for name in gone if name not in reported]
        if not new or client.min_groups is None or len(set(live) - set(gone)) < client.min_groups:
            return
        hosts = {name: self.listed[name][0].rpartition(":")[0] for name in live if name in gone}
        elsewhere = [name for name, host in hosts.items() if host != self.host]  # over a network
        if 2 * len(elsewhere) > len(live) or (2 * len(elsewhere) == len(live) and live[0] in elsewhere):
            return  # perhaps the network is cut, and they report this side
        for name in new:
            reported.add(name)
            client.report_lost(name, **self._signed(name, self.listed[name][0], step, {"lost": True}))

    def _verified(self, one: Any) -> dict[str, Any] | None:
        """The fields of a member; None if it does not know the secret of the run."""
        data = dict(one.data or {})
        if not is_proof(
            data.pop("proof", None), self.secret, one.replica_id, one.store_address, one.step, data
        ):
            return None
        return {"name": one.replica_id, "store_address": one.store_address, "step": one.step, **data}

    def _connect(self, name: str) -> None:
        """Connect to the members. Raises `RuntimeError` if one fails; at once if its process has ended."""
        if self.size == 1:
            return
        for other, address in self.others:
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host, int(port)), REACH_S).close()
            except OSError:
                raise RuntimeError(f"group {label(other)} has ended") from None
        timeout = timedelta(seconds=CONNECT_S)
        met = self._unless_lost(lambda: connect_to_store(self.host_address, f"{name}/met", timeout))
        try:
            backend = self._unless_lost(
                lambda: connect_gloo(self.host_address, name, self.rank, self.size, timeout, self.host)
            )
        except RuntimeError:
            wait([in_thread(lambda: refuses(self.host_address) or met.add("failed", 1))], REFUSE_S)
            raise
        self._unless_lost(lambda: self._wait_for_all(met))
        self.backend, self.met, self.meetings = backend, met, 0

    def _wait_for_all(self, met: Any) -> None:
        """Wait until all members are connected. Raises `RuntimeError` if one of them is not.

        A member that gives up cannot close what gloo has connected so far: others would wait for its part of
        a sum.
        """
        deadline = time.monotonic() + CONNECT_S
        met.add("connected", 1)
        while met.add("connected", 0) < self.size:
            if met.add("failed", 0):
                raise RuntimeError("another group could not connect")
            if time.monotonic() > deadline:
                raise RuntimeError(f"another group has not connected within {CONNECT_S:.0f} s")
            time.sleep(0.01)

    def _lost(self) -> str:
        """Members of the connection that have ended or are silent (stopped, cut off, on a machine that is
        down), in words; empty if there is none. Local.
        """
        members = [(label(name), name, address) for name, address in self.others]
        beats = heartbeats(self.lighthouse)
        # a lighthouse that was started again names a group after its first heartbeat
        unknown = frozenset(name for _, name, _ in members if name not in beats and self.name in beats)
        silent = {name for name, is_old in beats.items() if is_old} | (unknown & self.not_listed)
        self.not_listed = unknown
        lost = [shown for shown, name, address in members if name in silent or refuses(address)]
        return f"group {', '.join(lost)} has ended, or is stopped or cut off" if lost else ""

    def _unless_lost(self, work: Callable[[], Any]) -> Any:
        """The result of `work` with the other members. Raises `RuntimeError` when one of them has ended or is
        silent: gloo would wait for `CONNECT_S`, up to four times, and a store without end.
        """
        result, wait_s = in_thread(work), WAIT_S
        while not wait([result], wait_s).done:
            wait_s = min(2 * wait_s, SILENT_S)
            if lost := self._lost():
                raise RuntimeError(lost)
        return result.result()

    def _meet(self, doing: str) -> None:
        """Wait for the other members at a key of their store. Raises `PeerLost` on all ranks of all groups if
        a member has ended, is silent, or has given up, and on those of this group after `timeout_s`.

        Collective: all groups.
        """
        self.meetings += 1
        met, size, number, given_up = self.met, self.size, self.meetings, Event()
        here, before, host = f"meeting/{number}", f"meeting/{number - 1}", self.host_address

        def arrive() -> bool:
            """Whether all are here: the first of the last to arrive and of those that give up decides."""
            began = time.monotonic()
            if refuses(host):  # torch logs a stack if it finds that out by itself
                return False
            if met.add(here, 1) == size:
                met.delete_key(before)  # all have left it
                met.delete_key(f"{before}/all")
                return bool(met.compare_set(f"{here}/all", "", "here") == b"here")
            while not met.check([f"{here}/all"]):
                if given_up.is_set():
                    return bool(met.compare_set(f"{here}/all", "", "left") == b"here")
                time.sleep(min(WAIT_S, 0.001 + (time.monotonic() - began) / 50))
                if refuses(host):
                    return False
            return bool(met.get(f"{here}/all") == b"here")

        result, began, wait_s = in_thread(arrive), time.monotonic(), WAIT_S
        while True:
            failure, asked = "", time.monotonic()
            if not wait([result], wait_s).done:
                failure = self._lost()
                if not failure and time.monotonic() - began > self.timeout_s:
                    failure = f"another group has not come for {self.timeout_s:.0f} s"
                if failure:
                    given_up.set()
                    wait([result], SILENT_S)  # a store of a group that is stopped does not answer
            if result.done():  # an error is one of the store, whose group has ended
                all_here = result.exception() is None and result.result()
                failure = "" if all_here else failure or "another group has ended or given up"
            if not self._is_pending(doing, failure, not result.done()):
                return
            self.waited(time.monotonic() - asked)
            wait_s = min(2 * wait_s, SILENT_S)

    def _is_pending(self, doing: str, failure: str, pending: bool = False) -> bool:
        """Whether one of the ranks of this group is not done. If one has failed, all raise `PeerLost`.

        Collective: own.
        """
        failures, waits = self.own.sum_(torch.tensor([float(bool(failure)), float(pending)])).tolist()
        if failures:
            self.disconnect()  # the other groups need not wait for a timeout
            raise PeerLost(f"{doing}: {failure or 'another rank of this group has failed'}")
        return bool(waits)

    def counters(self) -> Any:
        """A store that all members share, on the first rank of a group; it ends with the first member.

        Raises `PeerLost`. Collective: own.
        """
        store = None
        with self._raise_peer_lost("connecting to the store of the first group"):
            if self.own.rank == 0:
                name, timeout = f"claims/{self.connection}", timedelta(seconds=CONNECT_S)
                store = self._unless_lost(lambda: connect_to_store(self.host_address, name, timeout))
        return store

    def disconnect(self) -> None:
        """Close the connection, so that the other groups notice it at once, also when they meet. Local."""
        if self.met is not None:
            met, host, here = self.met, self.host_address, f"meeting/{self.meetings + 1}"
            wait([in_thread(lambda: refuses(host) or met.compare_set(f"{here}/all", "", "left"))], WAIT_S)
        self.connection, self.backend, self.met = "", None, None

    @contextmanager
    def _raise_peer_lost(self, doing: str) -> Iterator[None]:
        """Communicate with other groups; a failure on one rank of this group raises `PeerLost` on all.

        Collective: own.
        """
        failure = ""
        try:
            yield
        except RuntimeError as error:  # the type of all errors of gloo and its store
            failure = one_line(error)[:200] or type(error).__name__
        self._is_pending(doing, failure)

    def begin_sum_(self, tensor: Tensor, comm_dtype: torch.dtype | None = None) -> Reduction:
        """As the base, but complete on return. Raises `PeerLost`. Collective: this communicator, own."""
        if self.size > 1:
            self._meet("a sum")
            with self._raise_peer_lost("a sum"):
                super().begin_sum_(tensor, comm_dtype).wait_all()
        return Reduction([slice(0, tensor.numel())])

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """As the base. Raises `PeerLost`. Collective: this communicator, own."""
        if self.size > 1:
            self._meet("a broadcast")
            with self._raise_peer_lost("a broadcast"):
                super().broadcast_(tensor, root)
        return tensor

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        super().set_timeout(seconds)

    def leave(self) -> None:
        """Leave the elastic run; the other groups detect it at once, also where they meet."""
        self.disconnect()
        if self.client is not None:
            self.client.stop_heartbeats()


class AllGroups(Communicator):
    """All ranks of all groups, in the order of groups: sums inside each group, then across groups.

    It cannot broadcast. The sums are not counted in the `bytes_sent` of `cross`.
    """

    def __init__(self, own: Communicator, cross: ElasticCommunicator) -> None:
        self.own, self.cross, self.backend, self.device, self.bytes_sent = own, cross, None, own.device, 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.cross.rank * self.own.size + self.own.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.cross.size * self.own.size

    def begin_sum_(self, tensor: Tensor, comm_dtype: torch.dtype | None = None) -> Reduction:
        """As the base, but complete on return. Raises `PeerLost`. Collective: all groups."""
        sent = self.cross.bytes_sent
        self.cross.sum_(self.own.sum_(tensor, comm_dtype), comm_dtype)
        self.cross.bytes_sent = sent
        return Reduction([slice(0, tensor.numel())])
