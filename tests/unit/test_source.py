"""From data to episodes: columns, refusals by their text, episodes as pure functions of their seed, and the
real data.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest

from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.parallel.costs import rows_of
from fmmeta.tasks.augment import reading
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.data.encode import encode_pairs, encode_texts
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import Draw, EpisodeRows, EpisodeShape, transformed
from fmmeta.tasks.sources.load import Sources, load_sources
from tests.support.helpers import DATA, refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs

TOKENIZER = byte_tokenizer()
SMALL = {"n_way": 2, "k_shot": 2, "num_query": 3, "max_length": 64}


def load(path: Path | str, notices: list[str] | None = None, **settings) -> Sources:
    config = Config(dataset=[str(path)], **{**SMALL, **settings})
    return load_sources(config, TOKENIZER, (notices if notices is not None else []).append)


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


def test_episodes_are_a_function_of_the_seed(classes):
    assert episodes(load(classes)) == episodes(load(classes))
    assert episodes(load(classes), seed=3) != episodes(load(classes), seed=4)


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


def test_names_of_classes_belong_to_no_split(tmp_path, classes):
    sources, plain = (load(classes, label_names=names) for names in ("names", None))
    for split in ("train", "valid", "test"):
        assert getattr(sources, split).class_keys() == getattr(plain, split).class_keys()
    assert sources.summary == plain.summary
    assert len(sources.train.store) == len(plain.train.store)
    assert sources.fingerprint != plain.fingerprint


def test_descriptions_of_classes_are_support_examples(tmp_path, classes):
    file = tmp_path / "names.json"

    def described(prefix: str) -> Sources:
        file.write_text(json.dumps({f"c{c}": f"{prefix} {c}" for c in range(12)}))
        return load(classes, label_names=str(file))

    first = described("number")
    for episode in episodes(first):
        assert {text_of(row) for row in episode.support} > {f"number {name[1:]}" for name in episode.classes}
    assert described("another").fingerprint != first.fingerprint


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


def test_names_of_classes_that_are_refused(classes, pairs):
    check_message(
        refusal(load, classes, label_names="nowhere.json"), "label_names=nowhere.json", "give a JSON file"
    )
    check_message(
        refusal(load, pairs, task_type="causal_lm", label_names="names"),
        "label_names=names",
        "task_type=causal_lm",
    )
    check_message(
        refusal(load, classes, label_names='{"c0": "zero"}'),
        "label_names=",
        "no text for class 'c1'",
        "11 of 12 classes",
        "add it",
    )
    check_message(
        refusal(Config, label_names="names", task_type="tests.support.vision:of_nested"),
        "label_names=names with task_type=tests.support.vision:of_nested",
        "leave it out",
    )


def test_names_of_classes_count_as_rows(classes):
    """In the size of an episode, and in the rows of the largest support set."""
    named, plain = (Config(n_way=4, k_shot=2, k_shot_max=3, label_names=one) for one in ("names", None))
    assert (rows_of(named)[0], rows_of(plain)[0]) == (16, 12)
    shapes = [EpisodeShape.of(config) for config in (named, plain)]
    assert shapes[0].rows((1,), 9) == shapes[1].rows((1,), 9) + 4
    assert shapes[0].mean_rows(9) == shapes[1].mean_rows(9) + 4
    items = [load(classes, label_names=one).train.items.tokens for one in ("names", None)]
    assert (items[0] > items[1]).all()


def test_names_of_classes_in_a_folder_of_task_files(tmp_path):
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    for task in range(3):
        rows = [{"text": f"{c}{i} {task}", "label": f"{c}_{c}"} for c in "abc" for i in range(6)]
        write_rows(tmp_path / "tasks" / "one" / f"t{task}.jsonl", rows)
    for episode in episodes(load(tmp_path / "tasks", label_names="names")):
        named = {text_of(row): row.labels for row in episode.support if len(text_of(row)) == 3}
        assert named == {f"{name[0]} {name[0]}": label for label, name in enumerate(episode.classes)}


def test_joint_training_has_the_names_of_its_classes(classes):
    sources = load(classes, label_names="names", algorithm="joint")
    (task,) = Schedule(sources.train.items, 1, 3).meta_batch(0)
    transforms = [*sources.drawn, *reading(Config(), TOKENIZER, sources.numbers)]
    for row in transformed(sources.train.draw(task), transforms).support[2::3]:
        assert text_of(row) == "/".join([*sources.numbers][row.labels])


def test_episode_of_named_pairs(pairs):
    sources = load(pairs, task_type="causal_lm")
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for episode in episodes(sources):
        texts = [text_of(row) for row in episode.support + episode.query]
        of_task = [
            f"Input: {row['input']}\nOutput: {row['output']}"
            for row in rows
            if row["task"] == episode.task.name
        ]
        assert (len(episode.support), len(episode.query), len(set(texts))) == (2, 3, 5)
        assert set(texts) <= set(of_task)
        assert episode.classes == ()


def test_an_episode_of_named_tasks_has_classes_of_one_task():
    """The built-in suite: an episode never mixes tasks, and its splits share no task."""
    sources = load("letters", n_way=5)
    for episode in episodes(sources, steps=2):
        assert {name.split()[0] for name in episode.classes} == {episode.task.name.split("-")[0]}
    names = [{item.name for item in source.items} for source in (sources.train, sources.valid, sources.test)]
    assert sum(map(len, names)) == len(set.union(*names))
    assert len({item.stratum for item in sources.train.items}) == len(
        {name.split("-")[0] for name in names[0]}
    )


def test_items_know_their_expected_tokens(tmp_path):
    rows = [{"text": f"{c * 9}{i}", "label": c} for c in "abcdef" for i in range(5)]
    item = load(write_rows(tmp_path / "d.jsonl", rows)).train.items[0]
    assert item.tokens == 2 * 5 * 11  # ways, rows per class, <bos> and ten letters


def test_fingerprint_follows_the_data(tmp_path, classes):
    first = load(classes).fingerprint
    assert load(classes).fingerprint == first
    assert load(write_classes(tmp_path / "other.jsonl", classes=11)).fingerprint != first
    assert load(classes, max_length=10).fingerprint != first


def test_repeated_rows_are_left_out_and_logged(tmp_path):
    rows = [{"text": f"{c}{i % 6}", "label": c} for c in "abcdef" for i in range(8)]
    notices: list[str] = []
    sources = load(write_rows(tmp_path / "d.jsonl", rows), notices)
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


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"text_column": "body"},
            ["text_column=body", "dataset={path}", "it has label, stratum, text"],
        ),
        (
            {"stratum_column": "x"},
            ["stratum_column=x", "dataset={path}", "it has label, stratum, text"],
        ),
        (
            {"task_type": "causal_lm"},
            ["dataset={path}", "it has label, stratum"],
        ),
        (
            {"k_shot": 4},
            [
                "k_shot=4",
                "num_query=3",
                "7 rows",
                "has 6",
                "class 'c",
                "lower them or leave it out of the",
            ],
        ),
        ({"n_way": 13}, ["n_way=13", "12 classes", "lower n_way"]),
        ({"class_split": "01"}, ["class_split=01", "give --class_splits"]),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(classes, settings, parts):
    check_message(refusal(load, classes, **settings), *(part.format(path=classes) for part in parts))


def test_missing_columns_are_named(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"body": "x", "label": "y"}])
    check_message(refusal(load, path), f"dataset={path}", "it has body, label")
    check_message(
        refusal(load, path, text_column="body", label_column="kind"),
        "label_column=kind",
        f"dataset={path}",
        "it has body, label",
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None"), ("", "''"), ([1], "[1]"), ({"a": 1}, "{'a': 1}")]
)
def test_a_cell_without_text_is_named(tmp_path, value, shown):
    path = write_rows(tmp_path / "d.jsonl", [{"text": "x", "label": "y"}, {"text": value, "label": "y"}])
    check_message(refusal(load, path), f"text={shown}", f"{path}:2", "fix the row")


def test_too_small_tasks_are_named(tmp_path):
    few = write_rows(
        tmp_path / "few.jsonl", [{"task": "t", "input": str(i), "output": "o"} for i in range(4)]
    )
    check_message(
        refusal(load, few, task_type="causal_lm"),
        "k_shot=2",
        "num_query=3",
        "5 rows",
        "has 4",
        "'t'",
        "lower them or leave it out of the train",
    )
    one = [{"task": "t", "text": str(i), "label": "only"} for i in range(5)]
    check_message(
        refusal(load, write_rows(tmp_path / "one.jsonl", one)), "n_way=2", "1 class of", "'t'", "lower n_way"
    )
    check_message(
        refusal(
            load, write_rows(tmp_path / "four.jsonl", [*one[:4], *({**row, "label": "b"} for row in one)])
        ),
        "k_shot=2",
        "num_query=3",
        "5 rows",
        "has 4",
        "'only'",
        "'t'",
        "lower them or leave it out of the train",
    )


def test_too_few_classes_are_named_before_too_few_rows(tmp_path):
    rows = [{"text": f"{n} {m}", "label": f"c{n}"} for n in range(3) for m in range(2)]
    few = write_rows(tmp_path / "few.jsonl", rows)
    check_message(
        refusal(load, few, n_way=20), "n_way=20 is above the 3 classes of the train split", "lower n_way"
    )
    check_message(refusal(load, few, n_way=2), "k_shot=2", "need 5 rows", "has 2", "lower them")


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        (
            {"train": ["c0", "c1", "c99"]},
            ["'c99'", "the train split names the", "fix the split file"],
        ),
        (
            {"train": ["c0", "c1"], "test": ["c1", "c2"]},
            ["'c1'", "the class 'c1' is in the train", "list it once"],
        ),
        (
            {"train": ["c0", "c1", "c0"]},
            ["'c0'", "is twice in the train split", "list it once"],
        ),
        (
            {"train": ["c0", "c1"], "valid": ["c2"]},
            ["n_way=2", "1 class of", "lower n_way"],
        ),
        (
            {"train": [], "test": ["c1", "c2"]},
            ["dataset={path}", "fix the split file"],
        ),
    ],
)
def test_splits_that_do_not_fit_the_data_are_refused(tmp_path, classes, splits, parts):
    file = tmp_path / "splits.json"
    file.write_text(json.dumps(splits))
    check_message(
        refusal(load, classes, class_splits=str(file)), *(part.format(path=classes) for part in parts)
    )


def test_splits_divide_the_classes(tmp_path, classes):
    file, notices = tmp_path / "splits.json", list[str]()
    file.write_text(json.dumps({"train": ["c0", "c3"], "test": ["c1", "c2", "c4"]}))
    sources = load(classes, notices, class_splits=str(file))
    assert f"{classes.name}: 7 classes of 12 in no split, not used" in notices
    assert [item.name for item in sources.train.items] == ["c0", "c3"]
    assert sources.valid is None
    assert [item.name for item in sources.test.items] == ["c1", "c2", "c4"]
    file.write_text(json.dumps({"train": ["c0", "c3"], "test": ["c1", "c2"]}))
    assert (
        load(classes, class_splits=str(file)).fingerprint != sources.fingerprint
    )  # a run is not continued with other splits


@pytest.mark.parametrize("setting", ["class_splits", "task_splits", "class_split"])
def test_the_builtin_suite_takes_no_other_splits(setting):
    check_message(refusal(load, "letters", **{setting: "01"}), "dataset=letters", "leave --class_splits")


@pytest.mark.parametrize(("max_length", "label_tokens"), [(10, 5), (5, 4), (4, 3)])
def test_long_pairs_lose_the_start_of_the_prompt(max_length, label_tokens):
    (row,) = encode_pairs(TOKENIZER, ["a long question"], ["yes"], max_length)
    assert (len(row.input_ids), row.label_tokens) == (max_length, label_tokens)
    assert row.labels[0] == IGNORE  # something precedes the answer
    assert len(encode_texts(TOKENIZER, ["a long question"], max_length)[0]) == max_length


def test_long_texts_keep_the_side_that_the_tokenizer_keeps():
    tokenizer, text = copy.deepcopy(TOKENIZER), "begin" + "x" * 64 * 32 + "end"
    assert tokenizer.decode(encode_texts(tokenizer, [text], 16)[0], skip_special_tokens=True)[:5] == "begin"
    tokenizer.truncation_side = "left"
    assert tokenizer.decode(encode_texts(tokenizer, [text], 16)[0], skip_special_tokens=True)[-3:] == "end"


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")


@needs_data
@pytest.mark.parametrize(
    ("name", "split", "classes", "strata"),
    [
        ("banking77", "01", (25, 25, 27), 1),
        ("banking77", "05", (25, 25, 27), 1),
        ("clinc150", "03", (50, 50, 50), 10),
    ],
)
def test_real_classes_load_with_their_own_splits(name, split, classes, strata):
    sources = load(DATA / name, n_way=5, k_shot=5, num_query=15, class_split=split)
    wanted = json.loads((DATA / name / "class_splits.json").read_text())[split]
    made = {"train": sources.train, "valid": sources.valid, "test": sources.test}
    assert tuple(len(source.items) for source in made.values()) == classes
    assert all({item.name for item in source.items} == set(wanted[part]) for part, source in made.items())
    assert len({item.stratum for source in made.values() for item in source.items}) == strata
    assert len(episodes(sources, steps=1)[0].query) == 75


@needs_data
@pytest.mark.parametrize(("name", "tasks"), [("instruction_induction", 16), ("function_vectors", 39)])
def test_real_tasks_load_with_their_own_splits(name, tasks):
    sources = load(DATA / name, task_type="causal_lm", k_shot=5, num_query=5)
    wanted = json.loads((DATA / name / "task_splits.json").read_text())
    made = {"train": sources.train, "valid": sources.valid, "test": sources.test}
    assert all({item.name for item in source.items} == set(wanted[part]) for part, source in made.items())
    assert sum(len(source.items) for source in made.values()) == tasks
    assert all(row.label_tokens > 0 for episode in episodes(sources) for row in episode.query)


@needs_data
def test_real_classes_without_a_split_file():
    notices: list[str] = []
    sources = load(DATA / "fewrel_val_wiki", notices, n_way=5)
    assert sources.valid is None
    assert [len(source.items) for source in (sources.train, sources.test)] == [11, 5]
    assert "no split file: 11 train, 0 valid, 5 test, by a hash of their names" in notices


def test_strata_by_a_function_replace_those_of_the_column_and_change_the_fingerprint(tmp_path, monkeypatch):
    path = write_classes(tmp_path / "classes.jsonl")
    by = {"stratify_by": "tests.support.loading:label_number"}
    found = load(path, **by)
    assert found.train.items.strata == ["0", "1"]
    for item in found.train.items:
        assert item.stratum == str(int(item.name[1:]) % 2)
    assert found.fingerprint != load(path).fingerprint
    monkeypatch.setattr("tests.support.loading.label_number", lambda row: "one")
    monkeypatch.setattr("fmmeta.tasks.data.token_store.source_of", lambda module: "changed")
    assert load(path, **by).train.items.strata == ["one"]  # not from the store of the other function


def test_a_folder_of_task_files_takes_neither_strata_by_a_function_nor_class_weights(tmp_path):
    (tmp_path / "tasks" / "s").mkdir(parents=True)
    for name in "abc":
        write_classes(tmp_path / "tasks" / "s" / f"{name}.jsonl", classes=2)
    weights = tmp_path / "weights.json"
    weights.write_text('{"c0": 2}')
    for setting, value, why in (
        ("stratify_by", "tests.support.loading:label_number", "whose folders are the strata"),
        ("class_weights", str(weights), "put the tasks into one file"),
        ("task_column", "name", "names and folders are the tasks and strata"),
        ("stratum_column", "kind", "names and folders are the tasks and strata"),
    ):
        check_message(refusal(load, tmp_path / "tasks", **{setting: value}), f"{setting}={value}", why)


@pytest.mark.parametrize("weight", ["1e300", "1e-60", f"1{400 * '0'}"])
def test_class_weights_whose_sums_overflow_are_refused(weight, tmp_path):
    weights = tmp_path / "weights.json"
    weights.write_text(f'{{"c0": {weight}}}')
    check_message(
        refusal(load, write_classes(tmp_path / "classes.jsonl"), class_weights=str(weights)),
        f"class_weights={weights}",
        "class 'c0'",
        "write a number from 1e-06 to 1e+06",
    )


def test_a_column_that_the_model_does_not_read_is_refused(tmp_path):
    check_message(
        refusal(load, write_classes(tmp_path / "classes.jsonl"), image_column="picture"),
        "image_column=picture",
        "the model reads texts",
        "leave it out",
    )


def test_class_weights_of_joint_training_have_the_names_of_its_labels(tmp_path):
    weights = tmp_path / "weights.json"
    weights.write_text('{"c0": 2, "c1": 3}')
    path = write_classes(tmp_path / "classes.jsonl")
    found = load(path, class_weights=str(weights), algorithm="joint")
    assert {"c0": 2, "c1": 3}.items() <= found.class_weights.items()
