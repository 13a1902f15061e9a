"""Groups that die, return, join late and leave: the run continues, every outer step has its complete
meta-batch, theta is the same.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from fmmeta import Config, MetaTrainer
from fmmeta.common.errors import MachineFault, PeerLost
from fmmeta.elastic import communicator, lighthouse
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.lighthouse import LighthouseClient, coordination
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.network import proof
from fmmeta.training.run import Run
from fmmeta.training.run_files import lock_folder
from harness.elastic import SLEEP, Born, Group, Trial, alone, lines_of, parity, theta_of
from harness.fork_server import ROOT, environment, free_port
from tests.support import slurm
from tests.support.launch import run_ranks
from tests.support.short_runs import LONG, QUICK, model_of, until

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft", reason="elastic groups need torchft")

STEPS = 60
SETTINGS = {
    "outer_steps": STEPS,
    "eval_episodes": 0,
    "logging_steps": 1,
    "save_steps": STEPS,
    "meta_batch_size": 3,
    "k_shot": 1,
    "num_query": 2,
    "inner_steps": 1,
    "num_workers": "0",
    "episode_transforms": ["harness.elastic:slowly"],
    "heartbeat_timeout": 2.0,
}
TASK_S = 1.0
PATIENCE_S = 200


@pytest.fixture
def trial(tmp_path, opened):
    def make(**settings):
        made = Trial({**SETTINGS, "output_dir": str(tmp_path / "run"), **settings}, TASK_S)
        opened.callback(made.close)
        return made

    return make


def finish(run: Trial) -> None:
    """Let the run end."""
    run.hurry()
    run.end(PATIENCE_S)
    assert run.code == 0, "\n".join(run.log[-50:])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Error of a run against the same run of one process, which trains in the background."""
    folder = tmp_path_factory.mktemp("alone")
    config = alone(SETTINGS, folder / "run")
    (folder / "config.json").write_text(
        json.dumps(
            {name: getattr(config, name) for name in (*SETTINGS, "output_dir") if hasattr(config, name)}
        )
    )
    words = ["-m", "fmmeta", "train", "--config", str(folder / "config.json")]
    rank = Born.of(words, folder / "log", environment(**{SLEEP: ""}))

    def relative_error(run: Trial) -> float:
        assert rank.wait() == 0, rank.rank.text
        return parity(config, run.folder, folder / "run")

    return relative_error


def complete_lines(trial: Trial) -> list[dict]:
    """The lines of a run that has finished: each outer step once, with its whole meta-batch."""
    lines = lines_of(trial.folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["tasks"] for line in lines} == {3}
    return lines


