"""Where a run begins: its folder and lock, the settings it may continue with, the newest whole checkpoint.

    find the folder -> lock it -> undo half a save -> compare settings
    -> check digests, newest first -> set aside what is newer

Nothing in a folder is overwritten or removed here; what must not be continued from is renamed and named.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta import checkpoint
from fmmeta.common.errors import UsageError
from fmmeta.common.security import make_folders, remove_empty
from fmmeta.common.text import as_stored
from fmmeta.config.settings import Config, changed_settings
from fmmeta.parallel.collectives import Communicator
from fmmeta.training.run_record import NOTHING, read_run, settings_of

LOCK = ".lock"

MOST = 100  # times that the checkpoints of a run are listed while others write them


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: its folder, the checkpoint to continue from (if any), whether nothing is left to
    do.
    """

    folder: Path
    checkpoint: Path | None
    finished: bool
    said: tuple[str, ...] = ()  # what the user should know of it
    explicit: bool = False  # the checkpoint was named by the user
    lock: FolderLock | None = None  # held by rank 0 while the run lasts


def open_run(
    config: Config, fingerprint: str, comm: Communicator, resolved: Mapping[str, Any] = NOTHING
) -> RunStart:
    """Make or find the run's folder; refuse one that holds a run with other settings, or is in use. The
    checkpoint is whole.

    Refused, it leaves no lock, nor a folder that it made. Collective: comm (world).
    """
    with ExitStack() as refused:
        start = _open(config, fingerprint, comm, resolved, refused)
        refused.pop_all()
        return start


def _open(
    config: Config, fingerprint: str, comm: Communicator, resolved: Mapping[str, Any], held: ExitStack
) -> RunStart:
    """See open_run. `held` gets the lock."""
    answer, lock = b"", None
    with comm.raise_on_all("opening output_dir"):
        if comm.rank == 0:
            folder = choose_run_folder(config, fingerprint, resolved)
            # with --elastic the writing group takes the lock (elastic/controller.py)
            lock = FolderLock(folder, None, make(folder)) if config.elastic else lock_folder(folder)
            held.callback(lock.close)
            if not config.elastic:
                checkpoint.undo_partial_save(folder)
            start = find_start(config, fingerprint, folder, resolved)
            answer = json.dumps(
                [
                    str(start.folder),
                    start.checkpoint and str(start.checkpoint),
                    start.finished,
                    start.said,
                    start.explicit,
                ]
            ).encode()
    folder, newest, finished, said, explicit = json.loads(comm.gather_bytes(answer)[0])
    chosen, refused = Path(newest) if newest else None, list[str]()
    if chosen is not None and explicit and (wrong := checkpoint.find_corruption(chosen, comm)):
        raise UsageError(
            f"resume_from_checkpoint={chosen} is not whole: {wrong}; give another one, or latest"
        )
    if chosen is not None and not explicit and not finished:
        chosen, refused = newest_whole(Path(folder), comm)
    with comm.raise_on_all("setting checkpoints aside"):
        if comm.rank == 0 and chosen is not None and not finished and not config.elastic:
            for path in newer(chosen, checkpoint.list_complete(Path(folder))):
                said.append(
                    f"{path} was renamed to {checkpoint.rename_aside(path).name}: the run goes on from an"
                    " older one"
                )
    return RunStart(Path(folder), chosen, finished, (*refused, *said), explicit, lock)


def newest_whole(folder: Path, comm: Communicator) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that is whole, and what is wrong with those that are newer.

    In an elastic run another group writes and removes checkpoints meanwhile, so the folder is listed again
    after each one that is refused. Raises `UsageError`.

    Collective: comm.
    """
    refused: dict[str, str] = {}
    for _ in range(MOST):
        listed = b""
        with comm.raise_on_all("listing checkpoints"):
            if comm.rank == 0:
                listed = json.dumps(manifests(folder)).encode()
        found: dict[str, str] = json.loads(comm.gather_bytes(listed)[0])
        refused = {key: text for key, text in refused.items() if key in found}
        left = [key for key in found if key not in refused]
        if found and not left:
            break
        if left:
            chosen = Path(found[left[-1]])
            wrong = checkpoint.find_corruption(chosen, comm)
            if not wrong:
                return chosen, list(refused.values())
            refused[left[-1]] = f"{chosen} is refused: {wrong}"
    why = "; ".join(refused.values()) or f"listed {MOST} times"
    raise UsageError(
        f"output_dir={folder} holds no whole checkpoint to go on from ({why}); to begin anew choose another"
        " output_dir"
    )


def manifests(folder: Path) -> dict[str, str]:
    """Finished checkpoints, oldest first, each by the file number of its manifest: another one may take its
    place.
    """
    found = dict[str, str]()
    for path in checkpoint.list_complete(folder):
        with suppress(OSError):  # removed by the group that writes
            found[str((path / checkpoint.MANIFEST).stat().st_ino)] = str(path)
    return found


def newer(chosen: Path, found: list[Path]) -> list[Path]:
    """Checkpoints of the run's folder that a run which goes on from `chosen` has not come to."""
    at = checkpoint.read_state(chosen)["outer_step"]
    return [
        path
        for path in found
        if path.resolve() != chosen.resolve() and int(path.name.removeprefix("checkpoint-")) >= at
    ]


