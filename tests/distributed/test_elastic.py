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
from fmmeta.training.run import Run
from fmmeta.training.run_files import lock_folder
from harness.elastic import SLEEP, Born, Group, Trial, alone, lines_of, parity, theta_of
from harness.fork_server import ROOT, environment, free_port
from tests.support import slurm
from tests.support.launch import run_ranks, train
from tests.support.short_runs import LONG, QUICK, model_of, until

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
def opened():
    """Closes in the end what a test has opened, the last first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def trial(tmp_path, opened):
    """trial(groups=N, **settings): a run in which all groups take part."""

    def start(**settings):
        run = Trial({**SETTINGS, "output_dir": str(tmp_path / "run"), **settings}, TASK_S)
        opened.callback(run.close)
        run.start()
        run.wait_for(settings["groups"], PATIENCE_S)
        return run

    return start


def finished_lines(run: Trial, steps: int = STEPS) -> list[dict]:
    """Let the run end. Its lines have each outer step once, with its whole meta-batch."""
    run.hurry()
    run.end(PATIENCE_S)
    assert run.code == 0, "\n".join(run.log[-50:])
    lines = lines_of(run.folder)
    assert [(line["step"], line["tasks"]) for line in lines] == [(step, 3) for step in range(1, steps + 1)]
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Error of a run against the same run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    settings = {**SETTINGS, "episode_transforms": "harness.elastic:slowly"}
    del settings["heartbeat_timeout"]
    train(folder, 1, **settings).ok()
    return lambda run: parity(alone(SETTINGS, folder), run.folder, folder)


def writers_of(trial: Trial) -> list[str]:
    """Who took over the files of the run, in this order."""
    return [line.split("]")[0].strip("[") for line in trial.log if "writes the files of the run" in line]


def kill(run: Trial, name: str) -> None:
    """In the middle of a step; the others continue, and the group comes back."""
    time.sleep(TASK_S / 2)
    run.kill(name)
    run.wait_for(2, PATIENCE_S)
    run.wait_for(3, PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_theta_after_three_kills_equals_the_undisturbed_run(trial, undisturbed):
    """A group that does not write, the one that writes, and one of those that came back; each heals and
    joins.
    """
    run = trial(groups=3)
    (wrote,) = writers_of(run)
    first, last = sorted({*run.groups} - {wrote})
    wrote_when_killed = 0
    for name in (first, wrote, first):
        wrote_when_killed += writers_of(run)[-1] == name
        kill(run, name)
    lines = finished_lines(run)
    assert {line["groups"] for line in lines} >= {2, 3}
    assert sum(line["retries"] > 0 for line in lines) + sum(line["lost_seconds"] > 0 for line in lines) >= 3
    assert [run.groups[name].starts for name in (first, wrote, last)] == [3, 2, 1]
    assert sum("state received from" in line for line in run.log) >= 3
    assert undisturbed(run) < 1e-4
    assert len(writers_of(run)) == 1 + wrote_when_killed >= 2
    assert (run.folder / "model/model.safetensors").is_file()
    assert json.loads((run.folder / "run.json").read_text())["finished"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_finished_tasks_are_kept_when_a_group_that_claims_is_killed(trial, undisturbed):
    """The others run its task alone again."""
    run = trial(groups=3, task_schedule="dynamic")
    for _ in range(2):
        kill(run, writers_of(run)[-1])
    assert all(sum(line["tasks_by_group"]) == 3 for line in finished_lines(run))
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
    run.wait_for_step(1, PATIENCE_S)
    run.before = f"{__name__}:{delay_resume_until_checkpoint_is_removed.__name__}"
    run.launch(Group("late0"))
    run.wait_for_step(2, PATIENCE_S)
    finished_lines(run)
    assert [(group.starts, group.ended) for group in run.groups.values()] == [(1, 0)] * 2
    assert sum("state received from" in line for line in run.log) == 1
    assert any("[late0] fmmeta: resumed from" in line for line in run.log)


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_theta_of_sharded_groups_after_a_join_a_loss_and_a_leave(trial, undisturbed):
    """Groups of two with ZeRO 2.

    One joins a running job; a rank of it dies, and the group with it; it returns; the other one gets SIGTERM
    and leaves. theta is that of one process.
    """
    run = trial(groups=1, ranks_per_group=2, deepspeed=str(ROOT / "ds_configs/zero2.json"))
    first, late = run.groups["group0"], Group("late0")
    run.launch(late)
    run.wait_for(2, PATIENCE_S)
    late.ranks[1].send_signal(signal.SIGKILL)
    run.kill("late0")  # as a launcher does when one of its ranks has died
    run.wait_for(2, PATIENCE_S)
    run.wait_for_step(2, PATIENCE_S)
    first.send_signal(signal.SIGTERM)  # the writer leaves; the other one takes over
    until(lambda: first.ended is not None, PATIENCE_S)
    assert first.ended == 75
    run.groups = {"late0": late}
    lines = finished_lines(run)
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
        until(lambda: log.read_text().count("state received from group group0") == 1, PATIENCE_S)
        if launcher == "torchrun":
            psutil.Process(process.pid).children()[0].kill()
        else:
            leave.write_text("leave\n")
        until(lambda: log.read_text().count("state received from group group0") == 2, PATIENCE_S)
        run.hurry()
        run.end(PATIENCE_S)
        assert process.wait(PATIENCE_S) == run.code == 0, log.read_text()
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
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
def test_a_lighthouse_answers_until_sigterm(tmp_path):
    from torchft.coordination import LighthouseClient

    server, patience = LighthouseProcess(tmp_path, 0), timedelta(seconds=10)
    client = LighthouseClient(server.address, patience)
    asked = {"address": "", "store_address": "", "step": 3, "world_size": 1, "shrink_only": False}
    found = client.quorum("one", patience, **asked)
    assert [member.replica_id for member in found.participants] == ["one"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait() == 0


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


@pytest.mark.slow
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
def test_a_quorum_request_waits_for_working_groups_and_not_for_a_dead_lighthouse(
    monkeypatch, tmp_path, opened
):
    """A request stays pending while the other group works, for longer than the lighthouse timeout: it is sent
    once, since no group would receive the answer to a cancelled one. Then the lighthouse is killed during a
    request; restarted at its port, it answers; without a restart the request fails after the timeout.
    """
    monkeypatch.setattr(lighthouse, "STATUS_S", 0.2)
    server = LighthouseProcess(tmp_path, port := free_port())
    address, asked, question = f"http://127.0.0.1:{port}", [], lighthouse.in_thread
    a, b = (LighthouseClient(address, name, coordination()) for name in "ab")

    def count(mine):
        asked.append(mine.args[0])
        return question(mine)

    def request(line, step, patience_s=1.0):
        place = {"address": "", "store_address": "here:1", "world_size": 1, "shrink_only": False}
        found = line.request_quorum(patience_s, step=step, **place)
        return sorted(member.replica_id for member in found.participants)

    monkeypatch.setattr(lighthouse, "in_thread", count)
    for line in (a, b):
        opened.callback(line.stop_heartbeats)
        line.start_heartbeats("here:1", 1)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda line: request(line, 0), (a, b))) == [["a", "b"]] * 2
        del asked[:]
        waiting = pool.submit(request, a, 1)
        time.sleep(3.0)  # b is at work
        assert not waiting.done()
        assert request(b, 1) == waiting.result() == ["a", "b"]
        assert asked == ["a", "b"]
        waiting = pool.submit(request, a, 2, 60.0)
        time.sleep(0.5)
        server.kill()
        b.stop_heartbeats()
        time.sleep(1.0)
        server = LighthouseProcess(tmp_path, port)
        opened.callback(server.kill)
        assert waiting.result(30) == ["a"]
        server.kill()
        began = time.monotonic()
        silent = rf"lighthouse={address} .* silent for 1 s .*; look whether it runs"
        with pytest.raises(MachineFault, match=silent):
            request(a, 3)
        assert time.monotonic() - began < 10


def served(opened: ExitStack, **options: int) -> str:
    """The address of a lighthouse in this process."""
    server = coordination().LighthouseServer(bind="[::]:0", quorum_tick_ms=50, **options)
    opened.callback(server.shutdown)
    return server.address()


def joined(opened: ExitStack, address: str, names: str) -> list[ElasticCommunicator]:
    """Groups of one rank, which leave in the end."""
    alone = Communicator(None, 0, 1, torch.device("cpu"))
    groups = [ElasticCommunicator(alone, address, name) for name in names]
    for cross in groups:
        opened.callback(cross.leave)
    return groups


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
cross.timeout_s = 600.0  # of sums: gloo waits so long for a stopped member

while True:
    try:
        membership = cross.form(step, 60.0)
        step = membership.members[membership.donor].step
        time.sleep(0.2)
        cross.sum_(torch.ones(1))
        labels = [member.label for member in membership.members]
        print(json.dumps([time.time(), step, labels, cross.connection]), flush=True)
        step, cross.fresh = step + 1, False
    except PeerLost as lost:
        print(lost, flush=True)
        cross.disconnect()
"""
"""Outer steps without a model: a quorum, 0.2 s of work and a sum, again and again."""


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_killed_group_is_left_out_long_before_a_stopped_one(tmp_path, opened):
    """The port of a stopped group still accepts connections: it is left out when its heartbeats time out, and
    returns when it continues. Then the first group dies, whose store the others use, and one of the other
    two. No step has two memberships.
    """
    server, address = lighthouse.open_lighthouse(lighthouse.LighthouseConfig("127.0.0.1", 0, 20.0))
    opened.callback(server.shutdown)
    ranks = {n: Born.of(["-c", GROUP, address, n], tmp_path / n, environment()) for n in "abc"}
    for rank in ranks.values():
        opened.callback(rank.send_signal, signal.SIGKILL)

    def steps(name):
        """Time, step, groups and connection of the outer steps that a group has done."""
        text = (tmp_path / name).read_text() if (tmp_path / name).exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("[1")]  # torch logs [W

    def after(number: int, victim: str, together: str) -> float:
        """Seconds from a signal until each of the groups `together` has done five steps with the others."""
        began = time.time()
        ranks[victim].send_signal(number)

        def done(name):
            return [at for at, _, labels, _ in steps(name) if labels == [*together] and at > began]

        until(lambda: all(len(done(name)) >= 5 for name in together), PATIENCE_S)
        return min(done(together[0])) - began

    after(signal.SIGCONT, "a", "abc")
    assert after(signal.SIGSTOP, "b", "ac") > 19
    after(signal.SIGCONT, "b", "abc")
    assert after(signal.SIGKILL, "a", "bc") < 15
    assert after(signal.SIGKILL, "c", "b") < 15
    taken = {(step, connection) for name in "abc" for _, step, _, connection in steps(name)}
    assert len(taken) == len({step for step, _ in taken}) > 10
    assert len({connection for _, connection in taken}) < 10  # groups that did not change stay connected


