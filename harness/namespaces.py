"""Several hosts on one machine: network namespaces with a name, an address and a loopback of their own. Two
are joined by a cable (veth), more of them by a cable each to a switch (a bridge in another namespace).

    with Hosts() as hosts: hosts.run(0, ["python", ...]); hosts.shape(10); hosts.unplug()

Processes of one reach the others through the cables alone, which can be slowed down (tc tbf), delayed (tc
netem) and, with two hosts, unplugged. They share files and cores. Needs root and Debian's iproute2 and
util-linux; touches nothing but namespaces that it has made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

NAMES, ADDRESSES = ("alpha", "beta"), ("10.231.0.1", "10.231.0.2")
BURST = 6000  # bytes that pass at once, however slow the cable; a few packets
QUEUE_S, QUEUE = (
    0.1,
    32_000,
)  # what waits at most: seconds of the bandwidth, bytes at least; acknowledgements wait behind it


class Hosts:
    """Raises `OSError` with the reason where this machine cannot make them.

    relayed: the cable leads through a third namespace, in which a process delays what passes (relay.py).
    names: of the hosts, with different first letters.
    """

    def __init__(self, relayed: bool = False, names: Sequence[str] = NAMES) -> None:
        self.names, self.relayed = names, relayed
        self.addresses = [f"10.231.0.{number}" for number in range(1, len(names) + 1)]
        self.relay: subprocess.Popen[str] | None = None
        self.middle = f"fmmeta-{os.getpid()}-middle" if relayed or len(names) > 2 else ""
        self.spaces = [f"fmmeta-{os.getpid()}-{name}" for name in names]
        self.cables = [f"fm{os.getpid()}{name[0]}" for name in names]
        self.senders = list(zip(self.spaces, self.cables, strict=True))  # ends of cables that are shaped
        self.running: list[subprocess.Popen[Any]] = []
        missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
        if os.geteuid() or missing:
            raise OSError(f"{' and '.join(missing)} not found" if missing else "network namespaces need root")
        try:
            self._make()
        except OSError:
            self.close()
            raise

    def _make(self) -> None:
        for space, name in zip(self.spaces, self.names, strict=True):
            call("ip", "netns", "add", space)
            files = self.files(space)
            files.mkdir(parents=True)
            # as Debian does: a host's own name stands for a loopback address, which is no use to the
            # others
            lines = [
                f"{'127.0.1.1' if host == name else address} {host}"
                for address, host in zip(self.addresses, self.names, strict=True)
            ]
            (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
            (files / "hostname").write_text(f"{name}\n")
        if self.middle:
            self._make_middle()
        else:
            here, there = self.cables
            call(
                "ip",
                "link",
                "add",
                here,
                "netns",
                self.spaces[0],
                "type",
                "veth",
                "peer",
                "name",
                there,
                "netns",
                self.spaces[1],
            )
        for space, cable, address in zip(self.spaces, self.cables, self.addresses, strict=True):
            call("ip", "-n", space, "addr", "add", f"{address}/24", "dev", cable)
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "link", "set", cable, "up")

    def _make_middle(self) -> None:
        call("ip", "netns", "add", self.middle)
        ends = [f"{cable}m" for cable in self.cables]
        for space, cable, end in zip(self.spaces, self.cables, ends, strict=True):
            call(
                "ip",
                "link",
                "add",
                cable,
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                end,
                "netns",
                self.middle,
            )
            call("ip", "-n", self.middle, "link", "set", end, "up")
        if not self.relayed:
            call("ip", "-n", self.middle, "link", "add", "switch", "type", "bridge")
            call("ip", "-n", self.middle, "link", "set", "switch", "up")
            for end in ends:
                call("ip", "-n", self.middle, "link", "set", end, "master", "switch")
            self.senders += [(self.middle, end) for end in ends]
            return
        words = [
            "ip",
            "netns",
            "exec",
            self.middle,
            sys.executable,
            str(Path(__file__).with_name("relay.py")),
            *ends,
        ]
        self.relay = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)

    def delay(self, milliseconds: float) -> None:
        """Let the relay hold each packet for so long, each way."""
        assert self.relay is not None, "Hosts(relayed=True)"
        assert self.relay.stdin is not None
        print(milliseconds, file=self.relay.stdin, flush=True)

    @staticmethod
    def files(space: str) -> Path:
        """What `ip netns exec` lays over /etc."""
        return Path("/etc/netns") / space

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        inside = ["sh", "-c", f'hostname {self.names[host]} && exec "$@"', "sh", *words]
        return ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", *inside]

    def run(
        self, host: int, words: Sequence[str], output: int | IO[Any] = subprocess.DEVNULL, **options: Any
    ) -> subprocess.Popen:
        """Start a process on a host, in a session of its own; `close` ends it and its children."""
        started = subprocess.Popen(
            self.command(host, words),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        self.running.append(started)
        return started

    def shape(self, mbit: float | None, delay_ms: float = 0.0) -> None:
        """Let each cable carry so many Mbit/s each way (None: as fast as it goes) and take so long.

        Raises `OSError`.
        """
        for space, cable in self.senders:
            subprocess.run(
                ["tc", "-n", space, "qdisc", "del", "dev", cable, "root"], capture_output=True, check=False
            )
            added = ["tc", "-n", space, "qdisc", "add", "dev", cable, "root"]
            if delay_ms:
                rate = ["rate", f"{mbit}mbit"] if mbit else []
                call(*added, "netem", "delay", f"{delay_ms}ms", *rate)
            elif mbit:
                # whole frames pass through the bucket: no segments of 64 KB, which would not fit into it
                call("ip", "-n", space, "link", "set", cable, "gso_max_segs", "1")
                limit = max(QUEUE, round(QUEUE_S * mbit * 1e6 / 8))
                call(*added, "tbf", "rate", f"{mbit}mbit", "burst", str(BURST), "limit", str(limit))

    def unplug(self) -> None:
        call("ip", "-n", self.spaces[1], "link", "set", self.cables[1], "down")

    def plug(self) -> None:
        call("ip", "-n", self.spaces[1], "link", "set", self.cables[1], "up")

    def sent(self) -> list[int]:
        """Bytes that each host has put on the cable, headers included."""
        found = []
        for host, cable in enumerate(self.cables):
            words = self.command(host, ["cat", f"/sys/class/net/{cable}/statistics/tx_bytes"])
            found.append(int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
        return found

    def close(self) -> None:
        """End what runs there and remove the hosts."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        for space in [*self.spaces, *([self.middle] if self.middle else [])]:
            left = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in left:
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(self.files(space), ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def call(*words: str) -> None:
    """Run a tool; what it says against it becomes an `OSError`."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(f"`{' '.join(words)}`: {' '.join(ran.stderr.split()) or ran.returncode}")
