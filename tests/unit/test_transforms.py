"""Transforms: what they get, what they may give back, and every way to name a wrong one."""

import os
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.augment import TextExample, drop_words, reading, swap_words, weigh_classes
from fmmeta.tasks.batching import Batcher, pack
from fmmeta.tasks.loader import LoadEpisode, check_sent
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import Draw, transformed
from fmmeta.tasks.sources.load import load_sources
from fmmeta.tasks.sources.own import Tasks
from tests.support.messages import check_message, refusal
from tests.support.models import write_classes, write_pairs

TOKENIZER = byte_tokenizer()
HERE = "tests.unit.test_transforms"
NOT_A_FUNCTION = 3
LOCAL = [lambda example, rng: example][0]


def add_a_number(example, rng):
    return replace(example, text=f"{example.text} {rng.integers(100, 1000)}")


def upper(example, rng):
    return replace(example, text=example.text.upper(), target=example.target.upper())


def first_query_only(episode, rng):
    return replace(episode, query=episode.query[:1])


def broken(example, rng):
    raise KeyError("no such word")


def silent(example, rng):
    return replace(example, text="")


def forgetful(example, rng):
    return None


def third(episode, rng):
    """The first support row counts three times as much as another; its text has a number of the task."""
    first, *others = episode.support
    first = replace(first, weight=3.0, text=f"{first.text} {rng.integers(1000)}")
    return replace(episode, support=[first, *others])


def weightless(example, rng):
    return replace(example, weight=0.0)


def relabel(example, rng):
    return replace(example, label=7)


def raised(row, rng):
    """A point (x, y) a step higher."""
    return [row[0], row[1] + 1]


def one_point(episode, rng):
    return replace(episode, support=episode.support[:1])


def louder(example, rng):
    return replace(example, text=f"{example.text}!")


def drawn(tmp_path, **settings):
    causal = settings.get("task_type") == "causal_lm"
    path = (write_pairs if causal else write_classes)(tmp_path / "d.jsonl")
    config = Config(dataset=[str(path)], n_way=2, k_shot=2, num_query=2, **settings)
    source = load_sources(config, TOKENIZER, lambda text: None).train
    return config, source.draw(Schedule(source.items, 1, 5).meta_batch(0)[0])


def run(tmp_path, **settings):
    config, draw = drawn(tmp_path, **settings)
    return draw.episode(), transformed(draw, reading(config, TOKENIZER))


def texts(rows) -> list[str]:
    return [TOKENIZER.decode(row.input_ids, skip_special_tokens=True) for row in rows]


def test_stored_tokens_are_read_without_own_transforms():
    assert reading(Config(), TOKENIZER) == [Draw.episode]


def test_examples_are_changed_before_the_tokenizer(tmp_path):
    plain, changed = run(tmp_path, example_transforms=[f"{HERE}:upper"])
    assert texts(changed.support) == [text.upper() for text in texts(plain.support)]
    assert [row.labels for row in changed.query] == [row.labels for row in plain.query]
    assert changed.classes == plain.classes


def test_transforms_of_a_row_have_random_numbers_of_their_own(tmp_path):
    """The first has those that it has alone."""
    _, alone = run(tmp_path, example_transforms=[f"{HERE}:add_a_number"])
    _, twice = run(tmp_path, example_transforms=[f"{HERE}:add_a_number"] * 2)
    for one, two in zip(texts(alone.support), texts(twice.support), strict=True):
        first, second = two.split()[-2:]
        assert two == f"{one} {second}"
        assert first != second


def test_pairs_are_changed_with_their_answers(tmp_path):
    plain, changed = run(tmp_path, task_type="causal_lm", example_transforms=[f"{HERE}:upper"])
    wanted = [
        text.upper().replace("INPUT:", "Input:").replace("OUTPUT:", "Output:") for text in texts(plain.query)
    ]
    assert texts(changed.query) == wanted
    assert [row.label_tokens for row in changed.query] == [row.label_tokens for row in plain.query]


def test_episode_transforms_run_last_on_complete_episodes(tmp_path):
    plain, changed = run(
        tmp_path,
        example_transforms=[f"{HERE}:upper"],
        episode_transforms=["fmmeta.tasks.augment:name_classes", f"{HERE}:first_query_only"],
    )
    prompt = " | ".join(plain.classes)
    assert texts(changed.support) == [f"{prompt}: {text.upper()}" for text in texts(plain.support)]
    assert len(changed.query) == 1


def test_own_and_built_in_transforms_of_an_episode_are_one_list(tmp_path):
    """Own weights of rows are multiplied by those of their classes; the seed of a task gives its texts."""
    config, draw = drawn(tmp_path, episode_transforms=[f"{HERE}:third"])
    source = load_sources(config, TOKENIZER, lambda text: None).train
    weights = {draw.classes[0]: 2.0, draw.classes[1]: 0.5}
    transforms = [*reading(config, TOKENIZER), partial(weigh_classes, weights)]
    rows = transformed(draw, transforms)
    assert rows == transformed(draw, transforms)
    assert [row.weight for row in rows.support] == [6.0, 2.0, 0.5, 0.5]
    assert [row.weight for row in rows.query] == [2.0, 2.0, 0.5, 0.5]
    assert texts(rows.support)[0].split()[-1].isdecimal()
    loaded = LoadEpisode(source, Batcher(0, 8), transforms)(draw.task).batches
    assert loaded is not None
    (batch,) = loaded.support
    assert sorted(batch.weights.tolist()) == pytest.approx([0.5 / 9, 0.5 / 9, 2 / 9, 6 / 9])
    assert float(loaded.query[0].weights.sum()) == pytest.approx(1)


