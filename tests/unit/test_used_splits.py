"""Which classes a model was trained on: stored with it, held to by later commands, and never tested
unnoticed.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation.command import adapt
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig, TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.data import splits
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.data.rows import IN_MEMORY, rows_in_memory
from fmmeta.tasks.data.splits import UsedSplits
from fmmeta.tasks.sources.load import Sources, load_sources
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS, write_classes, write_pairs

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
    config = Config(
        **{
            **QUICK,
            "model_name_or_path": str(model),
            "dataset": [str(data)],
            "output_dir": str(folder),
            **settings,
        }
    )
    return MetaTrainer(config).train().output_dir / "model"


@pytest.fixture(scope="module")
def model(bert, classes, tmp_path_factory):
    """Trained on 9 of 15 classes: n_way=3 holds 3 out twice, where 4 or more would hold out others."""
    return train(tmp_path_factory.mktemp("run"), bert, classes, n_way=3)


def stored_info(model: Path) -> dict:
    return json.loads((model / "fmmeta.json").read_text())


def splits_at(data: Path, n_way: int, **settings) -> dict[str, list[str]]:
    """Class names by part as a plain run with this n_way has them."""
    config = Config(dataset=[str(data)], n_way=n_way, k_shot=1, num_query=1, **settings)
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    return {
        part: list(source.items.names)
        for part in ("train", "valid", "test")
        if (source := getattr(sources, part))
    }


def drawn(model: Path, data: Path, **settings) -> set[str]:
    """The classes of the episodes of an evaluation."""
    asked = EvaluateConfig(model_name_or_path=str(model), dataset=[str(data)], **ASKED, **settings)
    return {name for draw in episodes_of(asked, 1, byte_tokenizer()).draws() for name in draw.classes}


def tune_on(model: Path, data: Path, n_way: str) -> None:
    asked = {"dataset": [str(data)], "n_way": n_way, "inner_lrs": [0.1], "max_steps": 1, **ASKED}
    tune(TuneConfig(model_name_or_path=str(model), **asked), progress=Progress(False))


def test_the_parts_are_stored_with_the_model(model, classes):
    (one,) = stored_info(model)["datasets"]
    assert (one["dataset"], one["noun"]) == ("rows.jsonl", "class")
    assert {part: set(names) for part, names in one["splits"].items()} == {
        part: set(names) for part, names in splits_at(classes, 3).items()
    }
    assert "/" not in one["dataset"]  # where it lay is no part of a model


@pytest.mark.parametrize(
    ("n_way", "part"), [("2", "test"), ("all", "test"), ("all", "valid"), ("3", "train")]
)
def test_evaluation_keeps_the_splits_of_the_model(model, bert, classes, n_way, part):
    assert drawn(model, classes, n_way=n_way, eval_split=part) == set(splits_at(classes, 3)[part])


def test_more_classes_than_were_held_out_are_refused_and_not_taken_from_the_trained_ones(
    model, bert, classes
):
    wide = {"dataset": str(classes), "n_way": "5", "k_shot": 1, "num_query": 1, "episodes": 2}
    by_hash, of_model = splits_at(classes, 5), splits_at(classes, 3)
    assert len(set(by_hash["test"]) & set(of_model["valid"])) == 2
    check_message(refusal(fmmeta.evaluate, model, **wide), "n_way=5", "3 classes", "lower n_way")
    assert fmmeta.evaluate(bert, **wide)["episodes"] == 2
    assert "above the 3 classes of the valid split" in refusal(tune_on, model, classes, "5")


def test_tune_chooses_on_the_models_own_validation_classes(model, classes, tmp_path, monkeypatch):
    seen, folder = [], shutil.copytree(model, tmp_path / "model")
    monkeypatch.setattr(
        "fmmeta.evaluation.command.episodes_of", lambda *args: seen.append(episodes_of(*args)) or seen[-1]
    )
    tune_on(folder, classes, "2")
    used = {name for draw in seen[0].draws() for name in draw.classes}
    assert used == set(splits_at(classes, 3)["valid"])
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
    mine, file = splits_at(classes, 3), tmp_path / "splits.json"
    names = sorted(mine["train"])
    file.write_text(
        json.dumps({"train": mine["valid"], "valid": names[:6], "test": [*mine["test"], names[6]]})
    )
    found = log_lines(model, classes, n_way=2, class_splits=str(file))
    found = [line for line in found if "in no split" not in line]
    counts = f"6 of 6 valid classes ({', '.join(names[:5])} and 1 more)", f"1 of 4 test classes ({names[6]})"
    for line, count in zip(found, counts, strict=True):
        check_message(line, f"class_splits={file}", count, "dataset=rows.jsonl", "leave class_splits and")
    assert log_lines(model, classes, n_way=3) == [SAME_SPLITS.format("rows.jsonl")]


def test_held_out_classes_with_names_that_were_trained_on_with_other_data_are_named(model, classes, tmp_path):
    """The same data under another name, after a change; names that are numbers say nothing."""
    trained = sorted(splits_at(classes, 3)["train"])[:2]
    rows = [
        {"text": f"{name} {i}", "label": name} for name in [*trained, "7", "new", "other"] for i in range(4)
    ]
    other = write_rows(tmp_path / "other.jsonl", rows)
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": ["new", "other"], "test": [*trained, "7"]}))
    (line,) = log_lines(model, other, n_way=2, class_splits=str(file))
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
    (tmp_path / "data").mkdir()
    shutil.copy(classes, tmp_path / "data" / "rows.jsonl")
    first, second = [f"c{i}" for i in range(15)], [f"c{i}" for i in range(14, -1, -1)]
    both = {
        name: {"train": names[:7], "valid": names[7:11], "test": names[11:]}
        for name, names in (("01", first), ("02", second))
    }
    (tmp_path / "data" / "class_splits.json").write_text(json.dumps(both))
    model = train(tmp_path / "run", bert, tmp_path / "data", class_split="02", n_way=3)
    assert drawn(model, tmp_path / "data", n_way="all") == set(both["02"]["test"])


def test_changed_data_are_recognized_by_name(model, classes, tmp_path):
    moved = shutil.copy(classes, tmp_path / "moved.jsonl")
    assert log_lines(model, Path(moved), n_way=3) == [SAME_SPLITS.format("moved.jsonl")]
    more = tmp_path / "rows.jsonl"
    row = json.loads(classes.read_text().splitlines()[0])
    more.write_text(classes.read_text() + json.dumps({**row, "text": "one more"}) + "\n")  # the same classes
    assert SAME_SPLITS.format("rows.jsonl") in log_lines(model, more, n_way=3)
    write_classes(more, classes=13, rows=8)
    messages = log_lines(model, more, n_way=3)
    assert any("no split file: 7 train, 3 valid, 3 test" in line for line in messages)
    assert any("were trained on with dataset=rows.jsonl" in text for text in messages)


NOTHING = {"dataset": "x", "content": "", "noun": "class", "digest": "", "trained": 1}


@pytest.mark.parametrize(
    "broken",
    [
        1,
        [1],
        [{"dataset": "x"}],
        [{**NOTHING, "dataset": 1}],
        [{**NOTHING, "splits": {"train": "abc"}}],
        [{**NOTHING, "held_out": "1"}],
    ],
)
def test_damaged_stored_classes_are_refused(model, classes, tmp_path, broken):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "fmmeta.json").write_text(json.dumps({**stored_info(model), "datasets": broken}))
    check_message(refusal(fmmeta.evaluate, folder, str(classes)), f"model_name_or_path={folder}")


def test_classes_of_earlier_training_stay_stored(model, classes, tmp_path):
    other = write_classes(tmp_path / "other.jsonl", classes=12)
    second = train(tmp_path / "second", model, other, n_way=2)
    assert [one["dataset"] for one in stored_info(second)["datasets"]] == ["rows.jsonl", "other.jsonl"]
    again = train(tmp_path / "again", second, classes, n_way=2)
    assert stored_info(again)["datasets"] == stored_info(second)["datasets"]  # the same splits
    untrained = train(tmp_path / "none", model, other, n_way=2, algorithm="none")
    assert stored_info(untrained)["datasets"] == stored_info(model)["datasets"]


def test_adapt_names_the_classes_that_were_trained_on(model, classes, tmp_path, capsys, terminal):
    mine = splits_at(classes, 3)
    pairs = [(f"{name} {i}", name) for name in (mine["train"][0], mine["test"][0]) for i in range(3)]
    settings = AdaptConfig(
        model_name_or_path=str(model), output_dir=str(tmp_path / "out"), early_stopping=False
    )
    adapt(settings, Progress(True), pairs)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "support: " in line]
    check_message(line, f"1 of 2 classes ({mine['train'][0]})", "dataset=rows.jsonl", "new classes")
    assert stored_info(tmp_path / "out")["datasets"] == stored_info(model)["datasets"]
    adapt(
        replace(settings, output_dir=None), Progress(True), [(text, f"new {label}") for text, label in pairs]
    )
    assert "were trained on" not in capsys.readouterr().out


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
    rows, given = [{**row, "text": change(row["text"])} for row in RENAMED], None
    dataset = [tmp_path / f"other.{form if form in ('csv', 'parquet') else 'jsonl'}"]
    if form == "tasks":  # of two classes each
        rows = [{**row, "label": "ab"[i % 2], "task": row["label"]} for i, row in enumerate(rows)]
    if form in ("rows", "pairs"):
        dataset, given = (
            [IN_MEMORY],
            rows if form == "rows" else [(row["text"], row["label"]) for row in rows],
        )
    elif form == "hub":
        part = datasets.Dataset.from_list(rows)
        monkeypatch.setattr("fmmeta.tasks.sources.load.open_hub", lambda *_: part)
        dataset = ["acme/other"]
    else:
        write_rows(dataset[0], rows)
    sources, said = loaded(dataset, trained, given)
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
    names = sorted({row["label"] for row in ROWS})
    file, own = tmp_path / "splits.json", {"train": names[:8], "valid": names[8:10], "test": names[10:]}
    file.write_text(json.dumps(own))
    again = [
        {"id": 0, "text": f" {ROWS[row]['text']}", "label": name} for row, name in ((0, "c9"), (36, "c8"))
    ]
    (line,) = loaded([write_rows(tmp_path / "one.jsonl", ROWS + again)], class_splits=str(file))[1]
    check_message(line, "dataset=one.jsonl: 1 of 9 rows of the test split (c9)", "leave them out of one")
    both = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", ROWS), ("b", RENAMED))]
    assert {line.split(":")[0] for line in loaded(both)[1]} == {"dataset=a.jsonl", "dataset=b.jsonl"}
    pairs = [{"input": row["text"], "output": row["label"]} for row in ROWS[:4]]
    (tmp_path / "tasks" / "s").mkdir(parents=True)
    for number in range(5):
        write_rows(tmp_path / "tasks" / "s" / f"t{number}.csv", pairs[::-1] if number % 2 else pairs)
    said = loaded([tmp_path / "tasks"], task_type="causal_lm")[1]
    assert [line.partition(": ")[2].split("/")[0] for line in said] == [
        f"4 of 4 rows of the {split} split (s" for split in ("valid", "test")
    ]
    other = [{**pair, "output": "no"} for pair in pairs]  # another answer is another pair
    for number in range(5):
        rows = [{**row, "input": f"{row['input']} {number}"} for row in other]
        write_rows(tmp_path / "tasks" / "s" / f"t{number}.csv", rows)
    assert loaded([tmp_path / "tasks"], task_type="causal_lm")[1] == []


def test_images_are_found_by_their_pixels(tmp_path):
    """A path, the bytes of a file of another format, and an array."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 3), np.uint8)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "label": f"c{number // 4}"} for number in range(24)]
    settings: dict[str, Any] = {"image_column": "image", "class_splits": str(tmp_path / "splits.json")}
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["c4", "c5"]}))
    trained = loaded([write_rows(tmp_path / "first.csv", rows)], **settings)[0].used
    names = {"train": ["new 0", "new 1"], "valid": ["new 2", "new 3"], "test": ["new 4", "new 5"]}
    (tmp_path / "splits.json").write_text(json.dumps(names))
    for form in (np.asarray, bmp, Image.fromarray):
        given = [{"image": form(one), "label": f"new {number // 4}"} for number, one in enumerate(pixels)]
        (line,) = loaded([IN_MEMORY], trained, given, **settings)[1]
        assert "test split: 8 of 8 rows (new 4, new 5)" in line, form


