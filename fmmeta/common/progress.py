"""Terminal output of a run: log messages, a progress line with the time left, and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from fmmeta.common.security import printable


class Progress:
    """Prints on the first rank only.

    On a terminal the live line is redrawn; elsewhere a line comes every few seconds.
    """

    def __init__(self, speaks: bool, every_s: float = 5.0) -> None:
        self.speaks, self.every_s = speaks, every_s
        self.live = sys.stdout.isatty()
        self.spoke = float("-inf")
        self.began: dict[str, float] = {}
        self.open_line = False

    def notice(self, *lines: str) -> None:
        """Names from data may be in them, but steer no terminal and begin no line."""
        if self.speaks:
            self._end_line()
            print("fmmeta: " + "\n".join(map(printable, lines)), flush=True)

    def line(self, what: str, done: int, total: int, text: str = "", first: int = 0) -> None:
        """Show `done` of `total`; `first` is where this process began, for the estimate of the time left."""
        if not self.speaks or (done == 0 and not self.live):
            return
        now = time.monotonic()
        began = self.began.setdefault(what, now)
        last = done >= total
        if not last and now - self.spoke < (0.2 if self.live else self.every_s) and done > first + 1:
            return
        self.spoke = now
        left = (now - began) / max(1, done - first) * (total - done) if done > first else 0.0
        shown = f"{what} {done}/{total}{'  ' + text if text else ''}  {clock(left)} left"
        print(
            f"\r\x1b[K{shown}" if self.live else shown, end="" if self.live and not last else "\n", flush=True
        )
        self.open_line = self.live and not last

    def start(self, what: str) -> None:
        self.began[what] = time.monotonic()

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not self.speaks:
            return
        self._end_line()
        header, rows = (
            [printable(name) for name in header],
            [[printable(value) for value in row] for row in rows],
        )
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

        def show(row: Sequence[str]) -> str:
            return "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
                ]
            )

        rule = "-" * len(show(header))
        print("\n".join(["", printable(title), rule, show(header), rule, *map(show, rows), rule]), flush=True)

    def _end_line(self) -> None:
        if self.open_line:
            print(flush=True)
            self.open_line = False


def clock(seconds: float) -> str:
    """12 -> 0:12, 3700 -> 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
