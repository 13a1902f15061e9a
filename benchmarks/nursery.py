"""Starts ranks in a fraction of a second: a process that has imported everything once, and forks.

    nursery = Nursery(); ranks = nursery.run(["--outer_steps=4", ...], 2, folder); nursery.wait(ranks, 60)

A rank is a process like any other: it can be killed, stopped and signalled, and its output lies in `folder`/rank-R.log. What is
not tried this way are the imports and the interpreter's own end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass
class Rank:
    pid: int
    log: Path
    code: int | None = None  # as subprocess has it: -9 after SIGKILL
    ended: float = 0.0  # on the monotonic clock

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Nursery:
    """One such process. preload: modules it imports besides."""

    preload: Sequence[str] = ()
    known: dict[int, Rank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.nursery", *self.preload]
        self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._hear() == ["ready"]

    def run(self, argv: Sequence[str], ranks: int, folder: Path, **env: str) -> list[Rank]:
        """Start `launch/train.py ARGV` on some ranks, with torchrun's variables."""
        folder.mkdir(parents=True, exist_ok=True)
        port, started = str(free_port()), []
        for rank in range(ranks):
            log = folder / f"rank-{rank}.log"
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": port}  # fmt: skip
            order = {"argv": list(argv), "log": str(log), "env": {**{key: str(value) for key, value in place.items()}, **env}}
            assert self.process.stdin is not None
            print(json.dumps(order), file=self.process.stdin, flush=True)
            while (heard := self._hear())[0] != "born":
                self._ended(heard)
            started.append(Rank(int(heard[1]), log))
            self.known[started[-1].pid] = started[-1]
        return started

    def wait(self, ranks: Sequence[Rank], timeout_s: float) -> list[int]:
        """Exit codes, once all have ended. Raises `TimeoutError` after killing those that have not."""
        deadline = time.monotonic() + timeout_s
        while any(rank.code is None for rank in ranks):
            if not self.poll(max(0.0, deadline - time.monotonic())):
                alive = [rank for rank in ranks if rank.code is None]
                for number in (signal.SIGUSR2, signal.SIGKILL):  # say where they are, then end
                    for rank in alive:
                        self.signal(rank, number)
                    time.sleep(1)
                raise TimeoutError("\n".join(f"{rank.code}: {rank.text[-6000:]}" for rank in ranks))
        return [rank.code for rank in ranks if rank.code is not None]

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take note of one rank that has ended, if one does within that time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return False
        self._ended(self._hear())
        return True

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
        self.process.kill()
        self.process.wait()

    def _hear(self) -> list[str]:
        assert self.process.stdout is not None
        return read_line(self.process.stdout.fileno()).split()

    def _ended(self, heard: Sequence[str]) -> None:
        rank = self.known[int(heard[1])]
        rank.code, rank.ended = int(heard[2]), time.monotonic()


def read_line(handle: int) -> str:
    """A line without reading ahead, so that `select` stays true."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(handle, 1)
        if not part:
            raise EOFError("the nursery has ended")
        line += part
    return line.decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(preload: Sequence[str]) -> None:
    import importlib

    told = os.fdopen(os.dup(1), "w")  # libraries print while they are imported
    os.dup2(2, 1)
    import fmmeta.train  # noqa: F401
    from fmmeta.cli import parse

    parse([])
    for name in ("datasets", "pyarrow", "transformers.models.bert.modeling_bert", *preload):
        importlib.import_module(name)
    print("ready", file=told, flush=True)
    while True:
        if select.select([0], [], [], 0.01)[0]:
            line = read_line(0)
            pid = os.fork()
            if pid == 0:
                be_born(json.loads(line))
            print(f"born {pid}", file=told, flush=True)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            print(f"ended {pid} {os.waitstatus_to_exitcode(status)}", file=told, flush=True)


def be_born(order: dict) -> None:
    """What a rank does; it never comes back."""
    code = 1
    try:
        os.environ.update(order["env"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for handle in (1, 2):
            os.dup2(log, handle)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from fmmeta.cli import train

        faulthandler.register(signal.SIGUSR2, all_threads=True)
        if "FAULTS_KILL_AT" in os.environ:
            arm(int(os.environ["FAULTS_KILL_AT"]))
        train(order["argv"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def arm(at: int) -> None:
    """In a rank: count the file operations of the thread that writes checkpoints, from its third save on; die before one."""
    import threading

    seen, saves = [0], [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "saver":
                saves[0] += real.__name__ == "mkdir"
                if saves[0] >= 3:
                    seen[0] += 1
                    if seen[0] == at:
                        os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    if os.environ["RANK"] == "0":
        for owner, name in ((os, "fsync"), (os, "rename"), (Path, "mkdir"), (Path, "open"), (shutil, "rmtree")):
            setattr(owner, name, counted(getattr(owner, name)))


if __name__ == "__main__":
    main(sys.argv[1:])
