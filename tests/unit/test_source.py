"""From data to episodes: columns, refusals by their text, episodes as pure functions of their seed, several
data sets as one, folders whose files are tasks, and the real data.
"""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from fmmeta.common.progress import Warn
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.parallel.costs import rows_of
from fmmeta.tasks.augment import reading
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.data.encode import encode_pairs, encode_texts
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import (
    Draw,
    EpisodeRows,
    EpisodeShape,
    short_names,
    stratum_shares,
    transformed,
)
from fmmeta.tasks.sources.load import FolderSource, Sources, glance, load_sources, task_files
from fmmeta.tasks.word_suite import WORD_ROWS, all_functions, words
from tests.support.helpers import DATA, refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS, write_classes, write_pairs

TOKENIZER = byte_tokenizer()
SMALL = {"n_way": 2, "k_shot": 2, "num_query": 3, "max_length": 64}
ONE = {"k_shot": 1, "num_query": 2}


def loaded(*names: Path | str, notices: list[str] | None = None, **settings) -> tuple[Config, Sources]:
    """Settings and the sources of data; a setting that is a dictionary is written to a file of JSON."""
    for name, value in settings.items():
        if isinstance(value, dict):
            settings[name] = str(Path(names[0]).with_name(f"given {name}.json"))
            Path(settings[name]).write_text(json.dumps(value))
    config = Config(dataset=[str(name) for name in names], **{**SMALL, **settings})
    return config, load_sources(config, TOKENIZER, (notices if notices is not None else []).append)


def load(*names: Path | str, **settings) -> Sources:
    return loaded(*names, **settings)[1]


def episodes(sources: Sources, steps: int = 5, seed: int = 3) -> list[EpisodeRows]:
    schedule = Schedule(sources.train.items, 4, seed)
    tasks = [task for step in range(steps) for task in schedule.meta_batch(step)]
    return [transformed(sources.train.draw(task), [*sources.drawn, Draw.episode]) for task in tasks]


def text_of(row) -> str:
    return TOKENIZER.decode(row.input_ids, skip_special_tokens=True)


@pytest.fixture
def classes(tmp_path):
    return write_classes(tmp_path / "classes.jsonl")


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl")


def test_episode_of_a_labelled_set(classes):
    class_of = {row["text"]: row["label"] for row in map(json.loads, classes.read_text().splitlines())}
    sources = load(classes, n_way=3)
    for episode in episodes(sources):
        assert len(set(episode.classes)) == 3
        assert episode.task.name in episode.classes  # the class that leads it
        for rows, per_class in ((episode.support, 2), (episode.query, 3)):
            assert Counter(row.labels for row in rows) == dict.fromkeys(range(3), per_class)
            assert all(class_of[text_of(row)] == episode.classes[row.labels] for row in rows)
        support, query = ({text_of(row) for row in rows} for rows in (episode.support, episode.query))
        assert not support & query
        assert len(support) + len(query) == 15
    orders = {tuple(sorted(range(3), key=e.classes.__getitem__)) for e in episodes(sources, 40)}
    assert len(orders) == 6  # labels are permuted: each order of names occurs
    assert sorted(item.name for item in sources.train.items) == sorted(
        {e.task.name for e in episodes(sources, 12)}
    )


def test_names_of_classes_are_support_examples(tmp_path):
    rows = [{"text": f"{c}{i}", "label": f"{c}_of-{c}"} for c in "abcdefghi" for i in range(6)]
    file = write_rows(tmp_path / "d.jsonl", rows)
    for episode, plain in zip(episodes(load(file, label_names="names")), episodes(load(file)), strict=True):
        names = [row for row in episode.support if " of " in text_of(row)]
        assert sorted((text_of(row), row.labels) for row in names) == sorted(
            (f"{name[0]} of {name[0]}", label) for label, name in enumerate(episode.classes)
        )
        assert [row for row in episode.support if row not in names] == plain.support
        assert episode.query == plain.query


