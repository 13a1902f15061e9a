"""The folder in shared memory through which loader processes pass episodes to their trainer.

    <pid>_<seed>    an episode that loader process <pid> is preparing or writing
    <seed>          a complete episode

If a loader process dies, <pid>_<seed> names the episode it was preparing. A trainer holds the lock of its
folder until it ends, so that a folder with a free lock is left over, in every PID namespace. No function here
communicates.
"""

import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PREFIX, SHM = "fmmeta-loader-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

Seed = tuple[int, ...]  # of a task: no other task of the run has it


def root() -> Path:
    return Path(SHM or tempfile.gettempdir())


class EpisodeFolder:
    """A new folder for this user alone (0700), locked until `close` or the end of this process.

    Raises `OSError`.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root()))
            with suppress(FileNotFoundError):  # another process found it before it was locked, and removed it
                self.lock = os.open(self.path, os.O_RDONLY)
                with suppress(OSError):  # a file system without locks: no process can take it for stale
                    fcntl.flock(self.lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self.lock)

    def prepared_by(self, pids: Iterable[int]) -> list[Seed]:
        """The tasks that dead loader processes were preparing, each at most one."""
        names = (file.name.split("_") for file in self.path.glob("*_*"))
        return [tuple(map(int, seed.split("."))) for pid, seed in names if int(pid) in set(pids)]

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def stale() -> Iterator[Path]:
    """Folders of this user whose trainers have ended; each is locked until the next one is requested."""
    for path in root().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process has just removed it, or it is another user's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its trainer lives
                    yield path
            finally:
                os.close(lock)


def remove_stale() -> None:
    """Remove what trainers of this user that were killed have left in memory."""
    for path in stale():
        shutil.rmtree(path, ignore_errors=True)


def put(path: Path, seed: Seed, make: Callable[[], Any]) -> tuple[str, int]:
    """In a loader process: write what `make()` returns; its file, or "" and the number of the error that
    writing met.
    """
    name = ".".join(map(str, seed))
    part = path / f"{os.getpid()}_{name}"
    try:
        with part.open("wb") as file:
            pickle.dump(make(), file)
        return str(part.rename(path / name)), 0
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        return "", error.errno or 0


def take(found: tuple[str, int]) -> Any:
    """In the trainer: what `put` has written. Raises `OSError` where it is not there."""
    name, errno = found
    if not name:
        raise OSError(errno, os.strerror(errno))
    content = Path(name).read_bytes()
    os.unlink(name)
    return pickle.loads(content)
