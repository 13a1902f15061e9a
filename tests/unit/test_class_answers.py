"""Rows with classes for a language model: the answers that an episode gives its classes (--answers)."""

import json
from dataclasses import replace

import pytest

import fmmeta
from fmmeta import Config, MetaTrainer, Tasks
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.metrics.language import values_of
from fmmeta.parallel.costs import rows_of
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeShape
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message, check_text, exit_code

CLASSES = 15


def intents(folder):
    rows = [
        {"text": f"{verb} thing {number}", "label": f"intent_{number}", "stratum": f"s{number % 2}"}
        for number in range(CLASSES)
        for verb in ("do", "undo", "move", "find", "sell", "keep")
    ]
    return str(write_rows(folder / "intents.jsonl", rows))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    given = {"task_type": "causal_lm", "n_way": 3, "k_shot": 2, "num_query": 1, "answers": "symbols"}
    return {**given, "dataset": [intents(tmp_path)]}


def drawn(settings, split="train", seed=5, **more):
    """A draw of the first item with the texts of its rows, and its source."""
    config = Config(**settings, **more)
    tokenizer = load_tokenizer(config, describe(config), print)
    source = load_sources(config, tokenizer, print).of_split[split]
    name, stratum = source.items.names[0], source.items.strata[source.items.stratum[0]]
    draw = source.draw(Task(0, name, stratum, 1, (seed,)))
    return draw, values_of(draw, draw.support), values_of(draw, draw.query), source


def answers_by_class(rows):
    """The answers that the rows of each class have; a class is the number in its texts."""
    found = {}
    for row in rows:
        found.setdefault(row["input"].split()[-1], set()).add(row["output"])
    return found


@pytest.mark.parametrize("answers", ["names", "symbols", "flipped"])
def test_an_episode_gives_each_of_its_classes_one_answer(settings, answers):
    draw, support, query, _ = drawn({**settings, "answers": answers})
    assert len(support) == 3 * 2
    assert len(query) == 3
    found = answers_by_class([*support, *query])
    assert len(found) == 3
    assert all(len(one) == 1 for one in found.values())
    of_class = {f"intent_{number}": min(one) for number, one in found.items()}
    assert len({*of_class.values()}) == 3  # different ones
    if answers == "names":
        assert all(name == answer for name, answer in of_class.items())
    elif answers == "flipped":
        assert {*of_class} == {*of_class.values()}
        assert all(name != answer for name, answer in of_class.items())
    else:
        assert all(len(answer) == 1 and answer.islower() for answer in of_class.values())  # of a byte
    rows = draw.episode()
    assert not rows.classes
    learned = [[label for label in row.token_labels if label != IGNORE] for row in rows.support]
    texts = [byte_tokenizer().decode(labels, skip_special_tokens=True).strip() for labels in learned]
    assert texts == [row["output"] for row in support]


def test_episodes_of_several_sizes_have_an_answer_for_each_class(settings):
    sizes = {"n_way": 2, "n_way_max": 4, "k_shot": 1, "k_shot_max": 2}
    found = set()
    for seed in range(20):
        _, support, query, _ = drawn({**settings, **sizes}, seed=seed)
        answers = answers_by_class([*support, *query])
        assert len({*map(min, answers.values())}) == len(answers) == len(query)
        found.add((len(answers), len(support)))
    assert {classes for classes, _ in found} == {2, 3, 4}
    assert any(classes < rows < 2 * classes for classes, rows in found)  # shots differ
    for name in ("n_way_max", "k_shot_max"):
        message = refusal(Config, **{**settings, "answers": None, name: 9})
        check_message(message, f"{name}=9 means nothing for task_type=causal_lm")


def test_symbols_are_drawn_for_each_episode_by_its_seed_alone(settings):
    first, again, other = (drawn(settings, seed=seed)[1] for seed in (5, 5, 6))
    assert first == again
    assert {row["output"] for row in first} != {row["output"] for row in other}


def test_the_rows_of_a_seed_are_the_same_whatever_answers_are(settings):
    named, symbols = (drawn({**settings, "answers": one})[0] for one in ("names", "symbols"))
    assert {*named.support} == {*symbols.support}
    assert named.query == symbols.query
    labels = [label for _, label in symbols.support]
    assert labels != sorted(labels)  # a prompt does not have class after class


