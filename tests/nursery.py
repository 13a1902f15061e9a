"""Starts Python in a fraction of a second: processes that have imported everything once, and fork.

    nursery = shared(); ranks = nursery.train(["--outer_steps=4", ...], 2, folder); nursery.wait(ranks, 60)

What is born is a process like any other, with an environment, a folder, output files and arguments of its
own: it can be killed, stopped and signalled, and it runs the interpreter's exit handlers. What is not tried
this way are imports and what they read from the environment: for that start an interpreter (`run_ranks(...,
fresh=True)`). Ranks beside each other have different mothers, so that strings hash differently in them, as in
processes of separate starts. A mother has no threads and no process group.
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

from tests.mother import read_line

ROOT = Path(__file__).parent.parent
MOTHERS = 2
DROPPED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FMMETA_GLOBAL_RANK",
)


def environment(**extra: str) -> dict[str, str]:
    """The parent's environment without a launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def places(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank of a node."""
    node = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
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
    code: int | None = None  # as subprocess has it: -9 after SIGKILL
    ended: float = 0.0  # on the monotonic clock

    @property
    def text(self) -> str:
        """What it has printed so far; nothing before it has opened its file."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Nursery:
    """Mothers, and what they gave birth to. env: of the imports; the processes get their own."""

    def __init__(self, env: Mapping[str, str] | None = None, mothers: int = MOTHERS) -> None:
        self.env = dict(environment() if env is None else env)
        # DeepSpeed would look for an accelerator, and say so; pyarrow's allocator would start a thread
        own = {**self.env, "DS_ACCELERATOR": "cpu", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, "-m", "tests.mother"]
        self.mothers = [
            subprocess.Popen(command, env=own, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(mothers)
        ]
        self.known: dict[int, Rank] = {}
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
            assert [self._hear(mother) for mother in self.mothers] == [["ready"]] * len(self.mothers)
            self.ready = True
        mother = self.mothers[self.turn % len(self.mothers)]
        self.turn += 1
        order = {
            "words": list(words),
            "log": str(log),
            "errors": str(errors or log),
            "stdin": str(stdin or os.devnull),
            "env": dict(env),
            "cwd": str(cwd),
            "before": before,
        }
        write = cast("IO[bytes]", mother.stdin)
        write.write(json.dumps(order).encode() + b"\n")
        write.flush()
        while (heard := self._hear(mother))[0] != "born":
            self._ended(heard)
        rank = self.known[int(heard[1])] = Rank(int(heard[1]), log)
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
        """Exit codes, once all have ended. Raises `TimeoutError` after killing those that have not."""
        deadline = time.monotonic() + timeout_s
        while any(rank.code is None for rank in ranks):
            if not self.poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                for number in (signal.SIGUSR2, signal.SIGKILL):  # say where they are, then end
                    for rank in ranks:
                        self.signal(rank, number)
                    time.sleep(1)
                raise TimeoutError("\n".join(f"{rank.code}: {rank.text[-6000:]}" for rank in ranks))
        return [rank.code for rank in ranks if rank.code is not None]

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take note of ranks that have ended, if one does within that time."""
        heard = select.select([voice(mother) for mother in self.mothers], [], [], timeout_s)[0]
        for mother in self.mothers:
            if voice(mother) in heard:
                self._ended(self._hear(mother))
        return bool(heard)

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
        for mother in self.mothers:
            mother.kill()
            mother.wait()

    def _hear(self, mother: subprocess.Popen[bytes]) -> list[str]:
        return read_line(voice(mother)).split()

    def _ended(self, heard: Sequence[str]) -> None:
        rank = self.known.pop(int(heard[1]))
        rank.code, rank.ended = int(heard[2]), time.monotonic()


@cache
def shared() -> Nursery:
    """The one that the tests of a session share."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def voice(mother: subprocess.Popen[bytes]) -> int:
    """Where she tells of births and ends."""
    return cast("IO[bytes]", mother.stdout).fileno()
