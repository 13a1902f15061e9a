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

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

import fmmeta
from fmmeta.config.settings import Config
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import NativeClassifier
from fmmeta.tasks.data import files, hub
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.data.rows import Table, rows_in_memory, tabulate
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


@pytest.mark.parametrize(
    ("name", "data", "line", "parts"),
    [
        ("d.jsonl", b'{"a": 1}\n\n{"a": \n', 3, ["is not a line of JSON (Expecting"]),
        (
            "d.jsonl",
            b'{"a": 1}\n{"a": "\xff"}\n',
            2,
            ["'utf-8'", "is not a line of JSON ('utf-8'"],
        ),
        ("d.jsonl", b'{"a": 1}\n[1]\n', 2, ["is no JSON object", 'write {"text": ..., "label": ...}']),
        ("d.json", b'{"a": 1}\n{"a": \n', 2, ["is not a line of JSON (Expecting"]),
        ("d.tsv", b'a\tb\n"1\t2\n3\n', 3, ["has another number of fields than", "fix the line"]),
        ("d.csv", b"a,b\n1,2\n3\n", 3, ["has another number of fields than", "fix the line"]),
        ("d.csv", b"\n\na,b\n\n1\n", 5, ["has another number of fields than", "fix the line"]),
        ("d.csv", b"a,b\n1,2\n\n3,4,5\n", 4, ["has another number of fields than", "fix the line"]),
        (
            "d.csv",
            b'a,b\n1,2\n3,"4"4\n5,6\n',
            3,
            ["','", "'\"'", "fix the line"],
        ),
        (
            "d.csv",
            b'a,b\n1,2\n3,"4\n5,6\n',
            3,
            ["is not a line of CSV (unexpected", "fix the line"],
        ),
        (
            "d.csv",
            b"a,b\n1,2\n3,\xff\n5,6\n",
            3,
            ["is no UTF-8", "fix the line"],
        ),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_line_is_named(tmp_path, name, data, line, parts, compressed):
    path = tmp_path / (name + ".gz" * compressed)
    path.write_bytes(gzip.compress(data, mtime=0) if compressed else data)
    message = refusal(read_rows, str(path))
    check_message(message, f"{path}:{line} ", *parts)
    assert message.endswith("fix the line") or "; write {" in message


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("d.jsonl", b""),
        ("d.jsonl", b"\n  \n"),
        ("d.csv", b""),
        ("d.csv", b"text,label\n"),
        (
            "d.jsonl.gz",
            gzip.compress(b"", mtime=0),
        ),  # the time of writing would give every process another test
    ],
)
def test_an_empty_file_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert refusal(read_rows, str(tmp_path / name)) == f"{tmp_path / name} is empty; remove it or fill it"


def test_an_empty_parquet_is_refused(tmp_path):
    parquet_with(path := tmp_path / "d.parquet", "label", pyarrow.array([], pyarrow.string()))
    assert refusal(read_rows, str(path)) == f"{path} is empty; remove it or fill it"


GOOD = gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("d.jsonl.gz", b"plain", ["cannot be read (Not a gzipped file"]),
        ("d.jsonl.gz", GOOD[:-20], ["cannot be read"]),
        ("d.jsonl.gz", GOOD[:14] + b"\xff" * 9 + GOOD[23:], ["cannot be read"]),
        ("d.parquet", b"plain", ["is not a parquet file"]),
        ("d.parquet.gz", gzip.compress(b"plain", mtime=0), ["is not a parquet file"]),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, data, parts):
    (tmp_path / name).write_bytes(data)
    message = refusal(read_rows, str(tmp_path / name))
    check_message(message, f"{tmp_path / name} ", *parts, "; fix or remove")


