"""Elastic groups: roles in a quorum, settings that conflict with them, and repeated quorums."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from fmmeta.common.errors import MachineFault, PeerError, PeerLost
from fmmeta.config.settings import Config
from fmmeta.elastic import communicator, lighthouse
from fmmeta.elastic.communicator import MAX_LOST, ElasticCommunicator, GroupInfo, Membership
from fmmeta.elastic.controller import MAX_ATTEMPTS, ElasticSchedule, config_hash
from fmmeta.elastic.lighthouse import heartbeats, reachable_as
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.network import Interface
from fmmeta.parallel.process_groups import connect_to_store, listening_store
from harness.fork_server import free_port
from tests.support.messages import check_message, refusal
from tests.support.short_runs import until


def membership(*members: tuple[int, bool, bool]) -> Membership:
    """A membership of groups, each given as (step, fresh, writes)."""
    listed = [
        GroupInfo(f"g{n}", "host:1", step, fresh, writes, "", "", "")
        for n, (step, fresh, writes) in enumerate(members)
    ]
    return Membership(tuple(listed), 0)


HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("listed", "gone", "min_groups", "reported"),
    [
        ({"a": HERE, "me": HERE}, "a", 1, "a"),
        ({"a": HERE, "me": HERE, "z": HERE}, "az", 1, "az"),  # the refusing kernel runs their processes
        ({"a": HERE, "me": HERE, "z": HERE}, "z", 1, ""),  # a, the first, reports it
        ({"a": THERE, "me": HERE, "z": THERE}, "a", 1, "a"),
        ({"a": THERE, "me": HERE, "z": THERE}, "az", 1, ""),  # perhaps only this machine is cut off
        ({"a": THERE, "me": HERE}, "a", 1, ""),  # a half without the first member
        ({"me": HERE, "z": THERE}, "z", 1, "z"),  # a half with it
        ({"me": HERE, "x": HERE, "z": THERE}, "xz", 1, "xz"),
        ({"me": HERE, "z": HERE}, "z", 2, ""),  # one group remains
        ({"me": HERE, "z": HERE}, "z", None, ""),  # the minimum is not known
        ({"me": HERE, "y": HERE, "-b": THERE}, "b", 1, "b"),  # - : lost before, and the port still refuses
        ({"me": HERE, "y": HERE, "-b": THERE}, "", 1, ""),  # another process listens there now
        ({"me": HERE, **{f"-{n:02}": HERE for n in range(MAX_LOST + 1)}}, "all", 1, ""),
    ],
)
def test_which_lost_groups_are_reported(monkeypatch, listed, gone, min_groups, reported):
    cross, names = object.__new__(ElasticCommunicator), list[str]()
    cross.name, cross.host, cross.own, cross.secret = "me", HERE, SimpleNamespace(size=1), b""  # type: ignore
    ports = {name.strip("-"): f"{host}:{port}" for port, (name, host) in enumerate(listed.items(), 1)}
    cross.listed = {name.strip("-"): (ports[name.strip("-")], "-" in name) for name in listed}
    refused = {address for name, address in ports.items() if name != "me" and (name in gone or gone == "all")}
    monkeypatch.setattr(communicator, "refuses", lambda address: address in refused)
    client: Any = SimpleNamespace(min_groups=min_groups, report_lost=lambda name, **rest: names.append(name))
    done = set[str]()
    for _ in range(2):  # each once for a request
        cross._report_lost(client, 5, done)
    assert sorted(names) == list(reported)


def test_a_member_that_ends_while_the_others_connect_is_noticed_at_once():
    cross, over = object.__new__(ElasticCommunicator), threading.Event()
    cross.name, cross.others = "a:1", [("b:1", f"127.0.0.1:{free_port()}")]
    try:
        with pytest.raises(RuntimeError, match="group b has ended"):
            cross._unless_lost(over.wait)  # which does not return
    finally:
        over.set()
    assert cross._unless_lost(lambda: 7) == 7
    with pytest.raises(RuntimeError, match="the store"):
        cross._unless_lost(lambda: (_ for _ in ()).throw(RuntimeError("the store")))


@pytest.mark.parametrize("answers", [True, False])
def test_all_ranks_of_a_group_know_that_its_request_is_pending(monkeypatch, answers):
    """The wait may be longer than the bound of any stage. A lighthouse that is dead ends it on all ranks."""
    monkeypatch.setattr(communicator, "RENEW_S", 0.0)
    store = HashStore()

    def request_quorum(timeout_s, while_waiting, **request):
        for _ in range(3):
            while_waiting()
        if not answers:
            raise MachineFault("lighthouse=http://head:1 has been silent for 30 s")
        member = SimpleNamespace(
            replica_id="me", store_address="here:1", step=request["step"], data=request["data"]
        )
        return SimpleNamespace(
            quorum_id=1, created=SimpleNamespace(seconds=0, nanos=0), participants=[member]
        )

    client: Any = SimpleNamespace(
        min_groups=1,
        read_min_groups=lambda: None,
        start_heartbeats=lambda address, size: None,
        request_quorum=request_quorum,
    )

    def form(rank: int) -> tuple[int, str]:
        gloo = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        cross = object.__new__(ElasticCommunicator)
        Communicator.__init__(cross, None, 0, 1, torch.device("cpu"))
        cross.own, cross.name, cross.store_address = Communicator(gloo, rank, 2, cross.device), "me", "here:1"
        cross.fresh, cross.writes, cross.connection, cross.computed_by = True, False, "", ""
        cross.attempt, cross.listed, cross.timeout_s = (0, ""), {}, 10.0
        cross.config_hash, cross.secret, cross.client = "", b"", client if rank == 0 else None
        calls = list[int]()
        try:
            cross.form(0, 30.0, lambda: calls.append(rank))
        except (MachineFault, PeerError) as error:
            return len(calls), type(error).__name__
        return len(calls), ""

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(form, range(2)))
    assert found == ([(3, ""), (3, "")] if answers else [(3, "MachineFault"), (3, "PeerError")])


def test_a_stage_is_renewed_while_a_group_waits():
    stages = list[str]()

    def form(step, timeout_s, while_waiting):
        while_waiting()
        raise PeerLost("enough")

    schedule: Any = object.__new__(ElasticSchedule)
    schedule.cross, schedule.began_step = SimpleNamespace(form=form), None
    schedule.run = SimpleNamespace(
        state=SimpleNamespace(outer_step=3), stage=SimpleNamespace(begin=stages.append)
    )
    with pytest.raises(PeerLost):
        schedule.form()
    assert stages == ["waiting for the other groups"] * 2


NEW, OLD = True, False


@pytest.mark.parametrize(
    ("members", "donor", "behind", "writer"),
    [
        ([(0, NEW, False), (0, NEW, False)], 0, [1], 0),  # the first quorum: all groups start from one state
        (
            [(0, NEW, False), (7, NEW, False)],
            1,
            [0],
            1,
        ),  # only one group has found a checkpoint
        (
            [(5, NEW, False), (8, OLD, True), (8, OLD, False)],
            1,
            [0],
            1,
        ),  # a group that rejoins receives the state; the writer stays
        (
            [(9, NEW, False), (8, OLD, False), (8, OLD, False)],
            1,
            [0],
            1,
        ),  # also to a smaller step: a checkpoint is not the state of the running groups
        ([(8, NEW, False), (8, OLD, False)], 1, [0], 1),  # equal steps are not equal bits
        (
            [(8, OLD, True), (9, OLD, False)],
            1,
            [0],
            0,
        ),  # the writer missed the end of a step: it receives the state and writes
        ([(9, OLD, False)], 0, [], 0),
    ],
)
def test_donor_receivers_and_writer(members, donor, behind, writer):
    found = membership(*members)
    assert found.donor == donor
    assert [n for n in range(len(members)) if found.needs_state(n)] == behind
    assert found.writer == writer


OUT = {"elastic": True, "output_dir": "x"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"elastic": True},
            ("elastic=True needs output_dir", "give one on a disk that all of them see"),
        ),
        (
            {**OUT, "algorithm": "none"},
            ("elastic=True", "algorithm=none", "leave it out"),
        ),
        (
            {"lighthouse": "http://a:1"},
            ("lighthouse=http://a:1", "elastic=False", "leave it out, or give --elastic"),
        ),
        (
            {"group_name": "a"},
            ("group_name=a", "elastic=False", "leave it out, or give --elastic"),
        ),
        (
            {"reduce_dtype": "bf16", "algorithm": "none"},
            ("reduce_dtype=bf16", "algorithm=none", "leave it out"),
        ),
        ({"reduce_dtype": "fp16"}, ("reduce_dtype=fp16", "use fp32 or bf16")),
    ],
)
def test_conflicts_are_refused(settings, parts):
    check_message(refusal(lambda: Config(**settings)), *parts)


@pytest.mark.parametrize("address", ["host:1", "http://host", "https://127.0.0.1:5", ""])
def test_bad_lighthouse_addresses_are_refused(address):
    message = refusal(lambda: reachable_as(address))
    assert message.startswith(f"lighthouse={address} is no address (")
    assert "; give http://HOST:PORT" in message


def test_loopback_lighthouse_is_reached_at_loopback():
    assert reachable_as("http://127.0.0.1:9") == "127.0.0.1"
    assert reachable_as("http://localhost:9") in ("127.0.0.1", "::1")


LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"))
ETH, INFINIBAND = Interface("eth0", True, ("fe80::1", "10.0.0.5")), Interface("ib0", True, ("10.1.0.5",))


@pytest.mark.parametrize(
    ("known", "gloo", "address"),
    [
        ([LOOPBACK, ETH], "", "10.0.0.5"),
        ([LOOPBACK, ETH], "lo", "10.0.0.5"),  # set for the ranks of one launch
        ([LOOPBACK, replace(ETH, addresses=("fe80::1", "fd00::5"))], "", "fd00::5"),
        ([LOOPBACK, ETH, replace(INFINIBAND, up=False)], "", "10.0.0.5"),
        ([LOOPBACK, ETH, INFINIBAND], "ib0", "10.1.0.5"),
        ([LOOPBACK], "", "127.0.0.1"),  # no other machine
    ],
)
def test_a_name_that_stands_for_loopback_is_reached_at_the_interface(known, gloo, address, monkeypatch):
    """Debian's 127.0.1.1: groups of other machines would connect to themselves."""
    loopback_name(monkeypatch, known, gloo)
    assert reachable_as("http://head:9") == address


