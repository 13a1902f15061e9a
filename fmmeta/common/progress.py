"""Log messages, progress bars and tables of a run.

Messages are records of `logging.getLogger("fmmeta")`: an application that has configured logging gets them in
its own handlers; otherwise `terminal_log` prints them. Bars and tables are printed.
"""

import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from fmmeta.common.security import printable

LOGGER = logging.getLogger("fmmeta")
LOGGER.addHandler(logging.NullHandler())  # without any handler, logging would print warnings by itself


MARKS = 1000  # of the last steps the times are stored
LEAST, MANY = 3, 10  # intervals for an estimate, and for one that counts the longest too


class Warn(str):
    """A line that `Progress.notice` logs as a warning."""


class TerminalHandler(logging.Handler):
    """Prints records as `fmmeta: text` on standard output, above open progress bars.

    Errors, and records with `extra=STDERR`, are printed on standard error.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.ERROR or hasattr(record, "stderr") else sys.stdout
        text, tqdm = f"fmmeta: {self.format(record)}", sys.modules.get("tqdm")
        try:
            if tqdm is not None:
                tqdm.tqdm.write(text, file=stream)
            else:
                print(text, file=stream)
            stream.flush()
        except BrokenPipeError:
            raise  # a command whose product is its output ends
        except Exception:
            self.handleError(record)


STDERR = {"stderr": True}
"""`extra` of records that a rank other than rank 0 logs, or that must not be mixed with output."""


@contextmanager
def terminal_log(level: str = "info") -> Iterator[None]:
    """Print messages of at least `level` inside the block, unless the application handles them."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            yield
            return
        logger = logger.parent if logger.propagate else None
    handler, before = TerminalHandler(), (LOGGER.level, LOGGER.propagate)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False  # a library may add a handler to the root logger meanwhile
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class Progress:
    """Logs and shows if `enabled`: on rank 0. quiet: messages are logged, but no bars or tables are shown.

    On a terminal and in a notebook progress is a bar of tqdm; elsewhere a line is printed every few seconds.
    left_s: seconds left of what `line` was called for last, None if unknown; also where nothing is shown.
    """

    def __init__(self, enabled: bool, every_s: float = 5.0, quiet: bool = False) -> None:
        self.enabled, self.shows = enabled, enabled and not quiet
        has_size = shutil.get_terminal_size((0, 0)).columns > 0  # bars need a width
        self.has_bars = self.shows and ((sys.stdout.isatty() and has_size) or in_notebook())
        self.every_s = 0.2 if self.has_bars else every_s
        self.printed_at = float("-inf")
        self.left_s: float | None = None
        self.marks: dict[str, list[tuple[int, float]]] = {}  # steps done, and when
        self.bars: dict[str, Any] = {}  # open bars of tqdm, the outermost first

    def notice(self, *lines: str) -> None:
        """Log lines; control characters, which names from data may contain, are escaped."""
        if self.enabled:
            level = logging.WARNING if any(isinstance(line, Warn) for line in lines) else logging.INFO
            LOGGER.log(level, "%s", "\n".join(map(printable, lines)))

    def line(self, what: str, done: int, total: int, text: str = "", first: int = 0, stride: int = 1) -> None:
        """Show `done` of `total`, and the time left once some steps of this process are known.

        first: done before this process began. stride: the most that one step adds to `done`.
        """
        now = time.monotonic()
        self.left_s = left = self._seconds_left(what, done, total, now, first, stride)
        if not self.shows or (done == 0 and not self.has_bars):
            return
        text += f"{'  ' if text else ''}{clock(left)} left" if left is not None else ""
        if first + 1 < done < total and now - self.printed_at < self.every_s:
            return
        self.printed_at = now
        if self.has_bars:
            self._show_bar(what, done, total, text, first)
            return
        print(f"{what} {done}/{total}{'  ' + text if text else ''}", flush=True)

    def _seconds_left(
        self, what: str, done: int, total: int, now: float, first: int, stride: int
    ) -> float | None:
        """Seconds for the rest, at the rate of the later half of the stored steps; None if unknown.

        The first steps also start loader processes, compile and run checks: among few steps the longest does
        not count. Steps that another process took (an elastic group receives the state of the others) have no
        rate: counting begins again.
        """
        marks = self.marks.setdefault(what, [])
        if marks and not 0 < done - marks[-1][0] <= stride:
            marks.clear()
        if done <= first:
            return None
        marks.append((done, now))
        del marks[:-MARKS]
        half = (marks[0][0] + done) / 2
        since = [mark[0] for mark in marks if mark[0] <= half][-1]
        recent = [mark for mark in marks if mark[0] >= since]
        intervals = sorted((after - before, b - a) for (a, before), (b, after) in pairwise(recent))
        if len(intervals) < LEAST or done >= total:
            return None
        seconds, steps = zip(*intervals[: -1 if len(intervals) < MANY else None], strict=True)
        return sum(seconds) / sum(steps) * (total - done)

    def _show_bar(self, what: str, done: int, total: int, text: str, first: int) -> None:
        """Show a bar below those that were open when it began; bars below it end."""
        from tqdm.auto import tqdm

        if what in self.bars:
            self._close_bars(after=what)
        else:
            self._close_bars(after=next(iter(self.bars), ""))  # at most two: an outer step and an evaluation
            self.bars[what] = tqdm(
                total=total,
                desc=what,
                initial=first,
                file=sys.stdout,
                dynamic_ncols=True,
                mininterval=0,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )
        bar = self.bars[what]
        bar.n = done
        bar.set_postfix_str(text, refresh=False)
        bar.refresh()
        if done >= total:
            self._close_bars(after="")

    def _close_bars(self, after: str) -> None:
        """Close the bars that began after the bar `after`; all bars if there is none of that name.

        A bar that is not complete is erased.
        """
        names = list(self.bars)
        for name in names[names.index(after) + 1 if after in names else 0 :][::-1]:
            bar = self.bars.pop(name)
            bar.leave = bar.n >= bar.total
            bar.close()

    def close(self) -> None:
        """Close open bars."""
        self._close_bars(after="")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is aligned to the left, the others to the right."""
        if not self.shows:
            return
        self.close()
        cells = [[printable(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
        rule = "-" * len(lines[0])
        print("\n".join(["", printable(title), rule, lines[0], rule, *lines[1:], rule]), flush=True)


def clock(seconds: float) -> str:
    """Seconds as minutes or hours.

    >>> clock(12), clock(3700)
    ('0:12', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
