"""Network settings of this host, checked before any collective, and what processes agree on through a store.

    issues                        problems of the environment, for `fmmeta doctor` and for the start of a run
    check_and_choose_interface    at the start of a launch: choose gloo's interface if it is not set,
                                  and end all ranks if one cannot be reached
    raise_file_limit              room for a connection to every rank
    agree_on_generation           a fresh key prefix in torch's key-value store
    SharedStore                   signed values in that store

gloo takes the names of GLOO_SOCKET_IFNAME as they are; NCCL takes prefixes of names, `=` before a list asks
for exact names and `^` excludes (NCCL's documentation of NCCL_SOCKET_IFNAME and NCCL_IB_HCA).
"""

import hmac
import json
import os
import platform
import random
import resource
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import LOGGER, STDERR
from fmmeta.common.text import any_of
from fmmeta.parallel.layout import Launch

FILES, FIRST_FILES = 256, 64  # open files beside connections to other ranks: of a run, and at its start
LOWEST_PORT, FEWEST_PORTS = 10_000, 1_000  # of unused_port
INFINIBAND = Path("/sys/class/infiniband")
NUMBERS = (
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
RECORDERS = (  # number of collectives that the flight recorder keeps, and the prefix of its files
    ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
)
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of a node talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs of a node talk through sockets",
    "NCCL_IB_DISABLE": "nodes talk through sockets instead of InfiniBand or RoCE",
}


