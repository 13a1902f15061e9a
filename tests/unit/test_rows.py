"""Reading rows: every format and folder, and every refusal names file, line and what to do."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import re
from decimal import Decimal
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

import fmmeta
from fmmeta.config.settings import Config
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.tasks.data import files, hub
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.data.rows import rows_in_memory, tabulate
from fmmeta.tasks.sources.load import load_sources, reader_of, task_files
from tests.support.helpers import read_rows, refusal, stored_by, write_rows
from tests.support.messages import check_message

ROWS = [
    {"text": 'Grüße, "du"', "label": "a"},
    {"text": "two\nlines", "label": "b"},
    {"text": "long " * 60_000, "label": "a"},
]
FORMATS = [f"{end}{packed}" for end in (".jsonl", ".json", ".csv", ".parquet") for packed in ("", ".gz")]


@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_holds_the_same_rows(tmp_path, ending):
    path = write_rows(tmp_path / f"data{ending}", ROWS)
    read = read_rows(str(path))
    assert [row.values for row in read] == ROWS
    # a CSV has a header, and one row spans two lines; the items of a list have no lines
    assert (
        read[-1].origin == f"{path}{'[3]' if '.json' in path.suffixes else ':5' if 'csv' in ending else ':3'}"
    )


def test_a_folder_is_its_files_in_order(tmp_path):
    for name, row in zip(["b.csv", "a.jsonl.gz", "c.parquet"], ROWS, strict=True):
        write_rows(tmp_path / name, [row])
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert [row.values for row in read_rows(str(tmp_path))] == [ROWS[1], ROWS[0], ROWS[2]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.jsonl", b'\xef\xbb\xbf{"text": "x", "label": "y"}\n\n\n'),  # a byte order mark, empty lines
        ("d.json", b'\xef\xbb\xbf{"text": "x", "label": "y"}\n\n'),
        ("d.json", b'\xef\xbb\xbf\n [{"text": "x",\n"label": "y"}\n]\n\n'),
        ("d.csv", b"\xef\xbb\xbftext,label\r\n\r\nx,y\r\n"),
    ],
)
def test_byte_order_marks_and_empty_lines_are_ignored(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    assert [row.values for row in read_rows(str(tmp_path / name))] == [{"text": "x", "label": "y"}]


NO_JSON = "is not a line of JSON ("
FIELDS = "has another number of fields than"
EMPTY = " is empty; remove it or fill it"
GOOD = gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)  # the time would give every process another test


@pytest.mark.parametrize(
    ("name", "data", "where", "parts"),
    [
        ("d.jsonl", b'{"a": 1}\n\n{"a": \n', ":3 ", [f"{NO_JSON}Expecting", "fix the line"]),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2 ", [f"{NO_JSON}'utf-8'", "fix the line"]),
        ("d.jsonl", b'{"a": 1}\n[1]\n', ":2 ", ["is no JSON object", '; write {"text": ..., "label": ...}']),
        ("d.json", b'{"a": 1}\n{"a": \n', ":2 ", [f"{NO_JSON}Expecting", "fix the line"]),
        ("d.tsv", b'a\tb\n"1\t2\n3\n', ":3 ", [FIELDS, "fix the line"]),
        ("d.csv", b"a,b\n1,2\n3\n", ":3 ", [FIELDS, "fix the line"]),
        ("d.csv", b"\n\na,b\n\n1\n", ":5 ", [FIELDS, "fix the line"]),
        ("d.csv", b"a,b\n1,2\n\n3,4,5\n", ":4 ", [FIELDS, "fix the line"]),
        ("d.csv", b'a,b\n1,2\n3,"4"4\n5,6\n', ":3 ", ["','", "'\"'", "fix the line"]),
        ("d.csv", b'a,b\n1,2\n3,"4\n5,6\n', ":3 ", ["is not a line of CSV (unexpected", "fix the line"]),
        ("d.csv", b"a,b\n1,2\n3,\xff\n5,6\n", ":3 ", ["is no UTF-8", "fix the line"]),
        *(
            ("d.csv", f"text{one}label\na{one}x\n".encode(), ":1", [repr(one), "fix the header"])
            for one in ";\t|"
        ),
        ("d.csv", b"text,label,label\nx,y,z\n", ":1 ", ["has 2 columns named 'label'", "rename"]),
        ("d.jsonl", b"", EMPTY, []),
        ("d.jsonl", b"\n  \n", EMPTY, []),
        ("d.csv", b"", EMPTY, []),
        ("d.csv", b"text,label\n", EMPTY, []),
        ("d.jsonl.gz", b"plain", " ", ["cannot be read (Not a gzipped file", "; fix or remove"]),
        ("d.jsonl.gz", GOOD[:-20], " ", ["cannot be read", "; fix or remove"]),
        ("d.jsonl.gz", GOOD[:14] + b"\xff" * 9 + GOOD[23:], " ", ["cannot be read", "; fix or remove"]),
        ("d.parquet", b"plain", " ", ["is not a parquet file", "; fix or remove"]),
        ("d.parquet.gz", gzip.compress(b"plain", mtime=0), " ", ["is not a parquet file", "; fix or remove"]),
    ],
)
def test_a_file_or_line_that_cannot_be_used_is_named(tmp_path, name, data, where, parts):
    """A text file also where it is compressed."""
    written = {name: data}
    if not name.endswith((".gz", ".parquet")):
        written[f"{name}.gz"] = gzip.compress(data)
    for file, content in written.items():
        (tmp_path / file).write_bytes(content)
        check_message(refusal(read_rows, str(tmp_path / file)), f"{tmp_path / file}{where}", *parts)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), [f"d.parquet{EMPTY}"]),
        (
            pyarrow.Table.from_arrays([["a"], ["b"]], ["text"] * 2),
            ["has 2 columns named 'text'", "rename all"],
        ),
        (
            pyarrow.table({"text": ["a"]}).replace_schema_metadata({"huggingface": "{"}),
            ["d.parquet has metadata of datasets", "write the file again"],
        ),
        (
            pyarrow.table({"when": pyarrow.array([10**15], pyarrow.timestamp("us", tz="Mars/Base"))}),
            ["d.parquet:1 has a value in the column 'when' that cannot be read ("],
        ),
    ],
)
def test_a_parquet_file_that_cannot_be_used_is_named(tmp_path, table, parts):
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    check_message(refusal(read_rows, str(tmp_path / "d.parquet")), *parts)


def test_empty_columns_of_a_spreadsheet_may_have_no_name(tmp_path):
    (tmp_path / "e.csv").write_text("text,label,,\nx,y,,\n")
    assert read_rows(str(tmp_path / "e.csv"))[0].values == {"text": "x", "label": "y", "": ""}


KINDS = ".jsonl, .json, .csv, .tsv, .parquet file (.gz too; .txt, .md for documents)"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        *(
            (one, ["check the path"])
            for one in ("./none", "/none/at/all", "data/none.jsonl", "a/b/c", "none.csv.gz")
        ),
        ("empty", [KINDS, "convert it"]),
        ("data.txt", [KINDS, "convert it"]),
    ],
)
def test_a_path_without_data_is_refused(tmp_path, monkeypatch, path, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.txt").write_text("text")
    check_message(refusal(read_rows, path), f"dataset={path}", *parts)


def parquet_of(texts: bytes) -> bytes:
    """A file whose column `label` has a byte of `texts` in each row, of which one may be no UTF-8."""
    offsets = np.arange(len(texts) + 1, dtype=np.int32).tobytes()
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(texts)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), buffers)
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"label": column}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("d.csv", b"label\na\nb\nc\n\xe9\nd\n", ["d.csv:5 is no UTF-8", "fix the line"]),
        (
            "d.json",
            b'[{"label": "a"}, {"label": "b"}, {"label": "c"}, 7, {"label": "d"}]',
            ["d.json[4] is no JSON object", "write {"],
        ),
        (
            "d.parquet",
            parquet_of(b"abc\xffd"),
            [
                "d.parquet:4 has a value in the column 'label' that cannot be read ('utf-8'",
                "or remove the column",
            ],
        ),
    ],
)
def test_a_bad_row_costs_one_row(tmp_path, monkeypatch, name, data, parts):
    monkeypatch.setattr(files, "BATCH", 2)  # of a parquet file
    path, bad = tmp_path / name, list[str]()
    path.write_bytes(data)
    rows = files.read_file(path, lambda error: bad.append(str(error)))
    assert [row.values["label"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[-1].origin == f"{path}{ {'d.csv': ':6', 'd.json': '[5]', 'd.parquet': ':5'}[name] }"
    check_message(*bad, *parts)
    check_message(refusal(read_rows, str(path)), *parts)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("d.csv", b'text,label\nx,y\n"x"x,y\nx,y\n'),
        ("d.csv", b"te\xe9xt,label\nx,y\n"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "x", "label": "y"}\n' * 5000)[:-20]),
        ("d.json is not JSON (Expecting value: line 2", b'[{"text": "x", "label": "y"},\n{"text": }]'),
        ("d.json is not JSON", b'[{"text": "x", "label": "y"}'),
        ("d.json is not JSON ('utf-8'", b'[{"text": "\xe9"}]'),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_is_refused_although_bad_rows_are_left_out(
    tmp_path, name, data
):
    (path := tmp_path / re.split(r"[ \[]", name)[0]).write_bytes(data)
    assert name in refusal(files.read_file, path, lambda error: None)


def test_quotes_of_a_tsv_are_text(tmp_path):
    (path := tmp_path / "d.tsv").write_text('sentence\tlabel\n"a" b\t1\n"c\t0\n')
    assert [row.values for row in read_rows(str(path))] == [
        {"sentence": '"a" b', "label": "1"},
        {"sentence": '"c', "label": "0"},
    ]


def test_json_files_beside_others_are_no_rows(tmp_path):
    """They often have settings, as texts of classes. Without others they are rows, but for splits."""
    write_rows(tmp_path / "b.json", ROWS[:2])
    (tmp_path / "class_splits.json").write_text("{}")
    assert len(read_rows(str(tmp_path))) == 2
    write_rows(tmp_path / "a.csv", ROWS[:1])
    assert len(read_rows(str(tmp_path))) == 1


def circular() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


CAUSAL = {"task_type": "causal_lm"}
CHAT = {**CAUSAL, "prompt_template": "chat"}
TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS]
NO_TEXTS = [
    np.array([1, 2]),
    pd.NA,
    b"x",
    None,
    "",
    [1],
    {"a": 1},
    float("nan"),
    Decimal("sNaN"),  # cannot be compared
    10**5000,  # Python writes at most 4,300 digits
    [10**5000],
]
ASKED = {"input": "r", "output": "yes"}


@pytest.mark.parametrize(
    ("settings", "values", "parts"),
    [
        *(({}, {"text": one, "label": "a"}, ["d:1 has text=", "which is no text"]) for one in NO_TEXTS),
        (
            {},
            {"sentence1": "a b", "sentence2": None, "label": "x"},
            ["d:1 has sentence2=None", "fix the row"],
        ),
        ({}, {"task": "t", **ASKED}, ["dataset=d", "--text_column", "use --task_type causal_lm"]),
        (
            {"task_type": "tests.support.vision:of_nested"},
            {"label": "b", "more": circular()},
            ["d:1 has a value that JSON cannot hold ("],
        ),
        (CAUSAL, {**ASKED, "output": ""}, ["output=''", "fix the row"]),
        (CAUSAL, {**ASKED, "output": " \n"}, ["the answer ' \\n'", "fix the row"]),
        (
            CAUSAL,
            {**ASKED, "options": "yes or no"},
            ["options='yes or no'", "no list of texts", "leave it out"],
        ),
        (CAUSAL, {**ASKED, "options": {"yes": 1}}, ["options={'yes': 1}", "no list of texts"]),
        (CAUSAL, {**ASKED, "options": ["yes", 3]}, ["options=['yes', 3]", "no list of texts"]),
        (CAUSAL, {**ASKED, "options": ["yes", " "]}, ["no list of texts"]),
        (
            CAUSAL,
            {**ASKED, "options": ["yes", "\ud800"]},
            ["has half of a surrogate pair (\\ud800) in options", "fix the row"],
        ),
        (CAUSAL, {**ASKED, "options": ["yes", "yes"]}, ["two or more", "'yes' among them"]),
        (CAUSAL, {**ASKED, "options": ["no", "maybe"]}, ["'yes' among them", "add it"]),
        (CAUSAL, {"messages": MESSAGES}, ["several turns in messages", "--prompt_template chat"]),
        (CHAT, {"messages": MESSAGES[:1]}, ["no turn of an assistant in messages", "add the answer"]),
        (CHAT, {"messages": MESSAGES[1:2]}, ["d:1 has messages=''", "no text", "fix the row"]),
        *(
            (CHAT, {"messages": text}, ["d:1 has messages=", "no list of turns", "write"])
            for text in ("a", str(MESSAGES), json.dumps(MESSAGES)[:-1], "[]", "[" * 99_999)
        ),
        (CHAT, {"messages": [{"role": "user"}]}, ["d:1 has messages=", "no text", "fix the row"]),
        (CHAT, {"prompt": "a", "completion": []}, ["d:1 has completion=[]", "no text", "fix the row"]),
        (CHAT, {"messages": [*MESSAGES[:3], {"role": "assistant", "content": ""}]}, ["''", "fix the row"]),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(settings, values, parts):
    rows, one_task = [Row(values, "d:1")], "task" not in values
    check_message(refusal(tabulate, "d", rows, Config(**settings), print, one_task=one_task), *parts)


def learned(rows, **settings):
    """What a learner has stored of a task's rows."""
    config = Config(**settings)
    table = tabulate("d", [Row(row, "d:1") for row in rows], config, lambda text: None, one_task=True)
    return table.rows(config.learner.kind)


