"""Network settings: issues that are reported, and the interface that gloo gets where its default fails."""

from __future__ import annotations

import platform
import socket
import threading

import pytest

from fmmeta import doctor
from fmmeta.parallel import network
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.network import Interface, check_and_choose_interface, chosen, gloo_interface, issues
from tests.support.helpers import refusal
from tests.support.messages import check_message

LO, ETH, IB, DOWN = (
    Interface("lo", True, ("127.0.0.1", "::1")),
    Interface("eth0", True, ("10.0.0.5",)),
    Interface("ib0", True, ("10.1.0.5",)),
    Interface("eth1", False, ("10.2.0.5",)),
)
BARE = Interface("dummy0", True, ())
KNOWN = [LO, ETH, IB, DOWN, BARE]
HERE = platform.node()


@pytest.fixture(autouse=True)
def _no_adapters(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "infiniband")


def found_issues(nccl=False, **env):
    return [str(one) for one in issues(env, KNOWN, nccl)]


def assert_issue(found: list[str], *parts: str) -> None:
    """One issue that contains the parts; its text names the host."""
    assert len(found) == 1
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("", "eth0 eth1 ib0 docker0"),
        ("eth", "eth0 eth1"),
        ("eth0", "eth0"),
        ("=eth", ""),
        ("=eth1,ib0", "eth1 ib0"),
        ("^docker,eth", "ib0"),
        ("^=eth0", "eth1 ib0 docker0"),
        ("ib,eth1", "eth1 ib0"),
        ("wlan", ""),
    ],
)
def test_names_as_nccl_reads_them(wanted, left):
    assert chosen(wanted, ["eth0", "eth1", "ib0", "docker0"]) == left.split()


def test_a_missing_interface_is_one_issue():
    assert found_issues() == []
    assert found_issues(GLOO_SOCKET_IFNAME="eth0,ib0") == []
    for name, reason in (("eth", "is no interface"), ("eth1", "is down"), ("dummy0", "has no address")):
        found = found_issues(GLOO_SOCKET_IFNAME=name)
        assert_issue(found, f"GLOO_SOCKET_IFNAME={name} {reason}", HERE, "use lo, eth0 or ib0")
    found = found_issues(True, NCCL_SOCKET_IFNAME="wlan")
    assert_issue(found, "NCCL_SOCKET_IFNAME=wlan ", HERE, "use lo, eth0 or ib0")
    assert found_issues(True, NCCL_SOCKET_IFNAME="eth") == []
    assert found_issues(False, NCCL_SOCKET_IFNAME="wlan") == []  # nothing uses it


def test_infiniband_adapters_are_checked(monkeypatch, tmp_path):
    assert_issue(found_issues(True, NCCL_IB_HCA="mlx5"), "NCCL_IB_HCA=mlx5 ", HERE, "leave it out")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert found_issues(True, NCCL_IB_HCA="mlx5") == found_issues(True, NCCL_IB_HCA="=mlx5_0:1") == []
    assert_issue(found_issues(True, NCCL_IB_HCA="=mlx5_1:1"), "NCCL_IB_HCA==mlx5_1:1 ", HERE, "use mlx5_0")


def test_timeouts_and_the_flight_recorder(tmp_path):
    assert (
        found_issues(
            NCCL_IB_TIMEOUT="22", TORCH_FR_BUFFER_SIZE="2000", TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "fr_")
        )
        == []
    )
    (text,) = found_issues(NCCL_IB_TIMEOUT="long")
    check_message(text, "NCCL_IB_TIMEOUT=long", "use one, or leave it out")
    file = tmp_path / "absent" / "fr_"
    (text,) = found_issues(TORCH_NCCL_TRACE_BUFFER_SIZE="2000", TORCH_NCCL_DEBUG_INFO_TEMP_FILE=str(file))
    check_message(text, f"TORCH_NCCL_DEBUG_INFO_TEMP_FILE={file}", "choose another folder")
    (text,) = found_issues(TORCH_FR_DUMP_TEMP_FILE="/tmp/fr_")
    check_message(text, "TORCH_FR_DUMP_TEMP_FILE=/tmp/fr_", "set TORCH_FR_BUFFER_SIZE=2000")


def test_settings_that_only_cost_speed_are_warnings():
    found = list(
        issues(
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"},
            KNOWN,
            True,
        )
    )
    assert [one.fatal for one in found] == [False, False]
    check_message(str(found[0]), "TORCH_NCCL_ASYNC_ERROR_HANDLING=0")
    check_message(str(found[1]), "NCCL_P2P_DISABLE=1", "leave it out where the hardware works")


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


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def check(self, keys):
        return all(key in self for key in keys)


def test_an_issue_of_one_rank_ends_all_ranks(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    issue = "GLOO_SOCKET_IFNAME=x is wrong; use y"
    store = Store({"network/1": issue.encode(), "network/read/1": b"read"})
    assert refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2), False) == issue
    assert store["network/0"] == b""
    store = Store({"network/1": b"", "network/read/1": b"read"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    message = refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2), False)
    assert message.startswith("GLOO_SOCKET_IFNAME=eth9 ")


def test_rank_0_leaves_after_the_others_have_read_an_issue(monkeypatch):
    """It may host the store, without which the others would end with a lost connection."""
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    store, left = Store({"network/1": b""}), []
    reader = threading.Timer(0.3, lambda: (left.append("rank 1"), store.set("network/read/1", "read")))
    reader.start()
    refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2), False)
    assert left == ["rank 1"]
    reader.join()


def test_a_start_on_several_nodes_logs_the_interface_it_chose(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.setattr(network, "gloo_interface", lambda launch, known: "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    store = Store({"network/1": b""})
    (text,) = check_and_choose_interface(store, Launch(0, 2, 0, 1), False)
    check_message(text, "GLOO_SOCKET_IFNAME=ib0")
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert check_and_choose_interface(store, Launch(0, 2, 0, 2, "head"), False) == []  # one node
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == ""
    assert (
        check_and_choose_interface(store, Launch(0, 2, 0, 2, "127.0.0.1"), False) == []
    )  # and no other one has to reach it
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_doctor_looks_at_the_network(monkeypatch):
    for name in list(network.os.environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_")):
            monkeypatch.delenv(name)
    levels = {str(one).split()[0] for one in doctor.network()}
    assert levels <= {"ok", "warning"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    (found,) = [one for one in doctor.network() if one.level == "problem"]
    assert_issue([str(found)], "problem  network: GLOO_SOCKET_IFNAME=eth9 ", HERE, "; use ")
    assert doctor.network in doctor.CHECKS