def writers_of(trial: Trial) -> list[str]:
    """Who took over the files of the run, in this order."""
    return [line.split("]")[0].strip("[") for line in trial.log if "writes the files of the run" in line]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_theta_after_three_kills_equals_the_undisturbed_run(trial, undisturbed):
    """A group that does not write, the one that writes, and one of those that came back; each heals and
    joins.
    """
    run = trial(groups=3)
    run.start()
    run.wait_for(3, PATIENCE_S)
    (wrote,) = writers_of(run)
    first, last = sorted({*run.groups} - {wrote})
    wrote_when_killed = 0
    for name in (first, wrote, first):
        time.sleep(TASK_S / 2)  # in the middle of a step
        wrote_when_killed += writers_of(run)[-1] == name
        run.kill(name)
        run.wait_for(2, PATIENCE_S)
        run.wait_for(3, PATIENCE_S)
    finish(run)
    lines = complete_lines(run)
    assert {line["groups"] for line in lines} >= {2, 3}
    assert sum(line["retries"] > 0 for line in lines) + sum(line["lost_seconds"] > 0 for line in lines) >= 3
    assert [run.groups[name].starts for name in (first, wrote, last)] == [3, 2, 1]
    received = [line for line in run.log if "state received from" in line]
    assert len(received) >= 3
    assert undisturbed(run) < 1e-4
    assert len(writers_of(run)) == 1 + wrote_when_killed >= 2
    assert (run.folder / "model/model.safetensors").is_file()
    assert json.loads((run.folder / "run.json").read_text())["finished"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_finished_tasks_are_kept_when_a_group_that_claims_is_killed(trial, undisturbed):
    """A group that does not write dies, then the one that writes: the others run its task alone again."""
    run = trial(groups=3, task_schedule="dynamic")
    run.start()
    run.wait_for(3, PATIENCE_S)
    for _ in range(2):
        time.sleep(TASK_S / 2)  # in the middle of a step
        run.kill(writers_of(run)[-1])
        run.wait_for(2, PATIENCE_S)
        run.wait_for(3, PATIENCE_S)
    finish(run)
    assert all(sum(line["tasks_by_group"]) == 3 for line in complete_lines(run))
    assert any("of its tasks are finished, and are kept" in line for line in run.log), "\n".join(run.log)
    assert undisturbed(run) < 1e-4


def delay_resume_until_checkpoint_is_removed() -> None:
    """In a rank: resume only after the chosen checkpoint was removed."""
    os.setsid()
    resume = Run.resume

    def late(self: Run) -> None:
        while self.start.checkpoint is not None and self.start.checkpoint.exists():
            time.sleep(0.01)
        resume(self)

    Run.resume = late


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_joining_group_receives_learned_rates(trial):
    """They are float64 while theta is float32: gloo ends a process that receives a message of another size.

    The checkpoint that the group has chosen is removed before it is read.
    """
    run = trial(groups=1, inner_lr_learned="layer", save_steps=1, save_total_limit=1)
    run.start()
    run.wait_for_step(1, PATIENCE_S)
    run.before = f"{__name__}:{delay_resume_until_checkpoint_is_removed.__name__}"
    run.launch(Group("late0"))
    run.wait_for_step(2, PATIENCE_S)
    run.hurry()
    run.end(PATIENCE_S)
    assert [(group.starts, group.ended) for group in run.groups.values()] == [(1, 0)] * 2, "\n".join(
        run.log[-50:]
    )
    assert sum("state received from" in line for line in run.log) == 1
    assert any("[late0] fmmeta: resumed from" in line for line in run.log)
    assert run.code == 0
    complete_lines(run)


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_theta_of_sharded_groups_after_a_join_a_loss_and_a_leave(trial, undisturbed):
    """Groups of two with ZeRO 2.

    One joins a running job; a rank of it dies, and the group with it; it returns; the other one gets SIGTERM
    and leaves. theta is that of one process.
    """
    run = trial(groups=1, ranks_per_group=2, deepspeed=str(ROOT / "ds_configs/zero2.json"))
    run.start()
    run.wait_for(1, PATIENCE_S)
    late = Group("late0")
    run.launch(late)
    run.wait_for(2, PATIENCE_S)
    late.ranks[1].send_signal(signal.SIGKILL)
    run.kill("late0")  # as a launcher does when one of its ranks has died
    run.wait_for(2, PATIENCE_S)
    run.wait_for_step(2, PATIENCE_S)
    first = run.groups["group0"]
    first.send_signal(signal.SIGTERM)  # the writer leaves; the other one takes over
    deadline = time.monotonic() + PATIENCE_S
    while first.ended is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert first.ended == 75
    run.hurry()
    run.end(PATIENCE_S)
    lines = complete_lines(run)
    assert {line["groups"] for line in lines} == {1, 2}
    assert lines[-1]["groups"] == 1
    assert late.starts == 2
    assert sum("state received from" in line for line in run.log) >= 2
    assert undisturbed(run) < 1e-4
    assert len(theta_of(run.folder / f"checkpoint-{STEPS}")) > 3


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("launcher", ["torchrun", "sbatch"])
def test_a_group_comes_back_by_its_launcher(launcher, trial, tmp_path):
    """torchrun starts a killed rank again; a job that got a signal is requeued. Both join again."""
    run, log = trial(groups=1, outer_steps=150, save_steps=150), tmp_path / "slurm-4711.out"
    run.start()
    run.wait_for(1, PATIENCE_S)
    flags = ["--config", str(run.file_of_settings), "--group_name", "back", "--output_dir", str(run.folder)]
    env, leave = environment(), tmp_path / "leave"
    if launcher == "torchrun":
        agent = "-m torch.distributed.run --standalone --nproc-per-node=1 --max-restarts=1 -m fmmeta train"
        words = [sys.executable, *agent.split(), *flags]
    else:
        (tmp_path / "launch").symlink_to(ROOT / "launch")
        env |= {
            "PATH": f"{slurm.install(tmp_path / 'bin')}:{Path(sys.executable).parent}:{env['PATH']}",
            "STAND_IN_FOLDER": str(tmp_path),
            "STAND_IN_TASKS": "1",
            "STAND_IN_SIGNAL_AT": f"{leave}:1",
            "MASTER_PORT": str(free_port()),
        }
        words = ["sbatch", "--nodes=1", "launch/slurm_srun.sbatch", *flags]
    with log.open("a") as out:
        process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=out, stderr=out)
    try:
        run.wait_for(2, PATIENCE_S)
        run.kills.append({"group": "back", "at": time.monotonic()})
        if launcher == "torchrun":
            psutil.Process(process.pid).children()[0].kill()
        else:
            leave.write_text("leave\n")
        run.wait_for(2, PATIENCE_S)
        run.hurry()
        run.end(PATIENCE_S)
        assert process.wait(PATIENCE_S) == run.code == 0, log.read_text()
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
    assert log.read_text().count("state received from group group0") == 2
    lines = lines_of(run.folder)
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert {line["tasks"] for line in lines} == {3}