def test_classes_are_split_and_a_part_of_them_is_drawn_from(settings):
    names = {split: {*drawn(settings, split)[3].items.names} for split in ("train", "valid", "test")}
    assert sum(map(len, names.values())) == len(set.union(*names.values())) == CLASSES
    source = drawn(settings)[3]
    part = source.part([True] * 4 + [False] * (len(source.items) - 4))
    draw = part.draw(Task(0, part.items.names[0], "s0", 1, (1,)))
    assert {row["input"].split()[-1] for row in values_of(draw, draw.support)} <= {
        name.removeprefix("intent_") for name in part.items.names
    }
    assert all(len(row["output"]) == 1 for row in values_of(draw, draw.support))


def test_a_file_for_each_task_has_answers_too(settings, tmp_path):
    for number in range(4):
        rows = [
            {"text": f"{word} of {number} is {label}", "label": f"class {label}"}
            for label in range(3)
            for word in ("one", "two", "three", "four")
        ]
        path = tmp_path / "tasks" / f"s{number % 2}" / f"t{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows)
    _, support, query, _ = drawn({**settings, "dataset": [str(tmp_path / "tasks")]})
    found = answers_by_class([*support, *query])
    assert len(found) == 3
    assert all(len(one) == 1 and len(min(one)) == 1 for one in found.values())


def test_a_run_and_an_evaluation_use_the_answers_that_the_model_was_trained_with(settings, tmp_path):
    run = {"output_dir": str(tmp_path / "run"), "outer_steps": 2, "inner_steps": 1, "meta_batch_size": 2}
    MetaTrainer(Config(**settings, **run, algorithm="fomaml", eval_episodes=2)).train()
    assert "-shot episodes, answers symbols |" in (tmp_path / "run" / "model" / "README.md").read_text()
    model = tmp_path / "run" / "model"
    assert json.loads((model / "fmmeta.json").read_text())["answers"] == "symbols"
    shape = {key: settings[key] for key in ("dataset", "n_way", "num_query")} | {"k_shot": [2]}
    shape |= {"episodes": 4, "metrics": ["options", "exact_match"]}
    found, again = (
        fmmeta.evaluate(str(model), **shape, method=["finetune", "in_context"], **more)["cells"]
        for more in ({}, {"answers": "symbols"})
    )
    names = fmmeta.evaluate(str(model), **shape, method=["in_context"], answers="names")
    assert names["n_way"] == "3"
    assert names["loss"] != found[1]["loss"]
    assert [cell["scores"] for cell in found] == [cell["scores"] for cell in again]
    shares = [3 * score["metrics"]["options"] for cell in found for score in cell["scores"]]
    assert {*map(round, shares)} <= {0, 1, 2, 3}
    assert shares == pytest.approx([*map(round, shares)])


def test_models_are_compared_on_the_answers_of_the_first(settings, tmp_path, capsys):
    """Also with a base that stores none; one that was trained with others is refused before any score."""
    for answers in ("symbols", "flipped"):
        run = {"output_dir": str(tmp_path / answers), "outer_steps": 1, "inner_steps": 1}
        MetaTrainer(Config(**{**settings, **run, "answers": answers}, eval_episodes=0)).train()
    model, other = (str(tmp_path / answers / "model") for answers in ("symbols", "flipped"))
    words = ["evaluate", "--model_name_or_path", model, "--dataset", *settings["dataset"]]
    words += ["--n_way", "3", "--k_shot", "2", "--num_query", str(settings["num_query"]), "--episodes", "2"]
    assert exit_code([*words, "--compare", "tiny"]) == 0
    capsys.readouterr()
    assert exit_code([*words, "--compare", other]) == 2
    captured = capsys.readouterr()
    check_message(
        captured.err, f"compare={other} learns with answers=flipped", "answers=symbols", "--answers"
    )
    assert "accuracy" not in captured.out
    assert exit_code([*words, "--compare", other, "--answers", "names"]) == 0