def test_names_of_classes_belong_to_no_split(classes):
    sources, plain = (load(classes, label_names=names) for names in ("names", None))
    for one, other in (
        (sources.train, plain.train),
        (sources.valid, plain.valid),
        (sources.test, plain.test),
    ):
        assert one.class_keys() == other.class_keys()
        assert len(one.store) == len(other.store)
    assert sources.summary == plain.summary
    assert sources.fingerprint != plain.fingerprint


def test_descriptions_of_classes_are_support_examples(classes):
    first, other = (
        load(classes, label_names={f"c{c}": f"{prefix} {c}" for c in range(12)})
        for prefix in ("number", "another")
    )
    for episode in episodes(first):
        assert {text_of(row) for row in episode.support} > {f"number {name[1:]}" for name in episode.classes}
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ("cannot be read as JSON", "fix it")),
        ("[]", ("holds no object", "write {")),
        ('{"c0": " "}', ("class 'c0'", "not a text", "write one")),
        ('{"c0": 3}', ("class 'c0'", "not a text", "write one")),
        ('{"c0": "\\ud800 x"}', ("class 'c0'", "half of a surrogate pair", "remove")),
    ],
)
def test_descriptions_that_are_refused(tmp_path, content, parts):
    file = tmp_path / "names.json"
    file.write_text(content)
    for settings in (Config, EvaluateConfig, AdaptConfig):
        message = refusal(settings, label_names=str(file)).replace(str(tmp_path), "DIR")
        check_message(message, "label_names=DIR/names.json", *parts)


CAUSAL = {"task_type": "causal_lm"}
FEW_PAIRS = [{"task": "t", "input": str(i), "output": "o"} for i in range(4)]
ONE_CLASS = [{"task": "t", "text": str(i), "label": "only"} for i in range(5)]
FOUR_ROWS = [*ONE_CLASS[:4], *({**row, "label": "b"} for row in ONE_CLASS)]
THREE_CLASSES = [{"text": f"{n} {m}", "label": f"c{n}"} for n in range(3) for m in range(2)]
TOO_FEW = ["k_shot=2", "num_query=3", "5 rows", "has 4", "'t'", "lower them or leave it out of the train"]
OVERFLOW = ["class_weights=", "class 'c0'", "write a number from 1e-06 to 1e+06"]