NUMBERS = [1, np.int64(2), np.float32(0.5), True, datetime.date(2026, 1, 2), Decimal("1.50")]
CASES = {"TEXT": "x", "Label": "a", "Category": "news", "label ": "b"}
SENTENCES = {"sentence1": "a b", "sentence2": "c", "label": "x"}


@pytest.mark.parametrize(
    ("settings", "rows", "wanted"),
    [
        (
            {},
            [{"text": one, "label": "a"} for one in NUMBERS],
            [{"text": one, "label": "a"} for one in ("1", "2", "0.5", "True", "2026-01-02", "1.50")],
        ),
        ({}, [CASES], [{"text": "x", "label": "a"}]),
        ({"text_column": "Text", "label_column": "LABEL"}, [CASES], [{"text": "x", "label": "a"}]),
        ({}, [{"Text": "x", "text": "y", "label": "a"}], [{"text": "y", "label": "a"}]),
        ({}, [SENTENCES], [{"text": "a b [SEP] c", "label": "x"}]),
        ({"text_column": "sentence1"}, [SENTENCES], [{"text": "a b", "label": "x"}]),
        (
            CAUSAL,
            [{"Question": "q", "Answer": "yes", "Options": ["yes", "no"]}],
            [{"input": "q", "output": "yes", "options": ["yes", "no"]}],
        ),
        (
            CAUSAL,
            [{"messages": MESSAGES[:2]}, {"messages": SHARED[:2]}],
            [{"input": "a", "output": "b"}],  # of equal rows the first stays
        ),
        (
            CAUSAL,
            [{"question": "q", "answers": ["yes", "yes", "sure"]}, {"question": "r", "answers": ["no"]}],
            [{"input": "q", "output": "yes", "answers": ["yes", "sure"]}, {"input": "r", "output": "no"}],
        ),
        (
            CAUSAL,
            [{"question": "q", "answers": ["yes", "yes", "sure"], "options": ["sure", "never"]}],
            [{"input": "q", "output": "yes", "answers": ["yes", "sure"], "options": ["sure", "never"]}],
        ),
    ],
)
def test_what_is_learned_of_rows(settings, rows, wanted):
    assert learned(rows, **settings) == wanted


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_options_are_read_from_files(tmp_path, ending):
    given = [
        {"input": "q", "output": "yes", "options": ["no", "yes", "no"]},
        {"input": "r", "output": "a", "options": ["a", "b"]},
        {"input": "s", "output": "free", "options": []},  # as MetaICL writes tasks without options
        {"input": "t", "output": "free", "options": None},
    ]
    read = read_rows(str(write_rows(tmp_path / f"d{ending}", given)))
    found = learned([row.values for row in read], **CAUSAL)
    assert [row.get("options") for row in found] == [["no", "yes"], ["a", "b"], None, None]


