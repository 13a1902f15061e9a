"""Network settings of this host, checked before any collective: interfaces, timeouts, flight recorder.

    findings    problems of the environment, for `fmmeta doctor` and for the start of a run
    settle      at the start of a launch: choose gloo's interface if it is not set,
                and end all ranks if one cannot be reached

gloo takes the names of GLOO_SOCKET_IFNAME as they are; NCCL takes beginnings of names, `=` before a list asks
for whole ones and `^` excludes (NCCL's documentation of NCCL_SOCKET_IFNAME and NCCL_IB_HCA).
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of
from fmmeta.parallel.layout import Launch

INFINIBAND = Path("/sys/class/infiniband")
NUMBERS = (
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
RECORDERS = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
)
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of a node talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs of a node talk through sockets",
    "NCCL_IB_DISABLE": "nodes talk through sockets instead of InfiniBand or RoCE",
}


class Notes(Protocol):
    """What a store of torch can do."""

    def set(self, key: str, value: str, /) -> object: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@dataclass(frozen=True)
class Interface:
    """up and addresses are those of this moment."""

    name: str
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class NetworkIssue:
    """A setting that cannot work (fatal) or that costs something, and what to do."""

    text: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}"


def interfaces() -> list[Interface]:
    import psutil

    stats = psutil.net_if_stats()
    internet = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name, stats[name].isup, tuple(a.address.split("%")[0] for a in addresses if a.family in internet)
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats
    ]


def findings(env: Mapping[str, str], known: Sequence[Interface], nccl: bool) -> Iterator[NetworkIssue]:
    """What is wrong on this host. nccl: whether NCCL will be used, without which its interfaces do not
    matter.
    """
    usable = [one.name for one in known if one.up and one.addresses]
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        yield from _unusable("GLOO_SOCKET_IFNAME", name, known, usable)
    if nccl and not chosen(env.get("NCCL_SOCKET_IFNAME", ""), usable):
        wanted = env["NCCL_SOCKET_IFNAME"]
        yield NetworkIssue(
            f"NCCL_SOCKET_IFNAME={wanted} leaves no interface of {platform.node()} that is up",
            f"use {any_of(usable) if usable else 'another host'}, or a beginning of it",
        )
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    wanted = env.get("NCCL_IB_HCA", "")
    if nccl and wanted and not chosen(",".join(part.split(":")[0] for part in wanted.split(",")), adapters):
        yield NetworkIssue(
            f"NCCL_IB_HCA={wanted} leaves no adapter of {platform.node()}",
            f"use {any_of(adapters)}" if adapters else "there is none: leave it out",
        )
    yield from _numbers(env)
    yield from _recorder(env)
    if env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield NetworkIssue(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 leaves ranks waiting in NCCL when another one fails",
            "leave it out, or rely on the watchdog (--step_timeout)",
            fatal=False,
        )
    for name, cost in SLOW.items():
        if nccl and env.get(name, "0") not in ("", "0"):
            yield NetworkIssue(
                f"{name}={env[name]}: {cost}", "leave it out where the hardware works", fatal=False
            )


def _unusable(
    setting: str, name: str, known: Sequence[Interface], usable: list[str]
) -> Iterator[NetworkIssue]:
    found = next((one for one in known if one.name == name), None)
    if name not in usable:
        what = "is no interface" if found is None else "is down" if not found.up else "has no address"
        where = f" of {platform.node()}" if found is None else f" on {platform.node()}"
        yield NetworkIssue(
            f"{setting}={name} {what}{where}", f"use {any_of(usable) if usable else 'another host'}"
        )


def chosen(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that a setting of NCCL's leaves: beginnings, `=` whole names, `^` others.

    All of them for an empty one.
    """
    if not wanted:
        return list(names)
    rest = wanted.lstrip("^=")
    whole, listed = "=" in wanted[:2], [part for part in rest.split(",") if part]
    fits = [
        name for name in names if any(name == part if whole else name.startswith(part) for part in listed)
    ]
    return [name for name in names if name not in fits] if "^" in wanted[:2] else fits


def _numbers(env: Mapping[str, str]) -> Iterator[NetworkIssue]:
    for name in NUMBERS:
        if name in env and not env[name].strip().isdigit():
            yield NetworkIssue(f"{name}={env[name]} is not a number", "use one, or leave it out")


def _recorder(env: Mapping[str, str]) -> Iterator[NetworkIssue]:
    """The flight recorder keeps the last collectives of a rank, and writes them somewhere."""
    for size, file in RECORDERS:
        if file in env and env.get(size, "0") in ("", "0"):
            yield NetworkIssue(
                f"{file}={env[file]} names a file, and nothing is recorded for it",
                f"set {size}=2000",
                fatal=False,
            )
        folder = Path(env.get(file, "/tmp/nccl_trace_rank_")).parent
        if (
            env.get(size, "0").strip().isdigit()
            and int(env.get(size) or 0)
            and not os.access(folder, os.W_OK)
        ):
            yield NetworkIssue(
                f"{file}={env.get(file, '')} is in {folder}, which cannot be written to",
                "choose another folder",
            )


def gloo_interface(launch: Launch, known: Sequence[Interface]) -> str | None:
    """The interface that other nodes are reached by, where gloo's own choice would not reach them; else None.

    gloo takes the address that this host's name stands for. On many machines that is a loopback address, and
    on all of them ranks of other nodes would then wait for ever.
    """
    own = own_addresses()
    real = [one for one in known if one.up and not any(is_loopback(address) for address in one.addresses)]
    if any(own & set(one.addresses) for one in real):
        return None
    source = source_address(launch.master_addr)
    if (
        source and is_loopback(source) and len(real) == 1
    ):  # the master itself, by a name that stands for loopback
        return real[0].name
    return next((one.name for one in real if source in one.addresses), None)


def own_addresses() -> set[str]:
    """What the name of this host stands for."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(platform.node(), None)}
    except OSError:
        return set()


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def loopback_interface() -> str | None:
    """The interface that only processes of this host reach."""
    return next(
        (
            one.name
            for one in interfaces()
            if one.up and any(is_loopback(address) for address in one.addresses)
        ),
        None,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address. Raises `OSError`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def source_address(host: str) -> str | None:
    """The own address that packets to a host would carry; nothing is sent."""
    try:
        family, _, _, _, to = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(to)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def check_and_choose_interface(notes: Notes, launch: Launch, nccl: bool) -> list[str]:
    """Refuse on all ranks what cannot work on one; return what to say of the rest. Sets GLOO_SOCKET_IFNAME
    where it must be.

    Raises `UsageError`. Collective: world, through `notes`.
    """
    known, said = interfaces(), []
    if launch.local_world_size < launch.world_size and not os.environ.get("GLOO_SOCKET_IFNAME"):
        name = gloo_interface(launch, known)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            said.append(
                f"GLOO_SOCKET_IFNAME={name}: the name of this host stands for an address that other nodes"
                " cannot reach"
            )
    elif (
        is_loopback(launch.master_addr)
        and not os.environ.get("GLOO_SOCKET_IFNAME")
        and (name := loopback_interface())
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = (
            name  # all ranks are on this host, and no other one has to reach them
        )
    found = list(findings(os.environ, known, nccl))
    notes.set(f"network/{launch.global_rank}", next((str(one) for one in found if one.fatal), ""))
    for problem in notes.multi_get([f"network/{rank}" for rank in range(launch.world_size)]):
        if problem:
            raise UsageError(problem.decode())
    return said + [str(one) for one in found]
