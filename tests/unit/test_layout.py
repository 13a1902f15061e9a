"""Ranks and groups from launchers' variables, and group sizes from an estimate of memory."""

import os
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import accelerate
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.common import processes
from fmmeta.config.settings import Config
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
from fmmeta.parallel.memory import (
    HEADROOM,
    Sizes,
    at_size,
    check_group_size,
    choose_group_size,
    estimate,
    free_bytes,
)
from fmmeta.parallel.network import PORTS, listen
from fmmeta.parallel.process_groups import World, pick_device
from harness.fork_server import ROOT, environment
from tests.support.launch import python
from tests.support.memory import SIZES, world_of
from tests.support.messages import check_message, refusal

ZERO_3 = DeepSpeedSettings(3, False, False)
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
    for on_gpu in (False, True):
        assert len([*unread_settings({"ACCELERATE_USE_CPU": "True"}, Config(), on_gpu)]) == on_gpu


def test_every_variable_that_is_named_is_one_of_accelerate():
    package = Path(str(accelerate.__file__)).parent
    source = "".join((package / file).read_text() for file in ("utils/launch.py", "utils/dataclasses.py"))
    for name in UNREAD:
        assert name.removeprefix("PARALLELISM_CONFIG_") in source, name


def test_ports_of_slurm_jobs_are_not_given_to_connections():
    """Those of both ways to start a job: the kernel gives ports from 32768 on, by default."""
    line = next(line for line in SBATCH.read_text().splitlines() if line.startswith("export RDZV_PORT="))
    for job in (0, 19999, 20000, 39999):
        env = {**SLURM, "SLURM_JOB_ID": str(job)}
        words = ["bash", "-c", f"{line}; echo $RDZV_PORT"]
        port = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
        assert int(port) == Launch.from_env(env).master_port
        assert PORTS[0] <= int(port) < PORTS[1]


@pytest.mark.parametrize(
    ("env", "remedy"),
    [({**SLURM, "SLURM_PROCID": "0"}, "export MASTER_PORT="), ({**TORCHRUN, "RANK": "0"}, "--master_port ")],
)
def test_a_port_in_use_is_refused_with_the_setting_of_the_launcher(env, remedy, tmp_path):
    with listen("127.0.0.1", 0) as used:
        port = used.getsockname()[1]
        place = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ended = python(["launch/train.py"], tmp_path, **place)
    assert ended.returncode == 2, ended.stderr
    assert f"fmmeta: error: master_port={port} is in use on " in ended.stderr
    assert f"; give the launch another, such as {remedy}{port + 1}\n" in ended.stderr


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
    words, how = [sys.executable, "-c", code], {"env": env, "capture_output": True, "text": True}
    controller, terminal = os.openpty()
    shell, rank = (subprocess.run(words, stdin=stdin, **how) for stdin in (terminal, subprocess.DEVNULL))
    os.close(terminal)
    os.close(controller)
    assert rank.returncode == 0, rank.stderr
    parts = ("SLURM_STEP_NUM_TASKS=8", "srun -n 8 fmmeta", "env -u SLURM_PROCID")
    check_message(shell.stderr.strip().splitlines()[-1], *parts)


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


@given(st.integers(1, 12), st.integers(1, 12))
def test_groups_are_consecutive_ranks(num_groups, group_size):
    world_size = num_groups * group_size
    layouts = [Layout(Launch(rank, world_size), group_size) for rank in range(world_size)]
    assert {layout.num_groups for layout in layouts} == {num_groups}
    places = [(layout.group_index, layout.group_rank) for layout in layouts]
    assert places == [(g, m) for g in range(num_groups) for m in range(group_size)]


@pytest.mark.parametrize(
    ("call", "given", "parts"),
    [
        (Layout, (Launch(0, 8), 3), ("group_size=3", "world_size=8", "use 1, 2, 4 or 8")),
        (Layout, (Launch(0, 7), 2), ("group_size=2", "world_size=7", "use 1 or 7")),
        (Layout, (Launch(0, 4), 0), ("group_size=0", "world_size=4", "use 1, 2 or 4")),
        (
            Layout,
            (Launch(0, 1), 2),
            (
                "group_size=2 needs a launch of 2 ranks",
                "this process is alone",
                "torchrun --nproc_per_node 2 -m fmmeta train",
                "deepspeed --num_gpus 2 --module fmmeta train",
            ),
        ),
        (GroupCoordinates, (0, 4, 3), ("group_size=4", "pipeline_stages=3", "use 3 or 6")),
        (GroupCoordinates, (0, 3, 1, 2), ("group_size=3", "tensor_parallel_size=2", "use 2 or 4")),
        *(
            (first_host, (nodes,), (f"SLURM node list {nodes!r}", "set MASTER_ADDR"))
            for nodes in ("", "[1-2]", ",a")
        ),
    ],
)
def test_sizes_and_nodes_that_make_no_groups_are_refused(call, given, parts):
    check_message(refusal(call, *given), *parts)


