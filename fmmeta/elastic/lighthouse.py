"""torchft's lighthouse, which lists the groups of an elastic run: the client of a group, `fmmeta lighthouse`.

The client requests the quorum of the next outer step, and sends heartbeats:

    request_quorum     one request until it is answered; a status request once a second tells a lighthouse
                       that waits for other groups from one that has died
    report_lost        a request in the name of a group whose process has ended: the lighthouse waits for no
                       other one of it (communicator.py says when this is safe)
    start_heartbeats   from the first request on, by the threads of torchft's ManagerServer, outside the GIL

A pending quorum request is never cancelled while the lighthouse is alive: the server would still count this
group, and its peers would block waiting for it (communicator.py).

torchft's lighthouse has no authentication: any client that reaches it is listed and can delay the groups.
Members that do not know the secret of the run are left out by the groups themselves (communicator.py).
"""

import importlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from html import unescape
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from fmmeta.common.errors import MachineFault, UsageError, one_line, usage_errors
from fmmeta.common.processes import native_thread
from fmmeta.common.progress import LOGGER, STDERR
from fmmeta.config.fields import check_values
from fmmeta.config.settings import setting
from fmmeta.parallel.network import (
    interfaces,
    is_loopback,
    listen,
    loopback_interface,
    outside_addresses,
    source_address,
)

HEARTBEAT, CONNECT = timedelta(milliseconds=250), timedelta(seconds=10)
STATUS_S = 1.0  # between two status requests while a quorum request is pending
FIRST_WAIT_S, WAIT_S = 0.02, 0.25  # for an answer, until `while_waiting` is called the first time, and again
LIGHTHOUSE_S = 120.0  # timeout of a lighthouse that does not answer
STATUS_TIMEOUT, QUORUM_TIMEOUT = timedelta(seconds=5), timedelta(days=1)
LOST_TIMEOUT = timedelta(minutes=1)  # of a request in the name of a lost group, if no quorum is formed
T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of `work`, which may never return: its thread does not keep the process."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    native_thread("request", run)
    return result


def status_page(address: str) -> str:
    """What the lighthouse shows in a browser; empty if it does not answer."""
    direct, status = build_opener(ProxyHandler({})), f"http://{urlsplit(address).netloc}/status"
    with suppress(OSError, HTTPException), direct.open(status, timeout=STATUS_S) as page:
        return page.read().decode(errors="replace")
    return ""


def heartbeats(address: str) -> dict[str, bool]:
    """Whether the lighthouse has had no heartbeat for its timeout, by the name of the group."""
    found = re.findall(r'class="heartbeat\s*(old|)\s*">\s*(.+): seen', status_page(address))
    return {unescape(name): bool(old) for old, name in found}


class LighthouseClient:
    """One per group. Raises `MachineFault` if the lighthouse does not answer for `LIGHTHOUSE_S`.

    name: of this group, used once. ft: torchft's low-level interface (`coordination`).
    """

    def __init__(self, address: str, name: str, ft: Any) -> None:
        self.address, self.name, self.ft = address, name, ft
        self.host = reachable_as(address)
        self.client = wait_for(address, lambda: ft.LighthouseClient(address, CONNECT))
        self.heartbeats: Any = None
        self.min_groups: int | None = None  # of the lighthouse; None: not known yet

    def read_min_groups(self) -> None:
        """Read --min_groups on the status page of the lighthouse; torchft's requests cannot tell it.

        The page names it while fewer groups have a pending request; otherwise it stays unknown.
        """
        if self.min_groups is not None:
            return
        found = re.search(r"need min_replicas (\d+)", status_page(self.address))
        self.min_groups = int(found[1]) if found else None

    def start_heartbeats(self, store_address: str, size: int) -> None:
        """Send heartbeats in threads; from now on the other groups wait for this one."""
        if self.heartbeats is None:
            self.heartbeats = self.ft.ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self.address,
                hostname=self.host,
                bind=f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0",
                store_addr=store_address,
                world_size=size,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=CONNECT,
                quorum_retries=0,
            )

    def stop_heartbeats(self) -> None:
        if self.heartbeats is not None:
            self.heartbeats.shutdown()
        self.heartbeats = None

    def request_quorum(
        self, timeout_s: float, while_waiting: Callable[[], None] = lambda: None, **arguments: Any
    ) -> Any:
        """The quorum that this group is a member of. arguments: those of torchft's `quorum`.

        while_waiting: called every `WAIT_S` until the answer arrives. Raises `MachineFault` if the lighthouse
        does not answer for `timeout_s`.
        """
        answered = time.monotonic()
        while True:
            request = in_thread(partial(self.client.quorum, self.name, QUORUM_TIMEOUT, **arguments))
            failure, asked, wait_s = None, time.monotonic(), FIRST_WAIT_S
            while failure is None and not wait([request], wait_s).done:
                wait_s = min(WAIT_S, STATUS_S)
                while_waiting()
                if time.monotonic() - asked >= STATUS_S:
                    failure, asked = self._status_error(), time.monotonic()
                    if failure is None:  # the lighthouse waits for groups that are at work
                        answered = asked
            failure = failure or request.exception()
            if failure is None:
                return request.result()
            if time.monotonic() - answered > timeout_s:
                raise MachineFault(
                    f"lighthouse={self.address} has been silent for {timeout_s:.0f} s"
                    f" ({one_line(failure)[:200]}); look whether it runs; the last checkpoint is whole"
                ) from None
            time.sleep(0.1)

    def report_lost(self, name: str, **arguments: Any) -> None:
        """Request the next quorum in the name of a group that has ended. arguments: as `request_quorum`."""
        in_thread(partial(self.client.quorum, name, LOST_TIMEOUT, **arguments))

    def _status_error(self) -> Exception | None:
        """The error of a status request; None if the lighthouse answers it.

        After an error the next request uses a new connection.
        """
        try:
            self.client.heartbeat(self.name, STATUS_TIMEOUT)
        except Exception as error:
            with suppress(Exception):
                self.client = self.ft.LighthouseClient(self.address, STATUS_TIMEOUT)
            return error
        return None


