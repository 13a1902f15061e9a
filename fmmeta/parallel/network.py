"""Network settings of this host, checked before any collective, and what processes agree on through a store.

issues                        interfaces that cannot work, for `fmmeta doctor` and for the start of a run
check_and_choose_interface    at the start of a launch: choose gloo's interface if it is not set,
                              and end all ranks if one cannot be reached
raise_file_limit              room for a connection to every rank
agree_on_generation           a fresh key prefix in torch's key-value store
SharedStore                   signed values in that store
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
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import LOGGER, STDERR
from fmmeta.common.text import any_of
from fmmeta.parallel.layout import Launch

FILES, FIRST_FILES = 256, 64  # open files beside connections to other ranks: of a run, and at its start
PORTS = (10_000, 32_768)  # of unused_port, and of SLURM jobs


Store = Any
"""A store of torch: its methods set, check and multi_get are used."""


@dataclass(frozen=True)
class Interface:
    """A network interface: whether it is up now, and its addresses."""

    name: str
    up: bool
    addresses: tuple[str, ...]


def interfaces() -> list[Interface]:
    import psutil

    stats = psutil.net_if_stats()
    return [
        Interface(
            name,
            stats[name].isup,
            tuple(
                a.address.split("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)
            ),
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats
    ]


def issues(env: Mapping[str, str], known: Sequence[Interface]) -> Iterator[str]:
    """Interfaces in GLOO_SOCKET_IFNAME through which this host reaches no other, and what to do."""
    host, usable = platform.node(), [one.name for one in known if one.up and one.addresses]
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in usable:
            yield (
                f"GLOO_SOCKET_IFNAME={name} is no interface of {host} that is up and has an address; use"
                f" {any_of(usable) if usable else 'another host'}"
            )


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

    It is below those that Linux gives to connections, which may be taken by then.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with suppress(OSError):
            listen("0.0.0.0", port).close()
            return port


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


def file_issues(launch: Launch) -> Iterator[str]:
    """A hard limit of open files that is too low for the connections of this process."""
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], files_needed(launch)
    if resource.RLIM_INFINITY != hard < needed:
        yield (
            f"world_size={launch.world_size}: rank {launch.global_rank} on {platform.node()} may open {hard}"
            f" files and needs {needed}; raise the hard limit there (ulimit -Hn {needed}, or LimitNOFILE of"
            " the service that starts it)"
        )


def check_and_choose_interface(store: Store, launch: Launch) -> list[str]:
    """Raise on all ranks if a setting of one rank cannot work; return what was chosen, as a warning.

    Sets GLOO_SOCKET_IFNAME where gloo's own choice would not work. Raises `UsageError`. Collective: world,
    through `store`.
    """
    known, here, name = interfaces(), launch.local_world_size == launch.world_size, None
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        if not here:
            name = gloo_interface(launch, known)
        elif is_loopback(launch.master_addr):
            name = loopback_interface()
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    found = [*file_issues(launch), *issues(os.environ, known)]
    store.set(f"network/{launch.global_rank}", "".join(found[:1]))
    for issue in store.multi_get([f"network/{rank}" for rank in range(launch.world_size)]):
        if issue:
            _wait_for_readers(store, launch)
            raise UsageError(issue.decode())
    if here or name is None:
        return []
    return [
        f"GLOO_SOCKET_IFNAME={name}: the name of this host stands for an address that other nodes cannot"
        " reach"
    ]


PAUSE_S = 0.02
READ_S = 10.0  # that rank 0 waits until the other ranks have read an issue
PROOF = 64  # hex digits of an HMAC (`proof`)


def _wait_for_readers(store: Store, launch: Launch) -> None:
    """Let rank 0, with which the store may end, be the last to leave. Collective: world, through `store`."""
    store.set(f"network/read/{launch.global_rank}", "read")
    deadline = time.monotonic() + READ_S
    if launch.global_rank == 0:
        readers = [f"network/read/{rank}" for rank in range(launch.world_size)]
        while not store.check(readers) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def agree_on_generation(store: Store, rank: int, size: int, timeout_s: float) -> str:
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


def read(store: Store, keys: Sequence[str]) -> list[str]:
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

    def __init__(self, store: Store, secret: bytes) -> None:
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