def test_a_name_that_stands_for_loopback_is_refused_if_interfaces_differ(monkeypatch):
    loopback_name(monkeypatch, [LOOPBACK, ETH, INFINIBAND], "")
    check_message(
        refusal(reachable_as, "http://head:9"),
        "lighthouse=http://head:9",
        "stands for 127.0.0.1",
        "eth0, ib0",
        "give the lighthouse by its address, such as http://10.0.0.5:9, or set GLOO_SOCKET_IFNAME",
    )


def loopback_name(monkeypatch, known, gloo):
    """A machine with these interfaces, whose name `head` stands for a loopback address."""
    monkeypatch.setattr(lighthouse, "source_address", lambda host, port: "127.0.0.1")
    monkeypatch.setattr(lighthouse, "interfaces", lambda: known)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)


def test_config_hash_depends_on_settings_and_layout():
    precision = DeepSpeedSettings(1, False, False, file={"zero_optimization": {"stage": 1}})
    settings = {**Config().as_dict(), "dataset_fingerprint": "f", **precision.recorded()}

    def hashed(layout="1 group of 2 ranks", numel=10, precision=precision, changes=(), **more):
        return config_hash({**settings, **dict(changes), **more}, layout, numel, precision)

    assert hashed(save_steps=7, group_name="b") == hashed()
    assert hashed(bf16=True, deepspeed="b.json", deepspeed_layout={}) == hashed()  # by a flag or by the file
    others = [
        hashed(seed=1),
        hashed(dataset_fingerprint="g"),
        hashed("1 group of 1 rank"),
        hashed(numel=9),
        hashed(precision=DeepSpeedSettings(2, False, False)),
        hashed(task_schedule="dynamic"),
        hashed(deepspeed_values={"prescale_gradients": True}),
        hashed(transforms_fingerprint="x"),
        hashed(changes={"precision": "bf16"}),
    ]
    assert len({hashed(), *others}) == 10


