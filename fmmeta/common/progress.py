"""Terminal output of a run: log messages, a progress line with the time left, and tables."""

import sys
import time
from collections.abc import Sequence

from fmmeta.common.security import printable


class Progress:
    """Prints if `enabled`: on rank 0, unless the caller wants no output.

    On a terminal the progress line is redrawn; elsewhere a line is printed every few seconds.
    """

    def __init__(self, enabled: bool, every_s: float = 5.0) -> None:
        self.enabled, self.is_terminal = enabled, sys.stdout.isatty()
        self.every_s = 0.2 if self.is_terminal else every_s
        self.printed_at = float("-inf")
        self.began: dict[str, float] = {}
        self.open_line = False  # whether the progress line is still to be ended

    def notice(self, *lines: str) -> None:
        """Log lines; control characters, which names from data may contain, are escaped."""
        if self.enabled:
            self._print("fmmeta: " + "\n".join(map(printable, lines)))

    def line(self, what: str, done: int, total: int, text: str = "", first: int = 0) -> None:
        """Show `done` of `total`. first: done before this process began, for the time left."""
        if not self.enabled or (done == 0 and not self.is_terminal):
            return
        now = time.monotonic()
        began = self.began.setdefault(what, now)
        if first + 1 < done < total and now - self.printed_at < self.every_s:
            return
        self.printed_at = now
        elapsed, steps = now - began, done - first
        shown = f"{what} {done}/{total}{'  ' + text if text else ''}"
        if elapsed > 0 and steps > 0 and done < total:
            shown += f"  {clock(elapsed / steps * (total - done))} left"
        self.open_line = self.is_terminal and done < total
        print("\r\x1b[K" * self.is_terminal + shown, end="" if self.open_line else "\n", flush=True)

    def start(self, what: str) -> None:
        """Start the clock of the time left."""
        self.began[what] = time.monotonic()

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is aligned to the left, the others to the right."""
        if not self.enabled:
            return
        cells = [[printable(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
        rule = "-" * len(lines[0])
        self._print("\n".join(["", printable(title), rule, lines[0], rule, *lines[1:], rule]))

    def _print(self, text: str) -> None:
        """Print lines, after the end of an open progress line."""
        if self.open_line:
            print(flush=True)
            self.open_line = False
        print(text, flush=True)


def clock(seconds: float) -> str:
    """Seconds as minutes or hours.

    >>> clock(12), clock(3700)
    ('0:12', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
