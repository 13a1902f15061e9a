"""Several data sets as one, and folders whose files are tasks."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from fmmeta.common.progress import Warn
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import short_names, stratum_shares
from fmmeta.tasks.sources.load import FolderSource, Sources, glance, load_sources, task_files
from tests.support.helpers import DATA, refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS, write_classes, write_pairs

TOKENIZER = byte_tokenizer()


def load(*names: Path | str, notices: list[str] | None = None, **settings) -> tuple[Config, Sources]:
    given = {"n_way": 2, "k_shot": 1, "num_query": 2, "max_length": 64, **settings}
    config = Config(dataset=[str(name) for name in names], **given)
    return config, load_sources(config, TOKENIZER, (notices if notices is not None else []).append)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two strata of six files, each a task with two classes."""
    root = tmp_path / "tasks"
    for s in range(2):
        (root / f"s{s}").mkdir(parents=True)
        for f in range(6):
            made = [{"text": f"{WORDS[f]} {WORDS[i]}", "label": "ab"[i % 2]} for i in range(8)]
            write_rows(root / f"s{s}" / f"t{f}.{('jsonl', 'csv', 'jsonl.gz')[f % 3]}", made)
    return root


def tasks_of(config: Config, sources: Sources, count: int):
    given = stratum_shares(config, sources.train.items)
    return Schedule(sources.train.items, count, config.seed, shares=given).meta_batch(0)


def test_data_sets_of_a_mixture_are_strata_and_share_no_episode(tmp_path):
    first, second = (
        write_classes(tmp_path / "first.jsonl"),
        write_classes(tmp_path / "second.jsonl", classes=9, strata=1),
    )
    config, sources = load(first, second)
    parts = {path.stem: load(path)[1] for path in (first, second)}
    assert set(sources.train.items.strata) == {"first", "second"}
    assert len(sources.train.items) == sum(len(part.train.items) for part in parts.values())
    for task in tasks_of(config, sources, 30):
        own, name = task.name.split("/")
        episode = sources.train.draw(task).episode()
        alone = parts[own].train
        (number,) = [i for i, item in enumerate(alone.items) if item.name == name]
        assert episode.task == task
        assert episode.support == alone.draw(type(task)(number, name, "", 0, task.seed)).episode().support
    assert sources.fingerprint not in {part.fingerprint for part in parts.values()}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"mix_weights": [3.0, 1.0]}, {"first": 300, "second": 100}),
        ({"mix_temperature": float("inf")}, {"first": 200, "second": 200}),
        ({"mix_temperature": 2.0}, {"first": 223, "second": 177}),  # by the roots of 8 and 5
        ({"mix_temperature": 1e-3}, {"first": 398, "second": 2}),  # a share is never 0
        ({}, {"first": 246, "second": 154}),  # 8 of 13 training classes
    ],
)
def test_weights_and_temperature_set_the_shares(tmp_path, settings, wanted):
    first, second = (
        write_classes(tmp_path / "first.jsonl"),
        write_classes(tmp_path / "second.jsonl", classes=7, strata=1),
    )
    config, sources = load(first, second, **settings)
    drawn = Counter(task.stratum for task in tasks_of(config, sources, 400))
    assert {name: pytest.approx(count, abs=4) for name, count in wanted.items()} == drawn


def test_a_weight_for_the_only_data_set_changes_nothing(tmp_path):
    """Its strata are not data sets."""
    config, sources = load(write_classes(tmp_path / "a.jsonl"), mix_weights=[2.0])
    assert stratum_shares(config, sources.train.items) is None


def test_short_names_fall_back_to_paths_when_they_collide():
    assert short_names(["x/clinc150", "y/banking77.jsonl.gz"]) == ["clinc150", "banking77"]
    assert short_names(["x/data.jsonl", "y/data.jsonl"]) == ["x/data.jsonl", "y/data.jsonl"]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")
def test_real_data_sets_mix_with_their_own_splits():
    _, sources = load(DATA / "clinc150", DATA / "banking77", class_split="02")
    assert Counter(item.stratum for item in sources.train.items) == {"clinc150": 50, "banking77": 25}
    assert sources.test is not None
    assert Counter(item.stratum for item in sources.test.items) == {"clinc150": 50, "banking77": 27}


def test_a_data_set_that_class_split_does_not_fit_is_warned_of(tmp_path):
    names = [f"c{number}" for number in range(12)]
    contents = {
        "named": {"a": {"train": names[6:]}, "b": {"train": names[:6]}},
        "one": {"train": names},
        "no": None,
    }
    for name, splits in contents.items():
        (tmp_path / name).mkdir()
        write_classes(tmp_path / name / "rows.jsonl")
        if splits:
            (tmp_path / name / "class_splits.json").write_text(json.dumps(splits))
    notices: list[str] = []
    _, sources = load(*(tmp_path / name for name in contents), class_split="b", notices=notices)
    assert Counter(item.stratum for item in sources.train.items)["named"] == 6
    one, no, *rows = [text for text in notices if isinstance(text, Warn)]
    check_message(one, f"class_split=b is not used for {tmp_path / 'one'}", "holds one split only")
    check_message(no, f"class_split=b is not used for {tmp_path / 'no'}", "there is no file of splits")
    assert all("are in the" in text for text in rows)  # rows of the other copies, by their contents


