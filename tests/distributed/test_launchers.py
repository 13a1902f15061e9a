"""The files of launch/ as they are: sbatch files under stand-ins for SLURM's commands, submitit's local
executor; real ranks.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.launch import ROOT, environment, free_port, run_ranks
from tests.support.messages import check_message
from tests.support.short_runs import LONG, same, steps_of, until

pytestmark = pytest.mark.cluster

PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SLOW = {"EPISODE_S": "0.3"}


@pytest.fixture(scope="module")
def undisturbed_run(flags, tmp_path_factory):
    """Two ranks without signals."""
    run = tmp_path_factory.mktemp("undisturbed_run") / "run"
    run_ranks(
        ["launch/train.py", *flags(run, **LONG)], 2, per_rank={r: {"EPISODE_S": "0"} for r in (0, 1)}
    ).ok()
    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("slurm_srun.sbatch", {"STAND_IN_TASKS": "1"}),
        ("slurm_torchrun.sbatch", {"STAND_IN_GPUS": "1"}),
    ],
)
def test_a_job_saves_before_its_time_limit_and_resumes_after_requeue(
    file, place, flags, undisturbed_run, tmp_path
):
    """Two nodes of one rank. Only the shell of the sbatch file gets the signal; theta is that of
    the undisturbed run.
    """
    run = tmp_path / "runs" / "slurm-4711"
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    env = environment(
        PATH=f"{slurm.install(tmp_path / 'bin')}:{PATHS}",
        STAND_IN_FOLDER=str(tmp_path),
        **place,
        **SLOW,
        MASTER_PORT=str(free_port()),
        RDZV_PORT=str(free_port()),
        STAND_IN_SIGNAL_AT=f"{run / 'metrics.jsonl'}:3",
    )
    command = ["sbatch", f"launch/{file}", *flags(None, **LONG)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580, check=False
    )
    text = (tmp_path / "slurm-4711.out").read_text()
    assert ended.returncode == 0, ended.stderr + text[-6000:]
    assert "stopped by SIGUSR1 after outer step" in text
    code = 75 if "srun" in file else 1  # torchrun keeps the ranks' to itself
    assert f"fmmeta: exit code {code}; job 4711 goes back into the queue" in text
    assert (tmp_path / "requeued-0").is_file()
    assert not (tmp_path / "requeued").exists()
    assert f"resumed from {run.relative_to(tmp_path)}/checkpoint-" in text
    assert "2 groups of 1 rank" in text
    assert same(run, undisturbed_run)


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and that they have started."""
    below = {
        int(word)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for word in file.read_text().split()
    }
    return below.union(*(descendants(child) for child in below))


LAUNCHERS = {"deepspeed": ["--num_gpus=2"], "torchrun": ["--nproc_per_node=2"]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launcher", "number", "to_all", "code"),
    [
        (
            "deepspeed",
            signal.SIGTERM,
            False,
            -signal.SIGTERM,
        ),  # it dies of it, and leaves its launcher and the ranks behind
        (
            "deepspeed",
            signal.SIGINT,
            True,
            -signal.SIGINT,
        ),  # Ctrl-C goes to the whole session; the launcher adds SIGTERM
        ("torchrun", signal.SIGTERM, False, 1),
    ],
)
def test_a_stopped_launcher_leaves_a_save_and_the_command_resumes(
    launcher, number, to_all, code, flags, undisturbed_run, tmp_path
):
    """The ranks save and end with 75, and nothing is left; started again, the command ends with the bits of
    the undisturbed run.
    """
    run = tmp_path / "run"
    command = [
        launcher,
        *LAUNCHERS[launcher],
        f"--master_port={free_port()}",
        "launch/train.py",
        *flags(run, **LONG),
    ]
    env = environment(PATH=PATHS, EPISODE_S="0.1")
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        until(lambda: steps_of(run) >= 2 or started.poll() is not None, 150)
        below = descendants(started.pid)
        assert len(below) >= 2, (tmp_path / "log").read_text()[-3000:]
        (os.killpg if to_all else os.kill)(started.pid, number)
        ended = started.wait(60)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 60)
    text = (tmp_path / "log").read_text()
    assert ended == code, text[-3000:]
    assert re.search(
        r"fmmeta: stopped by (SIGTERM|SIGINT|the end of the launcher) after outer step \d+, saved in ", text
    ), text
    assert not re.search(r'File ".*/fmmeta/', text), text  # tracebacks are the launchers' own
    if number == signal.SIGTERM and launcher == "deepspeed":
        assert "exits with return code = 75" in text  # says the launcher that was left behind
    env["EPISODE_S"] = "0"
    again = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"resumed from {run}/checkpoint-" in again.stdout
    assert same(run, undisturbed_run)


