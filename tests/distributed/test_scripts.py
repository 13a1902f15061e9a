"""Programs of users that train with loader processes: each runs once, however it is started and written.
Every example runs: the scripts and the notebook of examples/, and each recipe with a small model.
"""

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fmmeta.cli import parse
from fmmeta.config import recipes
from tests.support.helpers import fast_or_slow
from tests.support.launch import ROOT, environment, python, run_ranks
from tests.support.messages import check_message
from tests.support.models import save_bert, save_llama, write_classes
from tests.support.short_runs import QUICK, model_of

TRAIN = """
with open("runs.txt", "a") as file:
    print(__name__, file=file)
from fmmeta import Config, MetaTrainer, UsageError
short = dict(n_way=2, k_shot=1, num_query=1, meta_batch_size=2, inner_steps=1, outer_steps=2)
short |= dict(eval_episodes=0, save_steps=0)
def train(**settings):
    return MetaTrainer(Config(**{**short, "num_workers": "1", "output_dir": "out", **settings})).train()
"""
CALL = "print('done', train().outer_steps)\n"
GUARDED = "if __name__ == '__main__':\n    " + CALL
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FORMS = {
    "no guard": (["script.py"], TRAIN + CALL, ""),
    "guard": (["script.py"], TRAIN + GUARDED, ""),
    "-m": (["-m", "script"], TRAIN + CALL, ""),
    "-m of a package": (["-m", "package"], TRAIN + CALL, ""),
    "-c": (["-c", TRAIN + CALL], "", ""),
    "stdin": (["-"], "", TRAIN + CALL),
    "two ranks": ([*LAUNCH, "script.py"], TRAIN + CALL, ""),
}


def write_script(folder: Path, text: str) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text(text)
    (folder / "script.py").write_text(text)


def ran(folder: Path) -> list[str]:
    """The name of the main module in each process that ran it."""
    return (folder / "runs.txt").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_start_a_program(form, tmp_path):
    words, text, given = FORMS[form]
    write_script(tmp_path, text)
    streams = {"input": given, "capture_output": True, "text": True, "check": False}
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment(), **streams)
    ranks = 2 if form == "two ranks" else 1
    assert (ended.returncode, ended.stdout.count("done 2")) == (0, ranks), ended.stderr
    assert ended.stderr == "" or ranks == 2  # a warning of the launcher
    assert ran(tmp_path) == ["__main__"] * ranks


