"""`fmmeta lighthouse`: runs torchft's lighthouse server, which lists the groups of an elastic run."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import setting
from fmmeta.elastic.lighthouse_client import coordination, first_line
from fmmeta.parallel.network import listen


@dataclass
class LighthouseConfig:
    host: str = setting(
        "::", "Address to listen on; ::: all interfaces; 127.0.0.1: for groups of this machine"
    )
    port: int = setting(29510, "Port to listen on; 0: any")
    heartbeat_timeout: float = setting(5.0, "Seconds without a beat after which a group counts as gone")
    join_timeout: float = setting(
        60.0, "Seconds that those who are there wait for a group that beats and does not come"
    )
    min_groups: int = setting(1, "Minimum number of groups of a step")


def lighthouse(config: LighthouseConfig) -> None:
    """Run the lighthouse until a signal arrives."""
    _server, address = open_lighthouse(config)
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *of: asked.set())
    print(f"fmmeta: lighthouse {address}", flush=True)
    while not asked.wait(1.0):
        pass
    os._exit(0)  # its threads have nothing to lose


def open_lighthouse(config: LighthouseConfig) -> tuple[Any, str]:
    """torchft's server and its address. Raises `UsageError`."""
    if (
        not 0 <= config.port < 2**16
        or config.min_groups < 1
        or config.heartbeat_timeout <= 0
        or config.join_timeout <= 0
    ):
        raise UsageError(
            f"port={config.port}, min_groups={config.min_groups},"
            f" heartbeat_timeout={config.heartbeat_timeout} or join_timeout={config.join_timeout}: use a port"
            " below 65536 and positive numbers"
        )
    ft = coordination()
    try:
        listen(config.host, config.port).close()  # it would say so in its own thread only
    except OSError as error:
        raise UsageError(
            f"host={config.host}, port={config.port} cannot be opened ({error.strerror}); give others"
        ) from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        server = ft.LighthouseServer(
            bind=f"{host}:{config.port}",
            min_replicas=config.min_groups,
            join_timeout_ms=round(1000 * config.join_timeout),
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * config.heartbeat_timeout),
        )
        address = server.address()  # by the name of this machine
    except Exception as error:
        raise UsageError(f"port={config.port}: the lighthouse cannot be lit ({first_line(error)})") from None
    return server, address if config.host in ("::", "0.0.0.0") else f"http://{host}:{urlsplit(address).port}"
