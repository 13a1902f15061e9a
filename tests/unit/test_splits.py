"""Splits: from a file, from the data folder's own file, or by a hash; and every refusal by its text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.common.progress import Warn
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.data.splits import check_splits, own_splits, read_splits
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal

FIVE = {
    "01": {"train": ["a"], "valid": ["b"], "test": ["c"]},
    "02": {"train": ["c"], "valid": ["a"], "test": ["b"]},
}


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
    ],
)
def test_the_chosen_split_is_read(tmp_path, value, settings, train):
    splits = read_splits("data", config_for(written(tmp_path, value), **settings), False, pytest.fail)
    assert splits is not None
    assert splits["train"] == train


def test_the_data_set_of_a_model_with_several_is_found_by_its_hub_name(tmp_path):
    stored = [{"dataset": f"me/{name}", "splits": {"train": [name], "test": ["t"]}} for name in ("b", "c")]
    path = written(tmp_path, {"datasets": stored})
    splits = read_splits("me/b", config_for(path), False, pytest.fail)
    assert splits == {"train": ["b"], "test": ["t"]}


@pytest.mark.parametrize(("file", "named_tasks"), [("class_splits", False), ("task_splits", True)])
def test_the_split_file_of_the_data_folder_is_read(tmp_path, file, named_tasks):
    (tmp_path / f"{file}.json").write_text(json.dumps({"train": ["a"]}))
    notices: list[str] = []
    assert read_splits(str(tmp_path), Config(dataset=[str(tmp_path)]), named_tasks, notices.append) == {
        "train": ["a"]
    }
    assert notices == [f"{file}: {tmp_path / file}.json"]
    assert (
        read_splits(str(tmp_path), Config(dataset=[str(tmp_path)]), not named_tasks, notices.append) is None
    )


@pytest.mark.parametrize(
    ("value", "settings", "parts"),
    [
        (FIVE, {"class_split": "07"}, ["class_split=07", "it has 01, 02"]),
        (
            FIVE["01"],
            {"class_split": "01"},
            ["class_split=01", "or leave it out"],
        ),
        (
            [1],
            {},
            ["class_splits={path}", 'write {{"train": [...], "valid": [...]'],
        ),
        (
            {},
            {},
            ["class_splits={path}", 'write {{"train": [...], "valid": [...]'],
        ),
        (
            {"01": {"test": ["a"]}},
            {},
            ["class_splits={path}", 'write {{"train": [...], "valid": [...]'],
        ),
        (
            {"train": ["a"], "validation": ["b"], "test": ["c"]},
            {},
            ["class_splits={path}", "names a split 'validation'", "use train, valid or test"],
        ),
        ("{train", {}, ["class_splits={path}", "; fix it, or give a JSON file"]),
        (
            {"train": "abc"},
            {},
            ["class_splits={path}", 'write {{"train": [...], "valid": [...]'],
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, value, settings, parts):
    path = written(tmp_path, value)
    check_message(
        refusal(read_splits, "data", config_for(path, **settings), False, print),
        *(part.format(path=path) for part in parts),
    )


def test_a_missing_file_is_refused(tmp_path):
    path = tmp_path / "none.json"
    message = refusal(read_splits, "data", config_for(path), False, print)
    check_message(message, f"class_splits={path}", "give a JSON file")


def test_the_other_kind_of_splits_is_refused(tmp_path):
    path = written(tmp_path, FIVE)
    tasks = Config(dataset=["data"], task_splits=path)
    check_message(
        refusal(read_splits, "data", config_for(path), True, print),
        f"class_splits={path}",
        "dataset=data",
        "use --task_splits",
    )
    check_message(
        refusal(read_splits, "data", tasks, False, print),
        f"task_splits={path}",
        "dataset=data",
        "use --class_splits",
    )


def test_members_must_exist_and_be_in_one_split():
    strata = {"a": "s", "b": "s"}
    check_splits({"train": ["a"], "test": ["b"]}, strata, "class")
    check_message(
        refusal(check_splits, {"train": ["a"], "valid": ["x"]}, strata, "class"),
        "'x'",
        "the valid split names the",
        "fix the split file",
    )
    check_message(
        refusal(check_splits, {"train": ["a", "b"], "test": ["b"]}, strata, "task"),
        "'b'",
        "the task 'b' is in the train",
        "list it once",
    )


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
        ({"n_way": 12}, None, ("20 classes", "n_way=12 to 6 or less", "more classes")),
        (
            {"n_way": 2},
            {"train": [f"c{i}" for i in range(20)], "test": []},
            ("give more classes", "file of splits"),
        ),
        ({"n_way": 12, "test_episodes": 0}, None, ()),
        ({"n_way": 6}, None, ()),
    ],
)
def test_a_run_that_will_have_no_table_is_warned_before(tmp_path, settings, splits, parts):
    rows = [{"text": f"text {i}", "label": f"c{i % 20}"} for i in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    if splits:
        (tmp_path / "splits.json").write_text(json.dumps(splits))
        settings = {**settings, "class_splits": str(tmp_path / "splits.json")}
    said: list[str] = []
    load_sources(
        Config(dataset=[str(data)], k_shot=1, num_query=1, **settings), byte_tokenizer(), said.append
    )
    found = [line for line in said if isinstance(line, Warn) and "without a table" in line]
    assert len(found) == bool(parts)
    for line in found:
        check_message(line, f"dataset={data}", *parts)
