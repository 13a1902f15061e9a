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

from tests.support.launch import ROOT, environment, free_port
from tests.support.short_runs import LONG, handles, metrics_of, model_of, off, same, steps_of, theta_of, until


@pytest.fixture(scope="module")
def undisturbed_run(fork_server, flags, tmp_path_factory):
    """The run without signals or faults."""
    folder = tmp_path_factory.mktemp("undisturbed_run")
    ranks = fork_server.train(flags(folder / "run", **LONG), 2, folder, EPISODE_S="0")
    assert fork_server.wait(ranks, 100) == [0, 0], ranks[0].text
    return folder / "run"


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
    [(signal.SIGTERM, [0, 1]), (signal.SIGINT, [0, 0, 1]), (signal.SIGUSR1, [1]), (signal.SIGHUP, [0])],
)
def test_a_signal_saves_and_ends_every_rank_with_75(
    fork_server, flags, undisturbed_run, tmp_path, number, whom
):
    """To all ranks, to one twice as Ctrl-C does, to one alone; the same command then resumes to the same
    bits.
    """
    run = tmp_path / "run"
    ranks = fork_server.train(flags(run, **LONG), 2, tmp_path)
    until(lambda: steps_of(run) >= 2)
    time.sleep(random.random() * 0.3)
    for rank in whom:
        os.kill(ranks[rank].pid, number)
    asked = steps_of(run)
    assert fork_server.wait(ranks, 60) == [75, 75], ranks[0].text + ranks[1].text
    step, folder = stopped_by(number.name, ranks[0].text, run)
    assert step <= asked + 2  # the outer step that ran, and one whose line was not written yet
    assert "Traceback" not in ranks[0].text + ranks[1].text
    again = fork_server.train(flags(run, **LONG), 2, tmp_path, EPISODE_S="0")
    assert fork_server.wait(again, 100) == [0, 0], again[0].text
    assert f"resumed from {folder}" in again[0].text
    assert same(run, undisturbed_run)


def test_a_signal_to_every_process_stops_the_run_alone(fork_server, flags, tmp_path):
    """As SLURM sends it to a step: loader processes, their fork server and Python's resource tracker too."""
    run = tmp_path / "run"
    (rank,) = fork_server.train(flags(run, **LONG, num_workers=2), 1, tmp_path)
    until(lambda: steps_of(run) >= 2)
    trainer = psutil.Process(rank.pid)
    others = trainer.children(recursive=True)
    assert len(others) == 4
    for process in (*others, trainer):
        process.send_signal(signal.SIGUSR1)
    assert fork_server.wait([rank], 60) == [75], rank.text
    assert "stopped by SIGUSR1 after outer step" in rank.text
    assert "process died" not in rank.text
    assert "Traceback" not in rank.text


def test_a_repeated_command_that_names_a_checkpoint_resumes_from_its_own(
    fork_server, flags, undisturbed_run, tmp_path
):
    run, begun = tmp_path / "run", undisturbed_run / "checkpoint-10"
    command = flags(run, **LONG, resume_from_checkpoint=begun)
    ranks = fork_server.train(command, 2, tmp_path, EPISODE_S="1")
    until(lambda: steps_of(run) >= 1)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert fork_server.wait(ranks, 30) == [75, 75], ranks[0].text
    assert f"resumed from {begun}" in ranks[0].text
    again = fork_server.train(command, 2, tmp_path, EPISODE_S="0")
    assert fork_server.wait(again, 100) == [0, 0], again[0].text
    assert f"resumed from {run / 'checkpoint-11'}, outer step 11" in again[0].text
    assert f"resume_from_checkpoint={begun} is where this run began" in again[0].text
    assert same(run, undisturbed_run)
    ended = fork_server.train(command, 2, tmp_path)
    assert fork_server.wait(ended, 100) == [0, 0]
    assert f"{run} holds this run, finished" in ended[0].text


