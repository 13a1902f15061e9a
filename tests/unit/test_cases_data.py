"""Inputs of data that users have reported, from the folder `cases` beside the checkout."""

from __future__ import annotations

import re
import runpy

import pytest

from fmmeta import inspection
from fmmeta.cli import parse
from tests.support.helpers import CASES, needs_cases, refusal
from tests.support.messages import check_message

pytestmark = needs_cases


def inspect(*words: object) -> None:
    inspection.run(parse(list(map(str, words)), "inspect"))


def test_class_names_of_a_parquet_file(tmp_path, monkeypatch, capsys):
    made = CASES / "parquet-classlabel" / "make.py"
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


PAIRS = "--task_type", "causal_lm", "--k_shot", 1, "--num_query", 1
TEMPLATE = "template-placeholder/rows.jsonl", *PAIRS, "--prompt_template"
SHOTS = "--k_shot", 2, "--num_query", 2


@pytest.mark.parametrize(
    ("file", "words", "shown", "hidden"),
    [
        ("alpaca/rows.jsonl", PAIRS, r"'name a word for t1( |\\n)atm pin", "not read"),
        (
            TEMPLATE[0],
            (*TEMPLATE[1:], "{instruction}\\n{input}\\n"),
            r"g\|i\|v\|e\| \|w\|o\|r\|d\|",
            "{instruction}",
        ),
        *(
            (f"json-and-tsv/{name}", ("--n_way", 2, *SHOTS), "2 classes", "cannot be used")
            for name in ("lines.json", "array.json", "train.tsv")
        ),
        (
            "metaicl-empty-options/tasks.jsonl",
            (*PAIRS[:2], *SHOTS),
            "Training would accept this",
            "cannot be used",
        ),
    ],
    ids=["instruction and input", "template of columns", "lines", "array", "tsv", "empty options"],
)
def test_files_are_read_as_they_are_meant(file, words, shown, hidden, capsys):
    inspect(CASES / file, *words)
    text = capsys.readouterr().out
    assert re.search(shown, text)
    assert hidden not in text


@pytest.mark.parametrize(
    ("file", "words", "parts"),
    [
        ("json-and-tsv/semicolon.csv", (), ("semicolon.csv:1", "';'", "by commas", "fix the header")),
        ("json-and-tsv/train.label", (), ("is no .jsonl, .json, .csv, .tsv, .parquet file", "convert it")),
        ("json-and-tsv/clinc.json", (), ("none of the columns text", "it has", "train")),
        (
            TEMPLATE[0],
            (*TEMPLATE[1:], "{instruktion}\\n{input}\\n"),
            ("{instruktion}, which is no column", "it has input, instruction, output, task"),
        ),
    ],
)
def test_other_files_and_templates_are_refused_with_a_reason(file, words, parts):
    check_message(refusal(inspect, CASES / file, *words or ("--n_way", 2)), *parts)
