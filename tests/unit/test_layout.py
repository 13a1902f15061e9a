"""Ranks and groups from launchers' variables, and group sizes from an estimate of memory."""

import os
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import accelerate
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.common import processes
from fmmeta.config.settings import Config
from fmmeta.parallel import memory
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import (
    LAUNCHERS,
    SRUN,
    UNREAD,
    GroupCoordinates,
    Launch,
    Layout,
    first_host,
    unread_settings,
)
from fmmeta.parallel.memory import HEADROOM, Sizes, at_size, check_group_size, choose_group_size, estimate
from fmmeta.parallel.network import PORTS, listen
from fmmeta.parallel.process_groups import World, pick_device
from harness.fork_server import ROOT, environment, shared
from tests.support.memory import SIZES, world_of
from tests.support.messages import check_message, refusal

SBATCH = ROOT / "launch" / "slurm_torchrun.sbatch"
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "1234",
}
DEEPSPEED = {
    **{name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"},
    "LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "41234",
}

BATCH_SHELL = {  # a line of a batch script without srun
    **{name: value for name, value in SLURM.items() if "STEP" not in name},
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


BY = {one.rank: one for one in LAUNCHERS}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch(0, 1, 0, 1)),
        (TORCHRUN, Launch(5, 8, 1, 4, "n0", 1234)),
        (DEEPSPEED, Launch(5, 8, 1, 2, "n0", 1234)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, Launch(1, 2, 1, 2, "127.0.0.1", 29500)),
        ({"RANK": "3", "WORLD_SIZE": "64", "MASTER_ADDR": "m-0"}, Launch(3, 64, 0, 1, "m-0", 29500)),  # a pod
        (SLURM, Launch(6, 8, 2, 4, "gpu03", 10000 + 41234 % 20000, variables=SRUN)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "7"}, Launch(6, 8, 2, 4, "head", 7, variables=SRUN)),
        (
            {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"},
            Launch(5, 8, 1, 4, "n0", 1234),
        ),  # torchrun under srun
        (
            {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8", "PMIX_RANK": "6", "MASTER_ADDR": "h"},
            Launch(6, 8, 0, 1, "h", 29500, variables=BY["PMI_RANK"]),
        ),
        ({"WORLD_SIZE": "1", "PMI_SIZE": "4"}, Launch()),
        (BATCH_SHELL, Launch(0, 1, 0, 1)),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            Launch(0, 1, 0, 1, variables=SRUN),
        ),  # srun -n1 in a larger job
    ],
)
def test_launch_from_variables(env, launch):
    assert Launch.from_env(env) == launch


@pytest.mark.parametrize(
    ("name", "value", "silenced", "instead"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", {"bf16": True}, "--bf16, the only lower precision"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {"compile": True}, "--compile"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", {"deepspeed": "zero2"}, "--deepspeed zero3"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "a/b.json", {"deepspeed": "zero2"}, "--deepspeed a/b.json"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2", {}, "nothing: a group does not split sequences over ranks"),
    ],
)
def test_settings_of_the_launcher_that_are_not_read_are_named(name, value, silenced, instead):
    line = f"{name}={value} (accelerate launch) is not read; use {instead}"
    assert [*unread_settings({name: value}, Config(), False)] == [line]
    if silenced:
        assert not [*unread_settings({name: value}, Config(**silenced), False)]


def test_settings_that_choose_nothing_are_not_named():
    env = {name: quiet.upper() for name, (quiet, _, _) in UNREAD.items()}
    assert not [*unread_settings(env, Config(), True)]
    assert not [*unread_settings({"ACCELERATE_USE_CPU": "True"}, Config(), False)]
    assert len([*unread_settings({"ACCELERATE_USE_CPU": "True"}, Config(), True)]) == 1


def test_every_variable_that_is_named_is_one_of_accelerate():
    package = Path(str(accelerate.__file__)).parent
    source = "".join((package / file).read_text() for file in ("utils/launch.py", "utils/dataclasses.py"))
    for name in UNREAD:
        assert name.removeprefix("PARALLELISM_CONFIG_") in source, name