def without_torchft() -> None:
    """In a rank: as if it were not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchft"]:
        del sys.modules[name]
    sys.modules["torchft"] = None  # type: ignore[assignment]


NOWHERE = ("--lighthouse", "http://127.0.0.1:1")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "flags", "torchft", "parts"),
    [
        (
            "train",
            ("--elastic", "--output_dir", "OUT"),
            True,
            ["elastic=True", "start `fmmeta lighthouse`"],
        ),
        (
            "train",
            ("--elastic", "--output_dir", "OUT", "--lighthouse", "nowhere"),
            True,
            ["lighthouse=nowhere"],
        ),
        ("train", ("--elastic", "--output_dir", "OUT", *NOWHERE), False, ["elastic groups need torchft"]),
        ("elastic", ("--output_dir", "OUT"), False, ["elastic groups need torchft"]),
        ("elastic", ("--output_dir", "OUT", "--groups", "0"), True, ["groups=0", "use 1 or more"]),
        ("elastic", (), True, ["elastic=True"]),
        ("lighthouse", (), False, ["elastic groups need torchft"]),
        ("lighthouse", ("--port", "70000"), True, ["port=70000"]),
    ],
)
def test_missing_settings_are_one_error_line(command, flags, torchft, parts, tmp_path):
    words = ["-m", "fmmeta", command, *(str(tmp_path / "run") if flag == "OUT" else flag for flag in flags)]
    ended = run_ranks(
        words, 1, before=None if torchft else without_torchft, per_rank={0: {"TORCHFT_LIGHTHOUSE": ""}}
    )
    line = ended.output[0].strip().splitlines()[-1]
    assert ended.codes == [2], ended.output[0]
    assert line.startswith("fmmeta: error: ")
    assert all(part in line for part in parts)
    assert torchft or line.endswith("; pip install 'fmmeta[elastic]'")
    assert "Traceback" not in ended.output[0]


@pytest.mark.cluster
def test_a_lighthouse_answers_until_sigterm():
    from torchft.coordination import LighthouseClient

    command = [sys.executable, "-m", "fmmeta", "lighthouse", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            client = LighthouseClient(address, timedelta(seconds=10))
            found = client.quorum(
                "one",
                timedelta(seconds=10),
                address="",
                store_address="",
                step=3,
                world_size=1,
                shrink_only=False,
            )
            assert [member.replica_id for member in found.participants] == ["one"]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def short_waits() -> None:
    """In a rank: a lighthouse that does not answer is tried again soon, and given up soon."""
    lighthouse.CONNECT, lighthouse.LIGHTHOUSE_S = timedelta(milliseconds=200), 1.0


def test_a_lighthouse_that_stays_away_is_the_fault_of_a_machine(tmp_path):
    """Exit code 70, after which schedulers and torchrun start a group again, and one line."""
    words = ["-m", "fmmeta", "train", "--elastic", "--output_dir", str(tmp_path / "run"), *NOWHERE]
    ended = run_ranks(words, 1, before=short_waits)
    assert ended.codes == [70], ended.output[0]
    assert "Traceback" not in ended.output[0]
    lines = ended.output[0].strip().splitlines()
    assert (
        sum(line.startswith("fmmeta: lighthouse=http://127.0.0.1:1 does not answer (") for line in lines) == 1
    )
    assert lines[-1].startswith("fmmeta: error: lighthouse=http://127.0.0.1:1 has not answered for 1 s (")
    assert lines[-1].endswith("; start `fmmeta lighthouse` there, or give the address that it prints")


def short_connect() -> None:
    """In a rank: a lighthouse that does not answer is tried again soon."""
    lighthouse.CONNECT = timedelta(milliseconds=200)


@pytest.mark.timeout(300)
def test_a_group_that_starts_before_its_lighthouse_waits_for_it(tmp_path):
    """The machine of the lighthouse restarts: groups that start meanwhile join when it is back."""
    port = free_port()
    flags = [f"--{name}={x}" for name, x in SETTINGS.items() if isinstance(x, (int, str))]
    words = ["-m", "fmmeta", "train", "--elastic", "--output_dir", str(tmp_path / "run"), *flags]
    words += ["--outer_steps=2", "--save_steps=2", "--lighthouse", f"http://127.0.0.1:{port}"]
    place = f"{short_connect.__module__}:{short_connect.__qualname__}"
    rank = Born.of(words, tmp_path / "log", environment(), before=place)
    assert any("does not answer" in line for line in rank.lines()), rank.rank.text
    server = LighthouseProcess(tmp_path, port)
    try:
        assert rank.wait() == 0, rank.rank.text
    finally:
        server.kill()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


@pytest.mark.timeout(300)
def test_groups_of_a_loop_of_the_caller_come_and_go(tmp_path, flags):
    """One of two groups dies: the other repeats the outer step alone, and theta is that of one process."""
    server, seconds = LighthouseProcess(tmp_path, free_port()), tmp_path / "seconds"
    settings = {
        **LONG,
        "outer_steps": 40,
        "algorithm": "fomaml",
        "save_steps": 0,
        "episode_transforms": "harness.elastic:slowly",
    }
    words = ["examples/own_loop.py", *flags(tmp_path / "run", **settings)]
    words += ["--elastic", "--lighthouse", server.address]
    seconds.write_text(
        "1"
    )  # of a task: alone the first group would need 160 s, so that the other one can join
    try:
        groups = [
            Born.of(
                [*words, "--group_name", name], tmp_path / f"{name}.log", environment(**{SLEEP: str(seconds)})
            )
            for name in ("one", "two")
        ]
        until(lambda: any(line["groups"] == 2 for line in lines_of(tmp_path / "run")), PATIENCE_S)
        seconds.unlink()
        groups[1].send_signal(signal.SIGKILL)
        assert groups[0].wait() == 0, groups[0].rank.text
    finally:
        server.kill()
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, settings["outer_steps"] + 1)]
    assert {line["tasks"] for line in lines} == {QUICK["meta_batch_size"]}
    assert lines[-1]["groups"] == 1
    run_ranks(["launch/train.py", *flags(tmp_path / "alone", **settings)], 1).ok()
    found, wanted = (model_of(tmp_path / folder) for folder in ("run", "alone"))
    assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-5


class LighthouseProcess:
    """A lighthouse in a separate process that can be killed."""

    def __init__(self, folder: Path, port: int) -> None:
        words = ["-m", "fmmeta", "lighthouse", "--port", str(port)]
        self.process = Born.of(words, folder / f"lighthouse-{time.monotonic_ns()}.log", environment())
        self.address = next(line for line in self.process.lines() if "lighthouse" in line).split()[-1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.mark.cluster
def test_a_quorum_request_waits_for_working_groups_and_not_for_a_dead_lighthouse(monkeypatch, tmp_path):
    """A request stays pending while the other group works, for longer than the lighthouse timeout: it is sent
    once, since no group would receive the answer to a cancelled one. Then the lighthouse is killed during a
    request; restarted at its port, it answers; without a restart the request fails after the timeout.
    """
    monkeypatch.setattr(lighthouse, "STATUS_S", 0.2)
    server = LighthouseProcess(tmp_path, port := free_port())
    address = f"http://127.0.0.1:{port}"
    lines, asked, question = (
        [LighthouseClient(address, name, coordination()) for name in "ab"],
        [],
        lighthouse.in_thread,
    )

    def count(mine):
        asked.append(mine.args[0])
        return question(mine)

    def request(line, step, patience_s=1.0):
        found = line.request_quorum(
            patience_s, address="", store_address="here:1", step=step, world_size=1, shrink_only=False
        )
        return sorted(member.replica_id for member in found.participants)

    monkeypatch.setattr(lighthouse, "in_thread", count)
    try:
        with ThreadPoolExecutor(2) as pool:
            for line in lines:
                line.start_heartbeats("here:1", 1)
            assert list(pool.map(lambda line: request(line, 0), lines)) == [["a", "b"]] * 2
            del asked[:]
            waiting = pool.submit(request, lines[0], 1)
            time.sleep(3.0)  # b is at work
            assert not waiting.done()
            assert request(lines[1], 1) == waiting.result() == ["a", "b"]
            assert asked == ["a", "b"]
            waiting = pool.submit(request, lines[0], 2, 60.0)
            time.sleep(0.5)
            server.kill()
            lines[1].stop_heartbeats()
            time.sleep(1.0)
            server = LighthouseProcess(tmp_path, port)
            assert waiting.result(30) == ["a"]
            server.kill()
            began = time.monotonic()
            with pytest.raises(
                MachineFault,
                match=rf"lighthouse={address} .* silent for 1 s .*; look whether it runs",
            ):
                request(lines[0], 3)
            assert time.monotonic() - began < 10
    finally:
        for line in lines:
            line.stop_heartbeats()
        server.process.send_signal(signal.SIGKILL)


@pytest.fixture
def opened():
    """Closes in the end what a test has opened, the last first."""
    with ExitStack() as stack:
        yield stack


def served(opened: ExitStack, **options: int) -> str:
    """The address of a lighthouse in this process."""
    server = coordination().LighthouseServer(bind="[::]:0", quorum_tick_ms=50, **options)
    opened.callback(server.shutdown)
    return server.address()


def lighthouse_of(opened: ExitStack, **options: float) -> str:
    """The same with the options of `fmmeta lighthouse`."""
    server, address = lighthouse.open_lighthouse(lighthouse.LighthouseConfig("127.0.0.1", 0, **options))
    opened.callback(server.shutdown)
    return address


def joined(opened: ExitStack, address: str, names: str) -> list[ElasticCommunicator]:
    """Groups of one rank, which leave in the end."""
    alone = Communicator(None, 0, 1, torch.device("cpu"))
    groups = [ElasticCommunicator(alone, address, name) for name in names]
    for cross in groups:
        opened.callback(cross.leave)
    return groups


@pytest.mark.cluster
def test_a_group_that_ends_before_the_rendezvous_is_missed_at_once(opened):
    """The lighthouse counts it until its heartbeats are missed; the others do not wait for it."""
    address = served(opened, min_replicas=2)
    (cross,) = joined(opened, address, "a")
    ended = LighthouseClient(address, "b:1", coordination())
    store_address = f"127.0.0.1:{free_port()}"
    mine = {"fresh": False, "writes": False, "connection": "", "computed_by": "", "config_hash": ""}
    mine["proof"] = proof(b"", "b:1", store_address, 1, mine)
    opened.callback(ended.stop_heartbeats)
    with ThreadPoolExecutor(1) as pool:
        ended.start_heartbeats(store_address, 1)
        counted = pool.submit(
            ended.request_quorum,
            30.0,
            address="",
            store_address=store_address,
            step=1,
            world_size=1,
            shrink_only=False,
            data=mine,
        )
        began = time.monotonic()
        with pytest.raises(PeerLost, match="group b has ended"):
            cross.form(1, 30.0)
        assert time.monotonic() - began < 5
        assert [member.replica_id for member in counted.result().participants] == [cross.name, "b:1"]


@pytest.mark.cluster
def test_groups_with_different_memberships_agree_on_a_restart(opened):
    """One joins late, and the others take a step without it; one loses its communicator.

    A group that still has the previous communicator must form a new one with the others, and all must agree
    on it: what they do after a change is collective.
    """
    address = served(opened, min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=9000)
    groups = joined(opened, address, "abc")

    def form_all(pool, those, step):
        asked = []
        for cross in reversed(
            those
        ):  # the late one first: the lighthouse does not make those of the last roll wait for it
            asked.insert(0, pool.submit(cross.form, step, 30.0))
            time.sleep(0.2)
        memberships = [one.result() for one in asked]
        sums = list(pool.map(lambda cross: float(cross.sum_(torch.ones(1))), those))
        assert sums == [len(those)] * len(those)
        return [found.restarted for found in memberships]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda cross: form_until(cross, 3), groups))
        assert form_all(pool, groups, 0) == [False] * 3
        assert form_all(pool, groups[:2], 1) == [True] * 2  # c is late and not in this membership
        assert form_all(pool, groups, 2) == [True] * 3
        assert form_all(pool, groups, 3) == [False] * 3
        with pytest.raises(PeerLost, match="a sum: the cable"), groups[1]._raise_peer_lost("a sum"):
            raise RuntimeError("the cable")
        assert form_all(pool, groups, 3) == [True] * 3
        assert form_all(pool, groups, 4) == [False] * 3


def form_until(cross: ElasticCommunicator, size: int) -> None:
    """Form until the membership has this size: the first may have begun without the last, whose request waits
    until they request again.
    """
    there = 0
    while there < size:
        with suppress(PeerLost):
            there = len(cross.form(0, 60.0).members)


GROUP = """
import json, sys, time
import torch
from fmmeta.common.errors import PeerLost
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.parallel.collectives import Communicator
cross, step = ElasticCommunicator(Communicator(None, 0, 1, torch.device("cpu")), *sys.argv[1:]), 0
cross.timeout_s = 1.0  # of sums