@pytest.mark.parametrize(
    ("data", "settings", "parts"),
    [
        (write_classes, {"text_column": "body"}, ["text_column=body", "DATA", "it has label, stratum, text"]),
        (write_classes, {"stratum_column": "x"}, ["stratum_column=x", "DATA", "it has label, stratum, text"]),
        (write_classes, CAUSAL, ["DATA", "it has label, stratum"]),
        (
            write_classes,
            {"k_shot": 4},
            ["k_shot=4", "num_query=3", "7 rows", "has 6", "class 'c", "lower them or leave it out of the"],
        ),
        (write_classes, {"n_way": 13}, ["n_way=13", "12 classes", "lower n_way"]),
        (write_classes, {"class_split": "01"}, ["class_split=01", "give --class_splits"]),
        (
            write_classes,
            {"image_column": "picture"},
            ["image_column=picture", "the model reads texts", "leave it out"],
        ),
        (
            write_classes,
            {"label_names": "nowhere.json"},
            ["label_names=nowhere.json", "give a JSON file"],
        ),
        (
            write_classes,
            {"label_names": {"c0": "zero"}},
            ["label_names=", "no text for class 'c1'", "11 of 12 classes", "add it"],
        ),
        (write_pairs, {**CAUSAL, "label_names": "names"}, ["label_names=names", "task_type=causal_lm"]),
        (
            write_classes,
            {"label_names": "names", "task_type": "tests.support.vision:of_nested"},
            ["label_names=names with task_type=tests.support.vision:of_nested", "leave it out"],
        ),
        (write_classes, {"class_weights": {"c0": 1e300}}, OVERFLOW),
        (write_classes, {"class_weights": {"c0": 1e-60}}, OVERFLOW),
        (write_classes, {"class_weights": {"c0": 10**400}}, OVERFLOW),
        (
            write_classes,
            {"class_splits": {"train": ["c0", "c1", "c99"]}},
            ["'c99'", "the train split names the", "fix the split file"],
        ),
        (
            write_classes,
            {"class_splits": {"train": ["c0", "c1"], "test": ["c1", "c2"]}},
            ["'c1'", "the class 'c1' is in the train", "list it once"],
        ),
        (
            write_classes,
            {"class_splits": {"train": ["c0", "c1", "c0"]}},
            ["'c0'", "is twice in the train split", "list it once"],
        ),
        (
            write_classes,
            {"class_splits": {"train": ["c0", "c1"], "valid": ["c2"]}},
            ["n_way=2", "1 class of", "lower n_way"],
        ),
        (
            write_classes,
            {"class_splits": {"train": [], "test": ["c1", "c2"]}},
            ["DATA", "fix the split file"],
        ),
        ("letters", {"class_splits": "01"}, ["DATA", "leave --class_splits"]),
        ("letters", {"task_splits": "01"}, ["DATA", "leave --class_splits"]),
        ("letters", {"class_split": "01"}, ["DATA", "leave --class_splits"]),
        ([{"body": "x", "label": "y"}], {}, ["DATA", "it has body, label"]),
        (
            [{"body": "x", "label": "y"}],
            {"text_column": "body", "label_column": "kind"},
            ["label_column=kind", "DATA", "it has body, label"],
        ),
        (FEW_PAIRS, CAUSAL, TOO_FEW),
        (ONE_CLASS, {}, ["n_way=2", "1 class of", "'t'", "lower n_way"]),
        (FOUR_ROWS, {}, [*TOO_FEW, "'only'"]),
        (THREE_CLASSES, {"n_way": 20}, ["n_way=20 is above the 3 classes of the train split", "lower n_way"]),
        (THREE_CLASSES, {"n_way": 2}, ["k_shot=2", "need 5 rows", "has 2", "lower them"]),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(tmp_path, data, settings, parts):
    """DATA: the data set is named."""
    path = data if isinstance(data, str) else tmp_path / "d.jsonl"
    if callable(data):
        data(path)
    elif path != data:
        write_rows(path, data)
    message = refusal(load, path, **settings).replace(f"dataset={path}", "DATA")
    check_message(message, *parts)


def test_names_of_classes_count_as_rows(classes):
    """In the size of an episode, and in the rows of the largest support set."""
    named, plain = (Config(n_way=4, k_shot=2, k_shot_max=3, label_names=one) for one in ("names", None))
    assert (rows_of(named)[0], rows_of(plain)[0]) == (16, 12)
    shapes = [EpisodeShape.of(config) for config in (named, plain)]
    assert shapes[0].rows((1,), 9) == shapes[1].rows((1,), 9) + 4
    assert shapes[0].mean_rows(9) == shapes[1].mean_rows(9) + 4
    items = [load(classes, label_names=one).train.items.tokens for one in ("names", None)]
    assert (items[0] > items[1]).all()


def folder_of(tmp_path, files: dict[str, list]) -> Path:
    """A folder with one stratum of task files."""
    (tmp_path / "tasks" / "s0").mkdir(parents=True)
    for name, rows in files.items():
        write_rows(tmp_path / "tasks" / "s0" / f"{name}.jsonl", rows)
    return tmp_path / "tasks"


def test_names_of_classes_in_a_folder_of_task_files(tmp_path):
    files = {
        f"t{task}": [{"text": f"{c}{i} {task}", "label": f"{c}_{c}"} for c in "abc" for i in range(6)]
        for task in range(3)
    }
    for episode in episodes(load(folder_of(tmp_path, files), label_names="names")):
        named = {text_of(row): row.labels for row in episode.support if len(text_of(row)) == 3}
        assert named == {f"{name[0]} {name[0]}": label for label, name in enumerate(episode.classes)}


def test_joint_training_has_the_names_of_its_classes(classes):
    sources = load(classes, label_names="names", algorithm="joint")
    (task,) = Schedule(sources.train.items, 1, 3).meta_batch(0)
    transforms = [*sources.drawn, *reading(Config(), TOKENIZER, sources.numbers)]
    for row in transformed(sources.train.draw(task), transforms).support[2::3]:
        assert text_of(row) == "/".join([*sources.numbers][row.labels])


def test_episode_of_named_pairs(pairs):
    of_task = defaultdict(set)
    for row in map(json.loads, pairs.read_text().splitlines()):
        of_task[row["task"]].add(f"Input: {row['input']}\nOutput: {row['output']}")
    for episode in episodes(load(pairs, **CAUSAL)):
        texts = {text_of(row) for row in episode.support + episode.query}
        assert (len(episode.support), len(episode.query), len(texts), episode.classes) == (2, 3, 5, ())
        assert texts <= of_task[episode.task.name]


def test_an_episode_of_named_tasks_has_classes_of_one_task():
    """The built-in suite: an episode never mixes tasks, and its splits share no task."""
    sources = load("letters", n_way=5)
    for episode in episodes(sources, steps=2):
        assert {name.split()[0] for name in episode.classes} == {episode.task.name.split("-")[0]}
    parts = [{item.name for item in part.items} for part in (sources.train, sources.valid, sources.test)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert len({*sources.train.items.strata}) == len({name.split("-")[0] for name in parts[0]})


def test_items_know_their_expected_tokens(tmp_path):
    rows = [{"text": f"{c * 9}{i}", "label": c} for c in "abcdef" for i in range(5)]
    item = load(write_rows(tmp_path / "d.jsonl", rows)).train.items[0]
    assert item.tokens == 2 * 5 * 11  # ways, rows per class, <bos> and ten letters


def test_episodes_are_a_function_of_the_seed_and_the_fingerprint_follows_the_data(tmp_path, classes):
    sources, other = load(classes), load(write_classes(tmp_path / "other.jsonl", classes=11))
    assert episodes(sources) == episodes(load(classes)) != episodes(sources, seed=4)
    fingerprints = [one.fingerprint for one in (sources, load(classes), other, load(classes, max_length=10))]
    assert fingerprints[0] == fingerprints[1]
    assert len({*fingerprints}) == 3


def test_repeated_rows_are_left_out_and_logged(tmp_path):
    rows = [{"text": f"{c}{i % 6}", "label": c} for c in "abcdef" for i in range(8)]
    notices: list[str] = []
    sources = load(write_rows(tmp_path / "d.jsonl", rows), notices=notices)
    check_message(notices[0], "48 rows", "12 of 48 rows repeat another")
    assert "36 rows" in sources.summary


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        ({"text": "sentence", "label": "intent"}, {}),
        ({"text": "utterance", "label": "class"}, {}),
        ({"text": "Text", "label": "LABEL", "stratum": "Stratum"}, {}),
        (
            {"text": "body", "label": "y", "stratum": "z"},
            {"text_column": "body", "label_column": "y", "stratum_column": "z"},
        ),
    ],
)
def test_columns_by_usual_or_given_name(tmp_path, classes, columns, settings):
    rows = [json.loads(line) for line in classes.read_text().splitlines()]
    renamed = [{columns.get(key, key): value for key, value in row.items()} for row in rows]
    path = write_rows(tmp_path / "renamed.jsonl", renamed)
    assert load(path, **settings).fingerprint == load(classes).fingerprint


def test_splits_divide_the_classes(classes):
    splits, notices = {"train": ["c0", "c3"], "test": ["c1", "c2", "c4"]}, list[str]()
    sources = load(classes, notices=notices, class_splits=splits)
    assert f"{classes.name}: 7 classes of 12 in no split, not used" in notices
    assert sources.valid is None
    assert [[item.name for item in part.items] for part in (sources.train, sources.test)] == [
        *splits.values()
    ]
    other = load(classes, class_splits={**splits, "test": ["c1", "c2"]})
    assert other.fingerprint != sources.fingerprint  # a run is not continued with other splits


@pytest.mark.parametrize(("max_length", "label_tokens"), [(10, 5), (5, 4), (4, 3)])
def test_long_pairs_lose_the_start_of_the_prompt(max_length, label_tokens):
    (row,) = encode_pairs(TOKENIZER, ["a long question"], ["yes"], max_length)
    assert (len(row.input_ids), row.label_tokens) == (max_length, label_tokens)
    assert row.labels[0] == IGNORE  # something precedes the answer
    assert len(encode_texts(TOKENIZER, ["a long question"], max_length)[0]) == max_length


@pytest.mark.parametrize(("side", "kept"), [("right", slice(5)), ("left", slice(-5, None))])
def test_long_texts_keep_the_side_that_the_tokenizer_keeps(side, kept):
    tokenizer, text = copy.deepcopy(TOKENIZER), "begin" + "x" * 64 * 32 + "final"
    tokenizer.truncation_side = side
    (ids,) = encode_texts(tokenizer, [text], 16)
    assert tokenizer.decode(ids, skip_special_tokens=True)[kept] == text[kept]


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")


FIVE = {"k_shot": 5, "num_query": 5}


@needs_data
@pytest.mark.parametrize(
    ("name", "settings", "count", "strata"),
    [
        ("banking77", {**FIVE, "n_way": 5, "class_split": "01"}, 77, 1),
        ("banking77", {**FIVE, "n_way": 5, "class_split": "05"}, 77, 1),
        ("clinc150", {**FIVE, "n_way": 5, "class_split": "03"}, 150, 10),
        ("instruction_induction", {**FIVE, **CAUSAL}, 16, None),
        ("function_vectors", {**FIVE, **CAUSAL}, 39, None),
    ],
)
def test_real_data_load_with_their_own_splits(name, settings, count, strata):
    sources = load(DATA / name, **settings)
    kind = "class" if strata else "task"
    wanted = json.loads((DATA / name / f"{kind}_splits.json").read_text())
    made = {"train": sources.train, "valid": sources.valid, "test": sources.test}
    for part, names in wanted.get(settings.get("class_split"), wanted).items():
        assert {item.name for item in made[part].items} == set(names)
    items = [item for source in made.values() for item in source.items]
    assert len(items) == count
    assert not strata or len({item.stratum for item in items}) == strata
    for episode in episodes(sources, steps=1):
        assert len(episode.query) == 5 * settings.get("n_way", 1)
        assert all(row.label_tokens > 0 for row in episode.query)


@needs_data
def test_real_classes_without_a_split_file():
    notices: list[str] = []
    sources = load(DATA / "fewrel_val_wiki", notices=notices, n_way=5)
    assert sources.valid is None
    assert [len(source.items) for source in (sources.train, sources.test)] == [11, 5]
    assert "no split file: 11 train, 0 valid, 5 test, by a hash of their names" in notices


@needs_data
def test_real_data_sets_mix_with_their_own_splits():
    sources = load(DATA / "clinc150", DATA / "banking77", class_split="02")
    shares = [Counter(item.stratum for item in part.items) for part in (sources.train, sources.test)]
    assert shares == [{"clinc150": 50, "banking77": 25}, {"clinc150": 50, "banking77": 27}]


def test_strata_by_a_function_replace_those_of_the_column_and_change_the_fingerprint(classes, monkeypatch):
    by = {"stratify_by": "tests.support.loading:label_number"}
    found = load(classes, **by)
    assert found.train.items.strata == ["0", "1"]
    assert all(item.stratum == str(int(item.name[1:]) % 2) for item in found.train.items)
    assert found.fingerprint != load(classes).fingerprint
    monkeypatch.setattr("tests.support.loading.label_number", lambda row: "one")
    monkeypatch.setattr("fmmeta.tasks.data.token_store.source_of", lambda module: "changed")
    assert load(classes, **by).train.items.strata == ["one"]  # not from the store of the other function


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("stratify_by", "tests.support.loading:label_number", "whose folders are the strata"),
        ("class_weights", {"c0": 2}, "put the tasks into one file"),
        ("algorithm", "joint", "put the tasks into one file"),
        ("task_column", "name", "names and folders are the tasks and strata"),
        ("stratum_column", "kind", "names and folders are the tasks and strata"),
    ],
)
def test_what_a_folder_of_task_files_does_not_take_is_refused(folder, setting, value, why):
    message = refusal(load, folder, **{setting: value})
    check_message(message, f"{setting}={value if isinstance(value, str) else ''}", why)