class FailingSchedule(ElasticSchedule):
    """A schedule whose first quorums fail after it has received the state of another group.

    cleared: how often the sums of its tasks were dropped.
    """

    def __init__(self, failures: int, outer_step: int = 3) -> None:
        cross = SimpleNamespace(disconnect=lambda: None)
        run: Any = SimpleNamespace(
            config=Config(),
            ranks=SimpleNamespace(cross=cross),
            progress=SimpleNamespace(notice=lambda text: None),
            view=SimpleNamespace(writes=True),
            stage=SimpleNamespace(leave_out=lambda seconds: None),
            state=SimpleNamespace(outer_step=outer_step, tasks={"seen": 0, "bad": 0}),
            schedule=SimpleNamespace(tasks_per_step=3),
            stop=SimpleNamespace(requested=False),
        )
        super().__init__(run)
        self.feed: Any = SimpleNamespace(keeps_finished=True)
        self.failures, self.cleared = failures, 0

    def form(self):
        if self.failures:
            self.failures -= 1
            self.run.state.tasks = {"seen": 9, "bad": 1}
            raise PeerLost("a broadcast: lost")
        self.quorum_step = self.run.state.outer_step

    def forget_tasks(self):
        self.cleared += 1


def test_group_lost_during_the_quorum_repeats_the_quorum():
    """The next attempt follows and keeps the state that was received before."""
    steps = Config().outer_steps
    schedule = FailingSchedule(3, steps)
    schedule.finish()
    assert (schedule.quorum_step, schedule.retries) == (steps, 3)
    assert schedule.run.state.tasks == {"seen": 9, "bad": 1}
    assert schedule.cleared == 3
    with pytest.raises(MachineFault, match=f"outer step {steps + 1} was attempted {MAX_ATTEMPTS} times"):
        FailingSchedule(-1, steps).finish()