def test_a_step_is_abandoned_between_two_tasks(fork_server, flags, undisturbed_run, tmp_path):
    """A group runs its tasks when it has all of them; the one that learns of a signal meanwhile does not
    begin.
    """
    run, released = tmp_path / "run", tmp_path / "released"
    held = {**LONG, "episode_transforms": "tests.support.short_runs:hold"}  # from step 3 on
    ranks = fork_server.train(flags(run, **held), 2, tmp_path, HOLD=str(released))
    until(lambda: steps_of(run) >= 2)
    os.kill(ranks[1].pid, signal.SIGTERM)
    time.sleep(0.2)  # a thread of the rank reads the signal
    released.touch()
    assert fork_server.wait(ranks, 30) == [75, 75], ranks[0].text
    assert steps_of(run) == 2
    assert "after outer step 2, saved in" in ranks[0].text
    again = fork_server.train(flags(run, **held), 2, tmp_path, HOLD=str(released))
    assert fork_server.wait(again, 100) == [0, 0]
    assert same(run, undisturbed_run)


def test_a_signal_before_the_first_step_ends_at_once(fork_server, flags, tmp_path):
    ranks = fork_server.train(flags(tmp_path / "run", **LONG), 2, tmp_path)
    until(lambda: all(handles(rank.pid, signal.SIGTERM) for rank in ranks))
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert fork_server.wait(ranks, 20) == [75, 75]


def test_a_second_signal_ends_the_process_at_once(fork_server, flags, tmp_path):
    """Rank 0 waits in a collective for rank 1, which is stopped: the first signal has no effect."""
    run = tmp_path / "run"
    ranks = fork_server.train(flags(run, **LONG), 2, tmp_path)
    until(lambda: (run / "checkpoint-5").is_dir())
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(ranks[0].pid, signal.SIGTERM)
    time.sleep(5.5)
    assert not fork_server.poll()
    os.kill(ranks[0].pid, signal.SIGTERM)
    until(lambda: fork_server.poll() or ranks[0].code is not None)
    assert ranks[0].code == 143
    assert "SIGTERM again: the process ends at once" in ranks[0].text
    os.kill(ranks[1].pid, signal.SIGKILL)
    fork_server.wait(ranks, 10)


PLACES = {
    "groups": (3, {}),
    "zero2": (2, {"group_size": 2, "deepspeed": "ds_configs/zero2.json"}),
    "zero3": (2, {"group_size": 2, "deepspeed": "ds_configs/zero3.json"}),
    "pipeline": (2, {"group_size": 2, "pipeline_stages": 2, "deepspeed": "ds_configs/zero1.json"}),
}


