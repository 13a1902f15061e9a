"""What processes that are no part of a run can do to it by way of its ports: where it listens, notes,
members.
"""

import errno
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from fmmeta.elastic import lighthouse
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.controller import SECRET, run_secret
from fmmeta.elastic.lighthouse import LighthouseClient, LighthouseConfig, coordination, open_lighthouse
from fmmeta.parallel import network
from fmmeta.parallel.collectives import Communicator
from tests.support.launch import run_ranks

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


def listening(process: psutil.Process) -> set[str]:
    return {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}


def test_one_node_listens_on_loopback_and_ignores_unsigned_store_entries():
    ended = run_ranks(["-c", LISTENERS], 2).ok()
    assert [text.strip().splitlines()[-1] for text in ended.output] == ["listens on ['127.0.0.1']"] * 2


@needs_torchft
def test_a_lighthouse_and_the_stores_of_one_node_listen_on_loopback():
    before = listening(psutil.Process())
    server, address = open_lighthouse(LighthouseConfig(host="127.0.0.1", port=0))
    cross = ElasticCommunicator(Communicator(None, 0, 1, torch.device("cpu")), address, "a")
    try:
        assert cross.form(0, 30.0).members[0].name == cross.name
        assert listening(psutil.Process()) - before <= {"127.0.0.1"}
    finally:
        cross.leave()
        server.shutdown()


@needs_torchft
def test_a_lighthouse_for_all_interfaces_starts_on_a_host_without_ipv6(monkeypatch):
    def without_ipv6(host, port):
        if ":" in host:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return network.listen(host, port)

    monkeypatch.setattr(lighthouse, "listen", without_ipv6)
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    server, address = open_lighthouse(LighthouseConfig(port=0))
    server.shutdown()
    assert re.fullmatch(r"http://\S+:\d+", address)


@needs_torchft
def test_members_without_the_secret_are_ignored():
    server, address = open_lighthouse(LighthouseConfig(host="127.0.0.1", port=0, min_groups=3))
    cross = ElasticCommunicator(Communicator(None, 0, 1, torch.device("cpu")), address, "b")
    cross.secret = b"ours"
    stranger = ElasticCommunicator(Communicator(None, 0, 1, torch.device("cpu")), address, "a")
    stranger.secret, stranger.fresh = b"theirs", False
    odd = LighthouseClient(address, "c:1", coordination())
    try:
        with ThreadPoolExecutor(3) as pool:
            odd.start_heartbeats("127.0.0.1:1", 1)
            memberships = [pool.submit(cross.form, 3, 30.0), pool.submit(stranger.form, 99, 30.0)]
            asked = pool.submit(
                odd.request_quorum,
                30.0,
                address="",
                store_address="127.0.0.1:1",
                step=9,
                world_size=1,
                shrink_only=False,
            )
            assert len(asked.result().participants) == 3
            for found, who in zip(memberships, (cross, stranger), strict=True):
                assert [member.name for member in found.result().members] == [who.name]
                assert found.result().unknown_groups == 2
    finally:
        odd.stop_heartbeats()
        for one in (cross, stranger):
            one.leave()
        server.shutdown()


def test_a_run_has_one_secret_readable_by_its_owner(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        (found,) = set(pool.map(lambda _: run_secret(tmp_path), range(8)))
    assert len(found) == 64
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert run_secret(tmp_path) == found