@pytest.mark.slow
def test_a_notebook(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text) for text in (TRAIN, CALL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [out for out in cells[1]["outputs"] if "name" in out]
    assert {out["name"] for out in outputs} == {"stdout"}
    assert "".join(out["text"] for out in outputs).split()[-2:] == ["done", "2"]
    assert ran(tmp_path) == ["__main__"]


@pytest.mark.slow
def test_the_snippet_of_the_quickstart_saved_as_a_script(tmp_path):
    page = (ROOT / "docs/tutorials/quickstart.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    write_script(tmp_path, "open('runs.txt', 'a').write('ran ')\n" + text)
    (output,) = run_ranks(["script.py"], 1, cwd=tmp_path, fresh=True).ok().output
    assert re.search(r"\n0\.\d{3} -> 0\.\d{3}\n$", output), output
    assert "Traceback" not in output
    assert ran(tmp_path) == ["ran"]


@pytest.mark.slow
def test_a_script_without_a_guard_trains_once_whatever_it_starts(tmp_path):
    """A process that it spawns runs the script, which is refused in one line; loader processes do not."""
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
    assert "loader process" in ended.stdout
    check_message(ended.stderr.splitlines()[-1], "MetaTrainer.train()", '`if __name__ == "__main__":`')
    assert ran(tmp_path) == ["__main__", "__mp_main__"]


@pytest.mark.slow
def test_what_loader_processes_cannot_receive_is_refused_before_training(tmp_path):
    """Code of the main module, and a module:name that runs the script once more; code of modules is found."""
    named = "def keep(example, rng):\n    return example\nunnamed = lambda example, rng: example\n"
    (tmp_path / "named.py").write_text(named)
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
    refused = [
        line for line in shown[:5] if line.startswith("error")
    ]  # the others are of the imported script
    parts = (
        ("num_workers=1", "keep of the main module", "use num_workers=0"),
        ("num_workers=auto", "keep of the main module", "move it to another module"),
        ("num_workers=1", "<lambda> on named", "define it in a module", "use num_workers=0"),
    )
    for line, of_line in zip(refused, parts, strict=True):
        check_message(line, *of_line)
    imported = ("example_transforms=script:keep", "module script is imported", '`if __name__ == "__main__":`')
    check_message(ended.stderr.splitlines()[-1], *imported)
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
        **QUICK,
        "n_way": 3,
        "meta_batch_size": 2,
        "pooling": "mean",
        "inner_lr": 0.3,
        "save_steps": 0,
        "outer_steps": 1,
        "outer_optimizer": "sgd",
        "outer_lr": 0.5,
        "max_length": 128,
    }
    shared["model_name_or_path"] = str(save_llama(folder / "llama"))
    shared["dataset"] = [str(write_classes(folder / "rows.jsonl", classes=15))]
    (folder / "runs.json").write_text(json.dumps([shared, [kinds.get(kind) for kind in order]]))
    (folder / "loop.py").write_text(LOOP)
    ended = run_ranks([str(folder / "loop.py")], ranks, cwd=folder).ok()
    scores = [float(line) for line in ended.output[0].splitlines() if re.fullmatch(r"\d\.\d+", line)]
    assert (len(scores), len(set(scores))) == (order.count("evaluate"), 1)
    first, start = dict[str, dict](), load_file(folder / "llama" / "model.safetensors")
    for number, kind in enumerate(order):
        if kind != "evaluate":
            theta = model_of(folder / f"out{number}")
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
    kinds |= {
        "tensor": {"group_size": "2", "tensor_parallel_size": 2},
        "pipeline": {"group_size": "2", "pipeline_stages": 2},
    }
    names, order = list(kinds), []
    for number, name in enumerate(names):  # a cycle in which each pair of neighbours occurs once
        order += [name, *(one for later in names[number + 1 :] for one in (name, later))]
    one_process(tmp_path, 2, kinds, [*order, names[0], "evaluate", names[0], "evaluate"])


EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "column", "groups", "each"), [("intents", "label", 8, 12), ("pairs", "task", 6, 10)]
)
def test_the_sample_files_have_the_promised_shape(name, column, groups, each):
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert [*Counter(json.loads(line)[column] for line in lines).values()] == [each] * groups


def test_the_example_of_callbacks_stops_early(tmp_path, capsys):
    settings = {
        **QUICK,
        "dataset": str(EXAMPLES / "data" / "intents.jsonl"),
        "meta_batch_size": 1,
        "outer_lr": 1e-9,
        "outer_steps": 9,
        "save_steps": 0,
        "eval_steps": 1,
        "eval_episodes": 2,
        "test_episodes": 0,
        "output_dir": tmp_path,
    }
    result = runpy.run_path(str(EXAMPLES / "callbacks.py"))["main"](patience=1, **settings)
    assert result.outer_steps < 9
    assert "outer step 1: loss" in capsys.readouterr().out
    assert (tmp_path / "model").is_dir()
    assert json.loads((tmp_path / "run.json").read_text())["finished"]


