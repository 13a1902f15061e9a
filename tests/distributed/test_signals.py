"""Real processes that are killed, stopped, signalled and frozen: who ends when, with which code, and what is
lost.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from harness.fork_server import ROOT, environment, free_port, places, shared
from tests.support.short_runs import (
    LONG,
    Job,
    handles,
    metrics_of,
    model_of,
    off,
    same,
    steps_of,
    theta_of,
    until,
)

QUICKLY = {"EPISODE_S": "0"}
HELD = {**LONG, "episode_transforms": "tests.support.short_runs:hold"}  # from step 3 on


@pytest.fixture(scope="module")
def start(flags):
    """start(folder, ranks, env, **settings): a run in folder/run, by default with the settings LONG."""

    def begin(folder, ranks=2, env=None, **settings):
        return Job.start(flags(folder / "run", **{**LONG, **settings}), ranks, folder, **(env or {}))

    return begin


@pytest.fixture(scope="module")
def undisturbed_run(start, tmp_path_factory):
    """The run without signals or faults."""
    job = start(tmp_path_factory.mktemp("undisturbed_run"), env=QUICKLY)
    job.end()
    return job.run


def stopped_by(what: str, text: str, run: Path) -> tuple[int, Path]:
    """The outer step after which a run says that it stopped, and the checkpoint of it, which exists.

    It may be one that the run would have written without the stop.
    """
    found = re.search(rf"stopped by {what} after outer step (\d+), saved in ([^\s;]+)", text)
    assert found, text
    assert Path(found[2]) == run / f"checkpoint-{found[1]}"
    assert Path(found[2]).is_dir()
    return int(found[1]), Path(found[2])


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, [0, 1]),
        (signal.SIGINT, [0, 0, 1]),
        (signal.SIGHUP, [0]),
        pytest.param(signal.SIGUSR1, [1], marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_ends_every_rank_with_75(start, undisturbed_run, tmp_path, number, whom):
    """To all ranks, to one twice as Ctrl-C does, to one alone; the same command then resumes to the same
    bits.
    """
    job = start(tmp_path).reach(2)
    time.sleep(random.random() * 0.3)
    job.signal(number, *whom)
    asked = steps_of(job.run)
    step, folder = stopped_by(number.name, job.end(75), job.run)
    assert step <= asked + 2  # the outer step that ran, and one whose line was not written yet
    assert "Traceback" not in job.ranks[0].text + job.ranks[1].text
    assert f"resumed from {folder}" in start(tmp_path, env=QUICKLY).end()
    assert same(job.run, undisturbed_run)


@pytest.mark.slow
def test_a_signal_to_every_process_stops_the_run_alone(start, tmp_path):
    """As SLURM sends it to a step: loader processes, their fork server and Python's resource tracker too."""
    job = start(tmp_path, 1, num_workers=2).reach(2)
    others = psutil.Process(job.ranks[0].pid).children(recursive=True)
    assert len(others) == 4
    for process in others:
        process.send_signal(signal.SIGUSR1)
    job.signal(signal.SIGUSR1, 0)
    text = job.end(75)
    assert "stopped by SIGUSR1 after outer step" in text
    assert "process died" not in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_repeated_command_that_names_a_checkpoint_resumes_from_its_own(start, undisturbed_run, tmp_path):
    begun = undisturbed_run / "checkpoint-10"
    job = start(tmp_path, env={"EPISODE_S": "1"}, resume_from_checkpoint=begun).reach(1)
    job.signal(signal.SIGTERM, 1)
    assert f"resumed from {begun}" in job.end(75)
    again = start(tmp_path, env=QUICKLY, resume_from_checkpoint=begun).end()
    assert f"resumed from {job.run / 'checkpoint-11'}, outer step 11" in again
    assert f"resume_from_checkpoint={begun} is where this run began" in again
    assert same(job.run, undisturbed_run)
    ended = start(tmp_path, resume_from_checkpoint=begun).end()
    assert f"{job.run} holds this run, finished" in ended


def test_a_step_is_abandoned_between_two_tasks(start, undisturbed_run, tmp_path):
    """A group runs its tasks when it has all of them; the one that learns of a signal meanwhile does not
    begin.
    """
    released = tmp_path / "released"
    job = start(tmp_path, env={"HOLD": str(released)}, **HELD).reach(2)
    job.signal(signal.SIGTERM, 1)
    time.sleep(0.2)  # a thread of the rank reads the signal
    released.touch()
    assert "after outer step 2, saved in" in job.end(75)
    assert steps_of(job.run) == 2
    start(tmp_path, env={"HOLD": str(released)}, **HELD).end()
    assert same(job.run, undisturbed_run)