def log(event, members=()):
    labels = [member.label for member in members]
    print(json.dumps([time.time(), event, step, labels, cross.connection]), flush=True)

while True:
    try:
        membership = cross.form(step, 60.0)
        step = membership.members[membership.donor].step
        log("formed", membership.members)
        time.sleep(0.2)
        cross.sum_(torch.ones(1))
        log("done", membership.members)
        step, cross.fresh = step + 1, False
    except PeerLost as lost:
        log(f"lost: {lost}")
        cross.disconnect()
"""
"""Outer steps without a model: a quorum, 0.2 s of work and a sum, again and again."""


class Groups:
    """Groups a, b, c as processes, with the lines that they log."""

    def __init__(self, folder: Path, heartbeat_timeout: float) -> None:
        config = lighthouse.LighthouseConfig("127.0.0.1", 0, heartbeat_timeout)
        self.server, address = lighthouse.open_lighthouse(config)
        self.logs = {name: folder / name for name in "abc"}
        self.ranks = {
            name: Born.of(["-c", GROUP, address, name], log, environment()) for name, log in self.logs.items()
        }

    def lines(self, name: str, event: str) -> list[tuple[float, int, list[str], str]]:
        """Time, step, members and connection of the lines of an event."""
        text = self.logs[name].read_text() if self.logs[name].exists() else ""
        found = [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("[")]
        return [(at, step, labels, name) for at, kind, step, labels, name in found if kind == event]

    def wait_for(self, name: str, labels: str, since: float = 0.0, steps: int = 1) -> float:
        """Wait until a group has done so many steps with these groups; the time of the first such quorum."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if sum(found[2] == [*labels] and found[0] > since for found in self.lines(name, "done")) >= steps:
                return next(
                    found[0]
                    for found in self.lines(name, "formed")
                    if found[2] == [*labels] and found[0] > since
                )
            time.sleep(0.05)
        raise TimeoutError("\n".join(log.read_text() for log in self.logs.values()))

    def connections_of_steps(self) -> dict[int, set[str]]:
        """The connections of the groups that have done each step."""
        found: dict[int, set[str]] = {}
        for name in "abc":
            for _, step, _, connection in self.lines(name, "done"):
                found.setdefault(step, set()).add(connection)
        return found

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.send_signal(signal.SIGKILL)
        self.server.shutdown()