def test_class_weights_of_joint_training_have_the_names_of_its_labels(classes):
    found = load(classes, class_weights={"c0": 2, "c1": 3}, algorithm="joint")
    assert {"c0": 2, "c1": 3}.items() <= found.class_weights.items()


@pytest.fixture
def mixture(tmp_path):
    """Two data sets: of 12 classes in three strata, and of 7 in one."""
    first = write_classes(tmp_path / "first.jsonl")
    return first, write_classes(tmp_path / "second.jsonl", classes=7, strata=1)


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


def test_data_sets_of_a_mixture_are_strata_and_share_no_episode(mixture):
    config, sources = loaded(*mixture, **ONE)
    parts = {path.stem: load(path, **ONE) for path in mixture}
    assert set(sources.train.items.strata) == {"first", "second"}
    assert len(sources.train.items) == sum(len(part.train.items) for part in parts.values())
    for task in tasks_of(config, sources, 30):
        own, name = task.name.split("/")
        episode, alone = sources.train.draw(task).episode(), parts[own].train
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
def test_weights_and_temperature_set_the_shares(mixture, settings, wanted):
    drawn = Counter(task.stratum for task in tasks_of(*loaded(*mixture, **ONE, **settings), 400))
    assert {name: pytest.approx(count, abs=4) for name, count in wanted.items()} == drawn