@pytest.fixture
def two_groups(monkeypatch, opened):
    """Groups a and b, which have taken part in one membership, and a set of addresses that seem to refuse."""
    refused, refuses = set[str](), communicator.refuses
    monkeypatch.setattr(communicator, "refuses", lambda address: address in refused or refuses(address))
    address = served(opened, min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=30000)
    groups = joined(opened, address, "ab")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cross: form_until(cross, 2), groups))
        for cross in groups:
            cross.fresh = False
        yield pool, *groups, refused


def form_both(pool, a, b, steps):
    """What both groups find, for the outer steps that they ask for."""
    waiting = pool.submit(b.form, steps[1], 30.0)
    found = a.form(steps[0], 30.0)
    assert found == replace(waiting.result(30), here=0)
    return found


@pytest.mark.cluster
def test_a_live_group_that_is_reported_as_lost_is_in_no_membership(two_groups):
    """The lighthouse has its request and then the report, and all groups read one answer."""
    pool, a, b, _ = two_groups
    waiting = pool.submit(b.form, 1, 30.0)
    time.sleep(0.5)
    a.client.report_lost(b.name, **a._signed(b.name, b.store_address, 1, {"lost": True}))
    time.sleep(0.5)
    assert [member.name for member in a.form(1, 30.0).members] == [a.name]
    with pytest.raises(PeerLost, match="have left it out of a step"):
        waiting.result(30)
    found = form_both(pool, a, b, (2, 1))
    assert [found.needs_state(number) for number in range(2)] == [False, True]