def notices(rows, **settings) -> list[str]:
    """Notices about rows while they are read."""
    found: list[str] = []
    tabulate("d", [Row(row, f"d:{n}") for n, row in enumerate(rows)], Config(**settings), found.append)
    return found


def labelled(*labels):
    return [{"text": f"t{n}", "label": label} for n, label in enumerate(labels)]


ALIKE = [("a", "a "), ("caf\u00e9", "cafe\u0301"), (1, 1.0), (1, True), ("1", 1.0), ("a", "\u00a0a")]
UNLIKE = [("a", "A"), (1, 2.5), ("1", 1), (True, "True"), (float("inf"), "b")]


@pytest.mark.parametrize(
    ("rows", "settings", "parts"),
    [
        *(  # they would be two classes, of which one may be in the training split and one in the test split
            (
                labelled(one, other, one, other, "b", "b ", "c"),
                {},
                [
                    f"label={str(one)!r} at d:0 and label={str(other)!r} at d:1 differ only in",
                    "write them",
                    "different names (1 more like them)",
                ],
            )
            for one, other in ALIKE
        ),
        *((labelled(*pair), {}, []) for pair in UNLIKE),
        (
            [{"text": "x", "label": label} for label in ("a", "b", "b")],
            {},
            ["1 input of d in more than one class; correct the labels"],
        ),
        (
            [{"text": f"t{n}", "label": "xy"[n], "task": f"a{' ' * n}"} for n in range(2)],
            {},
            ["task='a' at d:0 and task='a ' at d:1 differ only in spaces"],
        ),
        (
            labelled(0, 1, 0, 1),
            {"label_names": "names"},
            ["label_names=names", "2 of 2 classes of d have no word as a name (0, 1)", "JSON file"],
        ),
        (
            [{"text": text, "label": "a"} for text in ("caf\u00e9 x", "cafe\u0301  x\r\n", "b")],
            {},
            ["1 of 3 rows equal another one but for spaces or Unicode form; remove them"],
        ),
    ],
)
def test_rows_that_may_be_mistakes_are_noted(rows, settings, parts):
    found = notices(rows, **settings)
    assert any(all(part in note for part in parts) for note in found) if parts else found == []