def test_a_weight_for_the_only_data_set_changes_nothing(classes):
    """Its strata are not data sets."""
    config, sources = loaded(classes, mix_weights=[2.0])
    assert stratum_shares(config, sources.train.items) is None


def test_short_names_fall_back_to_paths_when_they_collide():
    assert short_names(["x/clinc150", "y/banking77.jsonl.gz"]) == ["clinc150", "banking77"]
    assert short_names(["x/data.jsonl", "y/data.jsonl"]) == ["x/data.jsonl", "y/data.jsonl"]


def data_folder(folder: Path, splits) -> Path:
    """A data set of classes, with its splits."""
    folder.mkdir()
    write_classes(folder / "rows.jsonl")
    if splits:
        (folder / "class_splits.json").write_text(json.dumps(splits))
    return folder


def test_a_data_set_that_class_split_does_not_fit_is_warned_of(tmp_path):
    names = [f"c{number}" for number in range(12)]
    contents = {
        "named": {"a": {"train": names[6:]}, "b": {"train": names[:6]}},
        "one": {"train": names},
        "no": None,
    }
    folders = [data_folder(tmp_path / name, splits) for name, splits in contents.items()]
    notices: list[str] = []
    sources = load(*folders, class_split="b", notices=notices, **ONE)
    assert Counter(item.stratum for item in sources.train.items)["named"] == 6
    one, no, *rows = [text for text in notices if isinstance(text, Warn)]
    check_message(one, f"class_split=b is not used for {folders[1]}", "holds one split only")
    check_message(no, f"class_split=b is not used for {folders[2]}", "there is no file of splits")
    assert all("are in the" in text for text in rows)  # rows of the other copies, by their contents