def test_the_example_of_hydra_sweeps(tmp_path):
    """A run for each value; `Config` chooses what is left open, and refuses what is wrong in a line."""
    listed = {**QUICK, "meta_batch_size": 2, "outer_steps": 2, "save_steps": 0, "label_column": "label"}
    given = [f"{name}={value}" for name, value in listed.items()]
    given += [f"dataset=[{EXAMPLES}/data/intents.jsonl]", "hydra.sweep.dir=sweep"]
    words = [str(EXAMPLES / "hydra_train.py"), "--multirun", "inner_lr=0.05,0.1", *given]
    ended = python(words, tmp_path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    stored = [json.loads((tmp_path / f"sweep/{number}/run/run.json").read_text()) for number in (0, 1)]
    assert [one["settings"]["inner_lr"] for one in stored] == [0.05, 0.1]
    assert all(one["finished"] and one["settings"]["lora_r"] == 0 for one in stored)
    assert all((tmp_path / f"sweep/{number}/run/model/config.json").is_file() for number in (0, 1))
    ended = python([words[0], *given, "inner_lr=-1", "hydra.run.dir=bad"], tmp_path, cwd=tmp_path)
    assert ended.returncode == 2
    check_message(ended.stderr.splitlines()[-1], "inner_lr=-1")


@pytest.mark.slow
def test_the_example_of_own_data(tmp_path):
    run_ranks([str(EXAMPLES / "custom_data.py")], 1, cwd=tmp_path, fresh=True).ok()
    assert (tmp_path / "runs/custom_data/run/model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_is_stored_without_large_outputs(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    path = EXAMPLES / "quickstart.ipynb"
    assert path.stat().st_size < 50_000
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": tmp_path}}).execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "gain of meta-training" in "".join(texts)
    assert any("image/png" in output.get("data", {}) for output in notebook.cells[5].outputs)
    answers = notebook.cells[7].outputs[-1]["text"].split("\n")
    assert set(answers) <= {"double letter", "no double", ""}


SHORT = (
    "--outer_steps 2 --warmup_steps 0 --meta_batch_size 2 --eval_episodes 0 --save_steps 0 --num_workers 0"
)
INTENTS = f"--dataset {EXAMPLES}/data/intents.jsonl --n_way 2 --max_length 32"
PAIRS = (
    f"--dataset {EXAMPLES}/data/pairs.jsonl --task_column task --input_column input --output_column output"
    " --max_length 64 --k_shot 2 --num_query 2"
)
RUNS = {  # recipe: ranks, model, data, and what makes it small
    "intents": (1, save_bert, INTENTS, ""),
    "intents_fomaml": (1, save_bert, INTENTS, ""),
    "language_lora": (1, save_llama, PAIRS, '--tune={"episodes":2,"inner_lrs":[0.1],"max_steps":2}'),
    "language_in_context": (1, save_llama, PAIRS, ""),
    "8b_zero3": (2, save_llama, PAIRS, f"--deepspeed {ROOT}/ds_configs/zero3.json --group_size 2"),
    "pipeline": (2, save_llama, PAIRS, "--group_size 2 --pipeline_stages 2"),
    "elastic": (1, save_bert, INTENTS, "--groups 2"),
}


@pytest.mark.parametrize("name", fast_or_slow(recipes.names(), lambda name: name == "intents", str))
def test_a_recipe_runs_with_a_small_model_and_the_sample_data(name, tmp_path):
    ranks, save_model, data, small = RUNS[name]
    command = "elastic" if name == "elastic" else "train"
    if name == "elastic":
        pytest.importorskip("torchft")
    model, run = str(save_model(tmp_path / "model")), tmp_path / "run"
    flags = f"--model_name_or_path {model} {data} {SHORT} {small} --output_dir {run}".split()
    run_ranks(["-m", "fmmeta", command, name, *flags], ranks).ok()
    assert json.loads((run / "run.json").read_text())["finished"]
    again, recipe = (parse([one, f"--output_dir={run}"]) for one in (str(run / "config.yaml"), name))
    assert (again.model_name_or_path, again.algorithm) == (model, recipe.algorithm)


def test_a_bad_recipe_ends_all_ranks_alike(tmp_path):
    (tmp_path / "bad.yaml").write_text("n_way: 3\nn_wey: 4\n")
    ended = run_ranks(["launch/train.py", "--local_rank=0", str(tmp_path / "bad.yaml")], 2)
    assert (ended.codes, ended.others) == ([2, 2], "")
    check_message(ended.output[0], "sets n_wey, which is no setting; did you mean n_way?")
