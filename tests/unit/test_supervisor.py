"""How a supervisor of elastic groups ends: by what the run's folder says, whatever codes its groups have
ended with.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fmmeta.config.settings import Config
from fmmeta.elastic import supervisor as module
from fmmeta.elastic.supervisor import ElasticConfig, Group, Supervisor
from fmmeta.reliability.signals import process_stat
from fmmeta.training.run_folder import lock_folder, settings_of, write_run
from tests.support.short_runs import until

FINISH = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "model").mkdir()
run = json.loads((folder / "run.json").read_text())
(folder / "run.json").write_text(json.dumps({**run, "finished": True}))
"""


class ScriptedGroup(Supervisor):
    """Each group is a process that runs a script in place of `fmmeta train`.

    `scripts`: by the number of the group.
    """

    def __init__(self, folder: Path, scripts: list[str], output=None, **settings) -> None:
        self.lines: list[str] = []
        self.folder, self.scripts = folder, scripts
        config = ElasticConfig(output_dir=str(folder), groups=len(scripts), max_restarts=0, **settings)
        super().__init__(config, output or self.lines.append)

    def begin(self) -> None:
        folder = self.folder / "settings.json"
        folder.write_text("{}")
        self.file = str(folder)

    def spawn(self, name, command, env):
        return super().spawn(name, [sys.executable, "-c", self.scripts[int(name[-1])], str(self.folder)], env)


@pytest.mark.parametrize(
    ("scripts", "code"),
    [
        (["", "import os; os._exit(9)"], 9),  # the one that was writing the model is dead, the other has left
        (["", ""], 70),
        ([FINISH, "import os; os._exit(9)"], 0),
        (["", FINISH], 0),
        (["import os; os._exit(2)", "import os; os._exit(2)"], 2),
    ],
)
def test_exit_code_and_record_agree(scripts, code, tmp_path):
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)
    supervisor = ScriptedGroup(tmp_path, scripts)
    assert supervisor.run() == code
    assert json.loads((tmp_path / "run.json").read_text())["finished"] == (code == 0)
    assert any(f"output_dir={tmp_path} holds no finished run" in line for line in supervisor.lines) == (
        code != 0
    )


@pytest.mark.parametrize("place", ["begin", "spawn"])
def test_a_signal_during_the_start_ends_all_groups(tmp_path, place, monkeypatch):
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)
    waits = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); time.sleep(60)"
    supervisor, pids = ScriptedGroup(tmp_path, [waits, waits]), list[int]()
    original = getattr(supervisor, place)

    def stopping(*arguments):
        process = original(*arguments)
        if place == "spawn":
            pids.append(process.pid)
        supervisor.stop(15)
        return process

    monkeypatch.setattr(supervisor, place, stopping)
    assert supervisor.run() != 0
    assert len(pids) == (place == "spawn")  # the second group is not started


LONG_OUTPUT = """
import os, signal
signal.alarm(20)  # a rank whose output is not read would block
os.write(1, b"caf\\xe9\\n")
for number in range(3000):
    print("outer step", number, "x" * 60, flush=True)
"""


def test_output_that_is_no_text_is_read_to_its_end(tmp_path):
    """3000 lines are more than a pipe holds. The rank ends by itself."""
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)
    supervisor = ScriptedGroup(tmp_path, [LONG_OUTPUT])
    supervisor.run()
    assert supervisor.groups[0].ended == 0
    until(lambda: sum("outer step" in line for line in supervisor.lines) == 3000, 10)
    assert r"[group0] caf\xe9" in supervisor.lines


def test_output_is_read_while_the_log_cannot_be_written(tmp_path):
    """The supervisor's own lines are dropped too, and its exit code is that of the groups."""
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)

    def disk_full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor = ScriptedGroup(tmp_path, [LONG_OUTPUT], output=disk_full)
    assert supervisor.run() == 70  # no finished run
    assert supervisor.groups[0].ended == 0


def test_a_record_without_a_model_is_not_finished(tmp_path):
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=True)
    assert ScriptedGroup(tmp_path, [""]).run() == 70
    (tmp_path / "model").mkdir()
    assert ScriptedGroup(tmp_path, [""]).run() == 0


def test_groups_of_another_node_that_hold_the_folder_are_waited_for(tmp_path, monkeypatch):
    """They hold the folder. Nothing is waited for once they have let go of it for a while."""
    monkeypatch.setattr(module, "WRITER_S", 0.5)
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)
    lock, codes = lock_folder(tmp_path), list[int]()
    thread = threading.Thread(
        target=lambda: codes.append(ScriptedGroup(tmp_path, [""], lighthouse="http://head:1").run())
    )
    thread.start()
    time.sleep(1.5)
    assert thread.is_alive()
    (tmp_path / "model").mkdir()
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=True)
    lock.close()
    thread.join(30)
    assert codes == [0]
    write_run(tmp_path, settings_of(Config(), "f"), "", finished=False)
    assert ScriptedGroup(tmp_path, [""], lighthouse="http://head:1").run() == 70


def test_a_dead_rank_leaves_no_process_behind():
    """Its session is ended too, as that of a rank that lives."""
    commands = ["sleep 100 & echo $!; exit 1", "sleep 100 & echo $!; wait"]
    ranks = [
        subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for command in commands
    ]
    below = [int(rank.stdout.readline()) for rank in ranks if rank.stdout]
    assert ranks[0].wait() == 1
    assert all(process_stat(pid)[0] for pid in below)
    Group("a", processes=list(ranks)).kill()
    assert ranks[1].wait() < 0
    until(lambda: all(process_stat(pid)[1][:1] in ([], ["Z"]) for pid in below), 5)
