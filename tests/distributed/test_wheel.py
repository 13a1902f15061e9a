"""The wheel alone, in an empty folder: launchers start the module, shipped files are found by name, and the
commands that `plan` prints run. The same names work with an editable install.
"""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fmmeta
from tests.support.launch import ROOT, environment, free_port
from tests.support.messages import check_message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAUNCHERS = ("deepspeed", "torchrun", "accelerate")
SHORT = "--outer_steps 1 --inner_steps 1 --meta_batch_size 2 --eval_episodes 0 --num_workers 0"
PIP = [sys.executable, "-m", "pip", "--no-input"]
OFFLINE = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what packaging reads, so that no build folder appears in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("fmmeta", "ds_configs", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checked(ended([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(source)], folder))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return environment_with(tmp_path_factory.mktemp("installed"), str(wheel))


def environment_with(folder: Path, *package: str) -> Path:
    """Make a venv with fmmeta and the launchers, which imports all else from this Python's packages.

    Returns its bin folder.
    """
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    words = [*PIP, "--python", str(folder), "install", *OFFLINE, "--ignore-installed", *package]
    checked(ended(words, folder))
    for name in LAUNCHERS:
        script = shutil.which(name, path=str(Path(sys.executable).parent))
        assert script, f"{name} is not installed beside {sys.executable}"
        code = Path(script).read_text().split("\n", 1)[1]
        (folder / "bin" / name).write_text(f"#!{folder / 'bin' / 'python'}\n{code}")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


def run(command: str, bin: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line with the programs of a venv, without this checkout on the path."""
    words = shlex.split(command)
    if words[0] in LAUNCHERS:  # a port of this test
        place, flag = (2, "--main_process_port") if words[0] == "accelerate" else (1, "--master_port")
        words[place:place] = [flag, str(free_port())]
    return ended(words, cwd, PATH=f"{bin}:/usr/bin:/bin")


def ended(words: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = environment(**env, PYTHONPATH="")
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)


def checked(result: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, which has ended well."""
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout + result.stderr


def trained(command: str, bin: Path, cwd: Path) -> str:
    text = checked(run(f"{command} {SHORT} --output_dir run", bin, cwd))
    assert {"config.json", "adapter_config.json"} & {file.name for file in (cwd / "run/model").iterdir()}
    return text


def test_wheel_holds_every_file_of_the_package_and_the_shipped_folders(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    listed = subprocess.run(
        ["git", "ls-files", "fmmeta", "ds_configs", "launch"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert {name if name.startswith("fmmeta/") else f"fmmeta/{name}" for name in listed} <= set(names)
    assert wheel.name.split("-")[1] == fmmeta.__version__
    assert not [name for name in names if name.startswith(("tests", "setup", "launch", "ds_configs"))]


@pytest.mark.parametrize(
    "command",
    [
        "fmmeta train --deepspeed zero0",
        "deepspeed --num_gpus 2 --module fmmeta train --deepspeed zero2 --group_size 2",
        "torchrun --nproc_per_node 2 -m fmmeta train --deepspeed zero1",
        "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision bf16"
        " --dynamo_backend no -m fmmeta train",
    ],
    ids=lambda command: command.split()[0],
)
def test_launchers_start_the_installed_module_in_an_empty_folder(command, installed, tmp_path):
    text = trained(command, installed, tmp_path)
    assert text.count("fmmeta: output_dir run\n") == 1  # one rank logs
    assert ("2 ranks" in text or "2 groups" in text) == (not command.startswith("fmmeta"))
    line = "ACCELERATE_MIXED_PRECISION=bf16 (accelerate launch) is not read; use --bf16, "
    assert text.count(line) == text.count("(accelerate launch)") == command.startswith("accelerate")


def test_every_command_that_plan_prints_runs_in_an_empty_folder(installed, tmp_path):
    plan = "fmmeta plan --model_name_or_path tiny --gpus 2 --gpu_memory_gib 0.02 --group_size 2 --bf16 false"
    commands = re.findall(r"^deepspeed .*", checked(run(plan, installed, tmp_path)), re.MULTILINE)
    assert [" --module fmmeta train " in command for command in commands] == [True] * 2  # all weights, LoRA
    for number, command in enumerate(commands):
        (tmp_path / str(number)).mkdir()
        trained(command, installed, tmp_path / str(number))


def test_unknown_name_of_a_deepspeed_file_ends_with_one_line(installed, tmp_path):
    result = run("fmmeta train --deepspeed zero4", installed, tmp_path)
    check_message(result.stderr, "deepspeed=zero4", "zero0, zero1, zero2, zero3, zero3_offload")
    assert (result.returncode, list(tmp_path.iterdir())) == (2, [])


def test_editable_install_finds_the_folders_of_its_checkout(source, tmp_path_factory):
    bin = environment_with(tmp_path_factory.mktemp("editable"), "--editable", str(source))
    code = "import fmmeta.common.install as i; print(i.shipped('ds_configs'), i.shipped('launch'))"
    printed = checked(run(f'python -c "{code}"', bin, tmp_path_factory.mktemp("empty")))
    assert printed.split() == [f"{source}/ds_configs", f"{source}/launch"]
