"""Redacts secrets, refuses links that leave a folder and oversized compressed files, names disk errors."""

import contextlib
import errno
import hashlib
import importlib
import inspect
import io
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from fmmeta.common.errors import UsageError, one_line
from fmmeta.common.processes import importing

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY")
TOKENS = (  # no match contains a quote, so that redacted JSON stays JSON
    (re.compile(r"(?<=://)[^/@\s\"']+@"), "***@"),  # https://user:password@host
    (re.compile(r"\b(hf_|gh[pousr]_|github_pat_|sk-|AKIA)[A-Za-z0-9_-]{12,}"), r"\1***"),
    (re.compile(r"(?i)([?&][\w-]*(?:token|secret|passw\w*|key|sig|signature)=)[^&\s\"']+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer)\s+[^\s\"']+"), r"\1 ***"),
)
LEAST = 8  # characters of a secret; shorter ones are words
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
GIB = 2**30
OLD_S = 86400.0  # no write of a file takes so long
TEMPORARY = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)
_swept = set[Path]()  # folders in which this process has looked for names that killed ones left
MOST_GIB = 16.0  # bound on the unpacked size of a file, for commands without max_file_gib
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redact(text: str, env: Mapping[str, str] | None = None) -> str:
    """The text without passwords, access tokens, and values of environment variables with secret names.

    >>> redact("https://me:pa55word@host.test/data?token=abc123", env={})
    'https://***@host.test/data?token=***'
    """
    for name, value in (os.environ if env is None else env).items():
        if SECRET.search(name.upper()) and len(value) >= LEAST:
            text = text.replace(value, "***")
    for pattern, instead in TOKENS:
        text = pattern.sub(instead, text)
    return text


def disk_trouble(error: BaseException) -> str | None:
    """One line about an error of the disk; None for other errors.

    Libraries that write by themselves have the number of the error in their text only.
    """
    if isinstance(error, OSError) and error.errno in DISK:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    found = re.search(r"\(os error (\d+)\)", str(error))
    return one_line(error) if found and int(found[1]) in DISK else None


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def printable(text: str) -> str:
    """The text with control characters (of terminals, line ends, direction marks) escaped as in JSON.

    >>> print(printable("red\\x1b[31m"))
    red\\u001b[31m
    """
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def is_inside(root: Path, path: Path) -> bool:
    """Whether the target of `path` is inside `root`, or in the blobs of the hub cache that holds `root`."""
    there, home = Path(os.path.realpath(path)), root.resolve()
    return there.is_relative_to(home) or any(
        above.name == "snapshots" and there.parent == above.with_name("blobs") for above in home.parents
    )


def inside(root: Path, path: Path) -> Path:
    """`path`, unless it is a link that leaves `root` (see `is_inside`), or its name is no UTF-8. Raises
    `UsageError`.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{str(path)!a}: the name of the file is no UTF-8; rename it") from None
    if path.is_symlink() and not is_inside(root, path):
        raise UsageError(
            f"{path} is a link that leaves its folder (to {os.path.realpath(path)}); copy the file, or remove"
            " the link"
        )
    return path


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Rename a written file after its bytes are on the disk, so that `path` is complete or absent.

    Raises `OSError`.
    """
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """A new name beside `path`; the file or folder that the block writes there becomes `path` at its end.

    Several processes may write one path: a file replaces that of another, a folder that is there meanwhile
    stays. An error leaves nothing; what a process that was killed has left is removed here. A block that
    removes what it wrote publishes nothing. Raises `OSError`.
    """
    if path.parent not in _swept:  # once: a folder may get thousands of files
        _swept.add(path.parent)
        for one in path.parent.glob(".*.tmp"):
            with contextlib.suppress(OSError):  # another process removes it too
                if is_left(one):
                    remove(one)
    temporary = path.with_name(f".{path.name}.{host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        if temporary.is_dir():
            publish_folder(temporary, path)
        elif temporary.exists():
            publish(temporary, path)
    finally:  # a timeout is no `Exception`
        with contextlib.suppress(OSError):
            remove(temporary)


def host() -> str:
    """A short name of this host and, in a container, of its process numbers; equal in all processes there."""
    namespace = Path("/proc/self/ns/pid")
    numbers = os.readlink(namespace) if namespace.exists() else ""
    return hashlib.sha256(f"{platform.node()} {numbers}".encode()).hexdigest()[:8]


def is_left(temporary: Path) -> bool:
    """Whether a name is one of `publishing` whose process has ended; of another host, one that is old.

    Raises `OSError`.
    """
    found = TEMPORARY.fullmatch(temporary.name)
    if found and found["host"] == host():
        return not psutil.pid_exists(int(found["process"]))
    return bool(found) and time.time() - temporary.stat().st_mtime > OLD_S


def remove(path: Path) -> None:
    """Remove a file or folder. Raises `OSError`."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def publish_text(path: Path, text: str) -> None:
    """Replace a file of text; see `publishing`. Raises `OSError`."""
    with publishing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish_folder(temporary: Path, path: Path) -> None:
    """`publish` for a folder; nothing happens if another process has written files to `path` meanwhile.

    Raises `OSError`.
    """
    for file in temporary.iterdir():
        sync(file)
    try:
        publish(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def most_bytes(most_gib: float | None) -> int:
    """The bound on the unpacked size of a file. most_gib: max_file_gib; None for commands without it."""
    return round((MOST_GIB if most_gib is None else most_gib) * GIB)


def too_large(path: Path, most_gib: float | None, size: str = "") -> UsageError:
    """The error for a file that unpacks to more than its bound. most_gib: see `most_bytes`."""
    if most_gib is None:
        return UsageError(f"{path} unpacks to {size}more than {MOST_GIB:g} GiB; split the file")
    return UsageError(
        f"{path} unpacks to {size}more than max_file_gib={most_gib:g}; raise it if you trust the file"
    )


class Bounded(io.RawIOBase):
    """A compressed file with a bound on its unpacked size; reading past it raises `UsageError`.

    most_gib: see `most_bytes`.
    """

    def __init__(self, file: io.BufferedIOBase, path: Path, most_gib: float | None) -> None:
        self.file, self.path, self.most_gib, self.left = file, path, most_gib, most_bytes(most_gib)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self.file.read1(len(buffer))
        self.left -= len(part)
        if self.left < 0:
            raise too_large(self.path, self.most_gib)
        buffer[: len(part)] = part
        return len(part)


def import_named(setting: str, name: str, what: str) -> Any:
    """The object that the user names as `module:name`; modules in the current folder are found.

    Names come from flags and `--config` files, never from a model folder, a checkpoint or a data set.

    setting, what: name of the setting and kind of object, for the message. Raises `UsageError` in one line.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with importing(module):
            return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code, which may raise a UsageError too
        raise UsageError(
            f"{setting}={name} cannot be imported ({one_line(error)}); write module:name of {what}"
        ) from error


def import_function(setting: str, name: str) -> Callable[..., Any]:
    """The function that the user names as `module:name`; see `import_named`. Raises `UsageError`."""
    found = import_named(setting, name, "a function")
    if not callable(found):
        raise UsageError(
            f"{setting}={name} is a {type(found).__name__} and cannot be called; name a function"
        )
    return found


def source_of(found: Any) -> str:
    """The source text of a function or module of the user; "" if there is none."""
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):
        return ""
