"""Which classes a model was trained on: stored with it, held to by later commands, and never tested
unnoticed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation.command import adapt
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig, TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.models.tiny import byte_tokenizer
from fmmeta.tasks.data import splits
from fmmeta.tasks.data.splits import UsedSplits
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs

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


def drawn(settings: EvaluateConfig) -> set[str]:
    return {name for draw in episodes_of(settings, 1, byte_tokenizer()).draws() for name in draw.classes}


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
    settings = EvaluateConfig(
        model_name_or_path=str(model), dataset=[str(classes)], n_way=n_way, eval_split=part, **ASKED
    )
    assert drawn(settings) == set(splits_at(classes, 3)[part])


def test_more_classes_than_were_held_out_are_refused_and_not_taken_from_the_trained_ones(
    model, bert, classes
):
    wide = {"dataset": str(classes), "n_way": "5", "k_shot": 1, "num_query": 1, "episodes": 2}
    by_hash, of_model = splits_at(classes, 5), splits_at(classes, 3)
    assert len(set(by_hash["test"]) & set(of_model["valid"])) == 2
    check_message(refusal(fmmeta.evaluate, model, **wide), "n_way=5", "3 classes", "lower n_way")
    assert fmmeta.evaluate(bert, **wide)["episodes"] == 2
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        n_way="5",
        inner_lrs=[0.1],
        max_steps=1,
        **ASKED,
    )
    assert "above the 3 classes of the valid split" in refusal(tune, settings, progress=Progress(False))


def test_tune_chooses_on_the_models_own_validation_classes(model, classes, tmp_path, monkeypatch):
    seen, folder = [], shutil.copytree(model, tmp_path / "model")
    monkeypatch.setattr(
        "fmmeta.evaluation.command.episodes_of", lambda *args: seen.append(episodes_of(*args)) or seen[-1]
    )
    settings = TuneConfig(
        model_name_or_path=str(folder),
        dataset=[str(classes)],
        n_way="2",
        inner_lrs=[0.1],
        max_steps=1,
        **ASKED,
    )
    tune(settings, progress=Progress(False))
    used = {name for draw in seen[0].draws() for name in draw.classes}
    assert used == set(splits_at(classes, 3)["valid"])
    assert stored_info(folder)["datasets"] == stored_info(model)["datasets"]


def test_test_classes_that_were_tuned_on_are_named(bert, classes, tmp_path, capsys):
    """A plain model has no splits; those by hash depend on n_way."""
    folder = shutil.copytree(bert, tmp_path / "model")
    few = {"k_shot": 1, "num_query": 1, "episodes": 2}
    settings = TuneConfig(
        model_name_or_path=str(folder),
        dataset=[str(classes)],
        n_way="3",
        inner_lrs=[0.1],
        max_steps=1,
        **ASKED,
    )
    tune(settings, progress=Progress(False))
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
    settings = EvaluateConfig(
        model_name_or_path=str(bert),
        dataset=[str(classes)],
        n_way="all",
        class_splits=str(model / "fmmeta.json"),
        **ASKED,
    )
    assert drawn(settings) == set(splits_at(classes, 3)["test"])
    (one,) = stored_info(model)["datasets"]
    message = refusal(
        load_sources,
        Config(dataset=["letters"], class_splits=str(model / "fmmeta.json")),
        byte_tokenizer(),
        print,
    )
    assert "its own splits" in message
    assert one["content"]


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
    settings = EvaluateConfig(
        model_name_or_path=str(model), dataset=[str(tmp_path / "data")], n_way="all", **ASKED
    )
    assert drawn(settings) == set(both["02"]["test"])


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
    message = refusal(fmmeta.evaluate, folder, str(classes))
    check_message(message, f"model_name_or_path={folder}")


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


def test_of_very_many_names_a_digest_and_the_rule_are_stored(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "MOST_NAMES", 14)
    strata = {f"c{i}": "s" for i in range(15)}
    own = {"train": [f"c{i}" for i in range(9)], "valid": ["c9", "c10", "c11"], "test": ["c12", "c13", "c14"]}
    of_file = UsedSplits.of(str(classes), "digest", "class", own, None)
    assert of_file.splits is None
    assert of_file.restored("digest", "rows.jsonl", "class", strata) is None
    settings = {"dataset": [str(classes)], "k_shot": 1, "num_query": 1}
    first = load_sources(Config(**settings, n_way=3), byte_tokenizer(), lambda text: None)
    assert "c1" not in json.dumps([one.as_dict() for one in first.used])
    later = load_sources(Config(**settings, n_way=2), byte_tokenizer(), lambda text: None, first.used)
    assert later.used == first.used
    file, messages = tmp_path / "splits.json", list[str]()
    file.write_text(json.dumps(own))
    load_sources(
        Config(**settings, n_way=2, class_splits=str(file)), byte_tokenizer(), messages.append, first.used
    )
    (line,) = messages
    check_message(line, f"class_splits={file}", "9 classes of dataset=rows.jsonl", "leave class_splits")


def test_named_tasks_are_stored_too(llama, tmp_path):
    model = train(tmp_path / "run", llama, write_pairs(tmp_path / "pairs.jsonl"), task_type="causal_lm")
    (one,) = stored_info(model)["datasets"]
    assert one["noun"] == "task"
    assert sorted(name for names in one["splits"].values() for name in names) == [f"t{i}" for i in range(9)]
    tasks = tmp_path / "tasks"
    (tasks / "s").mkdir(parents=True)
    for i in range(6):
        write_pairs(tasks / "s" / f"t{i}.jsonl", tasks=1)
    model = train(tmp_path / "folder", llama, tasks, task_type="causal_lm")
    (one,) = stored_info(model)["datasets"]
    assert sorted(name for names in one["splits"].values() for name in names) == [f"s/t{i}" for i in range(6)]
    config = Config(dataset=[str(tasks)], task_type="causal_lm", k_shot=1, num_query=1)
    assert load_sources(
        config, byte_tokenizer(), lambda text: None, splits.read_used_splits(stored_info(model))
    ).used == splits.read_used_splits(stored_info(model))