@pytest.fixture
def start_groups(tmp_path, opened):
    def start(heartbeat_timeout: float) -> Groups:
        groups = Groups(tmp_path, heartbeat_timeout)
        opened.callback(groups.close)
        return groups

    return start


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_killed_group_is_left_out_long_before_its_heartbeats_time_out(start_groups):
    """The first group dies, whose store the others use, then one of the other two."""
    groups = start_groups(60.0)
    for name in "abc":
        groups.wait_for(name, "abc")
    for victim, others in (("a", "bc"), ("c", "b")):
        killed = time.time()
        groups.ranks[victim].send_signal(signal.SIGKILL)
        for name in others:
            assert groups.wait_for(name, others, killed, steps=5) - killed < 20
    assert all(len(found) == 1 for found in groups.connections_of_steps().values())


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_stopped_group_is_left_out_when_its_heartbeats_time_out(start_groups):
    """Its port still accepts connections. It returns when it continues, and no step has two memberships."""
    groups = start_groups(8.0)
    for name in "abc":
        groups.wait_for(name, "abc")
    groups.ranks["b"].send_signal(signal.SIGSTOP)
    stopped = time.time()
    try:
        for name in "ac":
            assert groups.wait_for(name, "ac", stopped) - stopped > 7
    finally:
        groups.ranks["b"].send_signal(signal.SIGCONT)
    continued = time.time()
    for name in "abc":
        groups.wait_for(name, "abc", continued, steps=3)
    assert all(len(found) == 1 for found in groups.connections_of_steps().values())


