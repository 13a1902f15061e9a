"""Nodes and the network between them: settings that are reported, the interface that gloo gets where its
default fails, the name of an attempt, groups that stay inside a node, the map of links. What processes that
are no part of a run can do to it by way of its ports: where it listens, notes, members.
"""

import errno
import importlib.util
import math
import platform
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from fmmeta import doctor
from fmmeta.common.errors import UsageError
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.controller import SECRET, run_secret
from fmmeta.elastic.lighthouse import LighthouseClient, LighthouseConfig, coordination, open_lighthouse
from fmmeta.parallel import memory, network
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import Launch, Nodes, divisors, identity, size_of
from fmmeta.parallel.network import (
    Interface,
    agree_on_generation,
    check_and_choose_interface,
    gloo_interface,
    issues,
)
from tests.support.launch import run_ranks
from tests.support.memory import SIZES, world_of
from tests.support.messages import check_message, refusal

LO, ETH, IB, DOWN = (
    Interface("lo", True, ("127.0.0.1", "::1")),
    Interface("eth0", True, ("10.0.0.5",)),
    Interface("ib0", True, ("10.1.0.5",)),
    Interface("eth1", False, ("10.2.0.5",)),
)
BARE = Interface("dummy0", True, ())
KNOWN = [LO, ETH, IB, DOWN, BARE]
HERE = platform.node()


def test_a_missing_interface_is_one_issue():
    assert list(issues({}, KNOWN)) == list(issues({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, KNOWN)) == []
    for name in ("eth", "eth1", "dummy0"):  # no such name, down, no address
        (issue,) = issues({"GLOO_SOCKET_IFNAME": name}, KNOWN)
        check_message(issue, f"GLOO_SOCKET_IFNAME={name} is no interface", HERE, "use lo, eth0 or ib0")


@pytest.mark.parametrize(
    ("own", "source", "name"),
    [
        ("10.0.0.5", "10.1.0.5", None),  # gloo's own choice can be reached
        ("127.0.0.1", "10.1.0.5", "ib0"),
        ("10.2.0.5", "10.0.0.5", "eth0"),  # of an interface that is down
        (None, "10.0.0.5", "eth0"),  # the name is not known
        ("127.0.0.1", "127.0.0.1", None),  # "nodes" that are one machine
        ("127.0.0.1", None, None),
    ],
)
def test_gloo_gets_the_interface_that_reaches_the_other_nodes(own, source, name, monkeypatch):
    def resolve(host, *of, **given):
        if own is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, None, None, "", (own, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(network, "source_address", lambda host: source)
    assert gloo_interface(Launch(0, 4, 0, 2, "10.0.0.1", 1), KNOWN) == name
    if source == "127.0.0.1":  # the master itself, by a name that stands for loopback
        assert gloo_interface(Launch(0, 4, 0, 2, "10.0.0.1", 1), [LO, ETH, DOWN]) == "eth0"


def test_source_address_of_a_host():
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.source_address("no.such.host.invalid") is None


def store_of(**texts: str) -> HashStore:
    """A store that holds what the ranks have written by now: network/1 or network/read/1."""
    store = HashStore()
    for name, text in texts.items():
        store.set({"issue": "network/1", "read": "network/read/1"}[name], text)
    return store


@pytest.fixture
def known(monkeypatch):
    """The interfaces of this host are KNOWN; known(name) chooses one by the environment."""
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return lambda name: monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)


def test_an_issue_of_one_rank_ends_all_ranks(known):
    launch, issue = Launch(0, 2, 0, 2), "GLOO_SOCKET_IFNAME=x is wrong; use y"
    store = store_of(issue=issue, read="read")
    assert refusal(check_and_choose_interface, store, launch) == issue
    assert store.get("network/0") == b""
    known("eth9")
    message = refusal(check_and_choose_interface, store_of(issue="", read="read"), launch)
    check_message(message, "GLOO_SOCKET_IFNAME=eth9 ")


def test_rank_0_leaves_after_the_others_have_read_an_issue(known):
    """It may host the store, without which the others would end with a lost connection."""
    known("eth9")
    store, left = store_of(issue=""), []
    reader = threading.Timer(0.3, lambda: (left.append("rank 1"), store.set("network/read/1", "read")))
    reader.start()
    refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2))
    assert left == ["rank 1"]
    reader.join()


@pytest.mark.parametrize(
    ("launch", "chosen", "logged"),
    [
        (Launch(0, 2, 0, 1), "ib0", True),
        (Launch(0, 2, 0, 2, "head"), "", False),  # one node
        (Launch(0, 2, 0, 2, "127.0.0.1"), "lo", False),  # and no other one has to reach it
    ],
)
def test_a_start_on_several_nodes_logs_the_interface_it_chose(known, monkeypatch, launch, chosen, logged):
    monkeypatch.setattr(network, "gloo_interface", lambda launch, known: "ib0")
    known("")
    texts = check_and_choose_interface(store_of(issue=""), launch)
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == chosen
    assert ["GLOO_SOCKET_IFNAME=ib0" in text for text in texts] == [True] * logged