def test_ports_of_slurm_jobs_are_not_given_to_connections():
    """Those of both ways to start a job: the kernel gives ports from 32768 on, by default."""
    jobs = (0, 19999, 20000, 39999)
    ports = [Launch.from_env({**SLURM, "SLURM_JOB_ID": str(job)}).master_port for job in jobs]
    assert PORTS[0] <= min(ports)
    assert max(ports) < PORTS[1]
    line = next(line for line in SBATCH.read_text().splitlines() if line.startswith("export RDZV_PORT="))
    for job in (0, 41234, 19999):
        env = {**SLURM, "SLURM_JOB_ID": str(job)}
        words = ["bash", "-c", f"{line}; echo $RDZV_PORT"]
        port = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
        assert int(port) == Launch.from_env(env).master_port


@pytest.mark.parametrize(
    ("env", "remedy"),
    [({**SLURM, "SLURM_PROCID": "0"}, "export MASTER_PORT="), ({**TORCHRUN, "RANK": "0"}, "--master_port ")],
)
def test_a_port_in_use_is_refused_with_the_setting_of_the_launcher(env, remedy, tmp_path):
    with listen("127.0.0.1", 0) as used:
        port = used.getsockname()[1]
        place = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        rank = shared().start(["launch/train.py"], tmp_path / "log", environment(**place), cwd=ROOT)
        codes = shared().wait([rank], 100)
    assert codes == [2], rank.text
    assert f"fmmeta: error: master_port={port} is in use on " in rank.text
    assert f"; give the launch another, such as {remedy}{port + 1}\n" in rank.text


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({**TORCHRUN, "RANK": "8"}, ("RANK=8", "WORLD_SIZE=8", "check the launcher")),
        ({**TORCHRUN, "RANK": "-1"}, ("RANK=-1", "WORLD_SIZE=8", "check the launcher")),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, ("variable WORLD_SIZE=eight", "check the launcher")),
        ({**SLURM, "SLURM_PROCID": ""}, ("variable SLURM_PROCID= ", "check the launcher")),
        ({"PMIX_RANK": "1"}, ("PMIX_RANK=1 without PMIX_SIZE", "unset PMIX_RANK for one process")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ("SLURM_PROCID=1 without", "SLURM_STEP_NUM_TASKS")),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK=1 without RANK", "unset LOCAL_RANK")),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, ("MASTER_PORT=99999", "use one from 1024")),
        ({**TORCHRUN, "MASTER_PORT": "0"}, ("MASTER_PORT=0", "use one from 1024")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ("LOCAL_WORLD_SIZE", "of 0 ranks", "check the launcher")),
        ({**TORCHRUN, "LOCAL_RANK": "5"}, ("LOCAL_RANK 5", "of 4 ranks", "check the launcher")),
        ({"RANK": "0"}, ("RANK=0 without WORLD_SIZE", "set RANK, WORLD_SIZE, LOCAL_RANK")),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ("WORLD_SIZE=2 without RANK", "unset WORLD_SIZE")),
        (
            {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"},
            ("RANK=0 of WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=5 of OMPI_COMM_WORLD_SIZE=8", "unset RANK"),
        ),
        (
            {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "h"},
            ("RANK=0 of WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=5", "unset RANK"),
        ),
        (OPEN_MPI, ("MASTER_ADDR is not set", "8 ranks of Open MPI", "mpirun -x MASTER_ADDR=")),
        (
            {"RANK": "3", "WORLD_SIZE": "64"},
            ("MASTER_ADDR is not set", "64 ranks", "--master_addr "),
        ),
    ],
)
def test_a_launch_with_bad_variables_or_that_is_known_in_part_is_refused(env, parts):
    """The latter processes would train the whole run, or wait for ranks that never come."""
    check_message(refusal(Launch.from_env, env).replace(platform.node(), "HOST"), *parts)