@pytest.fixture
def two_groups(monkeypatch, opened):
    """Groups a and b of one membership, and a function that makes the port of a group seem to refuse."""
    refused = set[str]()
    refuses = communicator.refuses
    monkeypatch.setattr(communicator, "refuses", lambda address: address in refused or refuses(address))
    address = served(opened, min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=30000)
    groups = joined(opened, address, "ab")

    def refuse(cross: ElasticCommunicator, is_refused: bool = True) -> None:
        (refused.add if is_refused else refused.discard)(cross.store_address)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cross: form_until(cross, 2), groups))
        yield pool, *groups, refuse


@pytest.mark.cluster
def test_a_live_group_that_is_reported_as_lost_is_in_no_membership(two_groups):
    """The lighthouse has its request and then the report, and all groups read one answer."""
    pool, a, b, _ = two_groups
    a.fresh = b.fresh = False
    waiting = pool.submit(b.form, 1, 30.0)
    time.sleep(0.5)
    a.client.report_lost(b.name, **a._signed(b.name, b.store_address, 1, {"lost": True}))
    time.sleep(0.5)
    assert [member.name for member in a.form(1, 30.0).members] == [a.name]
    with pytest.raises(PeerLost, match="have left it out of a step"):
        waiting.result(30)
    waiting = pool.submit(b.form, 1, 30.0)
    found = a.form(2, 30.0)
    assert found == replace(waiting.result(30), here=0)
    assert [found.needs_state(number) for number in range(2)] == [False, True]


