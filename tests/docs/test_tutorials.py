"""The tutorials, command by command: they gain, and the adapted models answer right."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, python

DATA = ROOT / "examples/data"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)


def follow(page: str, data: str, folder: Path) -> str:
    """Run the bash blocks of a page in one shell, then its Python, beside the data; returns what is printed.

    Packages are installed already.
    """
    shutil.copy(DATA / data, folder)
    lines = [line for line in "".join(blocks(page, "bash")).splitlines() if not line.startswith("pip ")]
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    words = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    ended = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=840, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    (code,) = blocks(page, "python")
    second = python(["-c", code], folder, cwd=folder)
    assert second.returncode == 0, second.stderr[-3000:]
    return ended.stdout + second.stdout


def gained(folder: Path, compared: Path | None, by: str) -> None:
    """Every measured gain, in accuracy or loss, has an interval above zero."""
    held_out = json.loads((folder / "run.json").read_text())["held_out"]
    gains = [held_out["gain"][by]]
    if compared:
        name = {"accuracy": ("accuracy_gain", "ci95"), "loss": ("loss_gain", "loss_ci95")}[by]
        cells = json.loads(compared.read_text())["compare"]["cells"]
        gains += [[cell[one] for one in name] for cell in cells]
        assert {cell["verdict"] for cell in cells} == {"better"}
    assert held_out["verdict"]["name"] == "better"
    assert all(mean > half > 0 for mean, half in gains), gains


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_on_classification(tmp_path):
    out = follow("tutorials/classification", "requests.csv", tmp_path)
    gained(tmp_path / "runs/requests", tmp_path / "results.json", "accuracy")
    shots = [
        cell["k_shot"] for cell in json.loads((tmp_path / "results.json").read_text())["compare"]["cells"]
    ]
    assert shots == [1, 5]
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
def test_the_data_are_those_of_their_script(name, tmp_path, monkeypatch):
    """Other content of the committed file would be no file that the script documents."""
    module = runpy.run_path(str(ROOT / f"examples/generate_{name}.py"))
    module["main"].__globals__["FILE"] = tmp_path / module["FILE"].name
    module["main"]()
    assert (tmp_path / module["FILE"].name).read_bytes() == module["FILE"].read_bytes()
