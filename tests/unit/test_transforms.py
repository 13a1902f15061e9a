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


def first_draw(config, tokenizer=TOKENIZER, rows=None) -> Draw:
    source = load_sources(config, tokenizer, lambda text: None, rows=rows).train
    return source.draw(Schedule(source.items, 1, 5).meta_batch(0)[0])


def drawn(tmp_path, **settings):
    write = write_pairs if settings.get("task_type") == "causal_lm" else write_classes
    data = [str(write(tmp_path / "d.jsonl"))]
    config = Config(dataset=data, n_way=2, k_shot=2, num_query=2, **settings)
    return config, first_draw(config)


def run(tmp_path, **settings):
    config, draw = drawn(tmp_path, **settings)
    return draw.episode(), transformed(draw, reading(config, TOKENIZER))


def texts(rows) -> list[str]:
    return [TOKENIZER.decode(row.input_ids, skip_special_tokens=True) for row in rows]


def test_examples_are_changed_before_the_tokenizer_and_episodes_last(tmp_path):
    plain, changed = run(
        tmp_path,
        example_transforms=[f"{HERE}:upper"],
        episode_transforms=["fmmeta.tasks.augment:name_classes", f"{HERE}:first_query_only"],
    )
    prompt = " | ".join(plain.classes)
    assert texts(changed.support) == [f"{prompt}: {text.upper()}" for text in texts(plain.support)]
    assert [row.labels for row in changed.support] == [row.labels for row in plain.support]
    assert texts(changed.query) == [f"{prompt}: {text.upper()}" for text in texts(plain.query[:1])]
    assert changed.classes == plain.classes


def test_pairs_are_changed_with_their_answers(tmp_path):
    plain, changed = run(tmp_path, task_type="causal_lm", example_transforms=[f"{HERE}:upper"])
    upper = [text.upper().replace("INPUT:", "Input:") for text in texts(plain.query)]
    assert texts(changed.query) == [text.replace("OUTPUT:", "Output:") for text in upper]
    assert [row.label_tokens for row in changed.query] == [row.label_tokens for row in plain.query]


def test_transforms_of_a_row_have_random_numbers_of_their_own(tmp_path):
    """The first has those that it has alone."""
    _, alone = run(tmp_path, example_transforms=[f"{HERE}:add_a_number"])
    _, twice = run(tmp_path, example_transforms=[f"{HERE}:add_a_number"] * 2)
    for one, two in zip(texts(alone.support), texts(twice.support), strict=True):
        first, second = two.split()[-2:]
        assert two == f"{one} {second}"
        assert first != second


def test_own_and_built_in_transforms_of_an_episode_are_one_list(tmp_path):
    """Own weights of rows are multiplied by those of their classes; the seed of a task gives its texts."""
    config, draw = drawn(tmp_path, episode_transforms=[f"{HERE}:third"])
    weights = dict(zip(draw.classes, (2.0, 0.5), strict=True))
    transforms = [*reading(config, TOKENIZER), partial(weigh_classes, weights)]
    rows = transformed(draw, transforms)
    assert rows == transformed(draw, transforms)
    assert [row.weight for row in rows.support] == [6.0, 2.0, 0.5, 0.5]
    assert [row.weight for row in rows.query] == [2.0, 2.0, 0.5, 0.5]
    assert texts(rows.support)[0].split()[-1].isdecimal()
    source = load_sources(config, TOKENIZER, lambda text: None).train
    loaded = LoadEpisode(source, Batcher(0, 8), transforms)(draw.task).batches
    for batches, wanted in ((loaded.support, [0.5, 0.5, 2, 6]), (loaded.query, [0.5, 0.5, 2, 2])):
        (batch,) = batches
        assert sorted(batch.weights.tolist()) == pytest.approx([one / sum(wanted) for one in wanted])


def test_weights_of_rows_of_pairs_are_those_of_their_tokens(tmp_path):
    config, draw = drawn(tmp_path, task_type="causal_lm", episode_transforms=[f"{HERE}:third"])
    rows = transformed(draw, reading(config, TOKENIZER)).support
    (batch,) = Batcher(0, 8).split(rows)
    total = sum(row.weight * row.label_tokens for row in rows)
    assert sorted(batch.weights.tolist()) == pytest.approx(sorted(row.weight / total for row in rows))
    packed = Batcher(0, 8, pack=partial(pack, length=config.max_length))
    check_message(refusal(packed.split, rows), "packing=True", "weights 1 and 3", "leave --packing out")


def test_built_in_transforms():
    words, rng = (
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        np.random.default_rng(0),
    )
    example = TextExample(" ".join(words), "c", 0)
    kept = [len(drop_words(example, rng).text.split()) for _ in range(500)]
    assert abs(np.mean(kept) - 9) < 0.2
    assert drop_words(replace(example, text="word"), np.random.default_rng(3)).text == "word"
    for transform in (drop_words, swap_words):
        assert transform(replace(example, text="  "), rng).text == "  "
    swapped = swap_words(example, rng).text.split()
    assert sorted(swapped) == sorted(words)
    assert sum(a != b for a, b in zip(swapped, words, strict=True)) == 2


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
    message = refusal(check_sent, [transforms], "auto")
    check_message(message, part, "; define it in a module, or use num_workers=0")


def test_modules_of_the_working_folder_are_found(tmp_path, monkeypatch):
    """Without transforms the stored tokens are read."""
    (tmp_path / "my_changes.py").write_text("def shout(example, rng):\n    return example\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert reading(Config(), TOKENIZER) == [Draw.episode]
    assert reading(Config(example_transforms=["my_changes:shout"]), TOKENIZER) != [Draw.episode]
    assert os.getcwd() in sys.path


def test_rows_of_other_kinds_are_transformed_as_they_were_read():
    """Points of a module's tasks in the order of the flags; texts of a function's tasks as those of files."""
    own = {"task_type": "examples.own_module:Sine", "dataset": ["examples.own_module:tasks"]}
    flags = {"example_transforms": [f"{HERE}:raised"], "episode_transforms": [f"{HERE}:one_point"]}
    config = Config(**own, **flags)
    draw = first_draw(config, None)
    episode, (x, y) = transformed(draw, reading(config, None)), draw.support[0][0]
    assert [example.values["row"] for example in episode.support] == [[x, y + 1]]
    assert len(episode.query) == len(draw.query)
    pairs = [{"text": "a b", "label": "x"}, {"text": "c d", "label": "y"}]
    config = Config(n_way=2, example_transforms=[f"{HERE}:louder"])
    draw = first_draw(config, rows=Tasks(lambda seed: (pairs, pairs), 3))
    episode = transformed(draw, reading(config, TOKENIZER))
    assert texts(episode.support) == ["a b!", "c d!"]
    assert [row.labels for row in episode.query] == [0, 1]