@pytest.mark.parametrize(
    ("place", "killed", "signalled"),
    [
        ("groups", 0, False),
        ("groups", 1, True),
        ("zero2", 0, False),
        ("zero2", 1, False),
        pytest.param("zero3", 1, False, marks=pytest.mark.slow),
        pytest.param("pipeline", 1, True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_the_others(fork_server, flags, tmp_path, place, killed, signalled):
    """Each of them ends with 70 and one line, also with the signal that launchers send to them then."""
    run, (count, settings) = tmp_path / "run", PLACES[place]
    ranks = fork_server.train(flags(run, **LONG, **settings), count, tmp_path)
    until(lambda: (run / "checkpoint-5").is_dir())
    before = [rank.text for rank in ranks]
    os.kill(ranks[killed].pid, signal.SIGKILL)
    others = [number for number in range(count) if number != killed]
    for rank in others if signalled else ():
        os.kill(ranks[rank].pid, signal.SIGTERM)
    codes = fork_server.wait(ranks, 60)
    assert codes == [-9 if rank == killed else 70 for rank in range(count)], [one.text for one in ranks]
    process = rf"rank {killed} \(process {ranks[killed].pid} on .*\)"
    line = rf"fmmeta: error: {process} has died .*; the same command resumes from {run}/checkpoint-(5|10)"
    for rank in others:
        said = ranks[rank].text.removeprefix(before[rank]).splitlines()
        of_fmmeta = [text for text in said if text.startswith("fmmeta: ")]
        assert re.fullmatch(line, "\n".join(of_fmmeta)), said
        assert "Traceback" not in "".join(said)  # torch may log that rank 0, the host of its store, has died


@pytest.mark.slow
def test_a_killed_rank_is_named_during_a_long_task(fork_server, flags, tmp_path):
    """Rank 0 notices it although it waits for no rank."""
    released = tmp_path / "released"
    held = {**LONG, "save_steps": 0, "episode_transforms": "tests.support.short_runs:hold"}
    ranks = fork_server.train(flags(tmp_path / "run", **held), 2, tmp_path, HOLD=str(released))
    until(lambda: steps_of(tmp_path / "run") >= 2)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert fork_server.wait(ranks, 60) == [70, -9], ranks[0].text
    assert "has died (killed, or out of memory); the same command starts over" in ranks[0].text


def test_the_failure_of_one_rank_is_told_from_its_loss(fork_server, flags, tmp_path):
    """It ends with its traceback, and the other with 1: a scheduler that restarts after 70 would do so for
    ever.
    """
    faulty = {**LONG, "episode_transforms": "tests.support.short_runs:fault"}
    faults = {"FAULT": "error", "FAULTED": str(tmp_path / "faulted")}
    ranks = fork_server.train(flags(tmp_path / "run", **faulty), 2, tmp_path, **faults)
    assert fork_server.wait(ranks, 60) == [1, 1], ranks[0].text
    assert "Traceback" in ranks[1].text
    assert "fmmeta: error: the failure of rank 1 ends the job; its log has the traceback" in ranks[0].text
    assert "Traceback" not in ranks[0].text


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_named_and_the_job_ends(fork_server, flags, undisturbed_run, tmp_path, frozen):
    """Rank 0 holds the shared store, which no rank can read while rank 0 is frozen."""
    run = tmp_path / "run"
    ranks = fork_server.train(flags(run, step_timeout=3, **LONG), 2, tmp_path)
    until(lambda: (run / "checkpoint-5").is_dir())
    os.kill(ranks[frozen].pid, signal.SIGSTOP)
    codes = fork_server.wait(ranks, 60)
    assert codes == ([-9, 70] if frozen == 0 else [70, -9]), ranks[0].text + ranks[1].text
    text = ranks[1 - frozen].text
    assert re.search(
        r"fmmeta: watchdog: outer step \d+ has taken \d+ s, .* 3 s \(--step_timeout\); the job ends",
        text,
    )
    assert re.search(
        rf"fmmeta: watchdog: rank {frozen} \(process {ranks[frozen].pid} on .*\) is silent", text
    )
    if frozen == 1:
        assert re.search(r"is silent .*, last heartbeat in outer step \d+, ", text)
    own = (
        rf"fmmeta: watchdog: rank {1 - frozen} \(process {ranks[1 - frozen].pid} on .*\): in outer step \d+,"
        r" .*; stack: .*loop"
    )
    assert re.search(own, text), text
    again = fork_server.train(flags(run, step_timeout=100, **LONG), 2, tmp_path, EPISODE_S="0")
    assert fork_server.wait(again, 100) == [0, 0], again[0].text
    assert same(run, undisturbed_run)


def test_the_watchdog_watches_a_single_process(fork_server, flags, tmp_path):
    ranks = fork_server.train(
        flags(tmp_path / "run", step_timeout=1.5, **{**LONG, "outer_steps": 3}), 1, tmp_path, EPISODE_S="60"
    )
    assert fork_server.wait(ranks, 30) == [70]
    assert re.search(
        r"watchdog: rank 0 \(.*\): in outer step 2, .*; stack: short_runs.py:\d+ slow_episode",
        ranks[0].text,
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_suspended_run_continues(fork_server, flags, tmp_path, count):
    """All ranks are stopped for longer than a step may take, as by a suspended SLURM job."""
    run = tmp_path / "run"
    ranks = fork_server.train(flags(run, step_timeout=4, **LONG), count, tmp_path, EPISODE_S="0.2")
    until(lambda: (run / "checkpoint-5").is_dir())
    for sent, seconds in ((signal.SIGSTOP, 9), (signal.SIGCONT, 0)):
        for rank in ranks:
            os.kill(rank.pid, sent)
        time.sleep(seconds)
    assert fork_server.wait(ranks, 60) == [0] * count, ranks[0].text


def test_ranks_save_and_end_when_their_launcher_is_killed(flags, undisturbed_run, tmp_path):
    """A launcher that is killed leaves its ranks behind."""
    run = tmp_path / "run"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"""
import subprocess, sys, time, os
for rank in range(2):
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), **{place!r})
    out = open({str(tmp_path)!r} + f"/rank-{{rank}}.log", "w")
    command = [sys.executable, "launch/train.py", *{flags(run, **LONG)!r}]
    print(subprocess.Popen(command, env=env, stdout=out, stderr=out).pid, flush=True)
time.sleep(1000)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    until(lambda: steps_of(run) >= 2, 120)
    launcher.kill()
    launcher.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 40)
    stopped_by("the end of the launcher", (tmp_path / "rank-0.log").read_text(), run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_restarts_a_killed_run_without_any_flag(flags, undisturbed_run, tmp_path):
    """The bare folder name too is found again: the run is made without --output_dir."""
    arguments = flags(None, **LONG)
    command = [
        "torchrun",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
        "--max-restarts=2",
        str(ROOT / "launch/train.py"),
    ]
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", EPISODE_S="0.02")
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen([*command, *arguments], cwd=tmp_path, env=env, stdout=log, stderr=log)
        until(lambda: list(tmp_path.glob("runs/*/checkpoint-5")), 150)
        ranks = [
            pid
            for children in Path(f"/proc/{started.pid}/task").glob("*/children")
            for pid in children.read_text().split()
        ]
        os.kill(int(ranks[-1]), signal.SIGKILL)
        try:
            code = started.wait(150)
        finally:
            started.kill()
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    assert f"resumed from {run.relative_to(tmp_path)}/checkpoint-" in text
    assert same(run, undisturbed_run)


MOVES = [
    ("groups 4, 2, 1", [(4, {}), (2, {}), (1, {})]),
    (
        "group sizes 1, 2, 4 and ZeRO 2, 3",
        [
            (2, {}),
            (2, {"group_size": 2, "deepspeed": "ds_configs/zero2.json"}),
            (4, {"group_size": 4, "deepspeed": "ds_configs/zero3.json"}),
        ],
    ),
    (
        "pipeline to ZeRO",
        [
            (2, {"group_size": 2, "pipeline_stages": 2, "deepspeed": "ds_configs/zero1.json"}),
            (2, {"group_size": 2, "deepspeed": "ds_configs/zero2.json"}),
        ],
    ),
]


MOVED = {"outer_steps": 6, "save_steps": 2, "save_total_limit": 9, "meta_batch_size": 4}


@pytest.fixture(scope="module")
def uninterrupted_run(fork_server, flags, tmp_path_factory):
    """One process without a stop."""
    folder = tmp_path_factory.mktemp("uninterrupted_run")
    assert fork_server.wait(fork_server.train(flags(folder / "run", **MOVED), 1, folder), 100) == [0]
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("places", [places for _, places in MOVES], ids=[name for name, _ in MOVES])
def test_a_run_resumes_on_another_layout_at_parity(fork_server, flags, uninterrupted_run, tmp_path, places):
    """Each layout resumes from the checkpoint two steps into the previous one, and ends at the theta of one
    uninterrupted process.
    """
    begin, wanted = (
        load_file(uninterrupted_run / f"checkpoint-{n}" / "shard-00000.safetensors") for n in (2, 6)
    )
    resumed = {}
    for number, (ranks, place) in enumerate(places):
        run = tmp_path / str(number)
        started = fork_server.train(flags(run, **MOVED, **place, **resumed), ranks, tmp_path)
        assert fork_server.wait(started, 200) == [0] * ranks, started[0].text
        assert not number or f"resumed from {resumed['resume_from_checkpoint']}" in started[0].text
        resumed = {"resume_from_checkpoint": run / f"checkpoint-{2 * number + 2}"}
        assert off(theta_of(run) if ranks == 1 else model_of(run), uninterrupted_run, begin, wanted) < 1e-4


def test_training_continues_after_a_failed_save(fork_server, flags, undisturbed_run, tmp_path):
    """A file blocks the folder of the first checkpoint; the next one is written."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "tmp-checkpoint-5").write_text("in the way")
    ranks = fork_server.train(flags(run, **LONG), 2, tmp_path, EPISODE_S="0")
    assert fork_server.wait(ranks, 100) == [0, 0], ranks[0].text
    assert same(run, undisturbed_run)
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == list(range(1, 13))