def test_a_data_set_without_training_tasks_is_named(tmp_path, classes):
    second = data_folder(tmp_path / "second", {"train": [], "test": ["c0", "c1"]})
    check_message(refusal(load, classes, second), f"dataset={second}", "fix the split file")


def test_files_of_a_folder_of_folders_are_tasks(folder):
    config, sources = loaded(folder, **ONE)
    assert isinstance(sources.train, FolderSource)
    check_message(sources.summary, "12 task", "2 strata", f"{folder}", "tasks: 8 train, 2 valid, 2 test")
    for task in tasks_of(config, sources, 16):
        episode = sources.train.draw(task).episode()
        stratum, file = task.name.split("/")
        assert (task.stratum, sorted(episode.classes)) == (stratum, ["a", "b"])
        for row in episode.support + episode.query:
            assert text_of(row).startswith(WORDS[int(file[1:])])


def test_pairs_in_files_need_no_task_column(tmp_path):
    files = {name: [{"input": f"{i}", "output": name} for i in range(5)] for name in "abc"}
    config, sources = loaded(folder_of(tmp_path, files), **ONE, **CAUSAL)
    for task in tasks_of(config, sources, 3):
        (row, *_) = sources.train.draw(task).episode().query
        assert text_of(row).endswith(f"Output: {task.name[-1]}")


