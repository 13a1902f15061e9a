"""Loader processes and their folders beside real trainers: none outlives its trainer, and no run disturbs
another one's.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from fmmeta.tasks.loader import PREFIX, SHM
from harness.fork_server import ROOT, environment
from tests.support.short_runs import steps_of, until

HELD = {"outer_steps": 6, "num_workers": 1, "episode_transforms": "tests.support.short_runs:hold"}
SPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


def processes_with(mark: str) -> list[int]:
    """Processes that have `mark` in the environment that they were started with; a fork has its parent's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("moment", ["while they start", "while they load"])
def test_no_process_outlives_a_killed_trainer(fork_server, flags, tmp_path, moment):
    mark = uuid.uuid4().hex
    argv = flags(tmp_path / "run", **{**HELD, "num_workers": 2})
    (rank,) = fork_server.train(argv, 1, tmp_path, HOLD=str(tmp_path / "never"), MARK=mark)
    try:
        if moment == "while they start":
            until(lambda: processes_with(mark))
        else:
            until(lambda: steps_of(tmp_path / "run") == 2)
            assert len(processes_with(mark)) >= 4  # fork server, resource tracker, loader processes
        fork_server.signal(rank, signal.SIGKILL)
        assert fork_server.wait([rank], 10) == [-signal.SIGKILL]
        until(lambda: not processes_with(mark), 30)  # a process that imports notices it afterwards
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


class NamespacedTrainer:
    """A trainer in a PID namespace, as in a container that shares /dev/shm. first: the number before its
    process's number.
    """

    def __init__(self, argv: list[str], folder: Path, name: str, first: int) -> None:
        self.log, self.prefix = folder / f"{name}.log", f"{PREFIX}{first + 1}-"
        script = (  # a child of the shell, with the next number
            f'echo {first} > /proc/sys/kernel/ns_last_pid && "$@"; exit $?'
        )
        words = [*SPACE, "sh", "-c", script, "sh", sys.executable, "launch/train.py", *argv]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment(HOLD=str(folder / "go")), stdout=log, stderr=log
            )

    @property
    def folders(self) -> list[Path]:
        return list(Path(SHM or "").glob(f"{self.prefix}*"))

    def end(self, timeout_s: float = 100) -> str:
        assert self.process.wait(timeout_s) == 0, self.log.read_text()
        return self.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_in_two_pid_namespaces_share_memory_undisturbed(flags, tmp_path):
    """A run trains, a second one was killed, a third one starts beside them and ends, and then the first one
    ends.
    """
    able = subprocess.run(
        [*SPACE, "sh", "-c", "echo 100 > /proc/sys/kernel/ns_last_pid"], capture_output=True, check=False
    )
    if able.returncode or SHM is None:
        pytest.skip(f"no PID namespaces, or no /dev/shm, here: {able.stderr.decode().strip()}")
    begin = time.time_ns() % 10_000 + 10_000  # not the numbers of another such test
    running, killed = (
        NamespacedTrainer(flags(tmp_path / name, **HELD), tmp_path, name, begin + 1000 * number)
        for number, name in enumerate(("running", "killed"))
    )
    try:
        until(lambda: steps_of(tmp_path / "running") == steps_of(tmp_path / "killed") == 2, 100)
        (used,), (left,) = running.folders, killed.folders
        killed.process.kill()  # the first process of its namespace, and so all of them
        killed.process.wait()
        assert left.exists()
        late = NamespacedTrainer(
            flags(tmp_path / "late", **{**HELD, "outer_steps": 2}), tmp_path, "late", begin + 2000
        )
        late.end()
        assert not left.exists()
        assert not late.folders
        assert running.folders == [used]
        (tmp_path / "go").touch()
        assert "was removed" not in running.end()
        assert steps_of(tmp_path / "running") == 6
        assert not running.folders
    finally:
        for run in (running, killed):
            run.process.kill()
            run.process.wait()