@pytest.mark.cluster
def test_groups_receive_the_bytes_of_one(two_groups):
    pool, a, b, _ = two_groups
    for root, wanted in enumerate((b"aa", b"b")):
        waiting = pool.submit(b.broadcast_bytes, b"b", root)
        assert a.broadcast_bytes(b"aa", root) == waiting.result(30) == wanted
    b.disconnect()
    with pytest.raises(PeerLost, match="a broadcast: "):
        a.broadcast_bytes(b"aa", 1)


@pytest.mark.cluster
def test_a_group_that_did_a_step_in_another_membership_receives_the_state(two_groups):
    """As if a firewall refused connections to it. Both have the same step, and sums differ by rounding."""
    pool, a, b, refuse = two_groups
    a.fresh = b.fresh = False
    refuse(b)
    assert len(a.form(0, 30.0).members) == 1  # b has done this step meanwhile: its sums had arrived
    refuse(b, False)
    waiting = pool.submit(b.form, 1, 30.0)
    found = a.form(1, 30.0)
    assert found == replace(waiting.result(30), here=0)
    assert [member.step for member in found.members] == [1, 1]
    assert [found.needs_state(number) for number in range(2)] == [False, True]


@pytest.mark.cluster
def test_no_group_waits_for_a_member_that_has_given_up_connecting(monkeypatch, opened):
    """gloo is connected by then, and stays so for a while: the sums of the others would wait for its part."""
    connect_gloo, connected = communicator.connect_gloo, []

    def give_up(address, name, rank, *rest):
        connected.append(connect_gloo(address, name, rank, *rest))
        if rank == 2:
            raise RuntimeError("given up")
        return connected[-1]

    monkeypatch.setattr(communicator, "connect_gloo", give_up)
    groups = joined(opened, lighthouse_of(opened, min_groups=3), "abc")
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        for found in [pool.submit(cross.form, 0, 30.0) for cross in groups]:
            with pytest.raises(PeerLost, match=r"given up|another group could not connect"):
                found.result(30)
        assert time.monotonic() - began < 8


