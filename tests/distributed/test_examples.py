"""Every example runs: the scripts and the notebook of examples/, and each recipe with a small model."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from tests.support.launch import ROOT, run_ranks

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
        patience=1, output_dir=tmp_path / "run", **quick, outer_lr=1e-9, outer_steps=9, eval_steps=1,
        eval_episodes=2, test_episodes=0, num_workers="0", save_steps=0,
    )  # fmt: skip
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
