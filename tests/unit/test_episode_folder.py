"""Episode folders in memory stay while their trainer runs and are removed by a later trainer."""

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from fmmeta.tasks import loader
from fmmeta.tasks.loader import PREFIX, EpisodeFile, EpisodeFolder, PreparedTasks, remove_stale, stale
from fmmeta.tasks.schedule.meta_batches import Task

ROUNDS, RANKS = 30, 4


@pytest.fixture
def shm(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHM", str(tmp_path))
    return tmp_path


def leave_stale_folder(root: Path, name: str) -> Path:
    """Create the folder with episodes that a killed trainer leaves."""
    folder = root / f"{PREFIX}{name}"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}").write_bytes(b"x" * 4096)
    return folder


def start_repeatedly(root: str, barrier, crashes) -> None:
    """Start a rank again and again, next to others; stale folders are created between the rounds."""
    loader.SHM = root
    for _ in range(ROUNDS):
        barrier.wait(60)
        try:
            folder = EpisodeFolder()
            remove_stale()
            assert folder.path.exists(), "another rank has removed the folder of this one"
            barrier.wait(60)
            remove_stale()  # beside those that end
            folder.close()
        except Exception as error:
            crashes.put(repr(error))
            barrier.abort()
            return
        if barrier.wait(60) == 0:
            for number in range(2 * RANKS):
                leave_stale_folder(Path(root), f"{number}-stale")


def test_concurrent_starts_after_a_killed_run_keep_each_others_folders(tmp_path):
    context = multiprocessing.get_context("forkserver")
    barrier, crashes = context.Barrier(RANKS), context.Queue()
    ranks = [
        context.Process(target=start_repeatedly, args=(str(tmp_path), barrier, crashes)) for _ in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert crashes.empty(), crashes.get()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS


def test_locked_folder_is_kept_whatever_its_name(shm):
    """The name holds the process id in the PID namespace of the trainer, which is another one here."""
    used, left = EpisodeFolder(), leave_stale_folder(shm, f"{os.getpid()}-left")
    other = used.path.rename(used.path.with_name(f"{PREFIX}999999999-used"))
    assert list(stale()) == [left]
    remove_stale()
    assert not left.exists()
    assert other.exists()
    os.close(used.lock)  # as the kernel does when the trainer ends
    remove_stale()
    assert not other.exists()


def test_symlinks_and_files_are_kept(shm, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (shm / f"{PREFIX}1-link").symlink_to(elsewhere)
    (shm / f"{PREFIX}1-file").touch()
    remove_stale()
    assert elsewhere.exists()
    assert len(list(shm.iterdir())) == 2


def test_episode_or_its_error_is_passed_to_the_trainer(shm):
    folder, task = EpisodeFolder(), Task(0, "name", "stratum", 1, (1, 0, 2, 3))
    prepared = []

    def load(_):
        prepared.extend(folder.preparing())
        return "episode"

    tasks = PreparedTasks(load, folder)
    found = tasks[task]
    assert found.take() == "episode"
    assert prepared == [(os.getpid(), (1, 0, 2, 3))]
    assert folder.preparing() == []
    folder.close()
    with pytest.raises(FileNotFoundError):
        found.take()
    assert tasks[task] == EpisodeFile("", errno.ENOENT)
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        EpisodeFile("", errno.ENOENT).take()