@pytest.mark.cluster
def test_groups_learn_the_minimum_of_groups_from_each_other(two_groups):
    """The status page names it only while too few groups have a pending request."""
    pool, a, b, _ = two_groups
    a.fresh = b.fresh = False
    b.client.min_groups = None
    b.client.read_min_groups = lambda: None
    waiting = pool.submit(b.form, 1, 30.0)
    a.form(1, 30.0)
    waiting.result(30)
    assert a.client.min_groups == b.client.min_groups == 1


@pytest.mark.cluster
def test_no_group_is_reported_below_the_minimum_of_groups(opened):
    """A report counts as a group for the lighthouse: a step would have fewer live groups than wanted."""
    address = lighthouse_of(opened, heartbeat_timeout=2.0, min_groups=2)
    a, b, c = joined(opened, address, "abc")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cross: form_until(cross, 2), (a, b)))
        b.leave()
        b.store = None  # closes its port
        waiting = pool.submit(form_until, a, 2)
        time.sleep(4.0)
        assert not waiting.done()
        form_until(c, 2)
        waiting.result(30)
        assert list(a.listed) == [a.name, c.name]


@pytest.mark.cluster
def test_the_writer_releases_the_folder(tmp_path, opened):
    """A later run of the same process need not wait for it."""
    short = {"outer_steps": 1, "inner_steps": 1, "meta_batch_size": 1, "num_workers": "0", "eval_episodes": 0}
    joins = {"elastic": True, "lighthouse": lighthouse_of(opened), "output_dir": str(tmp_path)}
    MetaTrainer(Config(**short, **joins)).train()
    assert (tmp_path / "model").is_dir()
    assert not (tmp_path / ".lock").exists()
    lock_folder(tmp_path, 0).close()
