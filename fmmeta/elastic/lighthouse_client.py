"""Client of torchft's lighthouse: requests the quorum of the next outer step, and sends heartbeats.

    ask      one request until it is answered; a status request once a second tells a lighthouse that
             waits for other groups from one that has died
    beat     heartbeats from the first request on, by the threads of torchft's ManagerServer, outside the GIL

A pending quorum request is never cancelled while the lighthouse is alive: the server would still count this
group, and its peers would block waiting for it (communicator.py).

torchft's lighthouse has no authentication: any client that reaches it is listed and can delay the groups.
Members that do not know the secret of the run are left out by the groups themselves (communicator.py).
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from fmmeta.common.errors import MachineFault, UsageError

BEAT, CONNECT = timedelta(milliseconds=250), timedelta(seconds=10)
# of a question without an answer, before the lighthouse is asked for a sign of life; and between two of them
LOOK_S = 1.0
SIGN = timedelta(seconds=5)  # that it gets for the sign
QUESTION = timedelta(days=1)


class LighthouseClient:
    """One per group. `name`: of this group, used once; `ft`: torchft's low-level interface. Raises
    `UsageError` without an answer.
    """

    def __init__(self, address: str, name: str, ft: Any) -> None:
        self.address, self.name, self.ft = address, name, ft
        self.host = reachable_as(address)
        try:
            self.client = ft.LighthouseClient(address, CONNECT)
        except Exception as error:
            raise UsageError(
                f"lighthouse={address} does not answer ({first_line(error)}); start `fmmeta lighthouse` "
                "there, or give the address that it prints"
            ) from None
        self.beats: Any = None

    def begin_beating(self, venue: str, size: int) -> None:
        """Start heartbeats; from now on the other groups wait for this one."""
        if self.beats is None:
            bind = f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0"
            self.beats = self.ft.ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self.address,
                hostname=self.host,
                bind=bind,
                store_addr=venue,
                world_size=size,
                heartbeat_interval=BEAT,
                connect_timeout=CONNECT,
                quorum_retries=0,
            )

    def stop_beating(self) -> None:
        if self.beats is not None:
            self.beats.shutdown()
        self.beats = None

    def ask(self, patience_s: float, **mine: Any) -> Any:
        """The quorum that this group is a member of. mine: arguments of torchft's `quorum`.

        Raises `MachineFault` if the lighthouse does not answer for `patience_s`.
        """
        heard, why = time.monotonic(), "no answer"
        while True:
            told = self._question(mine)
            while True:
                try:
                    found = told.get(timeout=LOOK_S)
                except queue.Empty:
                    found = self._sign()
                    if found is not None:
                        break
                    heard = time.monotonic()  # others are at work, and it waits for them
                    continue
                if not isinstance(found, Exception):
                    return found
                break
            why = first_line(found)
            if time.monotonic() - heard > patience_s:
                raise MachineFault(
                    f"lighthouse={self.address} has been silent for {patience_s:.0f} s ({why}); look whether"
                    " it runs; the last checkpoint is whole"
                ) from None
            time.sleep(0.1)

    def _question(self, mine: dict[str, Any]) -> queue.SimpleQueue[Any]:
        """Send the request in a thread; the answer or exception is put into the returned queue."""
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(
            target=put, args=(told, lambda: self.client.quorum(self.name, QUESTION, **mine)), daemon=True
        ).start()
        return told

    def _sign(self) -> Exception | None:
        """Why the lighthouse does not answer a status request; None if it does.

        Without an answer the next request uses a new connection.
        """
        try:
            self.client.heartbeat(self.name, SIGN)
        except Exception as error:
            try:
                self.client = self.ft.LighthouseClient(self.address, SIGN)
            except Exception as second:
                return second
            return error
        return None


def put(told: queue.SimpleQueue[Any], asked: Callable[[], Any]) -> None:
    try:
        told.put(asked())
    except Exception as error:
        told.put(error)


def coordination() -> Any:
    """torchft's low-level interface. Raises `UsageError` if it is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # it tells every question otherwise
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        raise UsageError(
            f"elastic groups need torchft ({first_line(error)}); pip install 'fmmeta[elastic]'"
        ) from None


def reachable_as(lighthouse: str) -> str:
    """The address of this machine as the lighthouse's machine sees it. Raises `UsageError`."""
    try:
        there = urlsplit(lighthouse)
        host, port = there.hostname, there.port
        if there.scheme != "http" or not host or not port:
            raise ValueError("no http://HOST:PORT")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"lighthouse={lighthouse} is no address ({error}); give http://HOST:PORT as `fmmeta lighthouse`"
            " prints it"
        ) from None


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