@pytest.mark.cluster
def test_groups_receive_the_bytes_of_one_and_learn_the_minimum_of_groups(two_groups):
    """The status page names the minimum only while too few groups have a pending request."""
    pool, a, b, _ = two_groups
    b.client.min_groups = None
    b.client.read_min_groups = lambda: None
    form_both(pool, a, b, (1, 1))
    assert a.client.min_groups == b.client.min_groups == 1
    for root, wanted in enumerate((b"aa", b"b")):
        waiting = pool.submit(b.broadcast_bytes, b"b", root)
        assert a.broadcast_bytes(b"aa", root) == waiting.result(30) == wanted
    b.disconnect()
    with pytest.raises(PeerLost, match="a broadcast: "):
        a.broadcast_bytes(b"aa", 1)


@pytest.mark.cluster
def test_a_group_that_did_a_step_in_another_membership_receives_the_state(two_groups):
    """As if a firewall refused connections to it. Both have the same step, and sums differ by rounding."""
    pool, a, b, refused = two_groups
    refused.add(b.store_address)
    assert len(a.form(0, 30.0).members) == 1  # b has done this step meanwhile: its sums had arrived
    refused.clear()
    found = form_both(pool, a, b, (1, 1))
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
    groups = joined(opened, served(opened, min_replicas=3), "abc")
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        for found in [pool.submit(cross.form, 0, 30.0) for cross in groups]:
            with pytest.raises(PeerLost, match=r"given up|another group could not connect"):
                found.result(30)
        assert time.monotonic() - began < 8


@pytest.mark.cluster
def test_the_writer_releases_the_folder(tmp_path, opened):
    """A later run of the same process need not wait for it."""
    short = {"outer_steps": 1, "inner_steps": 1, "meta_batch_size": 1, "num_workers": "0", "eval_episodes": 0}
    joins = {"elastic": True, "lighthouse": served(opened, min_replicas=1), "output_dir": str(tmp_path)}
    MetaTrainer(Config(**short, **joins)).train()
    assert (tmp_path / "model").is_dir()
    assert not (tmp_path / ".lock").exists()
    lock_folder(tmp_path, 0).close()
