"""Goodput: seconds of passes whose result is in theta over the seconds of all ranks, also after restarts; the
pages that `fmmeta report --watch` writes.
"""

import json
import math
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from fmmeta import Callback, Config, MetaTrainer
from fmmeta.config.algorithms import find
from fmmeta.meta.parameters import StateDict
from fmmeta.report import command
from fmmeta.report.command import watch
from fmmeta.report.goodput import Goodput, PassClock, began_at
from fmmeta.report.page import write
from fmmeta.training.run_files import lock_folder
from harness.fork_server import environment, shared
from tests.support.fake_runs import metrics, write_run
from tests.support.messages import check_message, exit_code, refusal
from tests.support.short_runs import QUICK, metrics_of, tensorboard_of, until

FOMAML: Any = find("fomaml")
SHORT = {**QUICK, "meta_batch_size": 2, "outer_steps": 6, "test_episodes": 0, "save_steps": 2}
NUMBERS = ("tasks_per_second", "tokens_per_second", "useful_share", "goodput_percent", "seconds_left")


@pytest.fixture
def clock(monkeypatch):
    """clock(s): the time since 1970 is s seconds."""
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: float(seconds))


def state_of(goodput: Goodput) -> StateDict:
    state = StateDict()
    goodput.add_state(state)
    return StateDict(facts=json.loads(json.dumps(state.facts)))


def test_repeated_work_and_the_time_without_a_process_are_not_useful(clock):
    """Two ranks. Two steps, of which the second is lost by a restart at 60 s, which repeats it."""
    goodput = Goodput(started=0.0)
    clock(20)
    assert goodput.count(useful=24.0, ranks=2, tasks=4, tokens=100, took=8.0) == {
        "tasks_per_second": 0.5,
        "tokens_per_second": 12.5,
        "useful_share": 0.6,
        "goodput_percent": 60.0,
    }
    saved = state_of(goodput)
    clock(30)
    assert goodput.count(16.0, 2, 4, 100, 8.0)["goodput_percent"] == pytest.approx(100 * 40 / 60)
    resumed = Goodput(started=60.0)
    resumed.load_state(saved)
    clock(80)
    assert resumed.count(16.0, 2, 4, 100, 8.0)["useful_share"] == pytest.approx(16 / 120)
    assert resumed.started == 0.0
    clock(90)
    facts = {"percent": 100 * 40 / 180, "useful_seconds": 40.0, "rank_seconds": 180.0}
    assert resumed.facts(2) == pytest.approx(facts)


def test_a_lost_group_counts_to_the_end_of_the_step(clock):
    goodput, found = Goodput(started=0.0), []
    for at, ranks in ((10, 3), (20, 2), (30, 2), (40, 3)):
        clock(at)
        goodput.count(0.0, ranks, 1, 1, 1.0)
        found.append(goodput.seconds)
    assert found == [30.0, 60.0, 80.0, 110.0]


def test_checkpoints_of_earlier_versions_have_no_goodput():
    goodput = Goodput(started=5.0)
    goodput.load_state(StateDict())
    assert (goodput.started, goodput.at, goodput.useful) == (5.0, 5.0, 0.0)


