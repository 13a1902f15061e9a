"""Start N processes as a launcher would, on loopback, and wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent


@dataclass
class Ended:
    """How a set of ranks ended: exit codes and output by rank."""

    codes: list[int]
    output: list[str]

    def ok(self) -> Ended:
        assert not any(self.codes), f"exit codes {self.codes}\n" + "\n".join(text[-4000:] for text in self.output)
        return self


def environment(**extra: str) -> dict[str, str]:
    """The parent's environment without a launcher's variables."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FMMETA_GLOBAL_RANK")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(arguments: Sequence[str], ranks: int, timeout_s: float = 300, per_rank: dict[int, dict[str, str]] | None = None,
              cwd: Path = ROOT, before: Callable[[], None] | None = None) -> Ended:  # fmt: skip
    """Run `python ARGUMENTS` once per rank with torchrun's variables. After `timeout_s` all are killed and the test fails.

    before: called in each process before Python starts.
    """
    port = str(free_port())
    processes, files = [], []
    for rank in range(ranks):
        env = environment(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **(per_rank or {}).get(rank, {}))  # fmt: skip
        # a pipe that nobody reads would stop its rank, and so all of them
        files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments], env=env, cwd=cwd, stdout=files[-1], stderr=subprocess.STDOUT, preexec_fn=before
            )
        )
    deadline = time.monotonic() + timeout_s
    late = False
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late = True
    output = [read_back(file) for file in files]
    if late:
        raise AssertionError(f"ranks still ran after {timeout_s} s:\n" + "\n".join(text[-3000:] for text in output))
    return Ended([process.returncode for process in processes], output)


def read_back(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()
