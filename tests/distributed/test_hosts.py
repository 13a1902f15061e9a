"""Training on two hosts: network namespaces joined by a cable, through DeepSpeed's launcher and torchrun; the
cable unplugged.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.namespaces import ADDRESSES, NAMES, Hosts
from tests.support.launch import ROOT, environment, free_port, run_ranks
from tests.support.short_runs import LONG, model_of, off, same, until

pytestmark = pytest.mark.cluster

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


class Launchers:
    """One launcher on each host."""

    def __init__(self, hosts: Hosts, folder: Path, command, **env: str) -> None:
        self.logs = [folder / f"{name}-{time.monotonic_ns()}.log" for name in NAMES]
        self.processes = []
        env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env)
        for host, log in enumerate(self.logs):
            with log.open("w") as file:
                self.processes.append(hosts.run(host, command(host), file, cwd=ROOT, env=env))

    def codes(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    @property
    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]


def deepspeed_command(folder: Path, slots: int, flags: list[str]):
    """The command for each host: without ssh, it is started on each of them."""
    hostfile, port = folder / "hostfile", free_port()
    hostfile.write_text("".join(f"{name} slots={slots}\n" for name in NAMES))
    return lambda host: [
        "deepspeed",
        "--hostfile",
        str(hostfile),
        "--no_ssh",
        "--node_rank",
        str(host),
        "--master_addr",
        ADDRESSES[0],
        "--master_port",
        str(port),
        "launch/train.py",
        *flags,
    ]


@pytest.mark.timeout(300)
def test_deepspeed_without_ssh_trains_on_two_hosts(hosts, flags, alone, tmp_path):
    run = tmp_path / "run"
    started = Launchers(
        hosts, tmp_path, deepspeed_command(tmp_path, 2, [*flags(run, **SHORT), "--log_level", "debug"])
    )
    assert started.codes(250) == [0, 0], started.texts
    text, cable = started.texts[0], hosts.cables[0]
    assert f"GLOO_SOCKET_IFNAME={cable}: " in text
    assert (
        "fmmeta: 4 groups of 1 rank on 2 nodes\ngroup 0: rank 0 on alpha\ngroup 1: rank 1 on"
        " alpha\ngroup 2: rank 2 on beta\ngroup 3: rank 3 on beta\nacross groups, between nodes"
        f" (GLOO_SOCKET_IFNAME={cable}): " in text
    )
    assert off(model_of(run), *alone) < 1e-4


@pytest.mark.timeout(300)
def test_torchrun_trains_on_two_hosts(hosts, flags, alone, tmp_path):
    """A group on each host, ZeRO 2 inside; the rendezvous is c10d's, on the first host."""
    run, port = tmp_path / "run", free_port()
    settings = [*flags(run, group_size=2, deepspeed="ds_configs/zero2.json", **SHORT)]
    words = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={NAMES[0]}:{port}",
        "--rdzv-id=x",
    ]
    before = hosts.sent()
    started = Launchers(hosts, tmp_path, lambda host: [*words, "launch/train.py", *settings])
    assert started.codes(250) == [0, 0], started.texts
    assert "2 groups of 2 ranks on cpu; DeepSpeed ZeRO 2" in "".join(started.texts)
    assert (
        min(now - then for now, then in zip(hosts.sent(), before, strict=True)) > 4 * 600_000
    )  # the shards went by the cable
    assert off(model_of(run), *alone) < 1e-4


@pytest.mark.timeout(300)
def test_elastic_groups_of_two_hosts_meet(hosts, flags, tmp_path):
    """The lighthouse is given by the name of its host, which stands for 127.0.1.1 there."""
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    port, run, logs = (
        free_port(),
        tmp_path / "run",
        [tmp_path / f"{name}.log" for name in ("lighthouse", *NAMES)],
    )
    words = [sys.executable, "-m", "fmmeta"]
    group = [*words, "train", "--elastic", f"--lighthouse=http://{NAMES[0]}:{port}", *flags(run, **LONG)]
    commands = [[*words, "lighthouse", f"--port={port}", "--min_groups=2"], group, group]
    started = []
    for host, command, log in zip((0, 0, 1), commands, logs, strict=True):
        with log.open("w") as file:
            started.append(hosts.run(host, command, file, cwd=ROOT, env=environment()))
    try:
        texts = [one.wait(250) for one in started[1:]], *(log.read_text() for log in logs)
    finally:
        os.killpg(started[0].pid, signal.SIGTERM)
    assert texts[0] == [0, 0], texts
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["groups"] for line in lines} == {2}


@pytest.mark.timeout(400)
def test_an_unplugged_cable_ends_the_job_and_the_resumed_run_is_exact(hosts, flags, tmp_path):
    """Each host names the silent rank; the same command resumes to the bits of a run on one host."""
    settings, bound_s = {**LONG, "step_timeout": 8}, 8 + 2 * (2 + 3) + 1
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    started = Launchers(
        hosts, tmp_path, deepspeed_command(tmp_path, 1, flags(run, **settings)), EPISODE_S="0.3"
    )
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
    for host, text in enumerate(started.texts):
        assert re.search(
            r"fmmeta: watchdog: outer step \d+ has taken \d+ s, .* 8 s \(--step_timeout\); the job ends",
            text,
        )
        assert re.search(
            rf"watchdog: rank {1 - host} \(process \d+ on {NAMES[1 - host]}\) is silent",
            text,
        )
    again = Launchers(
        hosts,
        tmp_path,
        deepspeed_command(tmp_path, 1, flags(run, **{**settings, "step_timeout": 100})),
        EPISODE_S="0",
    )
    assert again.codes(200) == [0, 0], again.texts
    assert f"resumed from {run}/checkpoint-" in again.texts[0]
    run_ranks(
        ["launch/train.py", *flags(undisturbed, **LONG)],
        2,
        per_rank={rank: {"EPISODE_S": "0"} for rank in (0, 1)},
    ).ok()
    assert same(run, undisturbed)


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
    run, env = tmp_path / "run", environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "hostfile").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    (tmp_path / ".deepspeed_env").write_text(
        f"HF_DATASETS_CACHE={os.environ['HF_DATASETS_CACHE']}\nOMP_NUM_THREADS=1\n"
    )
    words = [
        "deepspeed",
        "--hostfile",
        "hostfile",
        "--master_addr",
        ADDRESSES[0],
        "--master_port",
        str(free_port()),
        "--no_ssh_check",
        "launch/train.py",
        *flags(run, **SHORT),
    ]
    with (tmp_path / "log").open("w") as log:
        started = hosts.run(
            0, words, log, cwd=tmp_path, env={**env, "PDSH_SSH_ARGS_APPEND": f"-F {ssh_config}"}
        )
        code = started.wait(250)
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-4000:]
    assert "2 groups of 1 rank" in text
    assert off(model_of(run), *alone) < 1e-4