def coordination() -> Any:
    """torchft's low-level interface. Raises `UsageError` if it is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # it logs every request otherwise
    with usage_errors("elastic groups need torchft", "pip install 'fmmeta[elastic]'"):
        return importlib.import_module("torchft.coordination")


def wait_for(lighthouse: str, work: Callable[[], T]) -> T:
    """The result of `work`, repeated while it fails: the machine of the lighthouse may be restarting.

    Raises `MachineFault` after `LIGHTHOUSE_S`.
    """
    began, logged = time.monotonic(), False
    while True:
        try:
            return work()
        except Exception as error:
            reason = one_line(error)[:200]
        if time.monotonic() - began > LIGHTHOUSE_S:
            raise MachineFault(
                f"lighthouse={lighthouse} has not answered for {LIGHTHOUSE_S:.0f} s ({reason}); start"
                " `fmmeta lighthouse` there, or give the address that it prints"
            )
        if not logged:
            logged = True
            LOGGER.warning(
                "lighthouse=%s does not answer (%s); waiting for %g s at most",
                lighthouse,
                reason,
                LIGHTHOUSE_S,
                extra=STDERR,
            )
        time.sleep(WAIT_S)


def reachable_as(lighthouse: str) -> str:
    """The address of this machine that groups of other machines reach; a loopback address if `lighthouse` is
    one literally: all groups are on this machine then.

    It is that of packets to the lighthouse. On the lighthouse's machine it may be a loopback address, since
    the name of a machine stands for one on many (Debian's 127.0.1.1); then it is that of the interface.
    Raises `UsageError` if `lighthouse` is no address, and `MachineFault` if there is no route for
    `LIGHTHOUSE_S`.
    """
    with usage_errors(
        f"lighthouse={lighthouse} is no address", "give http://HOST:PORT as `fmmeta lighthouse` prints it"
    ):
        there = urlsplit(lighthouse)
        host, port = there.hostname, there.port
        if there.scheme != "http" or not host or not port:
            raise ValueError("no http://HOST:PORT")

    def own_address() -> str:
        found = source_address(host, port)
        if found is None:
            raise OSError(f"no route to {host}")
        return found

    address = wait_for(lighthouse, own_address)
    if is_loopback(host) or not is_loopback(address):
        return address
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names == loopback_interface():  # set for the ranks of one launch
        names = ""
    found = outside_addresses(interfaces(), names)
    if len(found) > 1:
        raise UsageError(
            f"lighthouse={lighthouse}: the name {host} stands for {address} on this machine, which groups of"
            f" other machines cannot reach, and the interfaces {', '.join(found)} are up; give the lighthouse"
            f" by its address, such as http://{next(iter(found.values()))}:{port}, or set GLOO_SOCKET_IFNAME"
        )
    return next(iter(found.values()), address)


@dataclass
class LighthouseConfig:
    host: str = setting(
        "::", "Address to listen on; ::: all interfaces; 127.0.0.1: for groups of this machine"
    )
    port: int = setting(29510, "Port to listen on; 0: any")
    heartbeat_timeout: float = setting(
        5.0, "Seconds without a heartbeat after which a group is dropped", positive=True
    )
    join_timeout: float = setting(
        60.0,
        "Seconds that groups wait for a group that sends heartbeats and no request",
        positive=True,
    )
    min_groups: int = setting(1, "Minimum number of groups of a step", least=1)


def lighthouse(config: LighthouseConfig) -> None:
    """Run the lighthouse until a signal arrives."""
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the threads of the server too
    _server, address = open_lighthouse(config)
    print(f"fmmeta: lighthouse {address}", flush=True)
    signal.sigwait(signals)
    os._exit(0)  # its threads hold no state


def open_lighthouse(config: LighthouseConfig) -> tuple[Any, str]:
    """torchft's server and its address. Raises `UsageError`."""
    check_values(config)
    if not 0 <= config.port < 2**16:
        raise UsageError(f"port={config.port} is not in 0 to {2**16 - 1}; use 0 for any free port, or 29510")
    ft = coordination()
    if config.host == "::" and not socket.has_dualstack_ipv6():
        config = replace(config, host="0.0.0.0")  # all interfaces of a host without IPv6
    with usage_errors(f"host={config.host}, port={config.port} cannot be opened", "give others"):
        listen(config.host, config.port).close()  # the server would log an error in its own thread only
    host = f"[{config.host}]" if ":" in config.host else config.host
    with usage_errors(f"port={config.port}: the lighthouse cannot be started", "give another"):
        server = ft.LighthouseServer(
            bind=f"{host}:{config.port}",
            min_replicas=config.min_groups,
            join_timeout_ms=round(1000 * config.join_timeout),
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * config.heartbeat_timeout),
        )
        address = server.address()  # by the name of this machine
    return server, address if config.host in ("::", "0.0.0.0") else f"http://{host}:{urlsplit(address).port}"
