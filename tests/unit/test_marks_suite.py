"""The suite `marks`: balanced support sets, queries without marks, held-out tasks of other kinds, and what is
refused.
"""

from __future__ import annotations

from collections import Counter

import pytest

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import setup
from fmmeta.models.load import describe, load_learner, load_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.tasks.suites import MARKS, hidden_kinds, marks, part_of
from tests.support.helpers import refusal
from tests.support.learners import batches_of, by_name, task_gradient, worker_of
from tests.support.messages import check_message

KIND_OF = {letter: number for number, kind in enumerate(hidden_kinds()) for letter in kind}


def load(**settings):
    config = Config(**{"dataset": ["marks"], "n_way": 3, "k_shot": 6, **settings})
    return load_sources(config, load_tokenizer(config, describe(config), print), print)


def kind(text: str) -> int:
    (found,) = {KIND_OF[sign] for sign in text if sign not in MARKS}
    return found


@pytest.fixture(scope="module")
def sources():
    return load()


def drawn(source, steps: int = 20):
    for step in range(steps):
        for task in Schedule(source.items, 2, 0).meta_batch(step):
            draw = source.draw(task)
            yield [
                [(draw.store.text("input", row), label) for row, label in rows]
                for rows in (draw.support, draw.query)
            ]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_only_the_marks_tell_the_labels_of_kinds(sources, split):
    """Every kind as often under every label; queries show the kinds, the marks say where they belong."""
    for support, query in drawn(getattr(sources, split)):
        assert set(Counter((kind(text), label) for text, label in support).values()) == {2}
        truth = {label: kind(text) for text, label in support if part_of(text) == 1}
        assert {label: kind(text) for text, label in query} == truth
        assert Counter(label for _, label in query) == {0: 5, 1: 5, 2: 5}
        assert all(part_of(text) == 0 for text, _ in query)
        assert Counter(part_of(text) for text, _ in support) == {1: 6, 2: 6, 3: 6}


def test_a_mark_gives_the_offset_of_the_label():
    rows, _ = marks()
    kinds = {
        (row.values["task"], row.values["label"]): kind(row.values["text"])
        for row in rows
        if not part_of(row.values["text"])
    }
    for row in rows:
        task, label, text = row.values["task"], int(row.values["label"].split()[1]), row.values["text"]
        off = max(0, part_of(text) - 1)
        assert kind(text) == kinds[task, f"class {(label + off) % 3}"]


def test_tasks_have_distinct_kinds_and_distinct_texts():
    rows, splits = marks()
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 80, "valid": 12, "test": 24}
    sets = [
        frozenset(kind(row.values["text"]) for row in rows if row.values["task"] == task)
        for tasks in splits.values()
        for task in tasks
    ]
    assert len(set(sets)) == len(sets) == 116
    assert len({(row.values["task"], row.values["label"], row.values["text"]) for row in rows}) == len(rows)


def test_remaining_rows_get_the_first_mark():
    for support, _ in drawn(load(k_shot=4).train, 3):
        assert Counter((label, part_of(text)) for text, label in support) == {
            (label, part): 2 if part == 1 else 1 for label in range(3) for part in (1, 2, 3)
        }


def test_the_first_order_gradient_of_the_marks_is_zero():
    """Exactly zero on their embeddings, where the exact gradient is not; both move the letters'."""
    found = {}
    for algorithm in ("fomaml", "maml"):
        config = Config(
            dataset=["marks"], n_way=3, k_shot=6, algorithm=algorithm, inner_steps=1, inner_lr=1.0
        )
        tokenizer, learner = (
            load_tokenizer(config, describe(config), print),
            load_learner(config, describe(config)),
        )
        source = load_sources(config, tokenizer, print).train
        episode = source.draw(Schedule(source.items, 1, 0).meta_batch(0)[0]).episode()
        worker = worker_of(learner, config)
        rule = find(algorithm).rule(setup(config, worker, learner.head_names, 3, False), 0)
        gradient = by_name(worker, task_gradient(rule, worker, batches_of(episode, 32)).gradient)
        table = gradient["hf.embeddings.word_embeddings.weight"]
        marks_of, letters = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (MARKS, "".join(KIND_OF))
        )
        found[algorithm] = float(table[marks_of].abs().max()), float(table[letters].abs().max())
    assert found["fomaml"][0] == 0
    assert found["maml"][0] > 1e-3 * found["maml"][1]
    assert found["fomaml"][1] > 0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"k_shot": 37}, ["k_shot=37", "dataset=marks", "36 texts", "lower it"]),
        (
            {"k_shot": 3, "k_shot_max": 40},
            ["k_shot=40", "dataset=marks", "36 texts", "lower it"],
        ),
        ({"num_query": 21}, ["num_query=21", "dataset=marks", "20 texts", "lower it"]),
        (
            {"task_type": "causal_lm"},
            ["dataset=marks", "task_type=causal_lm", "use classification"],
        ),
        ({"n_way": 4}, ["n_way=4", "3 classes", "'train-0'", "lower n_way"]),
    ],
)
def test_episodes_larger_than_the_suite_are_refused(settings, parts):
    check_message(refusal(load, **settings), *parts)
