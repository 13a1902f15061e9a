"""Starts Python in a fraction of a second: processes that have imported everything once, and fork.

    nursery = shared(); ranks = nursery.train(["--outer_steps=4", ...], 2, folder); nursery.wait(ranks, 60)

What is born is a process like any other, with an environment, a folder, output files and arguments of its own: it can be killed,
stopped and signalled, and it runs the interpreter's exit handlers. What is not tried this way are imports and what they read from
the environment: for that start an interpreter (`run_ranks(..., fresh=True)`). Ranks beside each other have different mothers, so
that strings hash differently in them, as in processes of separate starts. A mother has no threads and no process group.
"""

from __future__ import annotations

import atexit
import importlib
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
from typing import IO, Any, NoReturn, cast

ROOT = Path(__file__).parent.parent
MOTHERS = 2
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert", "roberta")
PRELOADED = (
    *("fmmeta.train", "fmmeta.cli", "datasets", "pyarrow", "peft", "deepspeed", "deepspeed.runtime.zero.stage3"),
    *("deepspeed.runtime.pipe.engine", "accelerate", "tensorboard", "torch.utils.tensorboard", "sklearn.linear_model", "yaml"),
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
)
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FMMETA_GLOBAL_RANK")


def environment(**extra: str) -> dict[str, str]:
    """The parent's environment without a launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def places(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank of a node."""
    node = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{key: str(value) for key, value in {**node, "RANK": rank, "LOCAL_RANK": rank}.items()} for rank in range(ranks)]


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
        return self.log.read_text(errors="replace")


class Nursery:
    """Mothers, and what they gave birth to. env: of the imports; the processes get their own."""

    def __init__(self, env: Mapping[str, str] | None = None, mothers: int = MOTHERS) -> None:
        self.env = dict(environment() if env is None else env)
        # DeepSpeed would look for an accelerator, and say so; pyarrow's allocator would start a thread
        own = {**self.env, "DS_ACCELERATOR": "cpu", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        command = [sys.executable, "-m", "tests.nursery"]
        self.mothers = [subprocess.Popen(command, env=own, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                        for _ in range(mothers)]  # fmt: skip
        self.known: dict[int, Rank] = {}
        self.ready = False
        self.turn = 0

    def start(self, words: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path = ROOT, before: str = "",
              errors: Path | None = None, stdin: Path | None = None) -> Rank:  # fmt: skip
        """Start `python WORDS`, where WORDS are `FILE.py ...`, `-m MODULE ...` or `-c CODE ...`.

        before: `module:function` that the process calls first. errors: where stderr goes, if not to `log`.
        """
        if not self.ready:
            assert [self._hear(mother) for mother in self.mothers] == [["ready"]] * len(self.mothers)
            self.ready = True
        mother = self.mothers[self.turn % len(self.mothers)]
        self.turn += 1
        order = {"words": list(words), "log": str(log), "errors": str(errors or log), "stdin": str(stdin or os.devnull),
                 "env": dict(env), "cwd": str(cwd), "before": before}  # fmt: skip
        write = cast("IO[bytes]", mother.stdin)
        write.write(json.dumps(order).encode() + b"\n")
        write.flush()
        while (heard := self._hear(mother))[0] != "born":
            self._ended(heard)
        rank = self.known[int(heard[1])] = Rank(int(heard[1]), log)
        return rank

    def train(self, argv: Sequence[str], ranks: int, folder: Path, before: str = "", **env: str) -> list[Rank]:
        """Start `launch/train.py ARGV` on some ranks, with torchrun's variables and `env`; output in FOLDER/rank-R.log."""
        folder.mkdir(parents=True, exist_ok=True)
        return [self.start(["launch/train.py", *argv], folder / f"rank-{rank}.log", environment(**place, **env), before=before)
                for rank, place in enumerate(places(ranks))]  # fmt: skip

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


def read_line(handle: int) -> str:
    """A line without reading ahead, so that `select` stays true."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(handle, 1)
        if not part:
            raise EOFError("the nursery has ended")
        line += part
    return line.decode()


def main() -> None:
    """A mother: import, then fork a process for every line of standard input."""
    told = os.fdopen(os.dup(1), "w")  # libraries print while they are imported
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in PRELOADED:
        importlib.import_module(name)
    from fmmeta.cli import parse

    parse([])
    sys.stdout.flush()
    os.environ.pop("DS_ACCELERATOR", None)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose threads: {threads}"
    print("ready", file=told, flush=True)
    while True:
        if select.select([0], [], [], 0.01)[0]:
            try:
                line = read_line(0)
            except EOFError:
                return
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


def be_born(order: dict[str, Any]) -> NoReturn:
    """What a new process does; it never comes back."""
    code = 1
    try:
        furnish(order)
        code = leave(order["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def furnish(order: dict[str, Any]) -> None:
    """Its files, environment and random numbers, as a start would give them."""
    import faulthandler

    import numpy

    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.dup2(os.open(order["stdin"], os.O_RDONLY), 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(order["log"], flags), 1)
    os.dup2(1 if order["errors"] == order["log"] else os.open(order["errors"], flags), 2)
    os.closerange(3, 1024)
    numpy.random.seed()  # `random` does so by itself
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if order["before"]:
        module, name = order["before"].split(":")
        getattr(importlib.import_module(module), name)()


def leave(words: Sequence[str]) -> int:
    """Run `python WORDS` to its end, with the exit handlers; return the exit code."""
    import threading

    code = 0
    try:
        execute(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons, as the interpreter does
    atexit._run_exitfuncs()
    return code


def execute(words: Sequence[str]) -> None:
    import runpy

    how, *rest = words
    if how == "-m":
        sys.argv, sys.path[:] = rest, ["", *sys.path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *sys.path]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:] = [how, *rest], [str(Path(how).resolve().parent), *sys.path]
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    main()