@pytest.mark.parametrize("missing", ["./none", "/none/at/all", "data/none.jsonl", "a/b/c", "none.csv.gz"])
def test_a_missing_path_is_refused(tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    check_message(refusal(read_rows, missing), f"dataset={missing}", "check the path")


def test_other_files_and_empty_folders_are_refused(tmp_path):
    kinds = ".jsonl, .json, .csv, .tsv, .parquet file (.gz too)"
    other = tmp_path / "data.txt"
    check_message(refusal(read_rows, str(tmp_path)), f"dataset={tmp_path}", kinds, "convert it")
    other.write_text("text")
    check_message(refusal(read_rows, str(other)), f"dataset={other}", kinds, "convert it")


def test_a_bad_line_of_a_csv_costs_one_row(tmp_path):
    lines = [b"text,label\n", *(b"row %d,a\n" % number for number in range(5))]
    lines[2] = b"\xe9,a\n"
    (tmp_path / "d.csv").write_bytes(b"".join(lines))
    bad: list[str] = []
    rows = files.read_file(tmp_path / "d.csv", lambda error: bad.append(str(error)))
    assert [row.values["text"] for row in rows] == ["row 0", "row 2", "row 3", "row 4"]
    assert len(bad) == 1
    assert "d.csv:3 is no UTF-8; fix the line" in bad[0]


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


def test_an_item_of_a_list_that_is_no_row_is_named(tmp_path):
    (path := tmp_path / "d.json").write_text('[{"text": "x", "label": "y"}, 7]')
    bad: list[str] = []
    assert len(files.read_file(path, lambda error: bad.append(str(error)))) == 1
    check_message(bad[0], f"{path}[2] is no JSON object", "write {")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_of_a_csv_is_named(tmp_path, separator):
    (path := tmp_path / "d.csv").write_text(f"text{separator}label\na{separator}x\n")
    check_message(refusal(read_rows, str(path)), f"{path}:1", repr(separator), "fix the header")


def test_json_files_beside_others_are_no_rows(tmp_path):
    """They often have settings, as texts of classes. Without others they are rows, but for splits."""
    write_rows(tmp_path / "b.json", ROWS[:2])
    (tmp_path / "class_splits.json").write_text("{}")
    assert len(read_rows(str(tmp_path))) == 2
    write_rows(tmp_path / "a.csv", ROWS[:1])
    assert len(read_rows(str(tmp_path))) == 1


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2]),
        pd.NA,
        b"x",
        None,
        "",
        float("nan"),
        Decimal("sNaN"),  # cannot be compared
        pytest.param(10**5000, id="digits"),  # Python writes at most 4,300
        pytest.param([10**5000], id="list of digits"),
    ],
)
def test_values_that_are_no_texts_are_refused(value):
    rows = [Row({"text": value, "label": "a"}, "here")]
    check_message(refusal(tabulate, "data", rows, Config(), print), "here has text=", "which is no text")


def test_numbers_and_dates_are_texts():
    values = [1, np.int64(2), np.float32(0.5), True, datetime.date(2026, 1, 2), Decimal("1.50")]
    rows = [Row({"text": value, "label": "a"}, "here") for value in values]
    assert tabulate("data", rows, Config(), print).input == ["1", "2", "0.5", "True", "2026-01-02", "1.50"]


def test_a_missing_stratum_is_an_error_only_in_a_column_that_was_named():
    rows = [Row({"text": "x", "label": "a", "category": one}, "here") for one in ("news", None)]
    rows[1].values["text"] = "y"
    assert tabulate("data", rows, Config(), print).stratum == ["news", "all"]
    assert "category=None" in refusal(tabulate, "data", rows, Config(stratum_column="category"), print)


def test_the_same_text_in_two_classes_is_noted():
    rows = [Row({"text": "x", "label": label}, "here") for label in ("a", "b", "b")]
    assert "1 input of data in more than one class; correct the labels" in notices(rows, Config(), "data")


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a "), ("caf\u00e9", "cafe\u0301"), (1, 1.0), (1, True), ("1", 1.0), ("a", "\u00a0a")],
)
def test_labels_that_look_the_same_are_noted(one, other):
    """They would be two classes, of which one may be in the training split and one in the test split."""
    labels = [one, other, one, other, "b", "b ", "c"]
    rows = [Row({"text": f"t{n}", "label": label}, f"d:{n}") for n, label in enumerate(labels)]
    notes: list[str] = []
    assert tabulate("d", rows, Config(), notes.append).target == [str(label) for label in labels]
    (note,) = notes
    first = f"label={str(one)!r} at d:0 and label={str(other)!r} at d:1 differ only in"
    check_message(note, first, "write them", "different names (1 more like them)")


def test_names_of_tasks_that_look_the_same_are_noted():
    rows = [Row({"text": f"t{n}", "label": "xy"[n % 2], "task": f"a{' ' * n}"}, f"d:{n}") for n in range(2)]
    assert "task='a' at d:0 and task='a ' at d:1 differ only in spaces" in notices(rows, Config())[0]


@pytest.mark.parametrize("labels", [("a", "A"), (1, 2.5), ("1", 1), (True, "True"), (float("inf"), "b")])
def test_other_labels_are_not_noted(labels):
    rows = [Row({"text": f"t{n}", "label": label}, "here") for n, label in enumerate(labels)]
    assert not notices(rows, Config())