def test_a_data_set_without_training_tasks_is_named(tmp_path):
    first = write_classes(tmp_path / "first.jsonl")
    (tmp_path / "second").mkdir()
    write_classes(tmp_path / "second" / "rows.jsonl")
    (tmp_path / "second" / "class_splits.json").write_text(json.dumps({"train": [], "test": ["c0", "c1"]}))
    check_message(
        refusal(load, first, tmp_path / "second"), f"dataset={tmp_path / 'second'}", "fix the split file"
    )


def test_files_of_a_folder_of_folders_are_tasks(folder):
    config, sources = load(folder)
    assert isinstance(sources.train, FolderSource)
    check_message(sources.summary, "12 task", "2 strata", f"{folder}", "tasks: 8 train, 2 valid, 2 test")
    for task in tasks_of(config, sources, 16):
        episode = sources.train.draw(task).episode()
        stratum, file = task.name.split("/")
        assert task.stratum == stratum
        assert sorted(episode.classes) == ["a", "b"]
        word = WORDS[int(file[1:])]
        for row in episode.support + episode.query:
            assert TOKENIZER.decode(row.input_ids, skip_special_tokens=True).startswith(word)


def test_pairs_in_files_need_no_task_column(tmp_path):
    (tmp_path / "tasks" / "s").mkdir(parents=True)
    for name in "abc":
        write_rows(
            tmp_path / "tasks" / "s" / f"{name}.jsonl", [{"input": f"{i}", "output": name} for i in range(5)]
        )
    config, sources = load(tmp_path / "tasks", task_type="causal_lm")
    for task in tasks_of(config, sources, 3):
        row = sources.train.draw(task).episode().query[0]
        assert TOKENIZER.decode(row.input_ids, skip_special_tokens=True).endswith(f"Output: {task.name[-1]}")


def test_no_file_is_read_before_its_task_is_drawn(folder):
    config, sources = load(folder)
    tasks = tasks_of(config, sources, 8)
    bad = next(task for task in tasks if task.name[-1] in "03")  # of a plain file
    (folder / f"{bad.name}.jsonl").write_text("{\n")  # not read so far
    for task in tasks:
        if task != bad:
            sources.train.draw(task)
    message = refusal(sources.train.draw, bad)
    assert message.startswith(f"{folder / bad.name}.jsonl:1 is not a line of JSON (")
    assert len(sources.train.opened) == 7
    assert pickle.loads(pickle.dumps(sources.train)).opened == {}


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (
            [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}],
            ["k_shot=1", "num_query=2", "3 rows", "has 1", "'a'", "'s0/t0'", "fix or remove the file"],
        ),
        (
            [{"text": f"x{i}", "label": "a"} for i in range(4)],
            ["n_way=2", "1 class of", "'s0/t0'", "fix or remove the file"],
        ),
    ],
)
def test_a_file_too_small_for_an_episode_is_named(tmp_path, rows, parts):
    (tmp_path / "tasks" / "s0").mkdir(parents=True)
    path = write_rows(tmp_path / "tasks" / "s0" / "t0.jsonl", rows)
    config, sources = load(tmp_path / "tasks")
    check_message(refusal(sources.train.draw, tasks_of(config, sources, 1)[0]), f"{path}: ", *parts)


def test_what_is_left_out_of_a_file_is_logged(tmp_path):
    """Rows that cannot be read, and classes with too few; the others of the file are a task."""
    (tmp_path / "tasks" / "s0").mkdir(parents=True)
    rows = [{"text": f"x{i}", "label": "ab"[i % 2]} for i in range(8)] + [{"text": "y", "label": "rare"}]
    path = write_rows(tmp_path / "tasks" / "s0" / "t0.jsonl", rows)
    with path.open("a") as file:
        file.write("{broken\n")
    config, sources = load(tmp_path / "tasks", on_bad_task="skip", max_bad_fraction=0.5)
    (task,) = tasks_of(config, sources, 1)
    draw = sources.train.draw(task)
    assert {*draw.classes} == {"a", "b"}
    bad, small = draw.notices
    check_message(bad, "1 of 10 rows cannot be used", f"{path}:10", "left out")
    check_message(small, f"left out: {path}", "class 'rare'", "has 1")
    assert sources.train.draw(task).notices == ()


def test_which_folders_hold_task_files(folder):
    assert len(task_files(str(folder), 64) or []) == 12
    (folder / "s0" / "t0.csv").write_text("text,label\na,b\n")  # a second file of this name
    check_message(refusal(load, folder), f"dataset={folder}", "rename one")
    write_pairs(folder / "rows.jsonl")
    assert task_files(str(folder), 64) is None  # files beside folders: one data set
    assert task_files(str(folder / "nowhere"), 64) is None


def test_tokens_of_a_file_are_guessed_from_its_first_line(tmp_path):
    short = write_rows(tmp_path / "a.jsonl", [{"text": "word " * 16, "label": "a"}])
    size, tokens = glance(short, 512)
    assert size == short.stat().st_size
    assert 20 < tokens < 40
    assert glance(short, 10)[1] == 10
    for ending in (".csv", ".tsv", ".json"):
        other = write_rows(tmp_path / f"a{ending}", [{"text": "word " * 16, "label": "a"}] * 9)
        assert glance(other, 512)[1] == pytest.approx(tokens, abs=6)  # not those of a header or of all rows
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(short.read_bytes()))
    assert glance(packed, 512)[1] == 512
    assert glance(tmp_path / "gone.jsonl", 512) == (-1, 512)