def choose_run_folder(config: Config, fingerprint: str, resolved: Mapping[str, Any] = NOTHING) -> Path:
    """The folder of the run: the one that is named, or the newest unfinished one of the same run, or a new
    one.
    """
    if config.output_dir is not None:
        folder = Path(config.output_dir)
    else:
        name = f"{config.algorithm.replace(':', '-')}-{Path(config.dataset[0]).name}"
        folder = (
            unfinished(config, settings_of(config, fingerprint, resolved), name)
            or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        )
    return folder


def unfinished(config: Config, now: dict[str, Any], name: str) -> Path | None:
    """The newest run in runs/ with these settings that was stopped, has a checkpoint, and is not in use."""
    if config.resume_from_checkpoint != "latest":
        return None
    for folder in sorted(Path("runs").glob(f"*-{name}"), reverse=True):
        try:
            run = read_run(folder)
        except UsageError:
            continue
        same = (
            run is not None
            and not run.get("finished")
            and not changed_settings(as_stored(run["settings"]), now)
        )
        if same and checkpoint.list_complete(folder):
            try:
                lock_folder(folder, 0).close()
            except (UsageError, OSError):  # in use, or another user's
                continue
            return folder
    return None


class FolderLock:
    """The lock `file` of a run's folder, if any, and the folders `made` for it, innermost first."""

    def __init__(self, folder: Path, file: Any, made: list[Path]) -> None:
        self.folder, self.file, self.made = folder, file, made

    def close(self) -> None:
        """Give the lock back; folders that were made and in which nothing was written go with it."""
        if self.file is not None:
            (self.folder / LOCK).unlink(missing_ok=True)
        remove_empty(self.made)
        if self.file is not None:
            self.file.close()


def make(folder: Path) -> list[Path]:
    """Make a run's folder; return those that were missing. Raises `UsageError`."""
    try:
        made = make_folders(folder)
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"output_dir={folder} cannot be written to; choose another")
    return made


def lock_folder(folder: Path, patience_s: float = 120.0, quiet: bool = False) -> FolderLock:
    """Make a run's folder and take its lock; the kernel takes it back when this process ends, however it
    ends. Raises `UsageError`.
    """
    made, began, told = make(folder), time.monotonic(), False
    while True:
        try:
            file = (folder / LOCK).open("a+")
        except FileNotFoundError:  # another start was refused, and has removed the folder
            made = make(folder) or made
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_file(file, folder / LOCK):
                break
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            if time.monotonic() - began >= patience_s:
                file.close()
                raise UsageError(
                    f"output_dir={folder} is in use by {owner}; wait for it, or choose another"
                ) from None
            if not told and not quiet:
                told = True
                print(
                    f"fmmeta: output_dir={folder} is in use by {owner}; waiting for {patience_s:g} s at most",
                    flush=True,
                )
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return FolderLock(folder, file, made)
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return FolderLock(folder, file, made)


def is_file(file: Any, path: Path) -> bool:
    """Whether an open file still has this name: its owner before may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def find_start(
    config: Config, fingerprint: str, folder: Path | None = None, resolved: Mapping[str, Any] = NOTHING
) -> RunStart:
    """What the settings and the names in the folder say; whether the checkpoint is whole is for all ranks to
    find out.
    """
    folder = folder or choose_run_folder(config, fingerprint, resolved)
    asked, said = config.resume_from_checkpoint, list[str]()
    explicit = None if asked in ("latest", "never") else Path(asked)
    before = read_run(folder)
    if explicit is not None:
        settings = checkpoint.read_state(explicit)["settings"]
        said += accept_changes(settings, config, fingerprint, f"resume_from_checkpoint={explicit}", resolved)
    if before is None:
        return RunStart(folder, explicit, False, tuple(said), explicit is not None)
    if asked == "never":
        raise UsageError(
            f"output_dir={folder} holds a run, and resume_from_checkpoint=never; choose another output_dir"
        )
    changes = accept_changes(before["settings"], config, fingerprint, f"output_dir={folder}", resolved)
    said += [text for text in changes if text not in said]
    saved = checkpoint.list_complete(folder)
    finished = (
        before.get("finished", False)
        and explicit is None
        and not any(text.startswith("accepted") for text in said)
    )
    return RunStart(
        folder, explicit or (saved[-1] if saved else None), finished, tuple(said), explicit is not None
    )


def accept_changes(
    before: dict[str, Any],
    config: Config,
    fingerprint: str,
    where: str,
    resolved: Mapping[str, Any] = NOTHING,
) -> list[str]:
    """What to say of settings that differ from those of the run before.

    Raises `UsageError` for those that change theta.
    """
    before, now = as_stored(before), settings_of(config, fingerprint, resolved)
    changed = changed_settings(before, now)
    accepted = {name: text for name, text in changed.items() if name in config.accept_changed_settings}
    refused = [text for name, text in changed.items() if name not in accepted]
    if refused:
        raise UsageError(
            f"{where} holds a run with other settings ({'; '.join(refused)}); use these, another output_dir,"
            " or --accept_changed_settings with their names"
        )
    said = [f"accepted from here on: {'; '.join(accepted.values())}"] if accepted else []
    free = changed_settings(before, now, free=True)
    return said + (
        [f"settings that differ, and do not change theta: {'; '.join(free.values())}"] if free else []
    )
