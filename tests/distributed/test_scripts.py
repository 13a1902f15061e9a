"""Programs of users that train with loader processes: each runs once, however it is started and written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, python, run_ranks
from tests.support.messages import check_message

TRAIN = """
with open("runs.txt", "a") as file:
    print(__name__, file=file)
from fmmeta import Config, MetaTrainer, UsageError
short = dict(meta_batch_size=2, inner_steps=1, num_query=1, outer_steps=2, eval_episodes=0, save_steps=0)
def train(**settings):
    return MetaTrainer(Config(**{**short, "num_workers": "1", "output_dir": "out", **settings})).train()
"""
CALL = "print('done', train().outer_steps)\n"
GUARDED = "if __name__ == '__main__':\n    " + CALL
FORMS = {
    "no guard": (["script.py"], TRAIN + CALL, ""),
    "guard": (["script.py"], TRAIN + GUARDED, ""),
    "-m": (["-m", "script"], TRAIN + CALL, ""),
    "-m of a package": (["-m", "package"], TRAIN + CALL, ""),
    "-c": (["-c", TRAIN + CALL], "", ""),
    "stdin": (["-"], "", TRAIN + CALL),
}


def write_script(folder: Path, text: str) -> None:
    (folder / "package").mkdir(exist_ok=True)
    for name in ("script.py", "package/__main__.py"):
        (folder / name).write_text(text)


def ran(folder: Path) -> list[str]:
    """The name of the main module in each process that ran it."""
    return (folder / "runs.txt").read_text().split()


def test_a_script_without_a_guard_trains_once(tmp_path):
    write_script(tmp_path, TRAIN + CALL)
    ended = python([str(tmp_path / "script.py")], tmp_path, cwd=tmp_path)
    assert (ended.returncode, ended.stdout.split()[-2:]) == (0, ["done", "2"]), ended.stderr
    assert "loader process" in ended.stdout
    assert ended.stderr == ""
    assert ran(tmp_path) == ["__main__"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_start_a_program(form, tmp_path):
    words, text, given = FORMS[form]
    write_script(tmp_path, text)
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()[-2:]) == (0, ["done", "2"]), ended.stderr
    assert ended.stderr == ""
    assert ran(tmp_path) == ["__main__"]


@pytest.mark.slow
def test_a_launch_of_two_ranks(tmp_path):
    write_script(tmp_path, TRAIN + CALL)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "script.py",
    ]
    ended = subprocess.run(
        launch, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.count("done 2")) == (0, 2), ended.stderr
    assert ran(tmp_path) == ["__main__"] * 2


@pytest.mark.slow
def test_a_notebook(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text) for text in (TRAIN, CALL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": tmp_path}}).execute()
    text = "".join(out["text"] for out in cells[1]["outputs"] if out.get("name") == "stdout")
    assert text.split()[-2:] == ["done", "2"]
    assert not [out for out in cells[1]["outputs"] if out.get("name") == "stderr"]
    assert ran(tmp_path) == ["__main__"]


@pytest.mark.slow
def test_the_snippet_of_the_quickstart_saved_as_a_script(tmp_path):
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)
    write_script(tmp_path, "open('runs.txt', 'a').write('ran ')\n" + text)
    ended = run_ranks(["script.py"], 1, cwd=tmp_path, fresh=True).ok()
    assert re.search(r"\n0\.\d{3} -> 0\.\d{3}\n$", ended.output[0]), ended.output[0]
    assert "Traceback" not in ended.output[0]
    assert ran(tmp_path) == ["ran"]


def test_a_process_that_the_program_starts_does_not_train(tmp_path):
    """Spawned without a guard it runs the script, which is refused in one line there."""
    start = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
print("exit code", process.exitcode)
"""
    write_script(tmp_path, TRAIN + CALL + start)
    ended = python([str(tmp_path / "script.py")], tmp_path, cwd=tmp_path)
    assert ended.stdout.split("\n")[-3:-1] == ["done 2", "exit code 1"]
    check_message(ended.stderr.splitlines()[-1], "MetaTrainer.train()", '`if __name__ == "__main__":`')
    assert ran(tmp_path) == ["__main__", "__mp_main__"]


def test_what_loader_processes_cannot_receive_is_refused_before_training(tmp_path):
    """Code of the main module, and a module:name that runs the script once more; code of modules is found."""
    (tmp_path / "named.py").write_text(
        "def keep(example, rng):\n    return example\nunnamed = lambda example, rng: example\n"
    )
    text = """
def keep(example, rng):
    return example
def show(name, **settings):
    try:
        print("done", train(example_transforms=[name], **settings).outer_steps)
    except UsageError as error:
        print("error:", error)
show("__main__:keep")
show("__main__:keep", num_workers="auto")
show("named:unnamed")
show("named:keep")
show("__main__:keep", num_workers="0", output_dir="here")
train(example_transforms=["script:keep"])
"""
    write_script(tmp_path, TRAIN + text)
    ended = python([str(tmp_path / "script.py")], tmp_path, cwd=tmp_path)
    shown = [line for line in ended.stdout.splitlines() if line.startswith(("done", "error"))]
    lines = shown[:5]  # the others are of the script that was imported
    assert [line[:5] for line in lines] == ["error"] * 3 + ["done "] * 2, ended.stderr
    check_message(lines[0], "num_workers=1", "keep of the main module", "use num_workers=0")
    check_message(lines[1], "num_workers=auto", "keep of the main module", "move it to another module")
    check_message(
        lines[2], "num_workers=1", "<lambda> on named", "define it in a module", "use num_workers=0"
    )
    check_message(
        ended.stderr.splitlines()[-1],
        "example_transforms=script:keep",
        "module script imports",
        '`if __name__ == "__main__":`',
    )
    assert ran(tmp_path) == ["__main__", "script"]
