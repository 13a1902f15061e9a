"""Programs of users that train with loader processes: each runs once, however it is started and written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.launch import ROOT, environment, python, run_ranks
from tests.support.messages import check_message
from tests.support.models import save_llama, write_classes

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
    (text,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tutorials/quickstart.md").read_text(), re.DOTALL
    )
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
        "module script is imported",
        '`if __name__ == "__main__":`',
    )
    assert ran(tmp_path) == ["__main__", "script"]


LOOP = """
import json, sys, torch, fmmeta
linear, hook = torch.nn.functional.linear, sys.excepthook
shared, runs = json.load(open("runs.json"))
data = {key: shared[key] for key in ("model_name_or_path", "dataset", "pooling", "n_way", "k_shot")}
for number, settings in enumerate(runs):
    if settings is None:
        print(fmmeta.evaluate(**data, episodes=2, inner_steps=1, num_query=1)["loss"])
    else:
        fmmeta.MetaTrainer(fmmeta.Config(**shared, **settings, output_dir=f"out{number}")).train()
    assert (torch.nn.functional.linear, sys.excepthook) == (linear, hook)
"""


def one_process(folder: Path, ranks: int, kinds: dict[str, dict], order: list[str]) -> None:
    """Train in one process per rank, run after run ("evaluate" scores): a kind of run ends every time at the
    same bits, and near the first run.
    """
    shared = {
        "model_name_or_path": str(save_llama(folder / "llama")),
        "dataset": [str(write_classes(folder / "rows.jsonl", classes=15))],
        "pooling": "mean",
        "n_way": 3,
        "k_shot": 1,
        "num_query": 1,
        "meta_batch_size": 2,
        "inner_steps": 1,
        "inner_lr": 0.3,
        "outer_steps": 1,
        "outer_optimizer": "sgd",
        "outer_lr": 0.5,
        "eval_episodes": 0,
        "save_steps": 0,
        "num_workers": "0",
    }
    (folder / "runs.json").write_text(json.dumps([shared, [kinds.get(kind) for kind in order]]))
    (folder / "loop.py").write_text(LOOP)
    ended = run_ranks([str(folder / "loop.py")], ranks, cwd=folder).ok()
    scores = [float(line) for line in ended.output[0].splitlines() if re.fullmatch(r"\d\.\d+", line)]
    assert (len(scores), len(set(scores))) == (order.count("evaluate"), 1)
    first, start = dict[str, dict](), load_file(folder / "llama" / "model.safetensors")
    for number, kind in enumerate(order):
        if kind != "evaluate":
            files = (folder / f"out{number}" / "model").glob("*.safetensors")
            theta = {name: value for file in files for name, value in load_file(file).items()}
            seen, reference = first.setdefault(kind, theta), next(iter(first.values()))
            assert all(theta[name].equal(value) for name, value in seen.items()), (number, kind)
            off = max(float((theta[name] - value).abs().max()) for name, value in reference.items())
            moved = max(float((value - start[f"model.{name}"]).abs().max()) for name, value in theta.items())
            assert off < 1e-5 < 1e-2 < moved, (number, kind)


STAGES = {f"zero{stage}": {"engine": "deepspeed", "deepspeed": f"zero{stage}"} for stage in range(4)}


@pytest.mark.slow
def test_a_notebook_trains_with_one_stage_of_deepspeed_after_another(tmp_path):
    order = ["evaluate", "zero3", "zero2", "plain", "zero3", "evaluate"]
    one_process(tmp_path, 1, {"plain": {}, **STAGES}, order)


@pytest.mark.slow
def test_ranks_train_with_one_layout_after_another(tmp_path):
    """Every layout after every layout and after itself."""
    kinds = {"plain": {"group_size": "1"}}
    kinds |= {name: {**settings, "group_size": "2"} for name, settings in STAGES.items()}
    kinds |= {"tensor": {"group_size": "2", "tensor_parallel_size": 2}}
    kinds |= {"pipeline": {"group_size": "2", "pipeline_stages": 2}}
    names, order = list(kinds), []
    for number, name in enumerate(names):  # a cycle in which each pair of neighbours occurs once
        order += [name, *(one for later in names[number + 1 :] for one in (name, later))]
    one_process(tmp_path, 2, kinds, [*order, names[0], "evaluate", names[0], "evaluate"])
