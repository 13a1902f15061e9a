"""Exceptions that end a command with one line on rank 0, and its exit code on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_FAULT, EXIT_STOPPED = 70, 75
CLEAR = (OSError, ValueError, RuntimeError, ImportError)  # their text is enough in a message
MOST_SHOWN = 300  # characters of a library's error


class UsageError(ValueError):
    """A setting or an input cannot work (exit code 2).

    The text is one line: the setting and its value, what is wrong with it, what to do.

    >>> from fmmeta import Config, UsageError
    >>> try:
    ...     Config(n_way=1)
    ... except UsageError as error:
    ...     print(error)
    n_way=1 is below 2; use 2 or more
    """

    exit_code = 2

    def __init__(self, text: object) -> None:
        super().__init__(" ".join(str(text).splitlines()))  # values of settings may have line breaks


class PeerError(RuntimeError):
    """A rank failed with an error that is not the user's (exit code 1); its own log holds the traceback."""

    exit_code = 1


class MachineFault(RuntimeError):
    """A machine or the network misbehaves (exit code 70); the last checkpoint is complete."""

    exit_code = EXIT_FAULT


class Stopped(Exception):
    """A signal has stopped the command (exit code 75); what was learned is saved."""

    exit_code = EXIT_STOPPED


class PeerLost(RuntimeError):
    """A group has died or cannot be reached (--elastic): a sum in which it took part is void."""


def one_line(text: object) -> str:
    """A text, or that of an error, on one line."""
    return " ".join(str(text).split())


@contextmanager
def usage_errors(broken: str, fix: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise a `UsageError`, `{broken} ({error}); {fix}`, if the block fails. passes: errors that stay as they
    are.

    It is for reading files, and for the user's code. Libraries raise errors of every type for damaged files.

    >>> with usage_errors("splits=a.json is not JSON", "fix the file"):
    ...     {"a": 1}["b"]
    Traceback (most recent call last):
    fmmeta.common.errors.UsageError: splits=a.json is not JSON (KeyError: 'b'); fix the file
    """
    try:
        yield
    except (UsageError, Stopped, PeerError, MemoryError, *passes):
        raise
    except Exception as error:
        text = (getattr(error, "strerror", None) or one_line(error))[:MOST_SHOWN]
        kind = "" if text and isinstance(error, CLEAR) else f"{type(error).__name__}: "
        raise UsageError(f"{broken} ({kind}{text}); {fix}") from error