def test_a_missing_stratum_is_an_error_only_in_a_column_that_was_named():
    rows = [
        Row({"text": text, "label": "a", "category": one}, "d:1")
        for text, one in (("x", "news"), ("y", None))
    ]
    assert tabulate("d", rows, Config(), print).stratum == ["news", "all"]
    assert "category=None" in refusal(tabulate, "d", rows, Config(stratum_column="category"), print)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({1: "a", "b": 2}, id="mixed keys"),
        pytest.param({(1, 2): "a"}, id="tuple as key"),
        pytest.param(10**5000, id="digits"),
        pytest.param(circular(), id="circular"),
    ],
)
def test_values_that_json_cannot_hold_are_refused(value):
    """The digest of rows that were given in Python is one of JSON."""
    rows = [
        Row({"text": "a", "label": "b", "more": one}, f"dataset[{n}]") for n, one in enumerate([1, value])
    ]
    check_message(
        refusal(reader_of, "in-memory", Config(), rows),
        "dataset[1] has a value that JSON cannot hold (",
        "whose keys are texts",
    )


@pytest.mark.parametrize("kind", [None, "pandas", "arrow", "numpy", "torch"])
def test_rows_of_a_data_set_with_a_format_and_recordings(kind):
    """The format counts for others; recordings are not decoded, which needs another package."""
    columns = {"text": ["a", "b"], "label": [0, 1], "audio": [{"path": None, "bytes": b"RIFF"}] * 2}
    part = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio()).with_format(kind)
    rows = [*hub.hub_rows("d", part)]
    assert [(row.values["text"], row.values["label"]) for row in rows] == [("a", 0), ("b", 1)]
    assert rows[0].values["audio"]["bytes"] == b"RIFF"