def test_a_signal_before_the_first_step_ends_at_once(start, tmp_path):
    job = start(tmp_path)
    until(lambda: all(handles(rank.pid, signal.SIGTERM) for rank in job.ranks))
    job.signal(signal.SIGTERM, 0, 1)
    job.end(75, 20)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(start, tmp_path):
    """Rank 0 waits in a collective for rank 1, which is stopped: the first signal has no effect."""
    job = start(tmp_path).reach(5)
    job.signal(signal.SIGSTOP, 1)
    time.sleep(1)
    job.signal(signal.SIGTERM, 0)
    time.sleep(5.5)
    assert not shared().poll()
    job.signal(signal.SIGTERM, 0)
    until(lambda: shared().poll() or job.ranks[0].code is not None)
    job.signal(signal.SIGKILL, 1)
    assert "SIGTERM again: the process ends at once" in job.end([143, -9], 10)


PLACES = {
    "groups": (3, {}),
    "zero2": (2, {"group_size": 2, "deepspeed": "ds_configs/zero2.json"}),
    "zero3": (2, {"group_size": 2, "deepspeed": "ds_configs/zero3.json"}),
    "pipeline": (2, {"group_size": 2, "pipeline_stages": 2, "deepspeed": "ds_configs/zero1.json"}),
}


