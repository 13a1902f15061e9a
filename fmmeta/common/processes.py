"""This process: the host memory that it may still allocate, its end with the process that started it, output
that is lost, a limit on the time of a call, the state of other libraries that a run changes, and whether its
main module is run by the processes that it starts.
"""

import ctypes
import io
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast
from weakref import WeakSet

from fmmeta.common.errors import UsageError

AGAIN_S = 1.0  # between exceptions at a time limit, if code catches them

CGROUP = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")


def host_bytes(local_world_size: int) -> int:
    """Bytes that one of `local_world_size` equal processes of a host may allocate.

    The processes share the memory of the host and of the cgroup; resource limits hold for each.
    """
    import psutil

    found = [psutil.virtual_memory().available // local_world_size]
    room = cgroup_room()
    if room is not None:
        found.append(room // local_world_size)
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(max(0, soft - status_bytes(used)))
    return min(found)


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 without this file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def cgroup_room() -> int | None:
    """Bytes left in this process's memory cgroup (version 2 or 1) and all above it; None without a limit.

    Under SLURM the limit is that of the job, above the cgroup of a step's task.
    """
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    rooms = []
    for root, controller, names in ((CGROUP, "", v2), (CGROUP / "memory", "memory", v1)):
        inside = own_cgroup(controller)
        rooms += [room_of_cgroup(root / part, *names) for part in (inside, *inside.parents)]
    return min((room for room in rooms if room is not None), default=None)


def own_cgroup(controller: str) -> Path:
    """The cgroup of this process, relative to the root (version 2: controller "")."""
    with suppress(OSError):
        for line in CGROUP_OF_SELF.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return Path(os.path.normpath(path)).relative_to("/")
    return Path()


def room_of_cgroup(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Bytes left below the limit of one cgroup; None without a limit.

    cache: the line of memory.stat with the files that the kernel holds in memory and frees on demand.
    """
    try:
        allowed, usage = (int((folder / name).read_text()) for name in (limit, used))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    with suppress(OSError):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        usage -= int(stat.get(cache, 0))
    return max(0, allowed - usage) if allowed < 2**60 else None


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; no effect outside Linux."""
    with suppress(AttributeError):
        # PR_SET_PDEATHSIG; forked processes do not inherit it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def output_of(command: list[str]) -> str:
    """What a short command prints; empty if it cannot be run."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""


_undo: list[Callable[[], object]] = []
"""Calls that restore other libraries, in the order of the changes."""


class LastingFile(io.FileIO):
    """A standard stream that may lose its reader, its terminal or the room on its disk: what cannot be
    written is dropped, and the first time standard error says so.
    """

    lost = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self.lost and self.fileno() == 1 and sys.stderr:
                print(
                    f"fmmeta: standard output: {error.strerror}; the command continues without it",
                    file=sys.stderr,
                    flush=True,
                )
            self.lost = True
            return len(data)


def keep_output(*names: str) -> None:
    """Make these of `stdout` and `stderr` streams that may be lost, until `restored_process` ends.

    Streams of an application (notebooks, redirect_stdout) stay. One that was closed at the start of the
    process discards its text.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            while os.open(os.devnull, os.O_RDWR) < 2:  # no file of the command gets the number of a stream
                pass
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif name in names and type(stream) is io.TextIOWrapper and stream.fileno() in (1, 2):
            raw = LastingFile(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                cast(Any, raw if stream.write_through else io.BufferedWriter(raw)),
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)
            _undo.extend([partial(setattr, sys, name, stream), lasting.flush])


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore environment variables, warning filters, standard streams, the verbosity of other libraries and
    the hook for errors, to which torch adds a prefix with every default process group, after the block. The
    streams may be lost in the block.
    """
    environment, done, hook = dict(os.environ), len(_undo), sys.excepthook
    keep_output("stdout", "stderr")
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.excepthook = hook
        while len(_undo) > done:
            _undo.pop()()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(
            {name: value for name, value in environment.items() if os.environ.get(name) != value}
        )


def undo_later(call: Callable[[], object]) -> None:
    """Let `restored_process` make this call at its end."""
    _undo.append(call)


def quiet_logger(name: str) -> None:
    """Let a logger of another library pass errors only, until `restored_process` ends."""
    logger = logging.getLogger(name)
    undo_later(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.ERROR)


def hide_download_bars() -> None:
    """Hide the progress bars of transformers and the hub, until `restored_process` ends."""
    from transformers.utils import logging as transformers_log

    if transformers_log.is_progress_bar_enabled():
        undo_later(transformers_log.enable_progress_bar)
        transformers_log.disable_progress_bar()


MAIN = ("__main__", "__mp_main__")
"""Names of the main module: in its own process, and in processes of multiprocessing that have imported it."""
_imported: list[str] = []
"""Modules of the user that are being imported because a setting names them."""


@contextmanager
def hidden_main_module() -> Iterator[None]:
    """Processes that multiprocessing starts in the block (spawn, forkserver) do not import the main module.

    A script without `if __name__ == "__main__":` would run once more in each of them.
    """
    main = vars(sys.modules["__main__"])
    shown = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main.update(__spec__=None, __file__=None)
    try:
        yield
    finally:
        del main["__spec__"], main["__file__"]
        main.update(shown)


@contextmanager
def importing(module: str) -> Iterator[None]:
    """`refuse_while_importing` refuses in the block."""
    _imported.append(module)
    try:
        yield
    finally:
        _imported.pop()


def refuse_while_importing(call: str) -> None:
    """Raise `UsageError` if `call` is made by a module that is only imported, in this process or, as the main
    module, in one that multiprocessing starts: the caller's own run would start a second time.
    """
    main = sys.modules.get("__mp_main__")  # an alias, but where multiprocessing has imported the main module
    is_starting = getattr(main, "__name__", "") == "__mp_main__" and main is not sys.modules["__main__"]
    if _imported or is_starting:
        when = f"module {_imported[-1]} is imported" if _imported else "multiprocessing imports this script"
        raise UsageError(
            f'{call} runs while {when}, and would start again; put it below `if __name__ == "__main__":`'
        )


NATIVE = WeakSet[threading.Thread]()  # those that `native_thread` has started


def native_thread(name: str, work: Callable[[], Any]) -> threading.Thread:
    """Start a daemon thread for `work` that calls a library in C++ or Rust, such as torch or torchft.

    If such a call returns while the interpreter is shutting down, the process is aborted (exit code 134).
    Join the thread where it ends soon; otherwise end the process with `end_process`, as commands do.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    NATIVE.add(thread)
    thread.start()
    return thread


def end_process(code: int) -> NoReturn:
    """Exit the process. If a `native_thread` is still alive, the interpreter's shutdown is skipped."""
    if any(thread.is_alive() for thread in NATIVE):
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


class TimedOut(BaseException):
    """Raised by `time_limit`; no `Exception`, so that code which catches errors does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimedOut` in the block once it has taken `seconds` (None: no limit).

    A signal interrupts Python code, sleeping and most system calls, but no library that never returns to
    Python. Signals reach the main thread only: in other threads there is no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed, began = [True], time.monotonic()

    def stop(*_: object) -> None:
        if armed:
            raise TimedOut

    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            armed.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # the timer of the caller continues
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)), interval)


@contextmanager
def without_fragments() -> Iterator[None]:
    """Inside, glibc returns each freed block from 128 KiB on to the system. Otherwise the larger blocks that
    were read and converted stay between the shards: 1.36 GB for 0.52 GB of shards. Afterwards the limit is
    the 32 MiB that glibc reaches by itself. The user's own limit stays, and other C libraries are left alone.
    """
    mallopt, threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3  # M_MMAP_THRESHOLD
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        yield
        return
    mallopt(threshold, 2**17)
    try:
        yield
    finally:
        mallopt(threshold, 2**25)
