"""The files of launch/ as they are: sbatch files under stand-ins for SLURM's commands, submitit's local
executor; real ranks. And two hosts: network namespaces joined by a cable, through DeepSpeed's launcher and
torchrun; the cable unplugged.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.namespaces import ADDRESSES, NAMES, Hosts
from tests.support import slurm
from tests.support.launch import ROOT, environment, free_port, run_ranks
from tests.support.messages import check_message, check_text
from tests.support.short_runs import LONG, metrics_of, model_of, off, same, steps_of, until

pytestmark = pytest.mark.cluster

PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
FAULTY = {"episode_transforms": "tests.support.short_runs:fault"}


@pytest.fixture(scope="module")
def undisturbed_run(flags, tmp_path_factory):
    """Two ranks without signals."""
    run, quick = tmp_path_factory.mktemp("undisturbed_run") / "run", {"EPISODE_S": "0"}
    run_ranks(["launch/train.py", *flags(run, **LONG)], 2, per_rank={0: quick, 1: quick}).ok()
    return run


def ended(command: list[str], cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """The command has ended, with the launchers of this Python on its path."""
    env = environment(**{"PATH": PATHS, **env})
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=580, check=False)


def slurm_place(folder: Path) -> dict[str, str]:
    """Variables of a job under the stand-ins for SLURM's commands."""
    return {"PATH": f"{slurm.install(folder / 'bin')}:{PATHS}", "STAND_IN_FOLDER": str(folder)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "place", "settings", "code"),
    [
        ("slurm_srun.sbatch", {"STAND_IN_TASKS": "1", "EPISODE_S": "0.3"}, {}, 75),
        ("slurm_torchrun.sbatch", {"STAND_IN_GPUS": "1", "EPISODE_S": "0.3"}, {}, 1),  # the ranks' is lost
        # a rank ends with 70 after a checkpoint
        ("slurm_torchrun.sbatch", {"STAND_IN_GPUS": "1", "FAULT": "exit"}, FAULTY, 1),
    ],
)
def test_a_job_resumes_after_its_time_limit_or_a_fault(
    file, place, settings, code, flags, undisturbed_run, tmp_path
):
    """Two nodes of one rank. Only the shell of the sbatch file gets the signal, before the time limit;
    theta is that of the undisturbed run.
    """
    run = tmp_path / "runs" / "slurm-4711"
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    signalled = run / "metrics.jsonl" if not settings else tmp_path / "never"
    place = place | {
        "STAND_IN_SIGNAL_AT": f"{signalled}:3",
        "FAULTED": str(tmp_path / "faulted"),
        "MASTER_PORT": str(free_port()),
        "RDZV_PORT": str(free_port()),
        **slurm_place(tmp_path),
    }
    job = ended(["sbatch", f"launch/{file}", *flags(None, **{**LONG, **settings})], tmp_path, **place)
    text = (tmp_path / "slurm-4711.out").read_text()
    assert job.returncode == 0, job.stderr + text[-6000:]
    assert ("stopped by SIGUSR1 after outer step" in text) == (not settings)
    resumed = f"resumed from {run.relative_to(tmp_path)}/checkpoint-{5 if settings else ''}"
    check_text(text, f"fmmeta: exit code {code}; job 4711 goes back into the queue", resumed, "2 groups of 1")
    assert [file.name for file in tmp_path.glob("requeued*")] == ["requeued-0"]
    assert same(run, undisturbed_run)


def children(pid: int) -> set[int]:
    """Processes that a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(word) for file in files for word in file.read_text().split()}


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and that they have started."""
    return children(pid).union(*map(descendants, children(pid)))


