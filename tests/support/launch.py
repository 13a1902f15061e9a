"""Start N processes as a launcher would, on loopback, and wait for them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.fork_server import ROOT, ForkServer, environment, free_port, places, shared

ON_GPU = Path("/dev/nvidiactl").exists()  # what has been looked for on a GPU cannot be forked
WAITS = re.compile(r"fmmeta: rank \d+ waits for rank \d+ on ")
READ_BY_IMPORTS = (
    "HF_",
    "TRANSFORMERS_",
    "OMP_",
    "MKL_",
    "MALLOC_",
    "DS_",
    "CUDA_",
    "PYTHON",
    "LD_",
    "HOME",
    "XDG_",
)


@dataclass
class ProcessResults:
    """How a set of ranks ended: exit codes and output by rank."""

    codes: list[int]
    output: list[str]

    def ok(self) -> ProcessResults:
        text = [f"rank {rank}:\n{text[-4000:]}" for rank, text in enumerate(self.output)]
        assert not any(self.codes), "\n".join([f"exit codes {self.codes}", *text])
        return self

    @property
    def others(self) -> str:
        """Output of the ranks after the first, without the lines that they wait for it on a busy machine."""
        lines = "".join(self.output[1:]).splitlines()
        return "\n".join(line for line in lines if line.strip() and not WAITS.match(line))


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    timeout_s: float = 300,
    per_rank: dict[int, dict[str, str]] | None = None,
    cwd: Path = ROOT,
    before: Callable[[], None] | None = None,
    fresh: bool = False,
) -> ProcessResults:
    """Run `python ARGUMENTS` once per rank with torchrun's variables. After `timeout_s` all are killed and
    the test fails.

    before: a function of a module that is called in each process first. fresh: the start of Python is a part
    of what is tried; so it is where a variable differs that libraries read when they are imported. Otherwise
    processes are forked (fork_server.py).
    """
    return start_ranks(arguments, ranks, per_rank, cwd, before, fresh).end(timeout_s)


def start_ranks(
    arguments: Sequence[str],
    ranks: int,
    per_rank: dict[int, dict[str, str]] | None = None,
    cwd: Path = ROOT,
    before: Callable[[], None] | None = None,
    fresh: bool = False,
) -> Forked | Fresh:
    """Begin what `run_ranks` does; `end(timeout_s)` waits for it."""
    envs = [
        environment(**place, **(per_rank or {}).get(rank, {})) for rank, place in enumerate(places(ranks))
    ]
    fresh = fresh or ON_GPU or any(imported(env) != imported(shared().env) for env in envs)
    return (Fresh if fresh else Forked)(arguments, envs, cwd, before)


TRAINING = {"outer_steps": 4, "inner_steps": 2, "eval_episodes": 0, "save_steps": 0, "logging_steps": 1}


def train_flags(folder: Path, **flags: object) -> list[str]:
    """Flags of a training run of a few seconds that writes into `folder`."""
    return [f"--{key}={value}" for key, value in {**TRAINING, "output_dir": folder, **flags}.items()]


def train(
    folder: Path, ranks: int, timeout_s: float = 200, fresh: bool = False, **flags: object
) -> ProcessResults:
    """Run launch/train.py on some ranks with these flags."""
    return run_ranks(["launch/train.py", *train_flags(folder, **flags)], ranks, timeout_s, fresh=fresh)


def imported(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read by imports."""
    return {key: value for key, value in env.items() if key.startswith(READ_BY_IMPORTS)}


class Forked:
    """Ranks from the fork_server."""

    def __init__(
        self, arguments: Sequence[str], envs: Sequence[dict[str, str]], cwd: Path, before: Callable | None
    ) -> None:
        name = f"{before.__module__}:{before.__qualname__}" if before else ""
        self.folder = tempfile.TemporaryDirectory()
        logs = [Path(self.folder.name) / f"rank-{rank}.log" for rank in range(len(envs))]
        self.ranks = [
            shared().start(arguments, log, env, cwd, name) for log, env in zip(logs, envs, strict=True)
        ]

    def end(self, timeout_s: float) -> ProcessResults:
        with self.folder:
            try:
                codes = shared().wait(self.ranks, timeout_s)
            except TimeoutError:
                raise too_late(timeout_s, [rank.text for rank in self.ranks]) from None
            finally:  # also when the test itself is interrupted
                for rank in self.ranks:
                    shared().signal(rank, signal.SIGKILL)
            return ProcessResults(codes, [rank.text for rank in self.ranks])


class Fresh:
    """Ranks that are separate interpreters."""

    def __init__(
        self, arguments: Sequence[str], envs: Sequence[dict[str, str]], cwd: Path, before: Callable | None
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self.folder.name) / f"rank-{rank}.log" for rank in range(len(envs))]
        self.processes = []
        for env, log in zip(envs, self.logs, strict=True):
            with log.open("w") as out:  # a pipe that is not read would stop its rank, and so all of them
                streams = {"stdout": out, "stderr": subprocess.STDOUT}
                command = [sys.executable, *arguments]
                self.processes.append(psutil.Popen(command, env=env, cwd=cwd, preexec_fn=before, **streams))

    def end(self, timeout_s: float) -> ProcessResults:
        with self.folder:
            _, late = psutil.wait_procs(self.processes, timeout_s)
            for process in late:
                process.kill()
                process.wait()
            output = [log.read_text() for log in self.logs]
            if late:
                raise too_late(timeout_s, output)
            return ProcessResults([process.returncode for process in self.processes], output)


def too_late(timeout_s: float, output: Sequence[str]) -> AssertionError:
    return AssertionError(
        f"ranks still ran after {timeout_s} s:\n" + "\n".join(text[-3000:] for text in output)
    )


def python(
    words: Sequence[str], folder: Path, cwd: Path = ROOT, stdin: str = "", timeout_s: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` without a launcher's variables; its streams are files in `folder` meanwhile."""
    return alone(shared(), words, folder, environment(**env), cwd, stdin, timeout_s)


def alone(
    fork_server: ForkServer,
    words: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    stdin: str = "",
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """The same in a given fork server, with the complete environment given."""
    given, out, err = (folder / f"std{name}" for name in ("in", "out", "err"))
    given.write_text(stdin)
    started = fork_server.start(words, out, env, cwd, errors=err, stdin=given)
    (code,) = fork_server.wait([started], timeout_s)
    return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())


__all__ = [
    "ROOT",
    "ProcessResults",
    "alone",
    "environment",
    "free_port",
    "python",
    "run_ranks",
    "start_ranks",
    "train",
    "train_flags",
]
