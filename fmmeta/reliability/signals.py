"""Signals, and a launcher that is gone: one question for the run, `asked`, and one rule for what comes again.

    starting   everything learned is on the disk: a signal ends the process at once, exit code 75
    running    a signal is stored; the run stops at its next safe point, saves, and ends with 75 on every rank
    ending     the last checkpoint is whole: signals are ignored

Launchers repeat signals (Ctrl-C reaches rank 0 twice within milliseconds), so what comes within 5 s is the
same signal; a later one leaves at once. The C level writes a byte for every signal and a thread reads it: a
Python handler would not be called while the process waits for other ranks.
"""

from __future__ import annotations

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

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_S = 5.0
EXIT_STOPPED, EXIT_FAULT = (
    75,
    70,
)  # exit codes: stopped by a signal after a save; ended because a rank or a machine misbehaves
SHELLS = {
    "bash",
    "sh",
    "zsh",
    "fish",
    "dash",
    "ash",
    "ksh",
    "csh",
    "tcsh",
    "screen",
    "tmux: server",
    "systemd",
    "init",
}


class Signals:
    """Listens from `__enter__` to `__exit__`, in the main thread of a process; elsewhere it hears nothing.

    leave: ends the process at once with an exit code.
    """

    def __init__(self, starting: bool = False, leave: Callable[[int], Any] = os._exit) -> None:
        """starting: the process does nothing but this run, and ends with it."""
        self.state, self.leave, self.whole_life = "starting" if starting else "running", leave, starting
        self.asked, self.at = "", 0.0  # which signal, and when
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self.reader, self.writer = socket.socketpair()
            self.writer.setblocking(False)
            self.wakeup = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
            self.before = {number: signal.signal(number, lambda *of: None) for number in STOPPING}
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if (
            self.before and not self.whole_life
        ):  # in the last moments of a process a late signal must not become its exit code
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            self.before = {}
            self.writer.close()

    def run(self) -> None:
        """From here on there is something to lose."""
        self.state = "running"

    def end(self) -> None:
        """Everything is saved; what comes now is late."""
        self.state = "ending"

    def receive(self, name: str, code: int) -> None:
        """A signal, or what counts as one; `code`: to leave with if it is a second one."""
        now = time.monotonic()
        if self.state == "starting":
            self.leave(EXIT_STOPPED)
        elif self.state == "running" and not self.asked:
            self.asked, self.at = name, now
        elif self.state == "running" and now - self.at > SAME_S:
            print(
                f"fmmeta: {name} again: leaving at once, the last checkpoint is whole",
                file=sys.stderr,
                flush=True,
            )
            self.leave(code)

    def _listen(self) -> None:
        while numbers := self.reader.recv(16):
            for number in numbers:
                if number in STOPPING:
                    self.receive(signal.Signals(number).name, 128 + number)
        self.reader.close()


@contextmanager
def interrupting() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGUSR1 raise `KeyboardInterrupt` with their name, as SIGINT does
    without one.

    For commands of one process, which remove their unfinished outputs on the way out. What comes after the
    first is ignored.
    """

    def stop(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Launcher:
    """Whether the process that started this one is still there.

    The `deepspeed` command starts a launcher, which starts the ranks; ended by SIGTERM it leaves both behind.
    A process that was started from a shell has no launcher: shells may go.
    """

    def __init__(self, launched: bool) -> None:
        self.parent = os.getppid()
        name, words, self.above = about(self.parent)
        self.watched = launched and self.parent > 1 and name not in SHELLS
        self.deep = "deepspeed.launcher.launch" in words

    @property
    def gone(self) -> bool:
        if not self.watched:
            return False
        return os.getppid() != self.parent or (self.deep and about(self.parent)[2] != self.above)


def about(pid: int) -> tuple[str, str, int]:
    """Name, command line and parent of a process; empty and 0 where it cannot be looked at."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        return name, words, int(rest.split()[1])
    except (OSError, ValueError, IndexError):
        return "", "", 0


def born(pid: int) -> str:
    """State and start time of a process, `T 12345`; empty if there is none.

    A number that comes again has another time.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{words[0]} {words[19]}"
    except (OSError, IndexError):
        return ""
