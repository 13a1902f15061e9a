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