CARD = """---
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names: {'0': 'no', '1': 'yes', '2': '0'}
  - name: image
    dtype: string
---
"""
LABELS = [0, 1, 2, -1, None, 1]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl", "images"])
def test_the_same_data_by_file_hub_id_and_object_give_the_same_rows(tmp_path, monkeypatch, form):
    """Classes have the names in the metadata of a parquet file, or in the card of a folder; -1 and null are
    none, and bad rows.
    """
    classes = {"label": datasets.ClassLabel(names=["no", "yes", "0"])}
    features = datasets.Features(
        {"text": datasets.Value("string"), **classes, "image": datasets.Value("string")}
    )
    rows = [{"text": f"text {i}", "label": label, "image": "12"} for i, label in enumerate(LABELS)]
    if form == "images":
        features["image"] = datasets.Image()
        rows = [{**row, "image": {"bytes": png(i), "path": None}} for i, row in enumerate(rows)]
    made = datasets.Dataset.from_list(rows, features=features)
    folder = tmp_path / "data"
    folder.mkdir()
    if form in ("parquet", "images"):
        made.to_parquet(folder / "train.parquet")
    else:
        write_rows(folder / f"train.{form}", rows)
        (folder / "README.md").write_text(CARD)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    opened = hub.open_hub(str(folder), None)
    (datasets.DatasetDict(train=made) if form == "csv" else made).save_to_disk(tmp_path / "saved")
    _, saved = reader_of(str(tmp_path / "saved"), Config(), None)
    found = [
        (tabulated(given, bad := [], images=form == "images"), len(bad))
        for given in (read_rows(str(folder)), [*hub.hub_rows("d", opened)], made, [*saved(print)])
    ]
    assert found[0] == found[1] == found[2] == found[3]
    (inputs, targets), bad = found[0]
    assert (targets, bad, len(set(inputs))) == (["no", "yes", "0", "yes"], 2, 4)