def parquet_with(path, name: str, column) -> None:
    texts = pyarrow.array([f"t{n}" for n in range(len(column))], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([texts, column], names=["text", name]), path)


def test_a_text_of_a_parquet_that_is_no_utf8_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH", 2)
    offsets, bytes_of = np.arange(6, dtype=np.int32).tobytes(), b"abc\xffd"
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 5, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(bytes_of)]
    )
    parquet_with(tmp_path / "d.parquet", "label", column)
    check_message(
        refusal(read_rows, str(tmp_path / "d.parquet")),
        "d.parquet:4 has a value in the column 'label' that cannot be read ('utf-8'",
        "fix it, or remove the column",
    )
    bad: list[str] = []
    rows = files.read_file(tmp_path / "d.parquet", lambda error: bad.append(str(error)))
    assert [row.values["label"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[-1].origin.endswith("d.parquet:5")
    assert len(bad) == 1


def test_a_column_of_an_unknown_time_zone_is_named(tmp_path):
    times = pyarrow.array([10**15], pyarrow.timestamp("us", tz="Mars/Base"))
    parquet_with(tmp_path / "d.parquet", "when", times)
    part = "d.parquet:1 has a value in the column 'when' that cannot be read ("
    assert part in refusal(read_rows, str(tmp_path / "d.parquet"))


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "d.csv").write_text("text,label,label\nx,y,z\n")
    check_message(
        refusal(read_rows, str(tmp_path / "d.csv")), "d.csv:1 has 2 columns named 'label'", "rename"
    )
    parquet_with(tmp_path / "d.parquet", "text", pyarrow.array(["a"]))
    check_message(refusal(read_rows, str(tmp_path / "d.parquet")), "has 2 columns named 'text'", "rename all")
    (tmp_path / "e.csv").write_text("text,label,,\nx,y,,\n")  # as spreadsheets write empty columns
    assert read_rows(str(tmp_path / "e.csv"))[0].values == {"text": "x", "label": "y", "": ""}


def circular() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


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


def test_columns_for_a_collate_function_that_json_cannot_hold_are_refused():
    rows = [Row({"label": "b", "more": circular()}, "d:1")]
    message = refusal(tabulate, "d", rows, Config(task_type="tests.support.vision:of_nested"), print)
    assert message.startswith("d:1 has a value that JSON cannot hold (")


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
    ("card", "parts"),
    [
        (CARD.replace("names:", "names: ["), ("has a data set card that cannot be read", "fix it")),
        (
            "---\ndataset_info:\n"
            + "".join(
                f"- config_name: {name}\n  features:\n  - name: label\n    dtype:\n      class_label:\n"
                f"        names: {{'0': {name}}}\n"
                for name in ("a", "b")
            )
            + "---\n",
            ("name the classes of label differently", "keep the one of these files"),
        ),
    ],
)
def test_a_card_that_does_not_say_the_names_of_classes_is_refused(tmp_path, card, parts):
    (tmp_path / "README.md").write_text(card)
    write_rows(tmp_path / "rows.csv", [{"text": "a", "label": 0}])
    check_message(refusal(read_rows, str(tmp_path)), str(tmp_path), *parts)


def test_metadata_of_a_parquet_file_that_cannot_be_read_is_refused(tmp_path):
    table = pyarrow.table({"text": ["a"]}).replace_schema_metadata({"huggingface": "{"})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    check_message(
        refusal(read_rows, str(tmp_path)), "rows.parquet has metadata of datasets", "write the file again"
    )


def test_numbers_as_names_of_classes_do_not_become_examples_in_silence():
    rows = [Row({"text": f"t{i}", "label": i % 2}, f"d:{i}") for i in range(4)]
    (line,) = notices(rows, Config(label_names="names"))
    check_message(line, "label_names=names", "2 of 2 classes of d have no word as a name (0, 1)", "JSON file")


def test_rows_that_differ_in_spaces_alone_are_noted():
    rows = [Row({"text": text, "label": "a"}, "d:1") for text in ("caf\u00e9 x", "cafe\u0301  x\r\n", "b")]
    assert notices(rows, Config()) == [
        "1 of 3 rows equal another one but for spaces or Unicode form; remove them"
    ]