def test_a_shell_of_srun_with_other_tasks_is_refused():
    """Its `fmmeta train` would wait for them; standard input of a rank that srun starts is no terminal."""
    env = environment(**{**SLURM, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "4242"})
    code = "import os; from fmmeta.parallel.layout import Launch; Launch.from_env(os.environ)"
    controller, terminal = os.openpty()
    shell, rank = (
        subprocess.run(
            [sys.executable, "-c", code], env=env, stdin=stdin, capture_output=True, text=True, check=False
        )
        for stdin in (terminal, subprocess.DEVNULL)
    )
    os.close(terminal)
    os.close(controller)
    assert rank.returncode == 0, rank.stderr
    check_message(
        shell.stderr.strip().splitlines()[-1],
        "SLURM_STEP_NUM_TASKS=8",
        "srun -n 8 fmmeta",
        "env -u SLURM_PROCID",
    )


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("gpu[03-05,09],cpu1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("n[1-2]-ib,n3-ib", "n1-ib"),
        ("rack-a-[001-004]", "rack-a-001"),
        ("x[12]", "x12"),
        ("login.cluster,b", "login.cluster"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[1-2]", ",a"])
def test_nodelist_without_hosts_is_refused(nodelist):
    check_message(refusal(first_host, nodelist), f"SLURM node list {nodelist!r}", "set MASTER_ADDR")


@given(st.integers(1, 12), st.integers(1, 12))
def test_groups_are_consecutive_ranks(num_groups, group_size):
    world_size = num_groups * group_size
    layouts = [Layout(Launch(rank, world_size), group_size) for rank in range(world_size)]
    assert {layout.num_groups for layout in layouts} == {num_groups}
    places = [(layout.group_index, layout.group_rank) for layout in layouts]
    assert places == [(g, m) for g in range(num_groups) for m in range(group_size)]


@pytest.mark.parametrize(
    ("group_size", "world_size", "use"),
    [(3, 8, "1, 2, 4 or 8"), (2, 7, "1 or 7"), (0, 4, "1, 2 or 4")],
)
def test_group_size_divides_the_world(group_size, world_size, use):
    check_message(
        refusal(Layout, Launch(0, world_size), group_size),
        f"group_size={group_size}",
        f"world_size={world_size}",
        f"use {use}",
    )


def test_a_group_of_a_process_that_is_alone_names_the_launcher():
    check_message(
        refusal(Layout, Launch(0, 1), 2),
        "group_size=2 needs a launch of 2 ranks",
        "this process is alone",
        "torchrun --nproc_per_node 2 -m fmmeta train",
        "deepspeed --num_gpus 2 --module fmmeta train",
    )


def test_layout_as_text():
    assert str(Layout(Launch(0, 4), 2)) == "2 groups of 2 ranks"
    assert str(Layout(Launch(0, 1), 1)) == "1 group of 1 rank"


ACTIVATIONS = 3 * 10 * 2 * (34 * 8 + 6 * 4 * 10)  # bytes in bf16


@pytest.mark.parametrize(
    ("stage", "bf16", "group_size", "kinds", "buffers", "staging"),
    [
        (
            0,
            False,
            4,
            (4000, 4000, 0, 20000),
            0,
            4000,
        ),  # in fp32 the weights are the masters; gradients flattened for a reduction
        (0, False, 1, (4000, 4000, 0, 20000), 0, 0),
        (0, True, 1, (2000, 4000, 4000, 20000), 2000, 2000),  # autograd's in bf16, added up in fp32
        (1, False, 4, (4000, 4000, 1000, 5000), 0, 4000 + 1000),  # flattened, and the rank's part
        (1, True, 4, (2000, 6000, 1000, 5000), 0, 4000),  # all of them in bf16 and in fp32
        (2, False, 4, (4000, 1000, 1000, 5000), 4000, 8000),  # a bucket of all gradients, flattened
        (2, True, 4, (2000, 1000, 1000, 5000), 2000, 2000 + 6000),
        (3, True, 4, (500, 1000, 1000, 5000), 4000, 12000),  # and gloo's copy
        (3, False, 1, (4000, 4000, 4000, 20000), 4000, 8000),
    ],
)
def test_estimate_by_hand(stage, bf16, group_size, kinds, buffers, staging):
    found = estimate(SIZES, DeepSpeedSettings(stage, bf16, False), group_size)
    assert (found.kinds["weights"], found.kinds["gradients"], found.kinds["master"], found.meta) == kinds
    assert (found.kinds["buffers"], found.kinds["staging"]) == (buffers, staging)
    assert found.kinds["activations"] == ACTIVATIONS * (1 if bf16 else 2)
    assert found.kinds["gathered"] == (2000 if stage == 3 and group_size > 1 else 0)
    assert (found.kinds["logits"], found.total) == (
        0,
        sum(kinds) + found.kinds["gathered"] + found.kinds["activations"] + buffers,
    )


@pytest.mark.parametrize(
    ("changes", "settings", "wanted"),
    [
        (  # tensor ranks share activations, but not those between split layers
            {"tensor": 2},
            DeepSpeedSettings(0, True, False),
            {"activations": 3 * 10 * 2 * (10 * 8 + (24 * 8 + 6 * 4 * 10) // 2)},
        ),
        # a fused kernel of attention, a gated feed-forward part and norms in fp32
        (
            {"heads": 0, "wide": 16, "gated": True},
            DeepSpeedSettings(0, True, False),
            {"activations": 3 * 10 * 2 * (24 * 8 + 8 * 16)},
        ),
        # with checkpointing: the inputs of two layers and one complete layer
        (
            {"checkpointing": True},
            DeepSpeedSettings(0, True, False),
            {"activations": 3 * 10 * 2 * 8 * 2 + ACTIVATIONS // 2},
        ),
        (
            {"checkpointing": True},
            DeepSpeedSettings(0, False, False),
            {"activations": 3 * 10 * 2 * 8 * 4 + ACTIVATIONS},
        ),
        (  # with gloo's copies, which a GPU does not need
            {"vocab": 30},
            DeepSpeedSettings(3, False, False, bucket=100),
            {"gathered": 4 * (1000 + 30 * 8), "buffers": 12 * 100},
        ),
        (
            {"vocab": 30, "lazy": False},
            DeepSpeedSettings(3, False, False, bucket=100),
            {"gathered": 4 * 1000, "buffers": 8 * 100},
        ),
        # reduced while the backward pass runs; then a step's own copy
        ({}, DeepSpeedSettings(2, False, False, bucket=100), {"buffers": 8 * 100, "staging": 1000}),
        (
            {},
            DeepSpeedSettings(2, False, False, bucket=0),
            {"buffers": 8 * 8**2},
        ),  # "auto": the square of the hidden size
        (  # a GPU has the bucket whole
            {"lazy": False},
            DeepSpeedSettings(1, False, False),
            {"buffers": 4 * 5 * 10**8, "staging": 4 * 5 * 10**8 + 1000},
        ),
        (
            {"vocab": 100},
            DeepSpeedSettings(0, False, False),
            {"logits": 3 * 3 * 10 * 100 * 4},
        ),  # of language models
        (  # shards that an algorithm keeps, and the outer optimizer
            {"kept": 5, "trajectory": 3, "moments": 1},
            DeepSpeedSettings(1, False, False),
            {"kept": 8 * 1000, "moments": 1000},
        ),
    ],
)
def test_kinds_of_memory_by_hand(changes, settings, wanted):
    found = estimate(replace(SIZES, **changes), settings, 4)
    assert {kind: found.kinds[kind] for kind in wanted} == wanted
    assert found.host == 0


def test_a_trajectory_beyond_its_budget_is_in_host_memory():
    sizes = replace(SIZES, kept=5, trajectory=3, moments=1, budget=2500)
    found = estimate(sizes, DeepSpeedSettings(1, False, False), 4)
    assert (found.kinds["kept"], found.host) == (7 * 1000, 1000)  # two of three fit into the budget


def test_peak_is_the_larger_of_two_phases():
    found = estimate(replace(SIZES, rows=1, tokens=1), DeepSpeedSettings(2, False, False), 4)
    assert found.kinds["activations"] == 4 * (34 * 8 + 6 * 4)
    assert found.total == 4000 + 1000 + 1000 + 5000 + 8000  # the reduction, after activations are freed
    assert str(found).split(" = ")[0].split(" + ")[-1].startswith("staging")


def test_pinned_vectors_take_powers_of_two():
    found = estimate(replace(SIZES, lazy=False, offload_outer=True), DeepSpeedSettings(1, False, False), 4)
    assert (found.kinds["theta"], found.host) == (0, 4 * 1024)  # with meta-gradient and two moments


def test_a_group_of_one_counts_as_its_engine():
    settings = DeepSpeedSettings(2, True, False)
    stages = [at_size(settings, 1, False, engine).zero_stage for engine in ("auto", "plain", "deepspeed")]
    assert stages == [0, 0, 2]


def test_offload_moves_the_shards_of_a_gpu():
    precision = DeepSpeedSettings(3, True, True, offload_param=True)
    found = estimate(replace(SIZES, lazy=False), precision, 4)
    assert (found.kinds["weights"], found.kinds["master"], found.meta, found.kinds["gradients"]) == (
        0,
        0,
        0,
        0,
    )
    assert found.host == 500 + 1000 + 5000 + 1000
    assert found.kinds["gathered"] == 2000
    on_cpu = estimate(SIZES, precision, 4)
    assert (on_cpu.kinds["weights"], on_cpu.host) == (500, 0)  # it is the same memory


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
def test_the_smallest_group_that_fits(monkeypatch, wanted):
    """The free memory just fits this group size and no smaller one."""
    precision = DeepSpeedSettings(3, False, False)
    free = int(estimate(SIZES, precision, wanted).total / HEADROOM) + 1
    size, why = choose_group_size(world_of(monkeypatch, 16, 8, free), lambda data: SIZES, precision)
    assert size == wanted
    assert why.startswith(f"group_size {wanted} (auto): weights ")


def test_a_group_stays_inside_a_node_and_divides_the_world(monkeypatch):
    precision = DeepSpeedSettings(3, False, False)
    free = int(estimate(SIZES, precision, 4).total / HEADROOM) + 1
    assert choose_group_size(world_of(monkeypatch, 6, 6, free), lambda data: SIZES, precision)[0] == 6
    assert "2 ranks of a group need" in refusal(
        choose_group_size, world_of(monkeypatch, 16, 2, free), lambda data: SIZES, precision
    )


def test_too_little_memory_is_refused(monkeypatch):
    sizes = Sizes(params=2**30, layers=0, hidden=0, heads=0, vocab=0, rows=1, tokens=1)
    world = world_of(monkeypatch, 8, 4, 2**32)
    check_message(
        refusal(choose_group_size, world, lambda data: sizes, DeepSpeedSettings(2, False, False)),
        "group_size=auto",
        "4 ranks",
        "meta 4 + buffers 3.73 = 13.7 GiB each at ZeRO 2",
        "4 GiB are free",
        "use a higher ZeRO stage",
    )
    check_message(
        refusal(choose_group_size, world, lambda data: sizes, DeepSpeedSettings(3, False, False)),
        "group_size=auto",
        "each at ZeRO 3",
        "use offload, more GPUs or",
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_coordinates_in_a_group(stages, data, tensor):
    size = stages * data * tensor
    places = [GroupCoordinates(rank, size, stages, tensor) for rank in range(size)]
    assert {place.data for place in places} == {data}
    found = [(place.stage, place.data_rank, place.tensor_rank) for place in places]
    assert found == [(s, d, t) for s in range(stages) for d in range(data) for t in range(tensor)]


def test_group_size_must_be_a_multiple_of_model_ranks():
    check_message(refusal(GroupCoordinates, 0, 4, 3), "group_size=4", "pipeline_stages=3", "use 3 or 6")
    check_message(
        refusal(GroupCoordinates, 0, 3, 1, 2), "group_size=3", "tensor_parallel_size=2", "use 2 or 4"
    )


def test_a_group_size_that_cannot_hold_the_model_is_refused(monkeypatch):
    sizes = Sizes(params=2**28, layers=0, hidden=0, heads=0, vocab=0, rows=1, tokens=1)
    world = world_of(monkeypatch, 8, 8, 4 * 2**30)
    precision = DeepSpeedSettings(3, False, False, 2**26, bucket=2**24)
    check_message(
        refusal(check_group_size, world, lambda data: sizes, precision, 1),
        "group_size=1",
        "needs weights 1 + gradients 1 + meta 4 = 6 GiB",
        "4 GiB are free",
        "use group_size 4 or 8",
    )
    check_group_size(world, lambda data: sizes, precision, 4)
    check_group_size(
        world, lambda data: sizes, DeepSpeedSettings(3, False, True), 1
    )  # offloaded: only a part is on the device
    check_message(
        refusal(check_group_size, world, lambda data: sizes, DeepSpeedSettings(0, False, False), 2),
        "group_size=2",
        "4 GiB are free",
        "use ZeRO 3, --pipeline_stages, --gradient_check",
    )


@pytest.mark.parametrize(
    ("settings", "model_ranks", "changes", "advice"),
    [
        (DeepSpeedSettings(3, False, False), 1, {}, "--gradient_checkpointing, --lora_r or more ranks"),
        (DeepSpeedSettings(2, False, False), 1, {"checkpointing": True, "frozen": 9}, "ZeRO 3 or more ranks"),
        (DeepSpeedSettings(1, True, False), 2, {"frozen": 9}, "more --pipeline_stages, --gradient_check"),
    ],
)
def test_the_advice_is_not_what_is_set_already(monkeypatch, settings, model_ranks, changes, advice):
    sizes = replace(SIZES, params=2**30, **changes)
    world = world_of(monkeypatch, 2, 2, 2**20)
    check_message(
        refusal(check_group_size, world, lambda data: sizes, settings, 2, model_ranks),
        "group_size=2 needs ",
        f"; use {advice}",
    )


@pytest.mark.parametrize(
    ("settings", "offload_outer", "advice"),
    [
        (DeepSpeedSettings(3, True, True, 2**20, 2**20, offload_param=True), False, "group_size 4"),
        (
            DeepSpeedSettings(0, False, False),
            True,
            "ZeRO 3, --pipeline_stages, no --offload_outer, --lora_r or",
        ),
    ],
)
def test_a_group_size_that_host_memory_cannot_hold_is_refused(monkeypatch, settings, offload_outer, advice):
    sizes = replace(SIZES, params=2**30, lazy=False, offload_outer=offload_outer)
    world = world_of(monkeypatch, 4, 4, 2**38)
    world.device = torch.device("cuda")
    monkeypatch.setattr(memory, "host_bytes", lambda local: 10 * 2**30)
    check_message(
        refusal(check_group_size, world, lambda data: sizes, settings, 2),
        "in host memory) per rank",
        "(and 10 in host memory)",
        f"use {advice}",
    )
    monkeypatch.setattr(memory, "host_bytes", lambda local: 2**38)
    check_group_size(world, lambda data: sizes, settings, 2)


def test_groups_chosen_for_model_ranks_hold_all_of_them(monkeypatch):
    precision, free = DeepSpeedSettings(0, False, False), 2**40
    for model_ranks in (3, 1):
        world = world_of(monkeypatch, 12, 12, free)
        assert choose_group_size(world, lambda data: SIZES, precision, model_ranks)[0] == model_ranks
    world = world_of(monkeypatch, 4, 4, free)
    check_message(
        refusal(choose_group_size, world, lambda data: SIZES, precision, 3),
        "group_size=auto",
        "tensor_parallel_size=3",
        "world_size=4",
        "give --group_size",
    )


def test_more_data_ranks_have_smaller_micro_batches(monkeypatch):
    """A group size is accepted where its own micro-batches fit, as `fmmeta plan` counts them."""

    def sizes_at(data):
        return replace(SIZES, params=10, rows=-(-64 // data), tokens=1000)

    settings = DeepSpeedSettings(3, False, False)
    free = int(estimate(sizes_at(4), settings, 4).total / HEADROOM) + 1
    world = world_of(monkeypatch, 8, 8, free)
    assert choose_group_size(world, sizes_at, settings)[0] == 4
    check_group_size(world, sizes_at, settings, 4)
    assert "use group_size 4 or 8" in refusal(check_group_size, world, sizes_at, settings, 1)


def test_limits_of_a_process(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "CGROUP", tmp_path)
    monkeypatch.setattr(processes, "CGROUP_OF_SELF", tmp_path / "cgroup")
    monkeypatch.setattr(processes, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("VmSize:\t 900 kB\nVmData:\t 300 kB\n")
    soft = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft[which], resource.RLIM_INFINITY))
    assert processes.cgroup_room() is None
    assert memory.free_bytes(torch.device("cpu"), 4) <= psutil.virtual_memory().total // 4
    soft[resource.RLIMIT_DATA] = 400 * 1024
    assert processes.host_bytes(1) == 100 * 1024
    soft[resource.RLIMIT_AS] = 950 * 1024
    assert processes.host_bytes(1) == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert processes.cgroup_room() is None
    (tmp_path / "memory.max").write_text("9000\n")
    assert processes.cgroup_room() == 8000
    assert processes.host_bytes(4) == 2000
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("6000")
    assert processes.cgroup_room() == 0


@pytest.mark.parametrize(
    ("controllers", "root", "limit", "usage", "cache"),
    [
        ("", "", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("hugetlb,memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_memory_limit_of_a_slurm_job(monkeypatch, tmp_path, controllers, root, limit, usage, cache):
    """The limit is on a cgroup above that of the process, and files that the kernel can free are no use."""
    monkeypatch.setattr(processes, "CGROUP", tmp_path)
    monkeypatch.setattr(processes, "CGROUP_OF_SELF", tmp_path / "own")
    (tmp_path / "own").write_text(f"9:cpu:/\n4:{controllers}:/slurm/job_7/step_0/user/task_0\n")
    job = tmp_path / root / "slurm" / "job_7"
    task = job / "step_0" / "user" / "task_0"
    task.mkdir(parents=True)
    limits = ((tmp_path / root, 2**63 - 4096, 90000), (job, 9000, 7000), (task, 8000, 500))
    for folder, allowed, used in limits:
        (folder / limit).write_text(f"{allowed}\n")
        (folder / usage).write_text(f"{used}\n")
    assert processes.cgroup_room() == 2000
    (job / "memory.stat").write_text(f"anon 1000\nfile 6000\n{cache} 4000\n")
    assert processes.cgroup_room() == 6000
    (tmp_path / "own").write_text(f"4:{controllers}:/../../elsewhere\n")  # of another cgroup namespace
    assert processes.cgroup_room() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of the rank is taken, and no threads are set")
@pytest.mark.parametrize(
    ("cores", "ranks", "small", "variable", "threads"),
    [(8, 2, False, None, 4), (8, 16, False, None, 1), (8, 1, True, None, 1), (8, 1, True, "2", None)],
)
def test_threads_of_a_rank_on_cpus(monkeypatch, cores, ranks, small, variable, threads):
    """A small model takes one; OMP_NUM_THREADS takes precedence."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert pick_device(Launch(local_world_size=ranks), small).type == "cpu"
    assert chosen == ([] if threads is None else [threads])


@pytest.mark.parametrize(("visible", "gpu"), [(4, 3), (1, 0)])
def test_a_rank_takes_its_own_gpu_or_the_only_one_that_it_sees(monkeypatch, visible, gpu):
    """`srun --gpus-per-task=1` shows each rank one GPU, which is number 0 for all of them."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    launch = Launch(local_rank=3, local_world_size=4)
    device = pick_device(launch)
    assert (str(device), chosen) == (f"cuda:{gpu}", [gpu])
    World(launch, device).split(1, default_group=False)
    assert os.environ["LOCAL_RANK"] == str(gpu)  # DeepSpeed takes this GPU
