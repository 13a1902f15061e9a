"""What is said of network settings, and what gloo is told where its own choice would not do."""

from __future__ import annotations

import platform
import socket

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
    use = "use lo, eth0 or ib0"
    assert found_issues(GLOO_SOCKET_IFNAME="eth") == [
        f"GLOO_SOCKET_IFNAME=eth is no interface of {HERE}; {use}"
    ]
    assert found_issues(GLOO_SOCKET_IFNAME="eth1") == [f"GLOO_SOCKET_IFNAME=eth1 is down on {HERE}; {use}"]
    assert found_issues(GLOO_SOCKET_IFNAME="dummy0") == [
        f"GLOO_SOCKET_IFNAME=dummy0 has no address on {HERE}; {use}"
    ]
    text = f"NCCL_SOCKET_IFNAME=wlan leaves no interface of {HERE} that is up; {use}, or a beginning of it"
    assert found_issues(True, NCCL_SOCKET_IFNAME="wlan") == [text]
    assert found_issues(True, NCCL_SOCKET_IFNAME="eth") == []
    assert found_issues(False, NCCL_SOCKET_IFNAME="wlan") == []  # nothing uses it


def test_infiniband_adapters_are_checked(monkeypatch, tmp_path):
    assert found_issues(True, NCCL_IB_HCA="mlx5") == [
        f"NCCL_IB_HCA=mlx5 leaves no adapter of {HERE}; there is none: leave it out"
    ]
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert found_issues(True, NCCL_IB_HCA="mlx5") == found_issues(True, NCCL_IB_HCA="=mlx5_0:1") == []
    assert found_issues(True, NCCL_IB_HCA="=mlx5_1:1") == [
        f"NCCL_IB_HCA==mlx5_1:1 leaves no adapter of {HERE}; use mlx5_0"
    ]


def test_timeouts_and_the_flight_recorder(tmp_path):
    assert (
        found_issues(
            NCCL_IB_TIMEOUT="22", TORCH_FR_BUFFER_SIZE="2000", TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "fr_")
        )
        == []
    )
    assert found_issues(NCCL_IB_TIMEOUT="long") == [
        "NCCL_IB_TIMEOUT=long is not a number; use one, or leave it out"
    ]
    file = tmp_path / "gone" / "fr_"
    assert found_issues(TORCH_NCCL_TRACE_BUFFER_SIZE="2000", TORCH_NCCL_DEBUG_INFO_TEMP_FILE=str(file)) == [
        f"TORCH_NCCL_DEBUG_INFO_TEMP_FILE={file} is in {file.parent}, which cannot be written to; choose"
        " another folder"
    ]
    assert found_issues(TORCH_FR_DUMP_TEMP_FILE="/tmp/fr_") == [
        "TORCH_FR_DUMP_TEMP_FILE=/tmp/fr_ names a file, and nothing is recorded for it; set"
        " TORCH_FR_BUFFER_SIZE=2000"
    ]


def test_settings_that_only_cost_speed_are_warnings():
    found = list(
        issues(
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"},
            KNOWN,
            True,
        )
    )
    assert [one.fatal for one in found] == [False, False]
    assert str(found[0]).startswith(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 leaves ranks waiting in NCCL when another one fails; "
    )
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


def test_an_issue_of_one_rank_ends_all_ranks(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = Store({"network/1": b"GLOO_SOCKET_IFNAME=x is no interface of b; use y"})
    check_message(
        refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2), False), "GLOO_SOCKET_IFNAME=x", "use y"
    )
    assert store["network/0"] == b""
    store = Store({"network/1": b""})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    check_message(
        refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2), False), "GLOO_SOCKET_IFNAME=eth9"
    )


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
    assert str(found).startswith(f"problem  network: GLOO_SOCKET_IFNAME=eth9 is no interface of {HERE}; use ")
    assert doctor.network in doctor.CHECKS