ACTIVATIONS = 3 * 10 * 2 * (34 * 8 + 6 * 4 * 10)  # bytes in bf16


def bytes_of(settings: DeepSpeedSettings, group_size: int = 4, **changes) -> dict[str, float]:
    """The estimate for SIZES, or changed ones, by kind; of meta, in host memory and at the peak too."""
    found = estimate(replace(SIZES, **changes), settings, group_size)
    return {**found.kinds, "meta": found.meta, "host": found.host, "total": found.total}


@pytest.mark.parametrize(
    ("stage", "bf16", "group_size", "kinds", "buffers", "staging"),
    [
        # in fp32 the weights are the masters; gradients flattened for a reduction
        (0, False, 4, (4000, 4000, 0, 20000), 0, 4000),
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
    found = bytes_of(DeepSpeedSettings(stage, bf16, False), group_size)
    wanted = dict(zip(("weights", "gradients", "master", "meta"), kinds, strict=True))
    wanted |= {
        "activations": ACTIVATIONS * (1 if bf16 else 2),
        "buffers": buffers,
        "logits": 0,
        "gathered": 2000 if stage == 3 and group_size > 1 else 0,
    }
    wanted |= {"staging": staging, "total": sum(wanted.values())}
    assert {kind: found[kind] for kind in wanted} == wanted


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
            {"largest": 240},
            DeepSpeedSettings(3, False, False, bucket=100),
            {"gathered": 4 * (1000 + 240), "buffers": 4 * 100 + 8 * 240},
        ),
        (
            {"vocab": 30, "lazy": False},
            DeepSpeedSettings(3, False, False, bucket=100),
            {"gathered": 4 * 1000, "buffers": 8 * 100},
        ),
        # reduced while the backward pass runs; then a step's own copy
        ({}, DeepSpeedSettings(2, False, False, bucket=100), {"buffers": 8 * 100, "staging": 1000}),
        # "auto": the square of the hidden size
        ({}, DeepSpeedSettings(2, False, False, bucket=0), {"buffers": 8 * 8**2}),
        (  # a GPU has the bucket whole
            {"lazy": False},
            DeepSpeedSettings(1, False, False),
            {"buffers": 4 * 5 * 10**8, "staging": 4 * 5 * 10**8 + 1000},
        ),
        # of language models
        ({"vocab": 100}, DeepSpeedSettings(0, False, False), {"logits": 3 * 3 * 10 * 100 * 4}),
        (  # shards that an algorithm keeps, and the outer optimizer
            {"kept": 5, "trajectory": 3, "moments": 1},
            DeepSpeedSettings(1, False, False),
            {"kept": 8 * 1000, "moments": 1000},
        ),
        (  # two of three vectors of a trajectory fit into its budget
            {"kept": 5, "trajectory": 3, "moments": 1, "budget": 2500},
            DeepSpeedSettings(1, False, False),
            {"kept": 7 * 1000, "host": 1000},
        ),
        (  # the peak is that of the reduction, after activations are freed
            {"rows": 1, "tokens": 1},
            DeepSpeedSettings(2, False, False),
            {"activations": 4 * (34 * 8 + 6 * 4), "total": 4000 + 1000 + 1000 + 5000 + 8000},
        ),
        (  # pinned vectors take powers of two: with meta-gradient and two moments
            {"lazy": False, "offload_outer": True},
            DeepSpeedSettings(1, False, False),
            {"theta": 0, "host": 4 * 1024},
        ),
        (  # offload moves the shards of a GPU
            {"lazy": False},
            DeepSpeedSettings(3, True, True, offload_param=True),
            {"weights": 0, "master": 0, "meta": 0, "gradients": 0, "gathered": 2000, "host": 7500},
        ),
        ({}, DeepSpeedSettings(3, True, True, offload_param=True), {"weights": 500}),  # it is the same memory
    ],
)
def test_kinds_of_memory_by_hand(changes, settings, wanted):
    found = bytes_of(settings, **changes)
    assert {kind: found[kind] for kind in ("host", *wanted)} == {"host": 0, **wanted}


def test_the_text_of_an_estimate_ends_with_the_larger_of_two_phases():
    found = estimate(replace(SIZES, rows=1, tokens=1), DeepSpeedSettings(2, False, False), 4)
    assert str(found).split(" = ")[0].split(" + ")[-1].startswith("staging")


