"""Bad data while two ranks train: the run ends as the policy says, the counts add up, no rank hangs. Loader
processes and their folders beside real trainers: none outlives its trainer, none disturbs another run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.loader import PREFIX, SHM
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.load import load_sources
from harness.fork_server import environment
from tests.support.launch import ROOT, ProcessResults, run_ranks
from tests.support.messages import check_message
from tests.support.models import write_tasks
from tests.support.short_runs import metrics_of, same, steps_of, until

# outer steps; when files break; from where on no loader has read ahead by then
STEPS, HARM_AT, SAFE = 16, 3, 10
FLAGS = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "outer_steps": STEPS,
    "eval_episodes": 0,
    "logging_steps": 1,
    "num_workers": 1,
    "prefetch_factor": 1,
    "episode_transforms": "tests.support.damage:harm",
}


@pytest.fixture
def root(tmp_path) -> Path:
    return write_tasks(tmp_path / "tasks")


@pytest.fixture
def steps(root) -> list[list[Task]]:
    """The tasks of each outer step."""
    config = Config(dataset=[str(root)], **{key: FLAGS[key] for key in ("n_way", "k_shot", "num_query")})
    items = load_sources(config, byte_tokenizer(), lambda text: None).train.items
    schedule = Schedule(items, 2, config.seed)
    return [schedule.meta_batch(step) for step in range(STEPS)]


@pytest.fixture
def train(root, tmp_path):
    """train(name, plan, **flags): a run of two ranks while files are damaged as the plan says."""

    def run(name: str, plan: dict, **flags) -> ProcessResults:
        file = tmp_path / f"{name}.damage.json"
        file.write_text(json.dumps(plan))
        env = {"FMMETA_DAMAGE": str(file)}
        given = {**FLAGS, "dataset": root, "output_dir": tmp_path / name, **flags}
        words = ["launch/train.py", *(f"--{key}={value}" for key, value in given.items())]
        return run_ranks(words, 2, 200, {0: env, 1: env}, before=drop_root_file_access)

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bad_tasks_are_left_out_and_counted(root, steps, train, tmp_path):
    path = {task.name: root / f"{task.name}.jsonl" for step in steps for task in step}
    cut, forbidden = (steps[step][0].name for step in (SAFE, SAFE + 2))
    nul, mixed, long = (steps[step][1].name for step in (2, SAFE, SAFE + 3))
    path[nul].write_bytes(b"\0" * 4096)
    latin = '{"text": "gr\u00fcn", "label": "a"}\n'.encode("latin-1")
    path[mixed].write_bytes(path[mixed].read_bytes()[:200] + latin)
    with path[long].open("a") as file:
        file.write(json.dumps({"text": "word " * 2_000_000, "label": "a"}) + "\n")
    plan = {"at": HARM_AT, "truncate": [str(path[cut])], "forbid": [str(path[forbidden])], "kill_at": 6}
    ended = train("out", plan, on_bad_task="skip", max_bad_fraction=0.1).ok()
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    bad = [
        (line["step"] - 1, one["task"], one["error"]) for line in lines for one in line.get("bad_tasks", ())
    ]
    # not the long one, which is read as far as it counts; the schedule is as it was
    assert sorted(task for _, task, _ in bad) == sorted([cut, forbidden, nul, mixed])
    assert all(name in {task.name for task in steps[step]} for step, name, _ in bad)
    assert [line["skipped_tasks"] for line in lines] == [len(line.get("bad_tasks", ())) for line in lines]
    found = {task: error for _, task, error in bad}
    assert "is not a line of JSON" in found[cut]
    assert found[forbidden].startswith("PermissionError: ")
    assert str(path[forbidden]) in found[forbidden]
    assert "is not a line of JSON ('utf-8' codec" in found[mixed]
    assert "1 of 1 rows cannot be used" in found[nul]
    output = "".join(ended.output)
    assert all(f"fmmeta: left out: task {name}: " in output for name in found)
    assert re.search(r"fmmeta: rank [01]: .* replaced: process \d+ was killed by SIGKILL", output)
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bad_task_stops_all_ranks_and_the_repaired_run_resumes(root, steps, train, tmp_path):
    undisturbed = train("undisturbed", {"at": 10**9}).ok()
    assert "Traceback" not in undisturbed.output[0]
    bad = steps[SAFE][0].name
    file = root / f"{bad}.jsonl"
    ended = train("out", {"at": HARM_AT, "forbid": [str(file)]})
    assert ended.codes == [2, 2]
    parts = (f"fmmeta: error: task {bad}: PermissionError", f"'{file}'", "--on_bad_task skip")
    check_message(ended.output[0].splitlines()[-1], *parts)
    assert not ended.others
    assert (tmp_path / "out" / f"checkpoint-{SAFE}").is_dir()  # what was learned so far is kept
    file.chmod(0o644)
    train("out", {"at": 10**9}, num_workers=0).ok()
    assert same(tmp_path / "undisturbed", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_too_many_bad_tasks_stop_all_ranks(root, steps, train):
    bad = [str(root / f"{task.name}.jsonl") for step in steps[SAFE:] for task in step]
    plan = {"at": HARM_AT, "truncate": bad}
    ended = train("out", plan, on_bad_task="skip", max_bad_fraction=0.03)
    assert ended.codes == [2, 2]
    last = ended.output[0].splitlines()[-1]
    assert last.startswith("fmmeta: error: max_bad_fraction=0.03: 4 of 24 tasks ")
    assert not ended.others


def drop_root_file_access() -> None:
    """Root reads everything; without these two capabilities, neither it nor what it starts does."""
    import ctypes

    libc, gone = ctypes.CDLL(None), 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    for capability in (1, 2):
        libc.prctl(24, capability)  # PR_CAPBSET_DROP: of what it starts
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for place in range(3):  # effective, permitted, inheritable: of the process itself
        sets[place] &= ~gone
    assert libc.capset(header, sets) == 0


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
        until(lambda: not processes_with(mark), 150)  # a process that imports notices it afterwards
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