LAUNCHERS = {"deepspeed": ["--num_gpus=2"], "torchrun": ["--nproc_per_node=2"]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launcher", "number", "to_all", "code"),
    [
        # it dies of it, and leaves its launcher and the ranks behind
        ("deepspeed", signal.SIGTERM, False, -signal.SIGTERM),
        # Ctrl-C goes to the whole session; the launcher adds SIGTERM
        ("deepspeed", signal.SIGINT, True, -signal.SIGINT),
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
    words = [launcher, *LAUNCHERS[launcher], f"--master_port={free_port()}"]
    command = [*words, "launch/train.py", *flags(run, **LONG)]
    env = environment(PATH=PATHS, EPISODE_S="0.1")
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    until(lambda: steps_of(run) >= 2 or started.poll() is not None, 150)
    below = descendants(started.pid)
    assert len(below) >= 2, (tmp_path / "log").read_text()[-3000:]
    (os.killpg if to_all else os.kill)(started.pid, number)
    assert started.wait(60) == code, (tmp_path / "log").read_text()[-3000:]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 60)
    text = (tmp_path / "log").read_text()
    stopped = r"stopped by (SIGTERM|SIGINT|the end of the launcher) after outer step \d+, saved in "
    assert re.search(f"fmmeta: {stopped}", text), text
    assert not re.search(r'File ".*/fmmeta/', text), text  # tracebacks are the launchers' own
    if number == signal.SIGTERM and launcher == "deepspeed":
        assert "exits with return code = 75" in text  # says the launcher that was left behind
    again = ended(command, EPISODE_S="0")
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
    late, times = (0, 100) if signalled else (code, 1)
    script = SCRIPT.replace("CODE", str(code)).replace("LATE", str(late)).replace("seq 100", f"seq {times}")
    env = environment(**slurm_place(tmp_path), SLURM_JOB_ID="4711", SLURM_RESTART_COUNT=str(restarts))
    words = ["bash", "-c", script, "job", str(tmp_path / "there")]
    shell = subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "there").exists)
    if signalled:
        shell.send_signal(signal.SIGUSR1)
    _, text = shell.communicate(timeout=30)
    assert (shell.returncode, (tmp_path / "requeued").is_file()) == (code, queued), text
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
        (out / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
    if before:
        (out / f"checkpoint-{before}" / "manifest.json").touch()
    made = f"touch {out}/checkpoint-{after}/manifest.json; " if after else ""
    command = f"{script} '{made}exit {code}' child {flags.replace('OUT', str(out))}"
    job = ended(["bash", "-c", command], **slurm_place(tmp_path), SLURM_JOB_ID="4711")
    assert (job.returncode, (tmp_path / "requeued").is_file()) == (code, queued), job.stderr


@pytest.mark.parametrize(
    "file", ["slurm_srun.sbatch", "slurm_torchrun.sbatch", "slurm_node.sh", "slurm_requeue.sh"]
)
def test_scripts_have_valid_syntax(file):
    subprocess.run(["bash", "-n", ROOT / "launch" / file], check=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "env", "reason", "checkpoint"),
    [
        ({}, {"EPISODE_S": "0.3"}, "stopped by SIGUSR1 after outer step", ""),
        # theta of one task changes, which ends the run with 70
        (
            {**FAULTY, "check_replicas_steps": 1},
            {"FAULT": "theta"},
            "fmmeta: error: theta is not the same on all ranks that hold it after outer step 8",
            5,
        ),
    ],
)
def test_submitit_queues_a_run_again(settings, env, reason, checkpoint, flags, undisturbed_run, tmp_path):
    """After a save, for which the tasks get the signal that the executor sends before its time limit, and
    after a fault.
    """
    pytest.importorskip("submitit")
    run, words = tmp_path / "run", f"--cluster=local --tasks_per_node=2 --folder {tmp_path / 'jobs'}".split()
    started = subprocess.Popen(
        [sys.executable, "launch/submitit_train.py", *words, *flags(run, **{**LONG, **settings})],
        cwd=ROOT,
        env=environment(PATH=PATHS, MASTER_PORT=str(free_port()), FAULTED=str(tmp_path / "faulted"), **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job = int(next(started.stdout).split()[1].rstrip(";"))  # the controller's process
    if not settings:
        until(lambda: steps_of(run) >= 3, 300)
        tasks = children(job)
        assert len(tasks) == 2
        for task in tasks:
            os.kill(task, signal.SIGUSR1)
    text, _ = started.communicate(timeout=500)
    logs = "".join(file.read_text() for file in sorted((tmp_path / "jobs").glob("*_log.*")))
    assert (started.returncode, text) == (0, f"finished in {run}\n"), logs[-6000:]
    check_text(logs, reason, f"Requeued job {job}", f"resumed from {run}/checkpoint-{checkpoint}")
    assert same(run, undisturbed_run)


def test_submitit_submits_nothing_with_bad_flags(tmp_path):
    words = ["--cluster=local", "--folder", str(tmp_path / "jobs"), "--inner_stepz=3"]
    job = ended([sys.executable, "launch/submitit_train.py", *words])
    assert (job.returncode, job.stdout, (tmp_path / "jobs").exists()) == (2, "", False)
    check_message(job.stderr, "fmmeta: error", "--help lists them")


SHORT = {"outer_steps": 4, "save_steps": 1, "save_total_limit": 9}


@pytest.fixture(scope="module")
def hosts():
    try:
        two = Hosts()
    except OSError as error:
        pytest.skip(f"no two hosts here: {error}")
    yield two
    two.close()


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """One process on one host: the model that every launch must reach, and its distance from the first
    checkpoint.
    """
    run = tmp_path_factory.mktemp("alone") / "run"
    run_ranks(["launch/train.py", *flags(run, **SHORT)], 1).ok()
    begin, end = (load_file(run / f"checkpoint-{n}" / "shard-00000.safetensors") for n in (1, 3))
    return run, begin, end


class OnHosts:
    """One launcher on each host."""

    def __init__(self, hosts: Hosts, folder: Path, commands: Sequence[list[str]], **env: str) -> None:
        self.logs = [folder / f"{number}-{time.monotonic_ns()}.log" for number in range(len(commands))]
        self.processes = []
        for number, (command, log) in enumerate(zip(commands, self.logs, strict=True)):
            with log.open("w") as file:
                place = {"cwd": ROOT, "env": environment(PATH=PATHS, **env)}
                self.processes.append(hosts.run(number, command, file, **place))

    def codes(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def check(self, *parts: str) -> None:
        """All end well, and print these parts."""
        assert not any(self.codes(250)), self.texts
        check_text("".join(self.texts), *parts)

    @property
    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]


def deepspeed_commands(folder: Path, slots: int, flags: list[str]) -> list[list[str]]:
    """The command for each host: without ssh, it is started on each of them."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{name} slots={slots}\n" for name in NAMES))
    place = f"--hostfile {hostfile} --no_ssh --master_addr {ADDRESSES[0]} --master_port {free_port()}".split()
    return [["deepspeed", *place, "--node_rank", host, "launch/train.py", *flags] for host in ("0", "1")]


@pytest.mark.timeout(300)
def test_deepspeed_without_ssh_trains_on_two_hosts(hosts, flags, alone, tmp_path):
    run, chosen = tmp_path / "run", f"GLOO_SOCKET_IFNAME={hosts.cables[0]}"
    commands = deepspeed_commands(tmp_path, 2, [*flags(run, **SHORT), "--log_level", "debug"])
    OnHosts(hosts, tmp_path, commands).check(
        f"{chosen}: ",
        "fmmeta: 4 groups of 1 rank on 2 nodes\ngroup 0: rank 0 on alpha\ngroup 1: rank 1 on"
        " alpha\ngroup 2: rank 2 on beta\ngroup 3: rank 3 on beta\nacross groups, between nodes"
        f" ({chosen}): ",
    )
    assert off(model_of(run), *alone) < 1e-4


@pytest.mark.timeout(300)
def test_torchrun_trains_on_two_hosts(hosts, flags, alone, tmp_path):
    """A group on each host, ZeRO 2 inside; the rendezvous is c10d's, on the first host."""
    run, endpoint = tmp_path / "run", f"{NAMES[0]}:{free_port()}"
    place = f"--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=x"
    settings = flags(run, group_size=2, deepspeed="ds_configs/zero2.json", **SHORT)
    before, command = hosts.sent(), ["torchrun", *place.split(), "launch/train.py", *settings]
    OnHosts(hosts, tmp_path, [command] * 2).check("2 groups of 2 ranks on cpu; DeepSpeed ZeRO 2")
    sent = [now - then for now, then in zip(hosts.sent(), before, strict=True)]
    assert min(sent) > 4 * 600_000  # the shards went by the cable
    assert off(model_of(run), *alone) < 1e-4


@pytest.mark.timeout(300)
def test_elastic_groups_of_two_hosts_meet(hosts, flags, tmp_path):
    """The lighthouse is given by the name of its host, which stands for 127.0.1.1 there."""
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    port, run, words = free_port(), tmp_path / "run", [sys.executable, "-m", "fmmeta"]
    group = [*words, "train", "--elastic", f"--lighthouse=http://{NAMES[0]}:{port}", *flags(run, **LONG)]
    lighthouse = OnHosts(hosts, tmp_path, [[*words, "lighthouse", f"--port={port}", "--min_groups=2"]])
    try:
        OnHosts(hosts, tmp_path, [group, group]).check()
    finally:
        os.killpg(lighthouse.processes[0].pid, signal.SIGTERM)
    assert {line["groups"] for line in metrics_of(run)} == {2}


@pytest.mark.timeout(400)
def test_an_unplugged_cable_ends_the_job_and_the_resumed_run_is_exact(
    hosts, flags, undisturbed_run, tmp_path
):
    """Each host names the silent rank; the same command resumes to the bits of a run on one host."""
    run, bound_s = tmp_path / "run", 8 + 2 * (2 + 3) + 1

    def start(step_timeout: int, seconds: str) -> OnHosts:
        commands = deepspeed_commands(tmp_path, 1, flags(run, **LONG, step_timeout=step_timeout))
        return OnHosts(hosts, tmp_path, commands, EPISODE_S=seconds)

    started = start(8, "0.3")
    until(
        lambda: (run / "checkpoint-5").is_dir() or any(p.poll() is not None for p in started.processes), 200
    )
    hosts.unplug()
    pulled = time.monotonic()
    try:
        codes = started.codes(bound_s + 60)
        took = time.monotonic() - pulled
    finally:
        hosts.plug()
    assert codes == [70, 70], started.texts
    assert took < bound_s + 20  # the launchers and a busy machine
    late = r"fmmeta: watchdog: outer step \d+ has taken \d+ s, .* 8 s \(--step_timeout\); the job ends"
    for host, text in enumerate(started.texts):
        assert re.search(late, text), text
        assert re.search(rf"rank {1 - host} \(process \d+ on {NAMES[1 - host]}\) is silent", text), text
    start(100, "0").check(f"resumed from {run}/checkpoint-")
    assert same(run, undisturbed_run)


SSHD = """
Port 22
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PidFile none
PasswordAuthentication no
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""


@pytest.fixture
def ssh_config(hosts, tmp_path):
    """ssh between the hosts with a key made for the test; the client's configuration."""
    missing = [tool for tool in ("pdsh", "ssh", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian: pdsh openssh-client openssh-server)")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for host, address in enumerate(ADDRESSES):
        (tmp_path / f"sshd-{host}").write_text(SSHD.format(address=address, key=key))
        hosts.run(host, ["/usr/sbin/sshd", "-D", "-f", str(tmp_path / f"sshd-{host}")])
    client = tmp_path / "ssh_config"
    client.write_text(
        f"Host *\n IdentityFile {key}\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel"
        " ERROR\n"
    )
    return client


@pytest.mark.timeout(300)
def test_deepspeed_starts_two_hosts_by_pdsh(hosts, ssh_config, flags, alone, tmp_path):
    """One command on one host; variables for the others are in .deepspeed_env."""
    run, variables = (
        tmp_path / "run",
        f"HF_DATASETS_CACHE={os.environ['HF_DATASETS_CACHE']}\nOMP_NUM_THREADS=1\n",
    )
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "hostfile").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    (tmp_path / ".deepspeed_env").write_text(variables)
    place = f"--hostfile hostfile --master_addr {ADDRESSES[0]} --master_port {free_port()} --no_ssh_check"
    words = ["deepspeed", *place.split(), "launch/train.py", *flags(run, **SHORT)]
    env = environment(PATH=PATHS, PDSH_SSH_ARGS_APPEND=f"-F {ssh_config}")
    with (tmp_path / "log").open("w") as log:
        code = hosts.run(0, words, log, cwd=tmp_path, env=env).wait(250)
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-4000:]
    assert "2 groups of 1 rank" in text
    assert off(model_of(run), *alone) < 1e-4