def test_doctor_looks_at_the_network(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert {str(one).split()[0] for one in doctor.network()} <= {"ok", "warning"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    (found,) = [str(one) for one in doctor.network() if one.level == "problem"]
    check_message(found, "problem  network: GLOO_SOCKET_IFNAME=eth9 ", HERE, "; use ")
    assert doctor.network in doctor.CHECKS


def generation_names(store, delays):
    def one(rank):
        time.sleep(delays[rank])
        return agree_on_generation(store, rank, len(delays), 10)

    with ThreadPoolExecutor(len(delays)) as pool:
        return [*pool.map(one, range(len(delays)))]


def test_every_attempt_has_a_new_name_in_any_order_of_arrival():
    store, seen = HashStore(), set()
    for delays in ((0, 0, 0), (0, 0.2, 0.1), (0.3, 0, 0.1), (0.1, 0.1, 0.4)):
        (name,) = set(generation_names(store, delays))
        assert name not in seen
        seen.add(name)


def test_a_missing_rank_ends_the_wait_with_a_timeout():
    store = HashStore()
    generation_names(store, (0, 0))  # leaves entries of the other rank
    with pytest.raises(TimeoutError, match=r"rank 1 .* the other 1 ranks within 0.3 s"):
        agree_on_generation(store, 1, 2, 0.3)


def nodes_of(*sizes: int) -> Nodes:
    return Nodes(
        tuple(n for n, size in enumerate(sizes) for _ in range(size)),
        tuple(f"gpu{n}" for n in range(len(sizes))),
    )


def test_nodes_are_counted_by_their_first_ranks():
    words = [["b", "x"], ["a", "y"], ["b", "x"], ["a", "y"]]
    gather = Mock(return_value=words)
    found = Nodes.of(SimpleNamespace(gather=gather), Launch())
    assert gather.call_args.args[0][1] == HERE
    assert (found, found.sizes) == (Nodes((0, 1, 0, 1), ("x", "y")), [2, 2])
    assert [found.first(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [found.is_second(rank) for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("env", "node"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "3"}, "3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "CROSS_RANK": "1"}, "1"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "5"}, "5"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_launchers_number_the_nodes(env, node):
    launch = Launch.from_env({**env, "MASTER_ADDR": "n0"})
    assert launch.node == node
    assert identity(launch) == f"node {node}" if node else identity(launch).startswith(f"{platform.node()}/")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 30))
def test_a_group_that_fits_on_a_node_is_on_one_node_or_refused(sizes, group_size):
    """Against a count by hand of the nodes under each group."""
    nodes = nodes_of(*sizes)
    if len(nodes.node) % group_size:
        return
    places = [set(nodes.node[start : start + group_size]) for start in range(0, len(nodes.node), group_size)]
    across = any(len(place) > 1 for place in places)
    if across and group_size <= min(sizes):
        with pytest.raises(UsageError):
            nodes.check(group_size)
    else:
        assert (nodes.check(group_size) is not None) == across
    assert nodes.are_groups_on_nodes(group_size) != across


def test_a_group_across_nodes_is_logged_or_refused_with_sizes_that_work():
    parts = ("group_size=4", "group 1 (ranks 4 to 7)", "gpu0 and gpu1", "use group_size 1, 2, 3, 6 or 12")
    check_message(refusal(nodes_of(6, 6).check, 4), *parts)
    cyclic = Nodes((0, 1, 0, 1), ("a", "a"))
    check_message(refusal(cyclic.check, 2), "group 0 (ranks 0 and 1)", "a (node 0) and a (node 1)")
    check_message(nodes_of(4, 4, 4, 4).check(8) or "", "group 0 (ranks 0 to 7)", "gpu0 and gpu1")
    assert cyclic.check(1) is nodes_of(4, 4, 4, 4).check(4) is None


def test_the_layout_map_names_groups_and_links(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert nodes_of(4, 4).map(2, "gradients", 614_400, "cuda") == [
        "group 0: ranks 0 and 1 on gpu0",
        "group 1: ranks 2 and 3 on gpu0",
        "group 2: ranks 4 and 5 on gpu1",
        "group 3: ranks 6 and 7 on gpu1",
        "inside groups, inside a node: gradients, in every pass",
        (
            "across groups, between nodes (NCCL_SOCKET_IFNAME=ib): 614 kB of meta-gradient per rank, once per"
            " outer step"
        ),
        "all ranks, between nodes: agreement and numbers of each outer step (gloo)",
    ]
    assert nodes_of(2).map(1, "nothing", 4e9, "cpu") == [
        "group 0: rank 0 on gpu0",
        "group 1: rank 1 on gpu0",
        "across groups, inside a node: 4 GB of meta-gradient per rank, once per outer step",
        "all ranks, inside a node: agreement and numbers of each outer step (gloo)",
    ]
    assert nodes_of(2, 2).map(4, "weights", 1, "cpu")[:2] == [
        "group 0: ranks 0 to 3 on gpu0 and gpu1",
        "inside groups, between nodes in 1 of 1 groups: weights, in every pass",
    ]
    many = nodes_of(*[8] * 8).map(1, "nothing", 1, "cpu")
    assert many[15:17] == ["group 15: rank 15 on gpu1", "and 48 more groups, all on one node each"]
    assert "(GLOO_SOCKET_IFNAME=not set)" in many[17]


def test_sizes_have_units():
    shown = ["0 bytes", "999 bytes", "1 kB", "614 kB", "4 GB", "4e+04 GB"]
    assert [size_of(n) for n in (0, 999, 1000, 614_400, 4e9, 4e13)] == shown


@pytest.mark.parametrize("sizes", [(6, 6), (8, 8), (3, 3), (4, 2), (1, 1)])
def test_the_smallest_group_is_chosen_that_fits_and_stays_inside_a_node(sizes, monkeypatch):
    """The free memory just fits a group of `least` ranks and no smaller one."""
    precision = DeepSpeedSettings(3, False, False)
    for least in divisors(sum(sizes)):
        free = int(memory.estimate(SIZES, precision, least).total / memory.HEADROOM) + 1
        world = world_of(monkeypatch, sum(sizes), sizes[0], free)
        world.nodes, asked = nodes_of(*sizes), (world, lambda data: SIZES, precision)
        fits = [size for size in divisors(math.gcd(*sizes)) if size >= least]
        if fits:
            size, why = memory.choose_group_size(*asked)
            assert (size, why.split(" weights ")[0]) == (fits[0], f"group_size {size} (auto):")
        else:
            refusal(memory.choose_group_size, *asked)


needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="elastic groups need torchft"
)
LISTENERS = """
import sys
import psutil
import torch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.layout import Launch
import os
world = World(Launch.from_env(os.environ), torch.device("cpu"))
ranks = world.split(1)
store = world.shared_store()
if ranks.first:
    store.store.set("stop", "SIGTERM")
    store.store.set("beat/0", "{}")
world.comm.barrier()
assert store.get("stop") == "", "a forged note counts"
assert store.get_existing(["beat/0"]) == [""]
world.comm.barrier()
if ranks.first:
    store.set("stop", "SIGUSR1")
world.comm.barrier()
assert store.get("stop") == "SIGUSR1"
assert store.get("another") == ""
hosts = {one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}
print("listens on", sorted(hosts))
world.comm.barrier()
world.close()
"""


def listening() -> set[str]:
    """Addresses at which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_one_node_listens_on_loopback_and_ignores_unsigned_store_entries():
    ended = run_ranks(["-c", LISTENERS], 2).ok()
    assert [text.strip().splitlines()[-1] for text in ended.output] == ["listens on ['127.0.0.1']"] * 2


@needs_torchft
def test_a_lighthouse_and_the_stores_of_one_node_listen_on_loopback():
    before = listening()
    server, address = open_lighthouse(LighthouseConfig(host="127.0.0.1", port=0))
    cross = ElasticCommunicator(Communicator(None, 0, 1, torch.device("cpu")), address, "a")
    try:
        assert cross.form(0, 30.0).members[0].name == cross.name
        assert listening() - before <= {"127.0.0.1"}
    finally:
        cross.leave()
        server.shutdown()


@needs_torchft
def test_a_lighthouse_for_all_interfaces_starts_on_a_host_without_ipv6(monkeypatch):
    def without_ipv6(host, port):
        if ":" in host:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return network.listen(host, port)

    monkeypatch.setattr("fmmeta.elastic.lighthouse.listen", without_ipv6)
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    server, address = open_lighthouse(LighthouseConfig(port=0))
    server.shutdown()
    assert re.fullmatch(r"http://\S+:\d+", address)


@needs_torchft
def test_members_without_the_secret_are_ignored():
    server, address = open_lighthouse(LighthouseConfig(host="127.0.0.1", port=0, min_groups=3))
    alone = Communicator(None, 0, 1, torch.device("cpu"))
    cross, stranger = (ElasticCommunicator(alone, address, name) for name in "ba")
    cross.secret = b"ours"
    stranger.secret, stranger.fresh = b"theirs", False
    odd = LighthouseClient(address, "c:1", coordination())
    asked = {"address": "", "store_address": "127.0.0.1:1", "step": 9, "world_size": 1, "shrink_only": False}
    try:
        with ThreadPoolExecutor(3) as pool:
            odd.start_heartbeats("127.0.0.1:1", 1)
            memberships = [pool.submit(cross.form, 3, 30.0), pool.submit(stranger.form, 99, 30.0)]
            assert len(odd.request_quorum(30.0, **asked).participants) == 3
        for found, who in zip(memberships, (cross, stranger), strict=True):
            assert [member.name for member in found.result().members] == [who.name]
            assert found.result().unknown_groups == 2
    finally:
        odd.stop_heartbeats()
        cross.leave()
        stranger.leave()
        server.shutdown()


def test_a_run_has_one_secret_readable_by_its_owner(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        (found,) = set(pool.map(lambda _: run_secret(tmp_path), range(8)))
    assert len(found) == 64
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert run_secret(tmp_path) == found
