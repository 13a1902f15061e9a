"""A process that imports everything once, then forks itself for every connection to its socket, and that copy
forks a child for every line of the connection, a request that fork_server.py writes.

    python -m harness.fork_server_process LISTENER OWNER    a file descriptor and a pid

No server has threads or a process group, so that a fork loses nothing. A child replaces environment, working
folder, streams and arguments, and ends as an interpreter does: exit handlers, threads, exit code. A copy ends
with its connection, and its children with it; the server ends with the process OWNER.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert", "roberta")
PRELOADED = (
    *(
        "fmmeta.train",
        "fmmeta.cli",
        "datasets",
        "pyarrow",
        "peft",
        "deepspeed",
        "deepspeed.runtime.zero.stage3",
    ),
    *(
        "deepspeed.runtime.pipe.engine",
        "deepspeed.runtime.zero.muon.original_muon",  # and with it torch._inductor: a second in each process
        "accelerate",
        "tensorboard",
        "torch.utils.tensorboard",
        "sklearn.linear_model",
        "yaml",
    ),
    "torchft.coordination",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
)


def main() -> None:
    """Import, then fork for every connection."""
    listener, owner = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    printed = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print while they are imported
    for name in PRELOADED:
        if importlib.util.find_spec(name.split(".")[0]):  # some come with extras
            importlib.import_module(name)
    from fmmeta.cli import parse

    parse([])
    sys.stdout.flush()
    os.dup2(printed, 1)
    os.environ.pop("DS_ACCELERATOR", None)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose threads: {threads}"
    gc.collect()
    gc.freeze()  # children neither search nor copy what was imported
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a session under nohup ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one in the background of a shell does
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets copies that have ended
    while owner not in (ready := select.select([listener, owner], [], [])[0]):
        if ready:
            connection = listener.accept()[0]
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with suppress(EOFError, ConnectionError):  # the other side has ended
                    serve(connection.fileno())
                os._exit(0)
            connection.close()


def serve(connection: int) -> NoReturn:
    """Fork a child for every line. Raises an error when the other side has closed the connection."""
    os.write(connection, b"ready\n")
    children: dict[int, int] = {}  # by the descriptor that is readable once the child has ended
    while True:
        for ready in select.select([connection, *children], [], [])[0]:
            if ready in children:
                pid = children.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(connection, f"ended {pid} {code}\n".encode())
                continue
            line = read_line(connection)
            pid = os.fork()
            if pid == 0:
                run_child(json.loads(line))
            children[os.pidfd_open(pid)] = pid
            os.write(connection, f"started {pid}\n".encode())


def run_child(request: dict[str, Any]) -> NoReturn:
    """Run a request in a new child; does not return."""
    code = 1
    try:
        setup_child(request)
        code = run_to_exit(request["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def setup_child(request: dict[str, Any]) -> None:
    """Set files, environment and random numbers as at the start of an interpreter."""
    import faulthandler

    import numpy

    from fmmeta.common.processes import end_with_parent

    end_with_parent()  # a test session that is killed leaves no process behind
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(request["log"], flags), 1)
    os.dup2(1 if request["errors"] == request["log"] else os.open(request["errors"], flags), 2)
    os.closerange(3, 1024)
    numpy.random.seed()  # `random` does so by itself
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if request["before"]:
        module, name = request["before"].split(":")
        getattr(importlib.import_module(module), name)()


def run_to_exit(words: Sequence[str]) -> int:
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
    # waits for the threads that are no daemons, as the interpreter does
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
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


def read_line(handle: int) -> str:
    """A line without reading ahead, so that `select` stays true."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(handle, 1)
        if not part:
            raise EOFError("the test session has ended")
        line += part
    return line.decode()


if __name__ == "__main__":
    main()