def test_weights_of_rows_of_pairs_are_those_of_their_tokens(tmp_path):
    config, draw = drawn(tmp_path, task_type="causal_lm", episode_transforms=[f"{HERE}:third"])
    rows = transformed(draw, reading(config, TOKENIZER)).support
    (batch,) = Batcher(0, 8).split(rows)
    total = sum(row.weight * row.label_tokens for row in rows)
    assert sorted(batch.weights.tolist()) == pytest.approx(sorted(row.weight / total for row in rows))
    packed = Batcher(0, 8, pack=partial(pack, length=config.max_length))
    check_message(refusal(packed.split, rows), "packing=True", "weights 1 and 3", "leave --packing out")


def test_built_in_transforms():
    example, rng = (
        TextExample("one two three four five six seven eight nine ten", "c", 0),
        np.random.default_rng(0),
    )
    kept = [len(drop_words(example, rng).text.split()) for _ in range(500)]
    assert abs(np.mean(kept) - 9) < 0.2
    assert drop_words(replace(example, text="word"), np.random.default_rng(3)).text == "word"
    for transform in (drop_words, swap_words):
        assert transform(replace(example, text="  "), rng).text == "  "
    swapped = swap_words(example, rng).text.split()
    assert sorted(swapped) == sorted(example.text.split())
    assert sum(a != b for a, b in zip(swapped, example.text.split(), strict=True)) == 2


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"example_transforms": ["nowhere:f"]},
            ["example_transforms=nowhere:f", "'nowhere'", "write module:name of a function"],
        ),
        (
            {"example_transforms": [f"{HERE}:missing"]},
            [
                f"example_transforms={HERE}:missing",
                f"'{HERE}'",
                "'missing'",
                "write module:name of a function",
            ],
        ),
        (
            {"episode_transforms": ["justaname"]},
            ["episode_transforms=justaname", "'justaname'", "write module:name of a function"],
        ),
        (
            {"example_transforms": [f"{HERE}:NOT_A_FUNCTION"]},
            [f"example_transforms={HERE}:NOT_A_FUNCTION", "name a function"],
        ),
        (
            {"example_transforms": [f"{HERE}:broken"]},
            [f"{HERE}:broken", f"transform {HERE}:broken failed (", "fix it or leave it out"],
        ),
        (
            {"example_transforms": [f"{HERE}:silent"]},
            [f"{HERE}:silent", f"transform {HERE}:silent left an", "return it as it was instead"],
        ),
        (
            {"example_transforms": [f"{HERE}:forgetful"]},
            [f"{HERE}:forgetful", f"transform {HERE}:forgetful returned", "return one"],
        ),
        (
            {"example_transforms": [f"{HERE}:weightless"]},
            [f"{HERE}:weightless", f"transform {HERE}:weightless left a weight", "leave out such rows"],
        ),
        (
            {"example_transforms": [f"{HERE}:relabel"]},
            ["2 classes", f"{HERE}:relabel", "leave labels alone"],
        ),
    ],
)
def test_failing_transforms_are_named(tmp_path, settings, parts):
    check_message(refusal(run, tmp_path, **settings), *parts)


def test_transforms_that_cannot_be_pickled_are_named():
    transforms = reading(Config(example_transforms=[f"{HERE}:LOCAL"]), TOKENIZER)
    part = "num_workers=auto: loader processes cannot receive an object "
    check_message(
        refusal(check_sent, [transforms], "auto"), part, "; define it in a module, or use num_workers=0"
    )


def test_modules_of_the_working_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_changes.py").write_text("def shout(example, rng):\n    return example\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert reading(Config(example_transforms=["my_changes:shout"]), TOKENIZER) != [Draw.episode]
    assert os.getcwd() in sys.path


def test_rows_of_other_kinds_are_transformed_as_they_were_read():
    """Points of a module's tasks in the order of the flags; texts of a function's tasks as those of files."""
    config = Config(
        task_type="examples.own_module:Sine",
        dataset=["examples.own_module:tasks"],
        example_transforms=[f"{HERE}:raised"],
        episode_transforms=[f"{HERE}:one_point"],
    )
    source = load_sources(config, None, lambda text: None).train
    draw = source.draw(Schedule(source.items, 1, 5).meta_batch(0)[0])
    episode = transformed(draw, reading(config, None))
    points = [example.values["row"] for example in episode.support]
    assert points == [[draw.support[0][0][0], draw.support[0][0][1] + 1]]
    assert len(episode.query) == len(draw.query)
    pairs = [{"text": "a b", "label": "x"}, {"text": "c d", "label": "y"}]
    config = Config(n_way=2, example_transforms=[f"{HERE}:louder"])
    source = load_sources(
        config, TOKENIZER, lambda text: None, rows=Tasks(lambda seed: (pairs, pairs), 3)
    ).train
    episode = transformed(
        source.draw(Schedule(source.items, 1, 5).meta_batch(0)[0]), reading(config, TOKENIZER)
    )
    assert texts(episode.support) == ["a b!", "c d!"]
    assert [row.labels for row in episode.query] == [0, 1]