@pytest.mark.parametrize(
    ("place", "killed", "signalled"),
    [
        ("groups", 1, True),
        ("zero2", 0, False),
        pytest.param("groups", 0, False, marks=pytest.mark.slow),
        pytest.param("zero2", 1, False, marks=pytest.mark.slow),
        pytest.param("zero3", 1, False, marks=pytest.mark.slow),
        pytest.param("pipeline", 1, True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_the_others(start, tmp_path, place, killed, signalled):
    """Each of them ends with 70 and one line, also with the signal that launchers send to them then."""
    count, settings = PLACES[place]
    job = start(tmp_path, count, **settings)
    until(lambda: (job.run / "checkpoint-5").is_dir())
    before = [rank.text for rank in job.ranks]
    others = [number for number in range(count) if number != killed]
    job.signal(signal.SIGKILL, killed)
    job.signal(signal.SIGTERM, *(others if signalled else ()))
    job.end([-9 if rank == killed else 70 for rank in range(count)])
    process = rf"rank {killed} \(process {job.ranks[killed].pid} on .*\)"
    line = rf"fmmeta: error: {process} has died .*; the same command resumes from {job.run}/checkpoint-(5|10)"
    for rank in others:
        said = job.ranks[rank].text.removeprefix(before[rank]).splitlines()
        of_fmmeta = [text for text in said if text.startswith("fmmeta: ")]
        assert re.fullmatch(line, "\n".join(of_fmmeta)), said
        assert "Traceback" not in "".join(said)  # torch may log that rank 0, the host of its store, has died


@pytest.mark.slow
def test_a_killed_rank_is_named_during_a_long_task(start, tmp_path):
    """Rank 0 notices it although it waits for no rank."""
    job = start(tmp_path, env={"HOLD": str(tmp_path / "released")}, **{**HELD, "save_steps": 0}).reach(2)
    job.signal(signal.SIGKILL, 1)
    assert "has died (killed, or out of memory); the same command starts over" in job.end([70, -9])


def test_the_failure_of_one_rank_is_told_from_its_loss(start, tmp_path):
    """It ends with its traceback, and the other with 1: a scheduler that restarts after 70 would do so for
    ever.
    """
    faults = {"FAULT": "error", "FAULTED": str(tmp_path / "faulted")}
    job = start(tmp_path, env=faults, episode_transforms="tests.support.short_runs:fault")
    text = job.end(1)
    assert "Traceback" in job.ranks[1].text
    assert "fmmeta: error: the failure of rank 1 ends the job; its log has the traceback" in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_named_and_the_job_ends(start, undisturbed_run, tmp_path, frozen):
    """Rank 0 holds the shared store, which no rank can read while rank 0 is frozen."""
    job = start(tmp_path, step_timeout=3)
    until(lambda: (job.run / "checkpoint-5").is_dir())
    job.signal(signal.SIGSTOP, frozen)
    job.end([-9, 70] if frozen == 0 else [70, -9])
    text, place = job.ranks[1 - frozen].text, r"rank {} \(process {} on .*\)"
    silent, own = (place.format(rank, job.ranks[rank].pid) for rank in (frozen, 1 - frozen))
    heartbeat = r" .*, last heartbeat in outer step \d+, " if frozen == 1 else ""
    for line in (
        r"outer step \d+ has taken \d+ s, .* 3 s \(--step_timeout\); the job ends",
        rf"{silent} is silent{heartbeat}",
        rf"{own}: in outer step \d+, .*; stack: .*loop",
    ):
        assert re.search(f"fmmeta: watchdog: {line}", text), text
    start(tmp_path, env=QUICKLY, step_timeout=100).end()
    assert same(job.run, undisturbed_run)


def test_the_watchdog_watches_a_single_process(start, tmp_path):
    text = start(tmp_path, 1, {"EPISODE_S": "60"}, step_timeout=1.5, outer_steps=3).end(70, 30)
    assert re.search(
        r"watchdog: rank 0 \(.*\): in outer step 2, .*; stack: short_runs.py:\d+ slow_episode", text
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_suspended_run_continues(start, tmp_path, count):
    """All ranks are stopped for longer than a step may take, as by a suspended SLURM job."""
    job = start(tmp_path, count, {"EPISODE_S": "0.1"}, step_timeout=2, outer_steps=8).reach(3)
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        job.signal(number, *range(count))
        time.sleep(seconds)
    job.end()


def test_ranks_save_and_end_when_their_launcher_is_killed(flags, tmp_path):
    """A launcher that is killed leaves its ranks behind."""
    run = tmp_path / "run"
    code = f"""
import os, runpy, sys, time
sys.argv = {["launch/train.py", *flags(run, **LONG)]!r}
for rank in ("0", "1"):
    if os.fork() == 0:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        sys.exit(runpy.run_path(sys.argv[0], run_name="__main__") and 0)
time.sleep(1000)
"""
    launcher = shared().start(["-c", code], tmp_path / "log", environment(**places(2)[0]))
    until(lambda: steps_of(run) >= 2)
    ranks = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid, signal.SIGKILL)
    assert shared().wait([launcher], 10) == [-9]
    gone, _ = psutil.wait_procs(ranks, 40)
    assert len(gone) == 2
    stopped_by("the end of the launcher", launcher.text, run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_restarts_a_killed_run_without_any_flag(flags, undisturbed_run, tmp_path):
    """The bare folder name too is found again: the run is made without --output_dir."""
    torchrun = f"--nproc_per_node=2 --master_port={free_port()} --max-restarts=2 {ROOT / 'launch/train.py'}"
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), *flags(None, **LONG)]
    with (tmp_path / "log").open("w") as log:
        env = environment(EPISODE_S="0.02")
        started = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
        until(lambda: list(tmp_path.glob("runs/*/checkpoint-5")), 150)
        psutil.Process(started.pid).children()[-1].kill()
        try:
            code = started.wait(150)
        finally:
            started.kill()
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    assert f"resumed from {run.relative_to(tmp_path)}/checkpoint-" in text
    assert same(run, undisturbed_run)


ZERO2, ZERO3, PIPELINE = (PLACES[name][1] for name in ("zero2", "zero3", "pipeline"))
MOVES = {  # ranks and settings of one layout after another
    "groups 4, 2, 1": [(4, {}), (2, {}), (1, {})],
    "group sizes 1, 2, 4 and ZeRO 2, 3": [(2, {}), (2, ZERO2), (4, {**ZERO3, "group_size": 4})],
    "pipeline to ZeRO": [(2, PIPELINE), (2, ZERO2)],
}
MOVED = {"outer_steps": 6, "save_steps": 2, "save_total_limit": 9, "meta_batch_size": 4}


@pytest.fixture(scope="module")
def uninterrupted_run(start, tmp_path_factory):
    """One process without a stop."""
    job = start(tmp_path_factory.mktemp("uninterrupted_run"), 1, QUICKLY, **MOVED)
    job.end()
    return job.run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("places", MOVES.values(), ids=MOVES)
def test_a_run_resumes_on_another_layout_at_parity(start, uninterrupted_run, tmp_path, places):
    """Each layout resumes from the checkpoint two steps into the previous one, and ends at the theta of one
    uninterrupted process.
    """
    begin, wanted = (
        load_file(uninterrupted_run / f"checkpoint-{n}" / "shard-00000.safetensors") for n in (2, 6)
    )
    resumed = {}
    for number, (ranks, place) in enumerate(places):
        job = start(tmp_path / str(number), ranks, QUICKLY, **MOVED, **place, **resumed)
        text = job.end()
        assert not number or f"resumed from {resumed['resume_from_checkpoint']}" in text
        resumed = {"resume_from_checkpoint": job.run / f"checkpoint-{2 * number + 2}"}
        found = theta_of(job.run) if ranks == 1 else model_of(job.run)
        assert off(found, uninterrupted_run, begin, wanted) < 1e-4


def test_training_continues_after_a_failed_save(start, undisturbed_run, tmp_path):
    """A file blocks the folder of the first checkpoint; the next one is written."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tmp-checkpoint-5").write_text("in the way")
    job = start(tmp_path, env=QUICKLY)
    job.end()
    assert same(job.run, undisturbed_run)
    assert [line["step"] for line in metrics_of(job.run)] == list(range(1, 13))