def png(shade: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 2), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def tabulated(given, bad, images) -> tuple[list[str], list[str]]:
    rows = given if isinstance(given, list) else rows_in_memory(given, Config())
    reader = ImageReader({}) if images else None
    table = tabulate("d", rows, Config(), lambda text: None, bad.append, tokenizer=reader)
    return table.input, table.target


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([["hi", "hello"]], True),
        ([{"title": 1, "text": "hi"}], True),
        ({"source": {"name": "web"}}, True),
        ([1, [2.5, "3"]], False),
        ({"path": "a.png", "bytes": b"a"}, False),
        ([{"path": "a.wav"}], False),
        (circular(), False),
    ],
)
def test_unread_texts_inside_lists_and_dictionaries_are_noted(value, named):
    row = {"task": "t", "input": "a", "output": "b", "history": value}
    lines = notices([row], **CAUSAL)
    assert len(lines) == named
    if named:
        check_message(lines[0], "texts in history of d are not read", "write each value as one text")
        (line,) = notices([{**row, "context": "c"}], **CAUSAL)
        check_message(line, "texts in context, history of d", "--prompt_template 'Q: {context} {input}")


def named_classes() -> datasets.Dataset:
    classes = datasets.ClassLabel(names=["no", "yes"])
    return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}).cast_column("label", classes)


def test_examples_of_a_data_set_have_class_names():
    adapted = fmmeta.adapt("tiny", named_classes(), inner_steps=1, early_stopping=False)
    assert adapted.labels == ("no", "yes")


def test_hub_rows_carry_class_names(monkeypatch):
    load = Mock(return_value=named_classes())
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    rows = read_rows("owner/set", "english")
    load.assert_called_once_with("owner/set", "english", split="train", revision=None)  # no test split
    assert [(row.values["label"], row.origin) for row in rows] == [
        ("yes", "owner/set[train]:1"),
        ("no", "owner/set[train]:2"),
    ]


