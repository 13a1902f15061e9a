"""The suite `words`: functions of words for language models, held-out functions, and what is refused."""

from collections import defaultdict

import pytest

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.tasks.sources.load import load_sources
from fmmeta.tasks.word_suite import WORD_ROWS, all_functions, words
from tests.support.messages import check_message, refusal


@pytest.fixture(scope="module")
def suite():
    return words()


def test_every_task_has_as_many_different_inputs(suite):
    rows, splits = suite
    inputs = defaultdict(set)
    for row in rows:
        inputs[row.values["task"]].add(row.values["input"])
    assert {len(found) for found in inputs.values()} == {WORD_ROWS}
    assert set(inputs) == {task for tasks in splits.values() for task in tasks}


def test_answers_are_not_empty_and_differ_within_a_task(suite):
    answers = defaultdict(set)
    for row in suite[0]:
        assert row.values["output"].strip() == row.values["output"] != ""
        answers[row.values["task"]].add(row.values["output"])
    assert min(map(len, answers.values())) >= 3


def test_held_out_tasks_are_other_functions_of_every_stratum(suite):
    rows, splits = suite
    assert len({task for tasks in splits.values() for task in tasks}) == sum(map(len, splits.values()))
    stratum = {row.values["task"]: row.values["stratum"] for row in rows}
    for tasks in splits.values():
        assert {stratum[task] for task in tasks} == {"pick", "list", "word", "number"}


def test_functions_do_what_their_names_say():
    import random

    named = {name: pair for group in all_functions().values() for name, pair in group.items()}
    rng = random.Random(0)
    for name, right in {
        "first capitals": lambda words: words[0].upper(),
        "last but one last letter": lambda words: words[-2][-1],
        "alphabetically first backwards": lambda words: sorted(words)[0][::-1],
        "longest as it is": lambda words: sorted(words, key=len)[-1],
        "list last and first": lambda words: f"{words[-1]} {words[0]}",
    }.items():
        for _ in range(20):
            given, answer = named[name](rng, "; ", 5)
            assert answer == right(given.split("; "))


def test_the_suite_is_for_language_models():
    config = Config(dataset=["words"], task_type="causal_lm", model_name_or_path="tiny")
    sources = load_sources(config, load_tokenizer(config, describe(config), print), print)
    assert [len(source.items) for source in (sources.train, sources.valid, sources.test)] == [67, 23, 23]
    config = Config(dataset=["words"])
    check_message(
        refusal(load_sources, config, load_tokenizer(config, describe(config), print), print),
        "dataset=words",
        "use --task_type causal_lm",
    )