def test_the_sum_of_finished_tasks_is_kept_unless_its_reduction_has_begun():
    schedule = FailingSchedule(0)
    schedule.is_open = True
    schedule.form_again(PeerLost("a sum"))
    assert not schedule.cleared
    schedule.is_open = False  # the metrics of all groups were added
    schedule.form_again(PeerLost("a sum"))
    assert schedule.cleared == 1


@pytest.mark.parametrize("tasks", [2, 4])
def test_an_outer_step_has_the_tasks_of_the_meta_batch(tasks):
    """Fewer: the groups left out those of a lost one. More: two groups learned the same."""
    schedule = FailingSchedule(0)
    schedule.check_task_count(3)
    with pytest.raises(MachineFault, match=f"{tasks} tasks were learned from in an outer step of 3"):
        schedule.check_task_count(tasks)


@pytest.fixture
def together(monkeypatch):
    """Communicators of groups that are connected through the store of the first, and what their lighthouse
    says of them; it is looked at often.
    """
    beats = dict[str, bool]()
    monkeypatch.setattr(communicator, "heartbeats", lambda address: dict(beats))
    monkeypatch.setattr(communicator, "WAIT_S", 0.05)
    monkeypatch.setattr(communicator, "SILENT_S", 0.1)
    store = listening_store("127.0.0.1", 0)
    address = f"127.0.0.1:{store.port}"

    def group(number: int, size: int, own: Communicator | None = None) -> Any:
        cross = object.__new__(ElasticCommunicator)
        Communicator.__init__(cross, None, number, size, torch.device("cpu"))
        cross.own = own or Communicator(None, 0, 1, cross.device)
        cross.name, cross.client, cross.timeout_s, cross.host_address = f"g{number}:1", None, 30.0, address
        cross.others = [(f"g{other}:1", address) for other in range(size) if other != number]
        cross.met = connect_to_store(address, f"rank{cross.own.rank}", timedelta(seconds=10))
        return cross

    return SimpleNamespace(group=group, beats=beats, store=store)


def outcome(cross: ElasticCommunicator, times: int = 1) -> str:
    """`met`, or why this group does not begin the sum."""
    try:
        for _ in range(times):
            cross._meet("a sum")
    except PeerLost as lost:
        return str(lost)
    return "met"


