"""Inputs of data that users have reported, from the folder `cases` beside the checkout."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fmmeta import inspection
from fmmeta.cli import parse
from tests.support.helpers import ROOT, refusal

CASES = ROOT.parent / "shared" / "cases"


def case(name: str) -> Path:
    """The folder of a case; the test is skipped without it."""
    if not (CASES / name).is_dir():
        pytest.skip(f"{CASES / name} is not there")
    return CASES / name


def inspect(*words: object) -> None:
    inspection.run(parse(list(map(str, words)), "inspect"))


def test_class_names_of_a_parquet_file(tmp_path, monkeypatch, capsys):
    made = case("parquet-classlabel") / "make.py"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(made))
    shape = ["--n_way", 2, "--k_shot", 1, "--num_query", 1]
    assert "rows.parquet:33 has label=None" in refusal(inspect, "rows.parquet", *shape)
    skipped = ["--on_bad_task", "skip", "--max_bad_fraction", 0.5, "--label_names", "names"]
    inspect("rows.parquet", *shape, *skipped)
    shown = capsys.readouterr().out
    assert "'card_lost'" in shown
    assert "'-1'" not in shown
    assert "8 of 40 rows cannot be used" in shown


PAIRS = ["--task_type", "causal_lm", "--k_shot", 1, "--num_query", 1]


def test_instruction_and_input_are_one_input(capsys):
    inspect(case("alpaca") / "rows.jsonl", *PAIRS)
    shown = capsys.readouterr().out
    assert "'name a word for t1 atm pin" in shown or "'name a word for t1\\natm pin" in shown
    assert "not read" not in shown


def test_columns_in_a_template_are_filled(capsys):
    rows = case("template-placeholder") / "rows.jsonl"
    inspect(rows, *PAIRS, "--prompt_template", "{instruction}\\n{input}\\n")
    shown = capsys.readouterr().out
    assert "g|i|v|e| |w|o|r|d|" in shown
    assert "{instruction}" not in shown
    refused = refusal(inspect, rows, *PAIRS, "--prompt_template", "{instruktion}\\n{input}\\n")
    assert "{instruktion}, which is no column" in refused
    assert "it has input, instruction, output, task" in refused


def test_an_empty_list_of_options_is_none(capsys):
    inspect(case("metaicl-empty-options") / "tasks.jsonl", *PAIRS[:2], "--k_shot", 2, "--num_query", 2)
    assert "Training would refuse nothing" in capsys.readouterr().out
