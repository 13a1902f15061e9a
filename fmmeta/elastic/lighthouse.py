"""`fmmeta lighthouse`: the one process that tells the groups of an elastic run who is there; torchft's server."""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import dataclass
from typing import Any

from fmmeta.config import UsageError, setting
from fmmeta.parallel.quorum import coordination, first_line


@dataclass
class LighthouseConfig:
    port: int = setting(29510, "Port to listen on; 0: any")
    heartbeat_timeout: float = setting(5.0, "Seconds without a beat after which a group counts as gone")
    join_timeout: float = setting(60.0, "Seconds that those who are there wait for a group that beats and does not come")
    min_groups: int = setting(1, "Fewest groups that go on together")


def lighthouse(config: LighthouseConfig) -> None:
    """Stand until a signal comes."""
    server = open_lighthouse(config)
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *of: asked.set())
    print(f"fmmeta: lighthouse {server.address()}", flush=True)
    while not asked.wait(1.0):
        pass
    os._exit(0)  # its threads have nothing to lose


def open_lighthouse(config: LighthouseConfig) -> Any:
    """torchft's server. Raises `UsageError`."""
    if not 0 <= config.port < 2**16 or config.min_groups < 1 or config.heartbeat_timeout <= 0 or config.join_timeout <= 0:
        raise UsageError(f"port={config.port}, min_groups={config.min_groups}, heartbeat_timeout={config.heartbeat_timeout} or "
                         f"join_timeout={config.join_timeout}: use a port below 65536 and positive numbers")  # fmt: skip
    ft = coordination()
    if config.port:  # it would say so in its own thread only
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("::", config.port))
            except OSError as error:
                raise UsageError(f"port={config.port} cannot be opened ({error.strerror}); give another") from None
    try:
        return ft.LighthouseServer(
            bind=f"[::]:{config.port}", min_replicas=config.min_groups, join_timeout_ms=round(1000 * config.join_timeout),
            quorum_tick_ms=100, heartbeat_timeout_ms=round(1000 * config.heartbeat_timeout))  # fmt: skip
    except Exception as error:
        raise UsageError(f"port={config.port}: the lighthouse cannot be lit ({first_line(error)})") from None