def notices(rows, config, name: str = "d") -> list[str]:
    found: list[str] = []
    tabulate(name, rows, config, found.append)
    return found


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
    lines = notices([Row(row, "d:1")], CAUSAL)
    assert len(lines) == named
    if named:
        check_message(lines[0], "texts in history of d are not read", "write each value as one text")
        (line,) = notices([Row({**row, "context": "c"}, "d:1")], CAUSAL)
        check_message(line, "texts in context, history of d", "--prompt_template 'Q: {context} {input}")


def named_classes() -> datasets.Dataset:
    classes = datasets.ClassLabel(names=["no", "yes"])
    return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}).cast_column("label", classes)


def test_examples_of_a_data_set_have_class_names():
    adapted = fmmeta.adapt("tiny", named_classes(), inner_steps=1, early_stopping=False)
    assert adapted.labels == ("no", "yes")


def test_hub_rows_carry_class_names(monkeypatch):
    asked, part = [], named_classes()
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: asked.append((*a, kw)) or part)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    rows = read_rows("owner/set", "english")
    assert asked == [("owner/set", "english", {"split": "train", "revision": None})]  # no test split
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
        f"dataset={tmp_path} has the file",
        "no name in UTF-8",
        "rename it",
    )


def test_pairs_read_as_texts_are_told_the_task_type():
    rows = [Row({"task": "t", "input": "a", "output": "b"}, "line 1")]
    check_message(
        refusal(tabulate, "pairs.jsonl", rows, Config(), print),
        "dataset=pairs.jsonl",
        "--text_column",
        "use --task_type causal_lm",
    )


CAUSAL = Config(task_type="causal_lm")


def options_in(table: Table) -> list[list[str] | None]:
    return [row.get("options") for row in table.rows(CausalLearner)]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"output": ""}, ("output=''", "fix the row")),
        ({"output": " \n"}, ("the answer ' \\n'", "fix the row")),
        ({"options": "yes or no"}, ("options='yes or no'", "no list of texts", "leave it out")),
        ({"options": {"yes": 1}}, ("options={'yes': 1}", "no list of texts")),
        ({"options": ["yes", 3]}, ("options=['yes', 3]", "no list of texts")),
        ({"options": ["yes", " "]}, ("no list of texts",)),
        (
            {"options": ["yes", "\ud800"]},
            ("has half of a surrogate pair (\\ud800) in options", "fix the row"),
        ),
        ({"options": ["yes", "yes"]}, ("two or more", "'yes' among them")),
        ({"options": ["no", "maybe"]}, ("'yes' among them", "add it")),
    ],
)
def test_answers_and_options_that_cannot_be_used_are_refused(values, parts):
    rows = [Row({"input": "q", "output": "yes", "options": ["yes", "no"]}, "d.jsonl:1")]
    rows.append(Row({"input": "r", "output": "yes", **values}, "d.jsonl:2"))
    check_message(refusal(tabulate, "d", rows, CAUSAL, print, one_task=True), "d.jsonl:2 has", *parts)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_options_are_read_from_files(tmp_path, ending):
    given = [
        {"input": "q", "output": "yes", "options": ["no", "yes", "no"]},
        {"input": "r", "output": "a", "options": ["a", "b"]},
        {"input": "s", "output": "free", "options": []},  # as MetaICL writes tasks without options
        {"input": "t", "output": "free", "options": None},
    ]
    path = write_rows(tmp_path / f"d{ending}", given)
    table = tabulate("d", read_rows(str(path)), CAUSAL, print, one_task=True)
    assert options_in(table) == [["no", "yes"], ["a", "b"], None, None]
    rows = [Row({"input": "q", "output": "yes"}, "d.jsonl:1")]
    assert options_in(tabulate("d", rows, CAUSAL, print, one_task=True)) == [None]


def test_columns_are_found_in_upper_and_lower_case():
    rows = [Row({"TEXT": "x", "Label": "a", "Category": "news", "label ": "b"}, "here")]
    for config in (Config(), Config(text_column="Text", label_column="LABEL")):
        table = tabulate("d", rows, config, lambda text: None)
        assert (table.input, table.target, table.stratum) == (["x"], ["a"], ["news"])
    rows = [Row({"Text": "x", "text": "y", "label": "a"}, "here")]
    assert tabulate("d", rows, Config(), print).input == ["y"]
    rows = [Row({"Question": "q", "Answer": "yes", "Options": ["yes", "no"]}, "here")]
    assert options_in(tabulate("d", rows, CAUSAL, print, one_task=True)) == [["yes", "no"]]


