"""A start that is refused leaves nothing behind: neither the folders that it made nor a lock."""

import threading
from pathlib import Path

import pytest

from fmmeta.common.progress import LOGGER
from fmmeta.config.settings import Config
from fmmeta.evaluation.results import check_output
from fmmeta.train import train
from fmmeta.training.build import settings_of
from fmmeta.training.run_files import lock_folder, open_run, write_run
from tests.support.checkpoints import WHOLE, saved
from tests.support.fake_runs import start_of
from tests.support.helpers import one_rank
from tests.support.messages import refusal


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"group_size": "2"}, {"resume_from_checkpoint": "none"}],
    ids=["after the folder is open", "while it is opened"],
)
def test_a_refused_train_leaves_no_folder_and_no_lock(tmp_path, settings, there):
    run = tmp_path / "runs" / "a"
    if there:
        run.mkdir(parents=True)
    refusal(train, Config(output_dir=str(run), **settings))
    assert list(tmp_path.rglob("*")) == ([run.parent, run] if there else [])


def test_runs_that_begin_in_the_same_second_have_different_folders(tmp_path, monkeypatch):
    """Jobs of an array: none waits for the lock of another one. Each is found again when it resumes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits for a lock"))
    monkeypatch.setattr("fmmeta.training.run_files.git_commit", lambda: None)  # may sleep in subprocess
    settings, world = [settings_of(Config(seed=seed), "f") for seed in range(3)], one_rank().world
    starts = [open_run(Config(seed=seed), settings[seed], world) for seed in range(3)]
    names = [f"20260101-000000{number}-fomaml-letters" for number in ("", "-2", "-3")]
    assert [start.folder for start in starts] == [Path("runs") / name for name in names]
    write_run(starts[1].folder, settings[1], "", finished=False)
    saved(starts[1].folder, WHOLE, 4)
    for start in starts:
        start.lock.close()
    assert [path.name for path in Path("runs").iterdir()] == [names[1]]
    assert start_of(Config(seed=1), settings[1]).checkpoint == starts[1].folder / "checkpoint-4"


def test_a_refused_elastic_group_removes_only_its_lock(tmp_path):
    """The lock is of the group that writes; another one's is left alone."""
    config = Config(output_dir=str(tmp_path / "run"), elastic=True)
    alone = open_run(config, settings_of(config, "f"), one_rank().world)
    assert (tmp_path / "run").is_dir()
    alone.lock.close()
    assert list(tmp_path.iterdir()) == []
    made = open_run(config, settings_of(config, "f"), one_rank().world)
    writer = lock_folder(tmp_path / "run")
    made.lock.close()
    assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]
    writer.close()


def test_a_start_that_waits_for_a_removed_folder_creates_it(tmp_path, monkeypatch):
    folder, taken, waits = tmp_path / "run", [], threading.Event()
    monkeypatch.setattr(LOGGER, "handle", lambda record: waits.set())  # that it waits
    refused = lock_folder(folder)
    thread = threading.Thread(target=lambda: taken.append(lock_folder(folder, 20)))
    thread.start()
    assert waits.wait(20)
    refused.close()
    thread.join()
    assert (folder / ".lock").read_text().startswith("process ")
    assert refusal(lock_folder, folder, 0.1).startswith(f"output_dir={folder} is in use by process ")
    (folder / "run.json").write_text("{}")
    taken[0].close()
    assert [file.name for file in folder.iterdir()] == ["run.json"]


def test_refused_evaluate_and_tune_leave_no_folder(tmp_path):
    check_output(tmp_path / "new" / "folder" / "results.json")
    assert list(tmp_path.iterdir()) == []