def test_no_file_is_read_before_its_task_is_drawn(folder):
    config, sources = loaded(folder, **ONE)
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
    root = folder_of(tmp_path, {"t0": rows})
    config, sources = loaded(root, **ONE)
    message = refusal(sources.train.draw, *tasks_of(config, sources, 1))
    check_message(message, f"{root / 's0' / 't0.jsonl'}: ", *parts)


def test_what_is_left_out_of_a_file_is_logged(tmp_path):
    """Rows that cannot be read, and classes with too few; the others of the file are a task."""
    rows = [{"text": f"x{i}", "label": "ab"[i % 2]} for i in range(8)] + [{"text": "y", "label": "rare"}]
    root = folder_of(tmp_path, {"t0": rows})
    path = root / "s0" / "t0.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    config, sources = loaded(root, **ONE, on_bad_task="skip", max_bad_fraction=0.5)
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


def test_the_suite_words_holds_functions_of_words_for_language_models():
    """Every task has as many different inputs, answers that are not empty and differ, and other functions are
    held out in every stratum.
    """
    rows, splits = words()
    tasks = [task for names in splits.values() for task in names]
    assert len(set(tasks)) == len(tasks)
    assert {row.values["task"] for row in rows} == {*tasks}
    inputs, answers, stratum = (defaultdict(set) for _ in range(3))
    for row in (row.values for row in rows):
        inputs[row["task"]].add(row["input"])
        answers[row["task"]].add(row["output"])
        stratum[row["task"]].add(row["stratum"])
    assert {len(found) for found in inputs.values()} == {WORD_ROWS}
    assert min(map(len, answers.values())) >= 3
    assert all(answer.strip() == answer != "" for found in answers.values() for answer in found)
    for names in splits.values():
        assert set().union(*(stratum[task] for task in names)) == {"pick", "list", "word", "number"}
    sources = load("words", **CAUSAL)
    assert [len(source.items) for source in (sources.train, sources.valid, sources.test)] == [67, 23, 23]
    check_message(refusal(load, "words"), "dataset=words", "use --task_type causal_lm")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("first capitals", lambda words: words[0].upper()),
        ("last but one last letter", lambda words: words[-2][-1]),
        ("alphabetically first backwards", lambda words: min(words)[::-1]),
        ("longest as it is", lambda words: sorted(words, key=len)[-1]),
        ("list last and first", lambda words: f"{words[-1]} {words[0]}"),
    ],
)
def test_functions_of_words_do_what_their_names_say(name, right):
    rng = random.Random(0)
    (function,) = (functions[name] for functions in all_functions().values() if name in functions)
    for _ in range(20):
        given, answer = function(rng, "; ", 5)
        assert answer == right(given.split("; "))