class StoreProtocol(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@dataclass(frozen=True)
class Interface:
    """A network interface: whether it is up now, and its addresses."""

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


def issues(env: Mapping[str, str], known: Sequence[Interface], nccl: bool) -> Iterator[NetworkIssue]:
    """Settings of this host that cannot work or that cost something. nccl: whether NCCL will be used."""
    host, usable = platform.node(), [one.name for one in known if one.up and one.addresses]
    use = f"use {any_of(usable) if usable else 'another host'}"
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        found = next((one for one in known if one.name == name), None)
        if found is None:
            yield NetworkIssue(f"GLOO_SOCKET_IFNAME={name} is no interface of {host}", use)
        elif name not in usable:
            yield NetworkIssue(
                f"GLOO_SOCKET_IFNAME={name} {'has no address' if found.up else 'is down'} on {host}", use
            )
    for name in NUMBERS:
        if name in env and not env[name].strip().isdigit():
            yield NetworkIssue(f"{name}={env[name]} is not a number", "use one, or leave it out")
    for size, file in RECORDERS:
        entries, folder = env.get(size, "").strip(), Path(env.get(file, "/tmp/nccl_trace_rank_")).parent
        if file in env and entries in ("", "0"):
            yield NetworkIssue(
                f"{file}={env[file]} names a file, and nothing is recorded for it",
                f"set {size}=2000",
                fatal=False,
            )
        elif entries.isdigit() and int(entries) and not os.access(folder, os.W_OK):
            yield NetworkIssue(
                f"{file}={env.get(file, '')} is in {folder}, which cannot be written to",
                "choose another folder",
            )
    if env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield NetworkIssue(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 leaves ranks waiting in NCCL when another one fails",
            "leave it out, or rely on the watchdog (--step_timeout)",
            fatal=False,
        )
    if nccl:
        yield from _nccl_issues(env, usable, use)


def _nccl_issues(env: Mapping[str, str], usable: Sequence[str], use: str) -> Iterator[NetworkIssue]:
    host, wanted = platform.node(), env.get("NCCL_SOCKET_IFNAME", "")
    if not chosen(wanted, usable):
        yield NetworkIssue(
            f"NCCL_SOCKET_IFNAME={wanted} leaves no interface of {host} that is up",
            f"{use}, or a beginning of it",
        )
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    wanted = env.get("NCCL_IB_HCA", "")
    if wanted and not chosen(",".join(part.split(":")[0] for part in wanted.split(",")), adapters):
        fix = f"use {any_of(adapters)}" if adapters else "there is none: leave it out"
        yield NetworkIssue(f"NCCL_IB_HCA={wanted} leaves no adapter of {host}", fix)
    for name, cost in SLOW.items():
        if env.get(name, "0") not in ("", "0"):
            yield NetworkIssue(
                f"{name}={env[name]}: {cost}", "leave it out where the hardware works", fatal=False
            )


def chosen(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that a setting of NCCL selects: prefixes, `=` exact names, `^` all others; empty: all."""
    if not wanted:
        return list(names)
    listed = tuple(filter(None, wanted.lstrip("^=").split(",")))
    fits = [name for name in names if (name in listed if "=" in wanted[:2] else name.startswith(listed))]
    return [name for name in names if name not in fits] if "^" in wanted[:2] else fits


def gloo_interface(launch: Launch, known: Sequence[Interface]) -> str | None:
    """The interface through which other nodes reach this one, if gloo's own choice would not work; else None.

    gloo takes the address that the name of this host resolves to. On many machines that is a loopback
    address, and ranks of other nodes would then wait for ever.
    """
    own, real = own_addresses(), not_loopback(known)
    if any(own & set(one.addresses) for one in real):
        return None
    source = source_address(launch.master_addr)
    if source and is_loopback(source) and len(real) == 1:  # the master, by a name that resolves to loopback
        return real[0].name
    return next((one.name for one in real if source in one.addresses), None)


def not_loopback(known: Sequence[Interface]) -> list[Interface]:
    """The interfaces that are up and lead to other hosts."""
    return [one for one in known if one.up and not any(map(is_loopback, one.addresses))]


def outside_addresses(known: Sequence[Interface], names: str = "") -> dict[str, str]:
    """By the name of each interface that leads to other hosts: an address of it, IPv4 where it has one.

    names: of the interfaces to choose from, such as GLOO_SOCKET_IFNAME; empty: all.
    """
    wanted, found = names.split(",") if names else None, dict[str, str]()
    for one in not_loopback(known):
        global_ones = [address for address in one.addresses if not address.startswith("fe80:")]
        if global_ones and (wanted is None or one.name in wanted):
            found[one.name] = min(global_ones, key=lambda address: ":" in address)
    return found


def own_addresses() -> set[str]:
    """The addresses that the name of this host resolves to."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(platform.node(), None)}
    except OSError:
        return set()


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def loopback_interface() -> str | None:
    """The interface that only processes of this host reach."""
    return next((one.name for one in interfaces() if one.up and any(map(is_loopback, one.addresses))), None)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address; port 0: any. Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=2048)


def unused_port() -> int:
    """A free port for a process that starts now and binds it in some seconds.

    Where there are enough, it is none of those that the kernel gives to connections and to sockets bound to
    port 0, which may be taken by then.
    """
    first, last = ephemeral_ports()
    ports = [*range(LOWEST_PORT, first), *range(last + 1, 2**16)]
    for port in random.SystemRandom().sample(ports, len(ports)) if len(ports) >= FEWEST_PORTS else ():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def ephemeral_ports() -> tuple[int, int]:
    """The first and the last of the ports that the kernel gives away; IANA's where Linux names none."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = file.read_text().split() if file.exists() else ("49152", "65535")
    return int(first), int(last)


def source_address(host: str, port: int = 1) -> str | None:
    """The own address that packets to a host would carry; nothing is sent. None if there is no route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def files_needed(launch: Launch) -> int:
    """Open files of this process: gloo connects every pair of ranks, and each rank has two connections to the
    store.
    """
    return launch.world_size * (3 if hosts_store(launch) else 1) + FILES


def hosts_store(launch: Launch) -> bool:
    """Whether this process is the store host, not torchrun's agent."""
    return launch.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def raise_file_limit(launch: Launch) -> None:
    """Raise the soft limit of open files to the hard limit where the ranks need more. Local.

    Logs a warning if even the hard limit leaves no room for the connections through which all ranks would
    learn of it (`file_issues`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files_needed(launch):
        soft = files_needed(launch) if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if hosts_store(launch) and resource.RLIM_INFINITY != hard < launch.world_size + FIRST_FILES:
        for issue in file_issues(launch):
            LOGGER.warning("%s", issue, extra=STDERR)


def file_issues(launch: Launch) -> Iterator[NetworkIssue]:
    """A hard limit of open files that is too low for the connections of this process."""
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], files_needed(launch)
    if resource.RLIM_INFINITY != hard < needed:
        yield NetworkIssue(
            f"world_size={launch.world_size}: rank {launch.global_rank} on {platform.node()} may open"
            f" {hard} files and needs {needed}",
            f"raise the hard limit there (ulimit -Hn {needed}, or LimitNOFILE of the service that starts it)",
        )


def check_and_choose_interface(store: StoreProtocol, launch: Launch, nccl: bool) -> list[str]:
    """Raise on all ranks if a setting of one rank cannot work; return warnings about other settings.

    Sets GLOO_SOCKET_IFNAME where gloo's own choice would not work. Raises `UsageError`. Collective: world,
    through `store`.
    """
    known, warnings = interfaces(), list[str]()
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        name = None
        if launch.local_world_size < launch.world_size:
            name = gloo_interface(launch, known)
        elif is_loopback(launch.master_addr):
            name = loopback_interface()  # all ranks are on this host
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        if name is not None and launch.local_world_size < launch.world_size:
            warnings.append(
                f"GLOO_SOCKET_IFNAME={name}: the name of this host stands for an address that other nodes"
                " cannot reach"
            )
    found = [*file_issues(launch), *issues(os.environ, known, nccl)]
    store.set(f"network/{launch.global_rank}", next((str(one) for one in found if one.fatal), ""))
    for issue in store.multi_get([f"network/{rank}" for rank in range(launch.world_size)]):
        if issue:
            _wait_for_readers(store, launch)
            raise UsageError(issue.decode())
    return warnings + [str(one) for one in found]


PAUSE_S = 0.02
READ_S = 10.0  # that rank 0 waits until the other ranks have read an issue
PROOF = 64  # hex digits of an HMAC (`proof`)


def _wait_for_readers(store: StoreProtocol, launch: Launch) -> None:
    """Let rank 0, with which the store may end, be the last to leave. Collective: world, through `store`."""
    store.set(f"network/read/{launch.global_rank}", "read")
    deadline = time.monotonic() + READ_S
    if launch.global_rank == 0:
        readers = [f"network/read/{rank}" for rank in range(launch.world_size)]
        while not store.check(readers) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def agree_on_generation(store: StoreProtocol, rank: int, size: int, timeout_s: float) -> str:
    """Return a name that is new and the same on all ranks.

    torchrun's agent keeps its store over `--max-restarts` when the rendezvous is static (torch's comment says
    otherwise), and ranks that read each other's old addresses wait for ever. So every process writes a random
    number:

        all     join/<rank> = own number
        first   roster = a new name and the numbers it has read; again, whenever one of them has changed
        all     ack/<rank> = the roster's name, if the roster has the own number
        first   final = that name, when all have acknowledged it

    An old value is never mistaken for a new one, since no number comes twice.
    Raises `TimeoutError`. Collective: world, through `store`.
    """
    number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    store.set(f"join/{rank}", number)
    known: list[str] = []
    name = ""
    while time.monotonic() < deadline:
        if rank == 0:
            numbers = read(store, [f"join/{one}" for one in range(size)])
            if numbers and numbers != known:
                known, name = numbers, uuid.uuid4().hex
                store.set("roster", json.dumps([name, *known]))
            if name and read(store, [f"ack/{one}" for one in range(1, size)]) == [name] * (size - 1):
                store.set("final", name)
                return name
        else:
            roster = read(store, ["roster"])
            offered, *numbers = json.loads(roster[0]) if roster else [""]
            if len(numbers) == size and numbers[rank] == number:
                if offered != name:
                    name = offered
                    store.set(f"ack/{rank}", name)
                if read(store, ["final"]) == [name]:
                    return name
        time.sleep(PAUSE_S)
    raise TimeoutError(f"rank {rank} has not met the other {size - 1} ranks within {timeout_s:g} s")


def read(store: StoreProtocol, keys: Sequence[str]) -> list[str]:
    """The values of these keys; an empty list if one of them does not exist yet."""
    if not store.check(list(keys)):
        return []
    return [value.decode() for value in store.multi_get(list(keys))]


class SharedStore:
    """Signed values by key, for the ranks of one launch. Rank 0 or torchrun's agent is the store host.

    Each value carries an HMAC with the secret of the launch: another client of the store can remove values,
    but a value that it writes is read as empty. Calls do not wait for the rank that writes, but while the
    store host is stopped every call blocks: call from a thread that may wait, and use one object per thread.
    """

    def __init__(self, store: StoreProtocol, secret: bytes) -> None:
        self.store, self.secret = store, secret

    def set(self, key: str, text: str) -> None:
        self.store.set(key, proof(self.secret, key, text) + text)

    def get(self, key: str) -> str:
        """A value; empty if the key does not exist."""
        return self.get_existing([key])[0] if self.store.check([key]) else ""

    def get_existing(self, keys: Sequence[str]) -> list[str]:
        """Values of keys that exist, in one request; empty where the signature is not valid."""
        found = [value.decode(errors="replace") for value in self.store.multi_get(list(keys))]
        return [
            value[PROOF:] if is_proof(value[:PROOF], self.secret, key, value[PROOF:]) else ""
            for key, value in zip(keys, found, strict=True)
        ]


def proof(secret: bytes, *signed: Any) -> str:
    """HMAC of JSON values, in PROOF hex digits: evidence that the writer knows the secret."""
    return hmac.new(secret, json.dumps(signed, sort_keys=True).encode(), "sha256").hexdigest()


def is_proof(found: Any, secret: bytes, *signed: Any) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), proof(secret, *signed).encode())