def bmp(pixels) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def test_a_sample_of_very_many_trained_rows_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "MOST_ROWS", 16)
    trained = loaded([write_rows(tmp_path / "first.jsonl", ROWS)])[0].used
    assert len(str(trained[0].rows)) == 172  # base64 of 128 bytes
    said = " ".join(loaded([IN_MEMORY], trained, RENAMED)[1])
    found = [(int(known), int(count)) for known, count in re.findall(r"(\d+) of (\d+) rows?", said)]
    assert found
    assert all(1 <= known <= count < 8 for known, count in found)


def test_adapt_names_rows_that_it_was_trained_on_or_that_it_is_asked_again(
    model, classes, tmp_path, capsys, terminal
):
    trained = splits_at(classes, 3)["train"][:2]
    rows = [json.loads(line) for line in classes.read_text().splitlines()]
    pairs = [(row["text"], f"new {row['label']}") for row in rows if row["label"] in trained]
    settings = AdaptConfig(model_name_or_path=str(model), early_stopping=False)
    adapt(settings, Progress(True), pairs, [(f"{text} ", label) for text, label in pairs[:2]])
    said = [line for line in capsys.readouterr().out.splitlines() if "by their contents" in line]
    assert [line.split(":")[1] for line in said] == [" support", " query", " query"]
    check_message(said[2], "2 rows of 2 are in the support set too", "leave them out")
    check_message(
        said[0], f"support: {len(pairs)} of {len(pairs)} rows", "dataset=rows.jsonl", "leave them out"
    )


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
    file, messages = tmp_path / "splits.json", list[str]()
    file.write_text(json.dumps(own))
    load_sources(
        Config(**settings, n_way=2, class_splits=str(file)), byte_tokenizer(), messages.append, first.used
    )
    line, rows = messages[-1], messages[:-1]
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