def test_two_sentences_are_one_text(tmp_path):
    rows = [Row({"sentence1": "a b", "sentence2": one, "label": "x"}, "d:1") for one in ("c", None)]
    assert tabulate("d", rows[:1], Config(), print).input == ["a b [SEP] c"]
    check_message(refusal(tabulate, "d", rows, Config(), print), "d:1 has sentence2=None", "fix the row")
    config = Config(text_column="sentence1")
    assert tabulate("d", rows[:1], config, lambda text: None).input == ["a b"]


TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS]


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
    config = Config(task_type="causal_lm", prompt_template="chat")
    written = [write_rows(tmp_path / f"rows{end}", [values]) for end in (".jsonl", ".parquet")]
    given = [[Row(values, "d:1")], *(read_rows(str(path)) for path in written)]
    for rows in [*given, hub.hub_rows("d", datasets.Dataset.from_list([values]))]:
        table = tabulate("d", list(rows), config, print, one_task=True)
        assert table.input == [
            '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
            ' {"role": "user", "content": "c"}]'
        ]
        assert (table.target, table.values) == (["d"], ["{}"])


@pytest.mark.parametrize("column", ["messages", "Conversations"])
def test_conversations_may_be_the_text_of_a_json_list(tmp_path, column):
    config = Config(task_type="causal_lm", prompt_template="chat")
    for values in ({}, {"completion": "d"}):
        lists, texts = ([{**values, column: one}] for one in (MESSAGES, json.dumps(MESSAGES)))
        rows = read_rows(str(write_rows(tmp_path / "rows.csv", texts)))
        wanted = tabulate("d", [Row(lists[0], "d:1")], config, print, one_task=True)
        assert wanted.target == ["d"]
        assert tabulate("d", list(rows), config, print, one_task=True) == wanted
        asked = stored_by(CausalLearner, config, texts[0], answered=False)
        assert asked == {"input": wanted.input[0]}


def test_a_single_turn_is_a_text():
    rows = [Row({"messages": MESSAGES[:2]}, "d:1"), Row({"messages": SHARED[:2]}, "d:2")]
    table = tabulate("d", rows, CAUSAL, lambda text: None, one_task=True)
    assert (table.input, table.target) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("values", "template", "parts"),
    [
        ({"messages": MESSAGES}, "plain", ("d:1 has several turns in messages", "--prompt_template chat")),
        ({"messages": MESSAGES[:1]}, "chat", ("no turn of an assistant in messages", "add the answer")),
        ({"messages": MESSAGES[1:2]}, "chat", ("d:1 has messages=''", "no text", "fix the row")),
        *(
            ({"messages": text}, "chat", ("d:1 has messages=", "no list of turns", "write"))
            for text in ("a", str(MESSAGES), json.dumps(MESSAGES)[:-1], "[]", "[" * 99_999)
        ),
        ({"messages": [{"role": "user"}]}, "chat", ("d:1 has messages=", "no text", "fix the row")),
        ({"prompt": "a", "completion": []}, "chat", ("d:1 has completion=[]", "no text", "fix the row")),
        ({"messages": [*MESSAGES[:3], {"role": "assistant", "content": ""}]}, "chat", ("''", "fix the row")),
    ],
)
def test_conversations_that_cannot_be_learned_are_refused(values, template, parts):
    config = Config(task_type="causal_lm", prompt_template=template)
    check_message(refusal(tabulate, "d", [Row(values, "d:1")], config, print, one_task=True), *parts)


def test_all_of_several_answers_are_right():
    rows = [Row({"question": "q", "answers": ["yes", "yes", "sure"]}, "d:1")]
    rows.append(Row({"question": "r", "answers": ["no"]}, "d:2"))
    table = tabulate("d", rows, CAUSAL, print, one_task=True)
    assert table.target == ["yes", "no"]
    assert [row.get("answers") for row in table.rows(CausalLearner)] == [["yes", "sure"], None]
    rows[0].values["options"] = ["sure", "never"]
    assert options_in(tabulate("d", rows, CAUSAL, print, one_task=True)) == [["sure", "never"], None]


def test_inputs_of_predict_are_those_of_training():
    chat = Config(task_type="causal_lm", prompt_template="chat")
    asked = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
    asked += ' {"role": "user", "content": "c"}]'
    for turns in (MESSAGES, MESSAGES[:3]):
        assert stored_by(CausalLearner, chat, {"Messages": turns}, answered=False) == {"input": asked}
    pair = {"Sentence1": "a", "sentence2": "b"}
    for config, text in ((Config(), "a [SEP] b"), (Config(text_column="sentence1"), "a")):
        assert stored_by(NativeClassifier, config, pair, answered=False) == {"text": text}
