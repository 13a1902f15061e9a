"""Splits: from a file, from the data folder's own file, or by a hash; and which classes and rows a model was
trained on: stored with it, held to by later commands, and never tested unnoticed.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation.command import adapt
from fmmeta.common.progress import Progress, Warn
from fmmeta.evaluation import command
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig, TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.data import splits
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.data.rows import IN_MEMORY, rows_in_memory
from fmmeta.tasks.data.splits import UsedSplits, check_splits, own_splits, read_splits
from fmmeta.tasks.sources.load import Sources, load_sources
from tests.support.helpers import recorded, write_rows
from tests.support.messages import check_message, check_text, refusal
from tests.support.models import WORDS, with_settings, write_classes, write_pairs

FIVE = {
    "01": {"train": ["a"], "valid": ["b"], "test": ["c"]},
    "02": {"train": ["c"], "valid": ["a"], "test": ["b"]},
}


HUB = ("other", "data")
FORM = 'write {"train": [...], "valid": [...]'


def config_for(path, **settings) -> Config:
    return Config(dataset=["data"], class_splits=str(path), **settings)


def written(tmp_path, value) -> str:
    path = tmp_path / "splits.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


@pytest.mark.parametrize(
    ("value", "settings", "train"),
    [
        (FIVE, {}, ["a"]),
        (FIVE, {"class_split": "02"}, ["c"]),
        ({"train": [1, 2], "test": []}, {}, ["1", "2"]),
        # the data set of a model with several is found by its hub name
        ({"datasets": [{"dataset": f"me/{one}", "splits": {"train": [one]}} for one in HUB]}, {}, ["data"]),
    ],
)
def test_the_chosen_split_is_read(tmp_path, value, settings, train):
    path = written(tmp_path, value)
    found = read_splits("me/data", config_for(path, **settings), False, pytest.fail)
    assert found is not None
    assert found["train"] == train


@pytest.mark.parametrize(("file", "named_tasks"), [("class_splits", False), ("task_splits", True)])
def test_the_split_file_of_the_data_folder_is_read(tmp_path, file, named_tasks):
    (tmp_path / f"{file}.json").write_text(json.dumps({"train": ["a"]}))
    notices: list[str] = []
    given = str(tmp_path), Config(dataset=[str(tmp_path)])
    assert read_splits(*given, named_tasks, notices.append) == {"train": ["a"]}
    assert notices == [f"{file}: {tmp_path / file}.json"]
    assert read_splits(*given, not named_tasks, notices.append) is None


@pytest.mark.parametrize(
    ("value", "settings", "parts"),
    [
        (FIVE, {"class_split": "07"}, ["class_split=07", "it has 01, 02"]),
        (FIVE["01"], {"class_split": "01"}, ["class_split=01", "or leave it out"]),
        *(
            (value, {}, ["class_splits=FILE", FORM])
            for value in ([1], {}, {"01": {"test": ["a"]}}, {"train": "abc"})
        ),
        (
            {"train": ["a"], "validation": ["b"], "test": ["c"]},
            {},
            ["class_splits=FILE", "names a split 'validation'", "use train, valid or test"],
        ),
        ("{train", {}, ["class_splits=FILE", "; fix it, or give a JSON file"]),
        (None, {}, ["class_splits=FILE", "give a JSON file"]),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, value, settings, parts):
    path = tmp_path / "none.json" if value is None else written(tmp_path, value)
    message = refusal(read_splits, "data", config_for(path, **settings), False, print)
    check_message(message.replace(str(path), "FILE"), *parts)


@pytest.mark.parametrize(
    ("given", "other"), [("class_splits", "task_splits"), ("task_splits", "class_splits")]
)
def test_the_other_kind_of_splits_is_refused(tmp_path, given, other):
    path = written(tmp_path, FIVE)
    config = Config(dataset=["data"], **{given: path})
    check_message(
        refusal(read_splits, "data", config, given == "class_splits", print),
        f"{given}={path}",
        "dataset=data",
        f"use --{other}",
    )


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        ({"train": ["a"], "valid": ["x"]}, ("'x'", "the valid split names the", "fix the split file")),
        ({"train": ["a", "b"], "test": ["b"]}, ("the class 'b' is in the train", "list it once")),
    ],
)
def test_members_must_exist_and_be_in_one_split(splits, parts):
    strata = {"a": "s", "b": "s"}
    check_splits({"train": ["a"], "test": ["b"]}, strata, "class")
    check_message(refusal(check_splits, splits, strata, "class"), *parts)


@given(st.sets(st.text(min_size=1), min_size=1, max_size=40), st.integers(1, 6))
def test_hash_splits_assign_every_member(names, least):
    notices: list[str] = []
    splits = own_splits(dict.fromkeys(sorted(names), "s"), least, notices.append)
    members = [member for part in splits.values() for member in part]
    assert sorted(members) == sorted(names)
    assert splits == own_splits(dict.fromkeys(sorted(names, reverse=True), "s"), least, notices.append)
    if len(names) < 3 * least:
        assert list(splits) == ["train"]
        assert "too few to hold out" in notices[0]
    else:
        tested = max(least, len(names) // 5)
        validated = tested if len(names) >= 4 * least else 0
        trained = len(names) - tested - validated
        assert [len(splits[name]) for name in ("train", "valid", "test")] == [trained, validated, tested]
        assert f"{trained} train, {validated} valid, {tested} test" in notices[0]
        assert trained >= tested + validated


@pytest.mark.parametrize(
    ("settings", "splits", "parts"),
    [
        ({"n_way": 12}, {}, ("20 classes", "n_way=12 to 6 or less", "more classes")),
        (
            {"n_way": 2},
            {"train": [f"c{i}" for i in range(20)], "test": []},
            ("give more classes", "file of splits"),
        ),
        ({"n_way": 12, "test_episodes": 0}, {}, ()),
        ({"n_way": 6}, {}, ()),
    ],
)
def test_a_run_that_will_have_no_table_is_warned_before(tmp_path, settings, splits, parts):
    rows = [{"text": f"text {i}", "label": f"c{i % 20}"} for i in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    file = {"class_splits": written(tmp_path, splits)} if splits else {}
    config, said = Config(dataset=[str(data)], k_shot=1, num_query=1, **settings, **file), list[str]()
    load_sources(config, byte_tokenizer(), said.append)
    found = [line for line in said if isinstance(line, Warn) and "without a table" in line]
    assert len(found) == bool(parts)
    for line in found:
        check_message(line, f"dataset={data}", *parts)


QUICK = {
    "k_shot": 1,
    "num_query": 1,
    "inner_steps": 1,
    "outer_steps": 1,
    "meta_batch_size": 1,
    "eval_episodes": 0,
    "save_steps": 0,
}
ASKED = {"k_shot": [1], "num_query": 1, "episodes": 12}

SAME_SPLITS = "{}: the splits that the model was trained with"


def train(folder: Path, model: Path | str, data: Path, **settings) -> Path:
    given = {"model_name_or_path": str(model), "dataset": [str(data)], "output_dir": str(folder)}
    return MetaTrainer(Config(**{**QUICK, **given, **settings})).train().output_dir / "model"


@pytest.fixture(scope="module")
def model(bert, classes, tmp_path_factory):
    """Trained on 9 of 15 classes: n_way=3 holds 3 out twice, where 4 or more would hold out others."""
    return train(tmp_path_factory.mktemp("run"), bert, classes, n_way=3)


def stored_info(model: Path) -> dict:
    return json.loads((model / "fmmeta.json").read_text())


def splits_at(data: Path, n_way: int) -> dict[str, list[str]]:
    """Class names by part as a plain run with this n_way has them."""
    config = Config(dataset=[str(data)], n_way=n_way, k_shot=1, num_query=1)
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    parts = {part: getattr(sources, part) for part in ("train", "valid", "test")}
    return {part: [*source.items.names] for part, source in parts.items() if source}


def drawn(model: Path, data: Path, **settings) -> set[str]:
    """The classes of the episodes of an evaluation."""
    asked = EvaluateConfig(model_name_or_path=str(model), dataset=[str(data)], **ASKED, **settings)
    return classes_of(episodes_of(asked, 1, byte_tokenizer()), settings["n_way"] == "all")


def classes_of(episodes, whole=False) -> set[str]:
    found = [{*draw.classes} for draw in episodes.draws()]
    assert not whole or found == [found[0]] * len(found)  # each episode has all of them
    return set().union(*found)


def tune_on(model: Path, data: Path, n_way: str) -> None:
    asked = {"dataset": [str(data)], "n_way": n_way, "inner_lrs": [0.1], "max_steps": 1, **ASKED}
    tune(TuneConfig(model_name_or_path=str(model), **asked), progress=Progress(False))


def test_the_parts_are_stored_with_the_model(model, classes):
    (one,) = stored_info(model)["datasets"]
    assert (one["dataset"], one["noun"]) == ("rows.jsonl", "class")  # where it lay is no part of a model
    for part, names in splits_at(classes, 3).items():
        assert sorted(one["splits"][part]) == sorted(names)


@pytest.mark.parametrize(
    ("n_way", "part"), [("2", "test"), ("all", "test"), ("all", "valid"), ("3", "train")]
)
def test_evaluation_keeps_the_splits_of_the_model(model, bert, classes, n_way, part):
    assert drawn(model, classes, n_way=n_way, eval_split=part) == set(splits_at(classes, 3)[part])


def test_more_classes_than_were_held_out_are_refused_and_not_taken_from_the_trained_ones(
    model, bert, classes
):
    wide = {"dataset": str(classes), "n_way": "5", "k_shot": 1, "num_query": 1, "episodes": 2}
    shared = {*splits_at(classes, 5)["test"]} & {*splits_at(classes, 3)["valid"]}
    assert len(shared) == 2
    check_message(refusal(fmmeta.evaluate, model, **wide), "n_way=5", "3 classes", "lower n_way")
    assert fmmeta.evaluate(bert, **wide)["episodes"] == 2
    assert "above the 3 classes of the valid split" in refusal(tune_on, model, classes, "5")


def test_tune_chooses_on_the_models_own_validation_classes(model, classes, tmp_path, monkeypatch):
    folder = shutil.copytree(model, tmp_path / "model")
    calls = recorded(monkeypatch, command, "episodes_of")
    tune_on(folder, classes, "2")
    assert classes_of(calls[0].result) == set(splits_at(classes, 3)["valid"])
    assert stored_info(folder)["datasets"] == stored_info(model)["datasets"]


def test_test_classes_that_were_tuned_on_are_named(bert, classes, tmp_path, capsys):
    """A plain model has no splits; those by hash depend on n_way."""
    folder = shutil.copytree(bert, tmp_path / "model")
    few = {"k_shot": 1, "num_query": 1, "episodes": 2}
    tune_on(folder, classes, "3")
    for n_way, split, shared in ((3, "test", 0), (3, "valid", 0), (5, "test", 2)):
        capsys.readouterr()
        fmmeta.evaluate(folder, classes, n_way=n_way, eval_split=split, quiet=False, **few)
        lines = [line for line in "".join(capsys.readouterr()).splitlines() if "fmmeta tune chose" in line]
        assert len(lines) == (shared > 0)
    check_message(lines[0], "dataset=rows.jsonl", f"{shared} of 5 test classes", "--class_splits")


def test_both_models_of_a_comparison_get_the_same_held_out_classes(model, bert, classes, capsys):
    settings = {"n_way": "all", "k_shot": 1, "num_query": 1, "episodes": 2}
    for first, second in ((bert, model), (model, bert)):
        found = fmmeta.evaluate(first, str(classes), compare=str(second), **settings)
        assert found["compare"]["cells"]
        assert found["cells"][0]["scores"][0]["stratum"] is not None
    alone = fmmeta.evaluate(model, str(classes), **settings)
    assert found["cells"][0]["episodes_fingerprint"] == alone["cells"][0]["episodes_fingerprint"]


def log_lines(model: Path, data: Path, **settings) -> list[str]:
    found: list[str] = []
    config = Config(dataset=[str(data)], model_name_or_path=str(model), k_shot=1, num_query=1, **settings)
    load_sources(config, byte_tokenizer(), found.append, splits.read_used_splits(stored_info(model)))
    return found


def test_other_splits_that_test_trained_classes_are_named(model, classes, tmp_path):
    mine = splits_at(classes, 3)
    names = sorted(mine["train"])
    changed = {"train": mine["valid"], "valid": names[:6], "test": [*mine["test"], names[6]]}
    file = written(tmp_path, changed)
    found = log_lines(model, classes, n_way=2, class_splits=file)
    found = [line for line in found if "in no split" not in line]
    counts = f"6 of 6 valid classes ({', '.join(names[:5])} and 1 more)", f"1 of 4 test classes ({names[6]})"
    for line, count in zip(found, counts, strict=True):
        check_message(line, f"class_splits={file}", count, "dataset=rows.jsonl", "leave class_splits and")
    assert log_lines(model, classes, n_way=3) == [SAME_SPLITS.format("rows.jsonl")]


def test_held_out_classes_with_names_that_were_trained_on_with_other_data_are_named(model, classes, tmp_path):
    """The same data under another name, after a change; names that are numbers say nothing."""
    trained = sorted(splits_at(classes, 3)["train"])[:2]
    names = [*trained, "7", "new", "other"]
    rows = [{"text": f"{name} {i}", "label": name} for name in names for i in range(4)]
    other = write_rows(tmp_path / "other.jsonl", rows)
    file = written(tmp_path, {"train": names[3:], "test": names[:3]})
    (line,) = log_lines(model, other, n_way=2, class_splits=file)
    shown = f"2 of 3 test classes ({', '.join(trained)}) have the names of classes"
    check_message(line, f"class_splits={file}", shown, "dataset=rows.jsonl", "hold out others")


def test_fmmeta_json_is_a_split_file(model, bert, classes):
    """So that a model that was not trained on the data is tested on the same classes."""
    splits_file = str(model / "fmmeta.json")
    assert drawn(bert, classes, n_way="all", class_splits=splits_file) == set(splits_at(classes, 3)["test"])
    config = Config(dataset=["letters"], class_splits=splits_file)
    assert "its own splits" in refusal(load_sources, config, byte_tokenizer(), print)
    assert stored_info(model)["datasets"][0]["content"]


def test_a_split_of_several_is_stored_without_its_name(bert, classes, tmp_path):
    """Where the folder has several splits, the first one is not what the model was trained with."""
    data, names = tmp_path / "data", [f"c{i}" for i in range(15)]
    data.mkdir()
    shutil.copy(classes, data / "rows.jsonl")
    both = {
        name: {"train": order[:7], "valid": order[7:11], "test": order[11:]}
        for name, order in (("01", names), ("02", names[::-1]))
    }
    (data / "class_splits.json").write_text(json.dumps(both))
    model = train(tmp_path / "run", bert, data, class_split="02", n_way=3)
    assert drawn(model, data, n_way="all") == set(both["02"]["test"])


def test_changed_data_are_recognized_by_name(model, classes, tmp_path):
    moved = shutil.copy(classes, tmp_path / "moved.jsonl")
    assert log_lines(model, moved, n_way=3) == [SAME_SPLITS.format("moved.jsonl")]
    more, row = tmp_path / "rows.jsonl", json.loads(classes.read_text().splitlines()[0])
    more.write_text(classes.read_text() + json.dumps({**row, "text": "one more"}) + "\n")  # the same classes
    assert SAME_SPLITS.format("rows.jsonl") in log_lines(model, more, n_way=3)
    write_classes(more, classes=13, rows=8)
    said = "\n".join(log_lines(model, more, n_way=3))
    check_text(said, "no split file: 7 train, 3 valid, 3 test", "were trained on with dataset=rows.jsonl")


NOTHING = {"dataset": "x", "content": "", "noun": "class", "digest": "", "trained": 1}


@pytest.mark.parametrize(
    "broken",
    [
        *({"datasets": datasets} for datasets in (1, [1], [{"dataset": "x"}], [{**NOTHING, "dataset": 1}])),
        {"datasets": [{**NOTHING, "splits": {"train": "abc"}}]},
        {"datasets": [{**NOTHING, "held_out": "1"}]},
        [],
    ],
)
def test_damaged_stored_classes_are_refused(bert, tmp_path, broken):
    folder = with_settings(bert, tmp_path / "model")
    (folder / "fmmeta.json").write_text(json.dumps(broken))
    check_message(
        refusal(fmmeta.evaluate, folder, "letters"), f"model_name_or_path={folder}", "fix or replace it"
    )


def test_classes_of_earlier_training_stay_stored(model, classes, tmp_path):
    other = write_classes(tmp_path / "other.jsonl", classes=12)
    second = train(tmp_path / "second", model, other, n_way=2)
    stored = [stored_info(one)["datasets"] for one in (model, second)]
    assert [one["dataset"] for one in stored[1]] == ["rows.jsonl", "other.jsonl"]
    again = train(tmp_path / "again", second, classes, n_way=2)  # the same splits
    untrained = train(tmp_path / "none", model, other, n_way=2, algorithm="none")
    assert [stored_info(one)["datasets"] for one in (untrained, again)] == stored


def test_adapt_names_the_classes_and_rows_that_were_trained_on(model, classes, tmp_path, capsys, terminal):
    """Rows that it meets again too; not where neither is known."""
    mine, rows = splits_at(classes, 3), [json.loads(line) for line in classes.read_text().splitlines()]
    known = [(row["text"], f"new {row['label']}") for row in rows if row["label"] in mine["train"][:2]]
    pairs = [(f"{name} {i}", name) for name in (mine["train"][0], mine["test"][0]) for i in range(3)]

    def said(*data, output_dir=None):
        given = {"model_name_or_path": str(model), "output_dir": output_dir, "early_stopping": False}
        adapt(AdaptConfig(**given), Progress(True), *data)
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if "by their contents" in line or "support: " in line]

    (line,) = said(pairs, output_dir=str(tmp_path / "out"))
    check_message(line, f"1 of 2 classes ({mine['train'][0]})", "dataset=rows.jsonl", "new classes")
    assert stored_info(tmp_path / "out")["datasets"] == stored_info(model)["datasets"]
    assert said([(text, f"new {label}") for text, label in pairs]) == []
    support, query, again = said(known, [(f"{text} ", label) for text, label in known[:2]])
    all_of_them = f"support: {len(known)} of {len(known)} rows"
    check_message(support, all_of_them, "dataset=rows.jsonl", "leave them out")
    assert " query:" in query
    check_message(again, " query:", "2 rows of 2 are in the support set too", "leave them out")


TEXTS = [f"caf\u00e9 {word}\nand {number}" for word in WORDS[:12] for number in range(4)]
ROWS = [{"id": i, "text": text, "label": f"c{i // 4}"} for i, text in enumerate(TEXTS)]
RENAMED = [{**row, "id": f"n{row['id']}", "label": f"new {row['label']}"} for row in reversed(ROWS)]


def loaded(dataset, trained=(), given=None, **settings) -> tuple[Sources, list[str]]:
    """The sources of a run, and what it says about rows that it has in two splits or was trained on."""
    config = Config(dataset=list(map(str, dataset)), **{"n_way": 2, "k_shot": 1, "num_query": 1, **settings})
    tokenizer = ImageReader({}) if "image_column" in settings else byte_tokenizer()
    rows = None if given is None else rows_in_memory(given, config)
    said: list[str] = []
    sources = load_sources(config, tokenizer, said.append, read_back(trained), rows)
    return sources, [line for line in said if "by their contents" in line]


def read_back(used) -> list[UsedSplits]:
    """As a later command reads them."""
    return splits.read_used_splits(json.loads(json.dumps({"datasets": [one.as_dict() for one in used]})))


@pytest.mark.parametrize("form", ["csv", "parquet", "crlf", "nfd", "spaces", "hub", "rows", "pairs", "tasks"])
def test_trained_rows_are_found_by_their_contents_in_every_form(tmp_path, monkeypatch, form):
    """Under other names of classes and ids, in another file and order: of 8 trained classes, those that the
    other names put into held-out splits.
    """
    trained = loaded([write_rows(tmp_path / "first.jsonl", ROWS)])[0].used
    change = {
        "crlf": lambda text: text.replace("\n", "\r\n"),
        "nfd": lambda text: unicodedata.normalize("NFD", text),
        "spaces": lambda text: f"\u00a0 {text}\t ",
    }.get(form, str)
    rows, given, dataset = [{**row, "text": change(row["text"])} for row in RENAMED], None, IN_MEMORY
    if form == "tasks":  # of two classes each
        rows = [{**row, "label": "ab"[i % 2], "task": row["label"]} for i, row in enumerate(rows)]
    if form == "rows":
        given = rows
    elif form == "pairs":
        given = [(row["text"], row["label"]) for row in rows]
    elif form == "hub":
        part, dataset = datasets.Dataset.from_list(rows), "acme/other"
        monkeypatch.setattr("fmmeta.tasks.sources.load.open_hub", lambda *_: part)
    else:
        dataset = write_rows(tmp_path / f"other.{form if form in ('csv', 'parquet') else 'jsonl'}", rows)
    sources, said = loaded([dataset], trained, given)
    before, found = {row["text"] for row in ROWS if row["label"] in trained[0].trained_names("class")}, []
    for split in ("valid", "test"):
        here = [row for row in RENAMED if row["label"] in (sources.used[0].splits or {})[split]]
        if known := sum(row["text"] in before for row in here):
            found.append(f"{split} split: {known} of {len(here)} rows")
    assert found
    assert [one for one, line in zip(found, said, strict=True) if one in line] == found


def test_the_same_data_in_another_form_keep_the_splits_of_the_model(tmp_path):
    first, _ = loaded([write_rows(tmp_path / "first.jsonl", ROWS)], n_way=3)
    other = write_rows(tmp_path / "other.csv", [{**row, "id": -1} for row in reversed(ROWS)])
    again, said = loaded([other], first.used, n_way=2)
    assert (again.used[0].splits, said) == (first.used[0].splits, [])


def test_rows_of_two_splits_of_one_run_are_found(tmp_path):
    """In one data set, in another one of a mixture, and in task files."""
    names, tasks = sorted({row["label"] for row in ROWS}), tmp_path / "tasks"
    file = written(tmp_path, {"train": names[:8], "valid": names[8:10], "test": names[10:]})
    again = [
        {"id": 0, "text": f" {ROWS[row]['text']}", "label": name} for row, name in ((0, "c9"), (36, "c8"))
    ]
    (line,) = loaded([write_rows(tmp_path / "one.jsonl", ROWS + again)], class_splits=file)[1]
    check_message(line, "dataset=one.jsonl: 1 of 9 rows of the test split (c9)", "leave them out of one")
    both = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", ROWS), ("b", RENAMED))]
    assert {line.split(":")[0] for line in loaded(both)[1]} == {"dataset=a.jsonl", "dataset=b.jsonl"}
    (tasks / "s").mkdir(parents=True)

    def said_of(input_of, answer_of):
        """The notices about five task files with the same four pairs, in turn in reverse order."""
        for number in range(5):
            pairs = [{"input": input_of(row["text"], number), "output": answer_of(row)} for row in ROWS[:4]]
            write_rows(tasks / "s" / f"t{number}.csv", pairs[:: -1 if number % 2 else 1])
        return loaded([tasks], task_type="causal_lm")[1]

    said = said_of(lambda text, number: text, lambda row: row["label"])
    assert [line.partition(": ")[2].split("/")[0] for line in said] == [
        f"4 of 4 rows of the {split} split (s" for split in ("valid", "test")
    ]
    assert said_of(lambda text, number: f"{text} {number}", lambda row: "no") == []


def bmp(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def test_images_are_found_by_their_pixels(tmp_path):
    """A path, the bytes of a file of another format, and an array."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 3), np.uint8)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "label": f"c{number // 4}"} for number in range(24)]
    file = written(tmp_path, {"train": ["c4", "c5"]})
    settings: dict[str, Any] = {"image_column": "image", "class_splits": file}
    trained = loaded([write_rows(tmp_path / "first.csv", rows)], **settings)[0].used
    names = [f"new {number}" for number in range(6)]
    written(tmp_path, {"train": names[:2], "valid": names[2:4], "test": names[4:]})
    for form in (np.asarray, bmp, Image.fromarray):
        given = [{"image": form(one), "label": names[number // 4]} for number, one in enumerate(pixels)]
        (line,) = loaded([IN_MEMORY], trained, given, **settings)[1]
        assert "test split: 8 of 8 rows (new 4, new 5)" in line, form


def test_a_sample_of_very_many_trained_rows_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "MOST_ROWS", 16)
    trained = loaded([write_rows(tmp_path / "first.jsonl", ROWS)])[0].used
    assert len(str(trained[0].rows)) == 172  # base64 of 128 bytes
    said = " ".join(loaded([IN_MEMORY], trained, RENAMED)[1])
    found = [(int(known), int(count)) for known, count in re.findall(r"(\d+) of (\d+) rows?", said)]
    assert found
    assert all(1 <= known <= count < 8 for known, count in found)


def test_of_very_many_names_a_digest_and_the_rule_are_stored(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "MOST_NAMES", 14)
    strata = {f"c{i}": "s" for i in range(15)}
    own = {"train": [f"c{i}" for i in range(9)], "valid": ["c9", "c10", "c11"], "test": ["c12", "c13", "c14"]}
    of_file = UsedSplits.of(str(classes), "digest", "class", own, None, {})
    assert of_file.splits is None
    assert of_file.restored("digest", "rows.jsonl", "class", strata) is None
    settings = {"dataset": [str(classes)], "k_shot": 1, "num_query": 1}
    first = load_sources(Config(**settings, n_way=3), byte_tokenizer(), lambda text: None)
    assert '"c1"' not in json.dumps([one.as_dict() for one in first.used])
    later = load_sources(Config(**settings, n_way=2), byte_tokenizer(), lambda text: None, first.used)
    assert later.used == first.used
    file, messages = written(tmp_path, own), list[str]()
    config = Config(**settings, n_way=2, class_splits=file)
    load_sources(config, byte_tokenizer(), messages.append, first.used)
    *rows, line = messages
    assert all("are rows that the model was trained on" in one for one in rows)
    check_message(line, f"class_splits={file}", "9 classes of dataset=rows.jsonl", "leave class_splits")


def test_named_tasks_are_stored_too(llama, tmp_path):
    tasks = tmp_path / "tasks"
    (tasks / "s").mkdir(parents=True)
    for i in range(6):
        write_pairs(tasks / "s" / f"t{i}.jsonl", tasks=1)
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    for data, names in ((pairs, [f"t{i}" for i in range(9)]), (tasks, [f"s/t{i}" for i in range(6)])):
        model = train(tmp_path / f"run-{data.stem}", llama, data, task_type="causal_lm")
        used = splits.read_used_splits(stored_info(model))
        assert used[0].noun == "task"
        assert sorted(name for part in (used[0].splits or {}).values() for name in part) == names
        config = Config(dataset=[str(data)], task_type="causal_lm", k_shot=1, num_query=1)
        assert load_sources(config, byte_tokenizer(), lambda text: None, used).used == used