@pytest.mark.parametrize(
    ("answers", "offline", "error", "parts"),
    [
        (True, False, "404\nnot found", ("dataset=owner/set is neither", "404 not found", "check the name")),
        (False, False, "no", ("dataset=owner/set is no path", "cannot be reached", "check the network")),
        (False, True, "not cached", ("dataset=owner/set is no path", "cannot be reached", "HF_HUB_OFFLINE")),
        (
            True,
            False,
            "Unknown split \"train\". Should be one of ['test'].",
            ("dataset_split=train is no split of dataset=owner/set", "['test']", "or all"),
        ),
    ],
)
def test_an_unreadable_hub_set_is_refused_with_the_reason(monkeypatch, answers, offline, error, parts):
    def fail(*_, **__):
        assert answers != datasets.config.HF_HUB_OFFLINE  # no retries without a network
        raise ConnectionError(error)

    before = datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(hub, "hub_answers", lambda: answers)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    check_message(refusal(read_rows, "owner/set"), *parts)
    assert before == datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dataset_split", "validation"), ("dataset_revision", "v2"), ("dataset_config_name", "en")],
)
@pytest.mark.parametrize("kind", ["local", "generated", "both"])
def test_settings_of_hub_sets_are_refused_for_other_data(tmp_path, setting, value, kind):
    rows = [{"text": f"{i}", "label": f"c{i % 5}"} for i in range(50)]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    names = {"local": [file], "generated": ["letters"], "both": ["letters", file]}[kind]
    config = Config(dataset=names, **{setting: value})
    check_message(
        refusal(load_sources, config, None, print),
        f"{setting}={value} is for data sets of the hub",
        "is generated or local",
        "leave it",
    )


def test_a_task_file_whose_name_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "stratum").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "stratum") + b"/caf\xe9.jsonl")).write_text("{}")
    check_message(
        refusal(task_files, str(tmp_path), 64),
        "caf\\udce9.jsonl': the name of the file is no UTF-8",
        "rename it",
    )


EARLIER = (
    '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
    ' {"role": "user", "content": "c"}]'
)


@pytest.mark.parametrize(
    "values",
    [
        {"messages": MESSAGES},
        {"prompt": "of another", "messages": [*MESSAGES, {"role": "user", "content": "e"}]},
        {"Conversations": SHARED},
        {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]},
        {"prompt": MESSAGES[:3], "completion": "d"},
    ],
)
def test_the_last_turn_of_an_assistant_is_the_answer(tmp_path, values):
    written = [write_rows(tmp_path / f"rows{end}", [values]) for end in (".jsonl", ".parquet")]
    of_hub = hub.hub_rows("d", datasets.Dataset.from_list([values]))
    for rows in ([Row(values, "d:1")], *(read_rows(str(path)) for path in written), [*of_hub]):
        assert learned([row.values for row in rows], **CHAT) == [{"input": EARLIER, "output": "d"}]


@pytest.mark.parametrize("column", ["messages", "Conversations"])
def test_conversations_may_be_the_text_of_a_json_list(tmp_path, column):
    for values in ({}, {"completion": "d"}):
        texts = [{**values, column: json.dumps(MESSAGES)}]
        rows = read_rows(str(write_rows(tmp_path / "rows.csv", texts)))
        wanted = learned([{**values, column: MESSAGES}], **CHAT)
        assert learned([row.values for row in rows], **CHAT) == wanted
        assert wanted[0]["output"] == "d"
        asked = stored_by(CausalLearner, Config(**CHAT), texts[0], answered=False)
        assert asked == {"input": wanted[0]["input"]}


PAIR = {"Sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(
    ("settings", "row", "wanted"),
    [
        (CHAT, {"Messages": MESSAGES}, {"input": EARLIER}),
        (CHAT, {"Messages": MESSAGES[:3]}, {"input": EARLIER}),
        ({}, PAIR, {"text": "a [SEP] b"}),
        ({"text_column": "sentence1"}, PAIR, {"text": "a"}),
    ],
)
def test_inputs_of_predict_are_those_of_training(settings, row, wanted):
    config = Config(**settings)
    assert stored_by(config.learner.kind, config, row, answered=False) == wanted