def test_tasks_share_the_seconds_of_their_passes(monkeypatch):
    now = iter((10.0, 22.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = PassClock()
    clock.begin(tasks=2)
    clock.leave_out(4.0)
    assert [clock.of_a_task() for _ in range(2)] == [4.0, 4.0]


def test_a_process_of_a_run_counts_from_its_start():
    begun, now = began_at(owns_process=True), time.time()
    assert begun < now <= began_at(owns_process=False)


class Pause(Callback):
    """Takes time that is not useful; ends the run with an error once, after an outer step."""

    def __init__(self, seconds: float = 0.0, fails_after: int | None = None) -> None:
        self.seconds, self.fails_after = seconds, fails_after

    def on_step_end(self, run, outcome):
        time.sleep(self.seconds)
        if run.state.outer_step == self.fails_after:
            raise OSError("the disk has failed")


def waits(task):
    time.sleep(WAIT_S)
    return FOMAML.rule(task)


WAIT_S = 0.1
WAITS = replace(FOMAML, name="waits", rule=waits)


def run_of(folder, callback, **settings):
    config = Config(**{**SHORT, **settings}, output_dir=str(folder))
    MetaTrainer(config, callbacks=[callback]).train()
    return json.loads((folder / "run.json").read_text())


def test_passes_are_useful_and_callbacks_are_not(tmp_path):
    settings = {"algorithm": f"{__name__}:WAITS", "report_to": "tensorboard", "outer_steps": 14}
    run = run_of(tmp_path, Pause(0.2), **settings)
    goodput, lines = run["goodput"], metrics_of(tmp_path)
    assert goodput["useful_seconds"] > 28 * WAIT_S
    assert goodput["rank_seconds"] > goodput["useful_seconds"] + 14 * 0.2
    assert goodput["percent"] == pytest.approx(100 * goodput["useful_seconds"] / goodput["rank_seconds"])
    assert 0 < lines[-1]["tasks_per_second"] < 1 / WAIT_S
    assert all(0 < line["useful_share"] < 1 for line in lines)
    logged = tensorboard_of(tmp_path)
    for name in NUMBERS:
        expected = {line["step"]: pytest.approx(line[name]) for line in lines if name in line}
        assert len(expected) >= 2, name
        assert logged[name] == expected
    assert f"Goodput {goodput['percent']:.1f} %" in write(tmp_path).read_text()


@pytest.mark.parametrize("at", [1, 5])
def test_a_resumed_run_counts_each_task_once_and_the_time_since_its_start(tmp_path, monkeypatch, at):
    """The run fails after outer step 1, without a checkpoint, or 5, with one of step 4, and then waits."""
    monkeypatch.setattr(PassClock, "of_a_task", lambda self: 1.0)
    began = time.time()
    check_message(refusal(run_of, tmp_path, Pause(fails_after=at)), "callbacks=Pause", "the disk has failed")
    started = json.loads((tmp_path / "run.json").read_text())["started"]
    time.sleep(1)
    run = run_of(tmp_path, Pause())
    assert (run["goodput"]["useful_seconds"], run["started"]) == (12.0, started)
    assert began <= started
    assert run["goodput"]["rank_seconds"] == pytest.approx(time.time() - started, abs=5)
    assert run["goodput"]["rank_seconds"] > 1
    assert len(metrics_of(tmp_path)) == 6


def test_a_run_that_begins_from_a_checkpoint_of_another_counts_its_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(PassClock, "of_a_task", lambda self: 1.0)
    run_of(tmp_path / "one", Pause())
    began = time.time()
    run = run_of(tmp_path / "two", Pause(), resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    assert run["goodput"]["useful_seconds"] == 4.0
    assert run["started"] >= began


def diverges(task):
    """The second task of every outer step is not finite."""
    result = FOMAML.rule(task)
    return result if task.drawn.seed[-1] == 0 else replace(result, finite=False)


DIVERGES = replace(FOMAML, name="diverges", rule=diverges)


def overflows(task):
    """The mean of the third outer step is not finite, though its tasks are."""
    result = FOMAML.rule(task)
    if task.outer_step == 2:
        task.into.sum.fill_(math.inf)
    return result


OVERFLOWS = replace(FOMAML, name="overflows", rule=overflows)


@pytest.mark.parametrize(("rule", "useful", "skipped"), [("DIVERGES", 6.0, 1), ("OVERFLOWS", 10.0, 0)])
def test_passes_that_theta_does_not_learn_from_are_not_useful(tmp_path, monkeypatch, rule, useful, skipped):
    monkeypatch.setattr(PassClock, "of_a_task", lambda self: 1.0)
    run = run_of(tmp_path, Pause(), algorithm=f"{__name__}:{rule}")
    assert run["goodput"]["useful_seconds"] == useful
    assert [line["skipped_tasks"] for line in metrics_of(tmp_path)] == [skipped] * 6


PACE = {
    "tasks_per_second": 4.25,
    "tokens_per_second": 1234.0,
    "goodput_percent": 87.5,
    "seconds_left": 3725.0,
}


def test_the_page_of_a_run_that_goes_on_has_its_pace_and_is_loaded_again(tmp_path):
    lines = [*metrics(39), {**metrics(40)[-1], **PACE}]
    folder = write_run(tmp_path, lines, finished=False)
    text = write(folder, refresh_s=2.5).read_text()
    assert '<meta http-equiv="refresh" content="3">' in text
    rates = "4.25 tasks/s; 1,234 tokens/s; 1:02:05 left."
    assert f"Goodput 87.5 %: passes whose result is in theta; {rates}" in text
    assert 'http-equiv="refresh"' not in write(folder).read_text()
    finished = write(write_run(tmp_path, lines), refresh_s=2.5).read_text()
    assert 'http-equiv="refresh"' not in finished
    assert "1:02:05 left" not in finished


def test_a_watch_ends_when_no_process_has_held_the_lock_for_a_while(tmp_path, monkeypatch):
    """A launcher may start the run again before."""
    monkeypatch.setattr(command, "GONE_S", 0.5)
    folder = write_run(tmp_path, metrics(40), finished=False)
    lock, slept = lock_folder(folder), []

    def sleep(seconds):
        slept.append(seconds)
        assert 'http-equiv="refresh"' in (folder / "report.html").read_text()
        monkeypatch.setattr(time, "monotonic", lambda: float(len(slept)))
        if len(slept) == 5:
            lock.close()

    monkeypatch.setattr(time, "sleep", sleep)
    text = watch(folder, 10.0)
    check_message(f"{text}; start it again", "stopped, as no process", "outer step 40")
    assert slept == [10.0] * 5
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()


def test_ctrl_c_ends_a_watch_with_0(tmp_path):
    folder, page = write_run(tmp_path / "run", metrics(40), finished=False), tmp_path / "run" / "report.html"
    words = ["-m", "fmmeta", "report", "--output_dir", str(folder), "--watch", "--every", "0.2"]
    rank = shared().start(words, tmp_path / "log", environment())
    until(lambda: page.exists() and 'http-equiv="refresh"' in page.read_text())
    shared().signal(rank, signal.SIGINT)
    assert shared().wait([rank], 60) == [0]
    assert rank.text.splitlines()[-1] == f"fmmeta: {page} is no longer written"
    assert 'http-equiv="refresh"' not in page.read_text()


def test_a_watch_writes_the_page_while_the_run_goes_on(tmp_path):
    """Beside a run whose third outer step waits for a file: the page shows two steps first, then all."""
    run, hold, page = tmp_path / "run", tmp_path / "hold", tmp_path / "run" / "report.html"
    settings = {**SHORT, "output_dir": run, "episode_transforms": "tests.support.short_runs:hold"}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    ranks = shared().train(flags, 1, tmp_path / "logs", HOLD=str(hold))
    until(lambda: (run / "run.json").exists() or ranks[0].code is not None)
    words = ["-m", "fmmeta", "report", "--output_dir", str(run), "--watch", "--every", "0.2"]
    watched = shared().start(words, tmp_path / "log", environment())
    until(lambda: page.exists() and "logged to outer step 2 of 6" in page.read_text())
    assert 'http-equiv="refresh" content="1"' in page.read_text()
    assert watched.code is None
    hold.touch()
    assert shared().wait([*ranks, watched], 60) == [0, 0]
    assert watched.text.splitlines() == [
        f"fmmeta: report {page}",
        "fmmeta: the run is finished: outer step 6",
    ]
    assert "Finished" in page.read_text()
    assert 'http-equiv="refresh"' not in page.read_text()


def test_the_seconds_between_two_reports_are_positive(tmp_path, capsys):
    folder = write_run(tmp_path, metrics(4))
    assert exit_code(["report", "--output_dir", str(folder), "--watch", "--every", "0"]) == 2
    check_message(capsys.readouterr().err.strip(), "fmmeta: error: every=0", "such as 10")
