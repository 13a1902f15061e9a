"""Network settings: issues that are reported, and the interface that gloo gets where its default fails."""

import platform
import socket
import threading

import pytest

from fmmeta import doctor
from fmmeta.parallel import network
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.network import Interface, check_and_choose_interface, gloo_interface, issues
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


def assert_issue(found: list[str], *parts: str) -> None:
    """One issue that contains the parts; its text names the host."""
    assert len(found) == 1
    assert all(part in found[0] for part in parts), found


def test_a_missing_interface_is_one_issue():
    assert list(issues({}, KNOWN)) == list(issues({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, KNOWN)) == []
    for name in ("eth", "eth1", "dummy0"):  # no such name, down, no address
        found = list(issues({"GLOO_SOCKET_IFNAME": name}, KNOWN))
        assert_issue(found, f"GLOO_SOCKET_IFNAME={name} is no interface", HERE, "use lo, eth0 or ib0")


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
    assert refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2)) == issue
    assert store["network/0"] == b""
    store = Store({"network/1": b"", "network/read/1": b"read"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    check_message(refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2)), "GLOO_SOCKET_IFNAME=eth9 ")


def test_rank_0_leaves_after_the_others_have_read_an_issue(monkeypatch):
    """It may host the store, without which the others would end with a lost connection."""
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    store, left = Store({"network/1": b""}), []
    reader = threading.Timer(0.3, lambda: (left.append("rank 1"), store.set("network/read/1", "read")))
    reader.start()
    refusal(check_and_choose_interface, store, Launch(0, 2, 0, 2))
    assert left == ["rank 1"]
    reader.join()


def test_a_start_on_several_nodes_logs_the_interface_it_chose(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)
    monkeypatch.setattr(network, "gloo_interface", lambda launch, known: "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    store = Store({"network/1": b""})
    (text,) = check_and_choose_interface(store, Launch(0, 2, 0, 1))
    check_message(text, "GLOO_SOCKET_IFNAME=ib0")
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert check_and_choose_interface(store, Launch(0, 2, 0, 2, "head")) == []  # one node
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == ""
    assert (
        check_and_choose_interface(store, Launch(0, 2, 0, 2, "127.0.0.1")) == []
    )  # and no other one has to reach it
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_doctor_looks_at_the_network(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert {str(one).split()[0] for one in doctor.network()} <= {"ok", "warning"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    (found,) = [one for one in doctor.network() if one.level == "problem"]
    assert_issue([str(found)], "problem  network: GLOO_SOCKET_IFNAME=eth9 ", HERE, "; use ")
    assert doctor.network in doctor.CHECKS