def test_a_model_that_learned_classes_is_used_for_pairs(settings, tmp_path):
    run = {"output_dir": str(tmp_path / "run"), "outer_steps": 1, "inner_steps": 1}
    MetaTrainer(Config(**settings, **run, eval_episodes=0)).train()
    model = str(tmp_path / "run" / "model")
    pairs = {"dataset": ["words"], "k_shot": [2], "num_query": 2, "episodes": 2, "answers": "none"}
    assert fmmeta.evaluate(model, **pairs)["cells"]
    assert Config(**{**settings, "answers": "none", "n_way": 5}).answers is None
    rows = [{"input": f"{n} plus 1", "output": [str(n + 1), f"number {n + 1}"]} for n in range(4)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    assert fmmeta.adapt(model, str(file), output_dir=tmp_path / "adapted", early_stopping=False).predict(
        ["1"]
    )


def test_rows_that_are_doubtful_as_classes_are_told(settings, tmp_path):
    rows = [{"text": f"some text {n} of {c}", "label": f"class {c}"} for c in range(12) for n in range(9)]
    rows += [{"text": f"other {n}", "label": "class 0 "} for n in range(9)]
    rows += [{"text": "some text 0 of 0", "label": "class 1"}]
    given, notices = {**settings, "dataset": [str(write_rows(tmp_path / "r.jsonl", rows))]}, list[str]()
    config = Config(**given)
    tokenizer = load_tokenizer(config, describe(config), print)
    load_sources(config, tokenizer, notices.append)
    check_text("\n".join(notices), "class 0", "in more than one class")
    rows[0]["label"] = ["class 0", "class 3"]
    write_rows(tmp_path / "r.jsonl", rows)
    message = refusal(lambda: load_sources(config, tokenizer, print))
    check_message(message, "r.jsonl:1 has 2 answers in label", "write one")


def test_inspect_counts_classes(settings, capsys):
    words = ["inspect", *settings["dataset"], "--task_type", "causal_lm", "--answers", "symbols"]
    assert exit_code([*words, "--n_way", "3", "--k_shot", "2", "--num_query", "1"]) == 0
    check_text(capsys.readouterr().out, "of 3 classes", "rows per class")


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"task_type": "classification"}, ["answers=symbols means nothing for task_type=classification"]),
        ({"n_way": 1}, ["n_way=1 is below 2"]),
        ({"n_way": 40}, ["n_way=40 is above the", "lower n_way"]),
        ({"n_way_max": 27}, ["answers=symbols with n_way_max=27", "has 26 words", "lower n_way_max"]),
        ({"answers": "letters"}, ["answers=letters is unknown; use none, names, symbols or flipped"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_a_line(settings, changes, fragments):
    message = refusal(lambda: drawn({**settings, **changes}))
    for fragment in fragments:
        check_message(message, fragment)


def test_symbols_that_do_not_suffice_are_refused(settings, tmp_path):
    rows = [{"text": f"{word} {n}", "label": f"c{n}"} for n in range(90) for word in ("a", "b", "c")]
    many = {**settings, "dataset": [str(write_rows(tmp_path / "many.jsonl", rows))], "n_way": 30}
    message = refusal(lambda: drawn(many))
    check_message(message, "answers=symbols with n_way=30: the tokenizer has 26 words of one token")


def test_functions_draw_their_own_answers(settings):
    tasks = Tasks(lambda number: ([("a", "b")] * 2, [("c", "d")]), train=4)
    given = {key: settings[key] for key in ("task_type", "answers")}
    message = refusal(lambda: MetaTrainer(Config(**given), dataset=tasks).prepare())
    check_message(message, "answers=symbols")


def test_every_class_is_no_number_of_answers(settings):
    asked = {"model_name_or_path": "tiny", "task_type": "causal_lm", "answers": "names", "n_way": "all"}
    evaluation = EvaluateConfig(**asked, dataset=settings["dataset"], k_shot=[1])
    message = refusal(lambda: evaluation.check_run(evaluation.run_config()))
    check_message(message, "n_way=all with answers=names")
    assert replace(evaluation, n_way="3").run_config().largest_way == 3


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, (3 * 2, 3 * 1)),
        ({"answers": None}, (2, 1)),
        ({"answers": None, "task_type": "classification"}, (3 * 2, 3 * 1)),
        ({"answers": None, "task_type": "token_classification"}, (2, 1)),  # n_way tags, not classes
    ],
    ids=str,
)
def test_memory_and_time_are_estimated_for_the_rows_of_an_episode(settings, changes, rows):
    config = Config(**{**settings, **changes})
    assert rows_of(config) == rows
    shape = EpisodeShape.of(config)
    assert (shape.n_way * shape.k_shot, shape.n_way * shape.num_query) == rows
