"""Stop signals, and launchers that have exited: `Signals.asked` names the signal that asks the run to stop.

    starting   nothing is lost by a stop: a signal ends the process at once, exit code 75
    running    a signal is stored; the run stops at its next safe point, saves, and all ranks exit with 75
    ending     the last checkpoint is complete: signals are ignored

Launchers repeat signals (Ctrl-C reaches rank 0 twice within milliseconds), so a repeat within 5 s counts as
the same signal; a later one ends the process at once. The C level writes a byte for every signal and a thread
reads it, because Python calls no handler while the main thread waits for other ranks in C code.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fmmeta.common.errors import EXIT_STOPPED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 5.0  # a repeat within this time counts as the same signal
SHELLS = (
    "ash",
    "bash",
    "csh",
    "dash",
    "fish",
    "ksh",
    "sh",
    "tcsh",
    "zsh",
    "init",
    "screen",
    "systemd",
    "tmux: server",
)


def heard() -> list[int]:
    """The stop signals of this process; `nohup` lets it ignore the one of a lost terminal."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOPPING if not (nohup and number == signal.SIGHUP)]


class Signals:
    """Receives stop signals from `__enter__` to `__exit__`, if entered in the main thread of a process.

    asked: name of the signal that asked the run to stop, empty without one; at: when it came.
    """

    def __init__(self, starting: bool = False, leave: Callable[[int], Any] = os._exit) -> None:
        """starting: the process ends with this run, and a signal before `run` ends it at once.

        leave: ends the process at once with an exit code.
        """
        self.state, self.leave, self.owns_process = "starting" if starting else "running", leave, starting
        self.asked, self.at = "", 0.0
        self.lock = threading.Lock()  # the listener, the heartbeats and the main thread learn of requests
        self.handlers: dict[int, Any] = {}  # to be restored

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self.reader, self.writer = socket.socketpair()
            self.writer.setblocking(False)
            self.wakeup = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
            self.handlers = {number: signal.signal(number, lambda *_: None) for number in heard()}
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        # a late signal must not become the exit code of a process that ends with the run
        if self.handlers and not self.owns_process:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            self.handlers = {}
            self.writer.close()

    def run(self) -> None:
        """From here on the process has results that a stop must save."""
        self.state = "running"

    def end(self) -> None:
        """From here on everything is saved, and signals are ignored."""
        self.state = "ending"

    def receive(self, name: str, code: int) -> None:
        """Handle a stop request to this process. code: exit code if it is a second one."""
        if not self.adopt(name) and self.state == "running" and time.monotonic() - self.at > SAME_S:
            print(
                f"fmmeta: {name} again: the process ends at once, the last checkpoint is complete",
                file=sys.stderr,
                flush=True,
            )
            self.leave(code)

    def adopt(self, name: str) -> bool:
        """Take over a stop request, for example another rank's; whether it is the first one.

        One that is not has no effect: several threads may pass on the same request.
        """
        if self.state == "starting":
            self.leave(EXIT_STOPPED)
        with self.lock:
            if self.asked or self.state != "running":
                return False
            self.at, self.asked = time.monotonic(), name
            return True

    def _listen(self) -> None:
        while numbers := self.reader.recv(16):
            for number in numbers:
                if number in STOPPING:
                    self.receive(signal.Signals(number).name, 128 + number)
        self.reader.close()


@contextmanager
def interrupting() -> Iterator[None]:
    """While the block runs, stop signals raise `KeyboardInterrupt` with their name; SIGINT raises it without
    one.

    For commands of one process, which remove their unfinished outputs. Signals after the first are ignored.
    """

    def stop(number: int, _: object) -> None:
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    handlers = {number: signal.signal(number, stop) for number in heard() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Launcher:
    """Detects that the process that started this one has exited.

    The `deepspeed` command starts a launcher, which starts the ranks; if SIGTERM ends the command, launcher
    and ranks keep running. A process started from a shell has no launcher: the shell may exit.
    """

    def __init__(self, launched: bool) -> None:
        self.parent = os.getppid()
        name, fields = process_stat(self.parent)
        self.watched = launched and self.parent > 1 and name not in SHELLS
        self.grandparent = fields[1:2]
        command = Path(f"/proc/{self.parent}/cmdline")
        self.is_deepspeed = command.is_file() and b"deepspeed.launcher.launch" in command.read_bytes()

    @property
    def has_exited(self) -> bool:
        if not self.watched:
            return False
        orphaned = self.is_deepspeed and process_stat(self.parent)[1][1:2] != self.grandparent
        return orphaned or os.getppid() != self.parent


def process_stat(pid: int) -> tuple[str, list[str]]:
    """Name of a process, and the fields of /proc/PID/stat after it: [0] state, [1] parent, [19] start time.

    Empty if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", []
    name, _, fields = stat.partition("(")[2].rpartition(")")
    return name, fields.split()
