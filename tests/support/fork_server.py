"""Starts Python processes in a fraction of a second: a server imports everything once and forks.

    ranks = shared().train(["--outer_steps=4", ...], 2, folder)
    codes = shared().wait(ranks, 60)

A started process has its own environment, working folder, output files and arguments: it can be killed,
stopped and signalled, and it runs the interpreter's exit handlers. Imports, and variables that libraries read
while they are imported, are not exercised this way: use `run_ranks(..., fresh=True)` for those. There are two
servers, and the ranks of a launch alternate between them: strings hash differently in each, as in processes
started one by one, so that an order taken from a set differs between ranks. (multiprocessing has one fork
server per process.) A server has no threads and no process group.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, cast

from tests.support.fork_server_process import read_line

ROOT = Path(__file__).parents[2]
SERVERS = 2
DROPPED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FMMETA_GLOBAL_RANK",
)


SESSION_ENVIRONMENT: dict[str, str] = {}
"""The environment of the servers, set when the test session starts: a test may change its own."""


def environment(**extra: str) -> dict[str, str]:
    """The parent's environment without a launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def places(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank of a node.

    LOCAL_SIZE is of DeepSpeed's launcher: without it DeepSpeed starts a process whenever it counts devices.
    """
    node = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "LOCAL_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    return [
        {key: str(value) for key, value in {**node, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Rank:
    pid: int
    log: Path
    code: int | None = None  # as in subprocess: -9 after SIGKILL
    ended: float = 0.0  # on the monotonic clock

    @property
    def text(self) -> str:
        """The output so far; empty until the process has opened its file."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class ForkServer:
    """The server processes and the processes that they started. env: of the servers' imports."""

    def __init__(self, env: Mapping[str, str] | None = None, servers: int = SERVERS) -> None:
        self.env = dict(environment() if env is None else env)
        # DeepSpeed would search for an accelerator and log that; pyarrow's allocator would start a thread
        server_env = {**self.env, "DS_ACCELERATOR": "cpu", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, "-m", "tests.support.fork_server_process"]
        self.servers = [
            subprocess.Popen(command, env=server_env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(servers)
        ]
        self.running: dict[int, Rank] = {}
        self.ready = False
        self.turn = 0

    def start(
        self,
        words: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        before: str = "",
        errors: Path | None = None,
        stdin: Path | None = None,
    ) -> Rank:
        """Start `python WORDS`, where WORDS are `FILE.py ...`, `-m MODULE ...` or `-c CODE ...`.

        before: `module:function` that the process calls first. errors: where stderr goes, if not to `log`.
        """
        if not self.ready:
            assert [self._read(server) for server in self.servers] == [["ready"]] * len(self.servers)
            self.ready = True
        server = self.servers[self.turn % len(self.servers)]
        self.turn += 1
        request = {
            "words": list(words),
            "log": str(log),
            "errors": str(errors or log),
            "stdin": str(stdin or os.devnull),
            "env": dict(env),
            "cwd": str(cwd),
            "before": before,
        }
        write = cast("IO[bytes]", server.stdin)
        write.write(json.dumps(request).encode() + b"\n")
        write.flush()
        while (line := self._read(server))[0] != "started":
            self._record_end(line)
        rank = self.running[int(line[1])] = Rank(int(line[1]), log)
        return rank

    def train(
        self, argv: Sequence[str], ranks: int, folder: Path, before: str = "", **env: str
    ) -> list[Rank]:
        """Start `launch/train.py ARGV` on some ranks, with torchrun's variables and `env`; output in
        FOLDER/rank-R.log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        return [
            self.start(
                ["launch/train.py", *argv],
                folder / f"rank-{rank}.log",
                environment(**place, **env),
                before=before,
            )
            for rank, place in enumerate(places(ranks))
        ]

    def wait(self, ranks: Sequence[Rank], timeout_s: float) -> list[int]:
        """Exit codes, once all have ended. Processes that run longer are killed: `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while any(rank.code is None for rank in ranks):
            if not self.poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                for number in (signal.SIGUSR2, signal.SIGKILL):  # log their stacks, then end them
                    for rank in ranks:
                        self.signal(rank, number)
                    time.sleep(1)
                raise TimeoutError("\n".join(f"{rank.code}: {rank.text[-6000:]}" for rank in ranks))
        return [rank.code for rank in ranks if rank.code is not None]

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Record ranks that have ended, waiting up to `timeout_s` for one."""
        line = select.select([stdout_fd(server) for server in self.servers], [], [], timeout_s)[0]
        for server in self.servers:
            if stdout_fd(server) in line:
                self._record_end(self._read(server))
        return bool(line)

    def signal(self, rank: Rank, number: int) -> bool:
        """Send a signal; False if the rank has ended before."""
        while self.poll():
            pass
        try:
            if rank.code is None:
                os.kill(rank.pid, number)
        except ProcessLookupError:
            return False
        return rank.code is None

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()

    def _read(self, server: subprocess.Popen[bytes]) -> list[str]:
        return read_line(stdout_fd(server)).split()

    def _record_end(self, line: Sequence[str]) -> None:
        rank = self.running.pop(int(line[1]))
        rank.code, rank.ended = int(line[2]), time.monotonic()


@cache
def shared() -> ForkServer:
    """The fork server of a test session."""
    fork_server = ForkServer(SESSION_ENVIRONMENT or None)
    atexit.register(fork_server.close)
    return fork_server


def stdout_fd(server: subprocess.Popen[bytes]) -> int:
    """File descriptor on which a server reports started and ended processes."""
    return cast("IO[bytes]", server.stdout).fileno()