SCRIPT = """
source launch/slurm_requeue.sh
trap 'rm -f "$child"' EXIT
child=$(mktemp)
printf '%s\\n' 'trap "sleep 0.2; exit CODE" USR1; touch "$1"' > "$child"
printf '%s\\n' 'for i in $(seq 100); do sleep 0.05; done; exit LATE' >> "$child"
run_and_requeue bash "$child" "$1"
"""


@pytest.mark.parametrize(
    ("signalled", "code", "restarts", "queued"),
    [
        (True, 75, 0, True),
        (True, 1, 0, True),
        (True, 0, 0, False),
        (True, 2, 0, False),
        (False, 70, 0, True),
        (False, 2, 0, False),
        (False, 0, 0, False),
        (True, 75, 50, False),
    ],
)
def test_which_exit_codes_are_requeued(signalled, code, restarts, queued, tmp_path):
    """Saved, or a machine's fault, or anything after a signal; never bad input, never the end, never for
    ever.
    """
    script = (
        SCRIPT.replace("CODE", str(code))
        .replace("LATE", str(0 if signalled else code))
        .replace("seq 100", f"seq {100 if signalled else 1}")
    )
    env = environment(
        PATH=f"{slurm.install(tmp_path / 'bin')}:{PATHS}",
        STAND_IN_FOLDER=str(tmp_path),
        SLURM_JOB_ID="4711",
        SLURM_RESTART_COUNT=str(restarts),
    )
    shell = subprocess.Popen(
        ["bash", "-c", script, "job", str(tmp_path / "there")],
        cwd=ROOT,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    until((tmp_path / "there").exists)
    if signalled:
        shell.send_signal(signal.SIGUSR1)
    _, text = shell.communicate(timeout=30)
    assert shell.returncode == code
    assert (tmp_path / "requeued").is_file() == queued, text
    assert ("not queued again: MAX_REQUEUES=50" in text) == (restarts == 50)


@pytest.mark.parametrize(
    ("before", "after", "code", "flags", "queued"),
    [
        (None, 5, 1, "--output_dir OUT", True),
        (5, 10, 1, "--output_dir=OUT", True),
        (9, 10, 137, "--output_dir elsewhere --output_dir OUT --seed 3", True),
        (None, None, 1, "--output_dir OUT", False),
        (5, 5, 1, "--output_dir OUT", False),  # a loop of crashes
        (5, 10, 2, "--output_dir OUT", False),
        (5, 10, 0, "--output_dir OUT", False),
        (5, 10, 1, "", False),
    ],
)
def test_a_crash_is_requeued_after_progress(before, after, code, flags, queued, tmp_path):
    """torchrun makes every exit code 1: a checkpoint tells a fault from a run that cannot work."""
    out, script = tmp_path / "out", "set -u; source launch/slurm_requeue.sh; run_and_requeue bash -c"
    for step in filter(None, (before, after)):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if step == before:
            (folder / "manifest.json").touch()
    made = f"touch {out}/checkpoint-{after}/manifest.json; " if after else ""
    command = f"{script} '{made}exit {code}' child {flags.replace('OUT', str(out))}"
    env = environment(
        PATH=f"{slurm.install(tmp_path / 'bin')}:{PATHS}", STAND_IN_FOLDER=str(tmp_path), SLURM_JOB_ID="4711"
    )
    ended = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "requeued").is_file() == queued, ended.stderr