LOST = "a sum: group g1 has ended, or is stopped or cut off"
LEFT = "a sum: another group has ended or given up"


def test_groups_meet_again_and_again_and_keep_no_keys(together):
    groups = [together.group(number, 3) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(outcome, groups, (5, 5, 5))) == ["met"] * 3
        before = together.store.num_keys()
        assert list(pool.map(outcome, groups, (20, 20, 20))) == ["met"] * 3
    assert together.store.num_keys() == before


def test_all_groups_give_up_where_a_member_is_silent(together):
    """It finds out when it continues, and meets the others in another connection only."""
    together.beats.update({"g0:1": False, "g1:1": True, "g2:1": False})
    groups = [together.group(number, 3) for number in range(3)]
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(outcome, groups[::2])) <= {LOST, LEFT}
    together.beats.clear()
    assert outcome(groups[1]) == LEFT
    assert all(group.met is None for group in groups)


def test_a_member_that_a_restarted_lighthouse_does_not_know_is_silent(together, monkeypatch):
    """It lists a group once it has a heartbeat of it: one look may come too early."""
    looks = list[dict[str, bool]]()

    def look(address):
        looks.append({} if not looks else {"g0:1": False})
        return looks[-1]

    monkeypatch.setattr(communicator, "heartbeats", look)
    assert outcome(together.group(0, 2)) == LOST
    assert len(looks) == 3


@pytest.mark.parametrize("leaves", [ElasticCommunicator.disconnect, ElasticCommunicator.leave])
def test_groups_that_meet_do_not_wait_for_one_that_gives_up_or_leaves(together, leaves):
    """Its process continues, with its heartbeats."""
    waiting, other = together.group(0, 2), together.group(1, 2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(outcome, waiting)
        leaves(other)
        assert found.result(20) == LEFT


def test_no_group_waits_longer_than_a_sum_may_take(together):
    together.beats.update({"g0:1": False, "g1:1": False})
    waiting, seconds = together.group(0, 2), list[float]()
    waiting.timeout_s, waiting.waited = 0.3, seconds.append
    assert outcome(waiting) == "a sum: another group has not come for 0 s"
    assert 0.2 < sum(seconds) < 20


def test_a_store_that_does_not_answer_is_not_waited_for(together):
    """Its group is stopped: the kernel accepts, and no answer comes."""
    waiting, over = together.group(0, 2), threading.Event()
    together.beats.update({"g0:1": False, "g1:1": True})
    waiting.met = SimpleNamespace(add=lambda key, count: over.wait(), compare_set=lambda *_: over.wait())
    try:
        assert outcome(waiting) == LOST
    finally:
        over.set()


def test_one_rank_that_does_not_meet_fails_all_ranks_of_its_group(together):
    """The other rank has met: neither begins a sum. While one rank waits, both leave out the time."""
    store, waited = HashStore(), [list[float](), list[float]()]

    def rank(number: int) -> str:
        gloo = ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        cross = together.group(0, 2, Communicator(gloo, number, 2, torch.device("cpu")))
        cross.waited = waited[number].append
        return outcome(cross)

    with ThreadPoolExecutor(3) as pool:
        first = together.group(1, 2)  # of the other group; its second rank does not come
        there, found = pool.submit(outcome, first), pool.map(rank, range(2))
        assert there.result(20) == "met"
        until(lambda: all(waited), 20)
        together.beats.update({"g0:1": False, "g1:1": True})
        assert set(found) == {"a sum: another rank of this group has failed", LOST}


def test_the_lighthouse_names_the_groups_that_are_silent():
    """Names are text, not words of HTML."""
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    ft, names = lighthouse.coordination(), ["my group:1", "a&b<c>:2"]
    server = ft.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=300)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    try:
        client = ft.LighthouseClient(address, timedelta(seconds=10))
        for name in names:
            client.heartbeat(name, timedelta(seconds=10))
        until(lambda: heartbeats(address) == dict.fromkeys(names, True), 20)
        until(
            lambda: client.heartbeat(names[0], timedelta(seconds=10)) or not heartbeats(address)[names[0]], 20
        )
    finally:
        server.shutdown()
    assert heartbeats(f"http://127.0.0.1:{free_port()}") == {}
