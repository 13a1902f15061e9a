"""`fmmeta lighthouse`: runs torchft's lighthouse server, which lists the groups of an elastic run."""

import os
import signal
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fmmeta.common.errors import UsageError
from fmmeta.config.fields import check_values
from fmmeta.config.settings import setting
from fmmeta.elastic.lighthouse_client import coordination, first_line
from fmmeta.parallel.network import listen


@dataclass
class LighthouseConfig:
    host: str = setting(
        "::", "Address to listen on; ::: all interfaces; 127.0.0.1: for groups of this machine"
    )
    port: int = setting(29510, "Port to listen on; 0: any")
    heartbeat_timeout: float = setting(
        5.0, "Seconds without a heartbeat after which a group is dropped", positive="such as 5"
    )
    join_timeout: float = setting(
        60.0,
        "Seconds that groups wait for a group that sends heartbeats and no request",
        positive="such as 60",
    )
    min_groups: int = setting(1, "Minimum number of groups of a step", least=1)


def lighthouse(config: LighthouseConfig) -> None:
    """Run the lighthouse until a signal arrives."""
    _server, address = open_lighthouse(config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"fmmeta: lighthouse {address}", flush=True)
    while not stop.wait(1.0):
        pass
    os._exit(0)  # its threads hold no state


def open_lighthouse(config: LighthouseConfig) -> tuple[Any, str]:
    """torchft's server and its address. Raises `UsageError`."""
    check_values(config)
    if not 0 <= config.port < 2**16:
        raise UsageError(f"port={config.port} is not in 0 to {2**16 - 1}; use 0 for any free port, or 29510")
    ft = coordination()
    try:
        listen(config.host, config.port).close()  # the server would log an error in its own thread only
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
        raise UsageError(
            f"port={config.port}: the lighthouse cannot be started ({first_line(error)})"
        ) from None
    return server, address if config.host in ("::", "0.0.0.0") else f"http://{host}:{urlsplit(address).port}"