@pytest.mark.timeout(600)
def test_a_job_of_torchrun_resumes_after_the_fault_of_a_rank(flags, undisturbed_run, tmp_path):
    """A rank ends with 70 after a checkpoint; torchrun ends with 1."""
    run = tmp_path / "runs" / "slurm-4711"
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    env = environment(
        PATH=f"{slurm.install(tmp_path / 'bin')}:{PATHS}",
        STAND_IN_FOLDER=str(tmp_path),
        STAND_IN_GPUS="1",
        STAND_IN_SIGNAL_AT=f"{tmp_path / 'never'}:1",
        RDZV_PORT=str(free_port()),
        FAULT="exit",
        FAULTED=str(tmp_path / "faulted"),
    )
    settings = {**LONG, "episode_transforms": "tests.support.short_runs:fault"}
    command = ["sbatch", "launch/slurm_torchrun.sbatch", *flags(None, **settings)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580, check=False
    )
    text = (tmp_path / "slurm-4711.out").read_text()
    assert ended.returncode == 0, ended.stderr + text[-6000:]
    assert "fmmeta: exit code 1; job 4711 goes back into the queue" in text
    assert f"resumed from {run.relative_to(tmp_path)}/checkpoint-5" in text
    assert same(run, undisturbed_run)


@pytest.mark.parametrize(
    "file", ["slurm_srun.sbatch", "slurm_torchrun.sbatch", "slurm_node.sh", "slurm_requeue.sh"]
)
def test_scripts_have_valid_syntax(file):
    subprocess.run(["bash", "-n", ROOT / "launch" / file], check=True)


@pytest.mark.timeout(600)
def test_submitit_queues_a_run_again_after_its_save(flags, undisturbed_run, tmp_path):
    """The local executor does with the tasks what it does before its time limit: it sends them the signal."""
    pytest.importorskip("submitit")
    words = ["--cluster=local", "--tasks_per_node=2", "--folder", str(tmp_path / "jobs")]
    env = environment(PATH=PATHS, MASTER_PORT=str(free_port()), **SLOW)
    command = [sys.executable, "launch/submitit_train.py", *words, *flags(tmp_path / "run", **LONG)]
    started = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert started.stdout is not None
    job = int(started.stdout.readline().split()[1].rstrip(";"))  # the controller's process
    until(lambda: steps_of(tmp_path / "run") >= 3, 300)
    tasks = [
        pid
        for children in Path(f"/proc/{job}/task").glob("*/children")
        for pid in children.read_text().split()
    ]
    assert len(tasks) == 2
    for pid in tasks:
        os.kill(int(pid), signal.SIGUSR1)
    text, _ = started.communicate(timeout=400)
    logs = "".join(file.read_text() for file in sorted((tmp_path / "jobs").glob("*_log.*")))
    assert started.returncode == 0, text + logs[-6000:]
    assert text == f"finished in {tmp_path / 'run'}\n"
    assert "stopped by SIGUSR1 after outer step" in logs
    assert f"Requeued job {job}" in logs
    assert f"resumed from {tmp_path / 'run'}/checkpoint-" in logs
    assert same(tmp_path / "run", undisturbed_run)


@pytest.mark.timeout(600)
def test_submitit_queues_a_run_again_after_a_fault(flags, undisturbed_run, tmp_path):
    """theta of one task changes, which ends the run with 70; the checkpoint before it is resumed from."""
    pytest.importorskip("submitit")
    words = ["--cluster=local", "--tasks_per_node=2", "--folder", str(tmp_path / "jobs")]
    settings = {**LONG, "episode_transforms": "tests.support.short_runs:fault", "check_replicas_steps": 1}
    env = environment(
        PATH=PATHS, MASTER_PORT=str(free_port()), FAULT="theta", FAULTED=str(tmp_path / "faulted")
    )
    command = [sys.executable, "launch/submitit_train.py", *words, *flags(tmp_path / "run", **settings)]
    ended = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    logs = "".join(file.read_text() for file in sorted((tmp_path / "jobs").glob("*_log.*")))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs[-6000:]
    assert "fmmeta: error: theta is not the same on all ranks that hold it after outer step 8" in logs
    assert "Requeued job " in logs
    assert f"resumed from {tmp_path / 'run'}/checkpoint-5" in logs
    assert same(tmp_path / "run", undisturbed_run)


def test_submitit_submits_nothing_with_bad_flags(tmp_path):
    words = ["--cluster=local", "--folder", str(tmp_path / "jobs"), "--inner_stepz=3"]
    ended = subprocess.run(
        [sys.executable, "launch/submitit_train.py", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    check_message(ended.stderr, "fmmeta: error", "--help lists them")
    assert not (tmp_path / "jobs").exists()