def test_a_group_of_one_counts_as_its_engine():
    settings = DeepSpeedSettings(2, True, False)
    stages = [at_size(settings, 1, False, engine).zero_stage for engine in ("auto", "plain", "deepspeed")]
    assert stages == [0, 0, 2]


@pytest.mark.parametrize(
    ("changes", "settings", "ranks", "asked", "parts"),
    [
        (
            {"params": 2**30},
            DeepSpeedSettings(2, False, False),
            (8, 4, 2**32),
            (),
            (
                "group_size=auto",
                "4 ranks",
                "meta 4 + buffers 3.73 = 13.7 GiB each at ZeRO 2",
                "4 GiB are free",
                "use a higher ZeRO stage",
            ),
        ),
        (
            {"params": 2**30},
            ZERO_3,
            (8, 4, 2**32),
            (),
            ("group_size=auto", "each at ZeRO 3", "use offload, more GPUs or"),
        ),
        ({"params": 2**20}, ZERO_3, (16, 2, 2**22), (), ("2 ranks of a group need",)),  # inside a node
        (
            {"params": 2**28},
            DeepSpeedSettings(3, False, False, 2**26, bucket=2**24),
            (8, 8, 2**32),
            (1,),
            (
                "group_size=1",
                "needs weights 1 + gradients 1 + meta 4 = 6 GiB",
                "4 GiB are free",
                "use group_size 4 or 8",
            ),
        ),
        (
            {"params": 2**28},
            DeepSpeedSettings(0, False, False),
            (8, 8, 2**32),
            (2,),
            ("group_size=2", "4 GiB are free", "use ZeRO 3, --pipeline_stages, --gradient_check"),
        ),
        # the advice is not what is set already
        (
            {"params": 2**30, "layers": 2},
            ZERO_3,
            (2, 2, 2**20),
            (2,),
            ("group_size=2 needs ", "; use --gradient_checkpointing, --lora_r or more ranks"),
        ),
        (
            {"params": 2**30, "layers": 2, "checkpointing": True, "frozen": 9},
            DeepSpeedSettings(2, False, False),
            (2, 2, 2**20),
            (2,),
            ("group_size=2 needs ", "; use ZeRO 3 or more ranks"),
        ),
        (
            {"params": 2**30, "layers": 2, "frozen": 9},
            DeepSpeedSettings(1, True, False),
            (2, 2, 2**20),
            (2, 2),
            ("group_size=2 needs ", "; use more --pipeline_stages, --gradient_check"),
        ),
    ],
)
def test_too_little_memory_is_refused(monkeypatch, changes, settings, ranks, asked, parts):
    """asked: the group size that was given, if any, and the number of model ranks."""
    sizes = replace(
        SIZES, **{"layers": 0, "hidden": 0, "heads": 0, "rows": 1, "tokens": 1, "directions": 0, **changes}
    )
    call = check_group_size if asked else choose_group_size
    message = refusal(call, world_of(monkeypatch, *ranks), lambda data: sizes, settings, *asked)
    check_message(message, *parts)


def test_a_group_size_that_holds_the_model_is_accepted(monkeypatch):
    """Of the model that one rank cannot hold; offloaded, only a part is on the device."""
    sizes = Sizes(params=2**28, layers=0, hidden=0, heads=0, vocab=0, rows=1, tokens=1)
    world = world_of(monkeypatch, 8, 8, 4 * 2**30)
    precision = DeepSpeedSettings(3, False, False, 2**26, bucket=2**24)
    check_group_size(world, lambda data: sizes, precision, 4)
    check_group_size(world, lambda data: sizes, DeepSpeedSettings(3, False, True), 1)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_coordinates_in_a_group(stages, data, tensor):
    size = stages * data * tensor
    places = [GroupCoordinates(rank, size, stages, tensor) for rank in range(size)]
    assert {place.data for place in places} == {data}
    found = [(place.stage, place.data_rank, place.tensor_rank) for place in places]
    assert found == [(s, d, t) for s in range(stages) for d in range(data) for t in range(tensor)]


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
    monkeypatch.setattr("fmmeta.parallel.memory.host_bytes", lambda local: 10 * 2**30)
    parts = ("in host memory) per rank", "(and 10 in host memory)", f"use {advice}")
    check_message(refusal(check_group_size, world, lambda data: sizes, settings, 2), *parts)
    monkeypatch.setattr("fmmeta.parallel.memory.host_bytes", lambda local: 2**38)
    check_group_size(world, lambda data: sizes, settings, 2)


