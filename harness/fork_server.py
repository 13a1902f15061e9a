"""Starts Python processes in a fraction of a second: a server imports everything once and forks.

    ranks = shared().train(["--outer_steps=4", ...], 2, folder)
    codes = shared().wait(ranks, 60)

A started process has its own environment, working folder, output files and arguments: it can be killed,
stopped and signalled, and it runs the interpreter's exit handlers. Imports, and variables that libraries read
while they are imported, are not exercised this way: use `run_ranks(..., fresh=True)` for those. There are two
servers, and the ranks of a launch alternate between them: strings hash differently in each, as in processes
started one by one, so that an order taken from a set differs between ranks. (multiprocessing has one fork
server per process.) A server has no threads and no process group.

The processes of a test session share the servers: a server forks a copy of itself for each `ForkServer` that
connects to its socket, and this copy forks what is to be started. Servers end with the session.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fmmeta.parallel import network
from fmmeta.parallel.layout import without_ranks
from harness.fork_server_process import read_line

ROOT = Path(__file__).parents[1]
SERVERS = 2
PRETENDED = "FMMETA_PRETENDED_CUDA"
"""Environment variable: processes have a pretended GPU (tests/support/pretended_cuda), by PYTHONPATH."""
NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
DROPPED = ("MASTER_ADDR", "MASTER_PORT", "FMMETA_GLOBAL_RANK")


SESSION_FOLDER = "FMMETA_TEST_SESSION"
"""Environment variable: the folder of the test session, with the sockets of its servers."""
SESSION_ENVIRONMENT: dict[str, str] = {}
"""The environment of the servers, set when the test session starts: a test may change its own."""


def environment(**extra: str) -> dict[str, str]:
    """The parent's environment without a launcher's variables.

    NVML counts GPUs without starting CUDA, which a forked process could not use after its server did.
    """
    kept = {key: value for key, value in without_ranks(os.environ).items() if key not in DROPPED}
    if PRETENDED not in kept:
        kept["PYTHONPATH"] = str(ROOT)
    return {**kept, "OMP_NUM_THREADS": "1", **NVML, **extra}


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
    """A port for ranks that start now, given to no other test of this session."""
    session = os.environ.get(SESSION_FOLDER)
    while True:
        port = network.unused_port()
        with suppress(FileExistsError):
            if session:
                (Path(session) / f"port-{port}").touch(exist_ok=False)
            return port


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
    """The servers and the processes that they started. env: of the servers' imports.

    folder: of the sockets; servers whose sockets are there are used. owner: pid of the process with which the
    servers end.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        servers: int = SERVERS,
        folder: Path | None = None,
        owner: int | None = None,
    ) -> None:
        self.env = dict(environment() if env is None else env)
        self.own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp())
        self.started: list[subprocess.Popen[bytes]] = []
        self.servers = self._connect(self.folder, servers, owner or os.getpid())
        self.running: dict[int, Rank] = {}
        self.ready = False
        self.turn = 0

    def _connect(self, folder: Path, servers: int, owner: int) -> list[socket.socket]:
        """A connection to each server, which is started if no process has done so."""
        # DeepSpeed would search for an accelerator and log that; pyarrow's allocator would start a thread
        device = "cuda" if PRETENDED in self.env else "cpu"
        env = {**self.env, "DS_ACCELERATOR": device, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, "-m", "harness.fork_server_process"]
        connections = [socket.socket(socket.AF_UNIX) for _ in range(servers)]
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number, connection in enumerate(connections):
                address = folder / f"server-{number}"
                if not address.exists():
                    with socket.socket(socket.AF_UNIX) as listener:
                        listener.bind(str(address))
                        listener.listen(64)
                        words = [*command, str(listener.fileno()), str(owner)]
                        self.started.append(
                            subprocess.Popen(
                                words,
                                env=env,
                                cwd=ROOT,
                                stdin=subprocess.DEVNULL,
                                pass_fds=[listener.fileno()],
                                start_new_session=True,
                            )
                        )
                connection.connect(str(address))
        return connections

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
        server.sendall(json.dumps(request).encode() + b"\n")
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
        with_line = select.select(self.servers, [], [], timeout_s)[0]
        for server in with_line:
            self._record_end(self._read(server))
        return bool(with_line)

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
        """End what runs, and servers that no other process uses."""
        for server in self.servers:
            server.close()
        if self.own_folder:
            for process in self.started:
                process.kill()
                process.wait()
            shutil.rmtree(self.folder)

    def _read(self, server: socket.socket) -> list[str]:
        return read_line(server.fileno()).split()

    def _record_end(self, line: Sequence[str]) -> None:
        rank = self.running.pop(int(line[1]))
        rank.code, rank.ended = int(line[2]), time.monotonic()


def shared() -> ForkServer:
    """The fork server of a test session: where processes have a pretended GPU, one that has it too."""
    return _shared(PRETENDED in os.environ)


@cache
def _shared(pretended: bool) -> ForkServer:
    if session := os.environ.get(SESSION_FOLDER):
        folder, owner = Path(session), int((Path(session) / "owner").read_text())
        env = SESSION_ENVIRONMENT
        if pretended:
            folder, env = folder / "pretended", environment()
            folder.mkdir(exist_ok=True)
        fork_server = ForkServer(env, folder=folder, owner=owner)
    else:
        fork_server = ForkServer()
    atexit.register(fork_server.close)
    return fork_server


def begin_session() -> Path:
    """Make the folder of a test session, which processes find that are started from here."""
    folder = Path(tempfile.mkdtemp(prefix="fmmeta-tests-"))
    (folder / "owner").write_text(str(os.getpid()))
    os.environ[SESSION_FOLDER] = str(folder)
    return folder
