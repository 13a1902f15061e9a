"""Every example runs: the scripts and the notebook of examples/, and each recipe with a small model."""

import json
import sys
from collections import Counter

import pytest

from fmmeta.cli import parse
from fmmeta.config import recipes
from tests.support.helpers import fast_or_slow
from tests.support.launch import ROOT, run_ranks
from tests.support.models import save_bert, save_llama

EXAMPLES = ROOT / "examples"


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / "data" / name).read_text().splitlines()]


def test_the_sample_files_have_the_promised_shape():
    intents = Counter(row["label"] for row in rows_of("intents.jsonl"))
    assert (len(intents), set(intents.values())) == (8, {12})
    pairs = Counter(row["task"] for row in rows_of("pairs.jsonl"))
    assert (len(pairs), set(pairs.values())) == (6, {10})
    for name in ("intents.jsonl", "pairs.jsonl"):
        assert len({json.dumps(row) for row in rows_of(name)}) == len(rows_of(name))


def test_the_example_of_callbacks_stops_early(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import callbacks

    quick = {"n_way": 2, "k_shot": 1, "num_query": 1, "meta_batch_size": 1, "inner_steps": 1}
    result = callbacks.main(
        patience=1,
        output_dir=tmp_path / "run",
        **quick,
        outer_lr=1e-9,
        outer_steps=9,
        eval_steps=1,
        eval_episodes=2,
        test_episodes=0,
        num_workers="0",
        save_steps=0,
    )
    sys.modules.pop("callbacks")
    assert result.outer_steps < 9
    assert "outer step 1: loss" in capsys.readouterr().out
    assert (result.output_dir / "model").is_dir()
    assert json.loads((result.output_dir / "run.json").read_text())["finished"]


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


def test_every_recipe_has_a_run():
    assert sorted(RUNS) == recipes.names()


@pytest.mark.parametrize("name", fast_or_slow(list(RUNS), lambda name: name == "intents", str))
def test_a_recipe_runs_with_a_small_model_and_the_sample_data(name, tmp_path):
    ranks, save_model, data, small = RUNS[name]
    command = "train"
    if name == "elastic":
        pytest.importorskip("torchft")
        command = "elastic"
    model, run = save_model(tmp_path / "model"), tmp_path / "run"
    flags = f"--model_name_or_path {model} {data} {SHORT} {small} --output_dir {run}".split()
    run_ranks(["-m", "fmmeta", command, name, *flags], ranks).ok()
    assert json.loads((run / "run.json").read_text())["finished"]
    again = parse([str(run / "config.yaml"), "--output_dir", str(run)])
    assert again.model_name_or_path == str(model)
    assert again.algorithm == parse([name, "--output_dir", str(run)]).algorithm


def test_a_bad_recipe_ends_all_ranks_alike(tmp_path):
    (tmp_path / "bad.yaml").write_text("n_way: 3\nn_wey: 4\n")
    ended = run_ranks(["launch/train.py", "--local_rank=0", str(tmp_path / "bad.yaml")], 2)
    assert ended.codes == [2, 2]
    assert "sets n_wey, which is no setting; did you mean n_way?" in ended.output[0]
    assert "Traceback" not in "".join(ended.output)
    assert not ended.others