def test_groups_chosen_for_model_ranks_hold_all_of_them(monkeypatch):
    precision, free = DeepSpeedSettings(0, False, False), 2**40
    for model_ranks in (3, 1):
        world = world_of(monkeypatch, 12, 12, free)
        assert choose_group_size(world, lambda data: SIZES, precision, model_ranks)[0] == model_ranks
    parts = ("group_size=auto", "tensor_parallel_size=3", "world_size=4", "give --group_size")
    asked = (world_of(monkeypatch, 4, 4, free), lambda data: SIZES, precision, 3)
    check_message(refusal(choose_group_size, *asked), *parts)


def test_more_data_ranks_have_smaller_micro_batches(monkeypatch):
    """A group size is accepted where its own micro-batches fit, as `fmmeta plan` counts them."""
    sizes = {data: replace(SIZES, params=10, rows=64 // data, tokens=1000) for data in (1, 2, 4, 8)}
    free = int(estimate(sizes[4], ZERO_3, 4).total / HEADROOM) + 1
    asked = (world_of(monkeypatch, 8, 8, free), sizes.get, ZERO_3)
    assert choose_group_size(*asked)[0] == 4
    check_group_size(*asked, 4)
    assert "use group_size 4 or 8" in refusal(check_group_size, *asked, 1)


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """A folder in place of the file system of control groups."""
    monkeypatch.setattr(processes, "CGROUP", tmp_path)
    monkeypatch.setattr(processes, "CGROUP_OF_SELF", tmp_path / "own")
    return tmp_path


def test_limits_of_a_process(monkeypatch, cgroup):
    monkeypatch.setattr(processes, "STATUS", cgroup / "status")
    (cgroup / "status").write_text("VmSize:\t 900 kB\nVmData:\t 300 kB\n")
    soft = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft[which], resource.RLIM_INFINITY))
    assert processes.cgroup_room() is None
    assert free_bytes(torch.device("cpu"), 4) <= psutil.virtual_memory().total // 4
    for limit, kilobytes, left in ((resource.RLIMIT_DATA, 400, 100), (resource.RLIMIT_AS, 950, 50)):
        soft[limit] = kilobytes * 1024
        assert processes.host_bytes(1) == left * 1024
    (cgroup / "memory.current").write_text("1000\n")
    for limit, room in (("max", None), ("9000", 8000), ("500", 0)):
        (cgroup / "memory.max").write_text(f"{limit}\n")
        assert processes.cgroup_room() == room
    assert processes.host_bytes(4) == 0


@pytest.mark.parametrize(
    ("controllers", "root", "limit", "usage", "cache"),
    [
        ("", "", "memory.max", "memory.current", "inactive_file"),
        ("hugetlb,memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_memory_limit_of_a_slurm_job(cgroup, controllers, root, limit, usage, cache):
    """The limit is on a cgroup above that of the process, and files that the kernel can free are no use."""
    (cgroup / "own").write_text(f"9:cpu:/\n4:{controllers}:/slurm/job_7/step_0/user/task_0\n")
    job = cgroup / root / "slurm" / "job_7"
    task = job / "step_0" / "user" / "task_0"
    task.mkdir(parents=True)
    for folder, allowed, used in ((cgroup / root, 2**63 - 4096, 90000), (job, 9000, 7000), (task, 8000, 500)):
        (folder / limit).write_text(f"{allowed}\n")
        (folder / usage).write_text(f"{used}\n")
    assert (processes.cgroup_room(), processes.host_bytes(4)) == (2000, 500)
    (job / "memory.stat").write_text(f"anon 1000\nfile 6000\n{cache} 4000\n")
    assert processes.cgroup_room() == 6000
    (cgroup / "own").write_text(f"4:{controllers}:/../../elsewhere\n")  # of another cgroup namespace
    assert processes.cgroup_room() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of the rank is taken, and no threads are set")
@pytest.mark.parametrize(
    ("cores", "ranks", "small", "variable", "threads"),
    [(8, 2, False, "", [4]), (8, 16, False, "", [1]), (8, 1, True, "", [1]), (8, 1, True, "2", [])],
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
    assert chosen == threads


@pytest.mark.parametrize(("visible", "gpu"), [(4, 3), (1, 0)])
def test_a_rank_takes_its_own_gpu_or_the_only_one_that_it_sees(monkeypatch, visible, gpu):
    """`srun --gpus-per-task=1` shows each rank one GPU, which is number 0 for all of them."""
    cuda = Mock(**{"is_available.return_value": True, "device_count.return_value": visible})
    for name in ("is_available", "device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    launch = Launch(local_rank=3, local_world_size=4)
    device = pick_device(launch)
    assert (str(device), cuda.set_device.call_args.args) == (f"cuda:{gpu}", (gpu,))
    World(launch, device).split(1, default_group=False)
    assert os.environ["LOCAL_RANK"] == str(gpu)  # DeepSpeed takes this GPU
