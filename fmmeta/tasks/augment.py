"""Transforms of episodes (`EpisodeTransform`): what happens to rows between a draw and its micro-batches.

    row numbers --(name_rows, number_classes)--(reading)--> rows --(prompts, weigh_classes, sample_support)

Callables of the user, named `module:name` in flags, change the rows of training episodes as they are read:

    example   (TextExample, rng) -> TextExample      text augmentation
              (ImageExample, rng) -> ImageExample    image augmentation
              (row, rng) -> row                      what another learner reads (`Learner.rows`)
    episode   (EpisodeRows, rng) -> EpisodeRows      rows of these types: transforms that need all of them

They run in the process that loads the episode, on the texts before they are tokenised, or on the pixels
before the image processor; so they must be importable. The seed of `rng` is the task's seed and the
example's index: augmentation differs between tasks and outer steps, and does not depend on the number of
loader processes. Held-out episodes are read as they are stored. Prompts are those of a method
(meta/algorithms/baselines.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_function, source_of
from fmmeta.config.settings import Config
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.images import EncodedImage, array_bytes, check_array, decode
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.sources.base import STREAM, ClassKey, Draw, EpisodeRows, EpisodeTransform, number_classes

T = TypeVar("T")
SETTINGS = ("example_transforms", "episode_transforms")


@dataclass(frozen=True)
class TextExample:
    """A row as text. target: name of the class, or the output. label: number of the class in this episode, 0
    for causal_lm. weight: of the row in the mean loss.
    """

    text: str
    target: str
    label: int
    weight: float = 1.0


@dataclass(frozen=True)
class ImageExample:
    """A row of an image model. pixels: uint8 [H, W, 3]. The others: as in `TextExample`."""

    pixels: np.ndarray
    target: str
    label: int
    weight: float = 1.0


def drop_words(example: TextExample, rng: np.random.Generator) -> TextExample:
    """Drop each word with probability 0.1, but not all of them (Wei and Zou 2019, arXiv 1901.11196)."""
    words = example.text.split()
    kept = [word for word, u in zip(words, rng.random(len(words)), strict=True) if u >= 0.1]
    return replace(example, text=" ".join(kept or words) or example.text)


def swap_words(example: TextExample, rng: np.random.Generator) -> TextExample:
    """Swap two adjacent words (Wei and Zou 2019, arXiv 1901.11196)."""
    words = example.text.split()
    if len(words) > 1:
        at = int(rng.integers(len(words) - 1))
        words[at], words[at + 1] = words[at + 1], words[at]
    return replace(example, text=" ".join(words) or example.text)


def name_classes(episode: EpisodeRows, rng: np.random.Generator) -> EpisodeRows:
    """Put the names of the episode's classes before every text. Raises `UsageError` where it has none."""
    if not episode.classes:
        raise UsageError(
            f"episode_transforms={__name__}:name_classes puts names of classes before texts, and answers of"
            " a language model are none; leave it out"
        )
    prompt = " | ".join(name.replace("_", " ") for name in episode.classes)
    support, query = (
        [replace(e, text=f"{prompt}: {e.text}") for e in rows] for rows in (episode.support, episode.query)
    )
    return replace(episode, support=support, query=query)


def named_transforms(config: Config, setting: str) -> list[tuple[str, Callable[..., Any]]]:
    """The callables that a setting names. Raises `UsageError` for one that cannot be imported."""
    return [(name, import_function(setting, name)) for name in getattr(config, setting)]


def fingerprint(config: Config) -> str:
    """A digest of the source of each callable that the settings name, if it has one, without the functions
    that it calls; empty if they name none.
    """
    found = [one for setting in SETTINGS for one in named_transforms(config, setting)]
    return digest([[name, source_of(function)] for name, function in found]) if found else ""


def reading(
    config: Config, tokenizer: Any, numbers: Mapping[ClassKey, int] | None = None
) -> list[EpisodeTransform]:
    """The transforms that read the rows of training episodes: as they are stored, or as texts for the
    callables that the settings name, which are tokenised afterwards. numbers: of the classes of all tasks.

    Raises `UsageError` for one that cannot be imported.
    """
    example, episode = (named_transforms(config, setting) for setting in SETTINGS)
    numbering, kind = [partial(number_classes, numbers)] if numbers else [], config.learner.kind
    if not (example or episode):
        return [*numbering, Draw.episode]
    return [
        *numbering,
        partial(read_rows, kind),
        partial(each_example, example),
        *(partial(checked, name, transform) for name, transform in episode),
        partial(encoded, RowEncoder(config, tokenizer)),
    ]


def read_rows(kind: Any, draw: Draw, rng: Any = None) -> EpisodeRows:
    """An `EpisodeTransform`: what a learner has read of rows, texts and images as examples with a label.
    kind: the class of the learner.
    """
    draw.store.check()
    support, query = (
        [as_example(kind, draw.store.value(row), label) for row, label in rows]
        for rows in (draw.support, draw.query)
    )
    return EpisodeRows(draw.task, support, query, draw.classes)


def each_example(
    named: Sequence[tuple[str, Callable[..., Any]]], episode: EpisodeRows, rng: Any = None
) -> EpisodeRows:
    """An `EpisodeTransform`: each row changed by callables on it; a row's generator has the row's seed."""
    sets = [[*episode.support], [*episode.query]]
    for part, rows in enumerate(sets):
        for index in range(len(rows)):
            rng = np.random.default_rng((*episode.task.seed, STREAM, part, index))
            for name, transform in named:
                rows[index] = checked(name, transform, rows[index], rng)
    return replace(episode, support=sets[0], query=sets[1])


def encoded(encoder: RowEncoder, episode: EpisodeRows, rng: Any = None) -> EpisodeRows:
    """An `EpisodeTransform`: the rows, each an `Example`.

    Raises `UsageError` for a label that is none of the episode's, and for rows that the learner cannot read.
    """
    classes, kind = len(episode.classes), encoder.config.learner.kind
    names = " ".join(name for setting in SETTINGS for name in getattr(encoder.config, setting))
    labels = [[row.label for row in rows] for rows in (episode.support, episode.query)] if classes else ()
    if any(not 0 <= label < classes for rows in labels for label in rows):
        raise UsageError(
            f"transforms {names} left a label that is none of the episode's {classes} classes; leave labels"
            " alone"
        )
    support, query = ([as_row(kind, row) for row in rows] for rows in (episode.support, episode.query))
    with usage_errors(f"transforms {names} left rows that cannot be encoded", "correct them"):
        return replace(episode, support=support, query=query).encoded(encoder, labels)


def weigh_classes(weights: Mapping[str, float], episode: EpisodeRows, rng: Any = None) -> EpisodeRows:
    """An `EpisodeTransform`: multiply the weights of rows by those of their classes; others have weight 1."""
    of_label = [weights.get(name, 1.0) for name in episode.classes]
    support, query = (
        [replace(row, weight=row.weight * of_label[row.labels]) for row in rows]
        for rows in (episode.support, episode.query)
    )
    return replace(episode, support=support, query=query)


def sample_support(size: int, steps: int, episode: EpisodeRows, rng: Any = None) -> EpisodeRows:
    """An `EpisodeTransform`: samples of at most `size` support rows for `steps` inner steps; 0: none."""
    if not 0 < size < len(episode.support):
        return episode
    return replace(episode, samples=(*sampled_rows(episode.support, size, steps, episode.task.seed),))


def sampled_rows(rows: Sequence[T], size: int, steps: int, seed: Sequence[int]) -> Iterator[list[T]]:
    """The rows of each inner step: at most `size`, without replacement, epoch by epoch.

    An epoch is a seeded order of all rows, cut into parts whose sizes differ by one at most.

    >>> [sorted(rows) for rows in sampled_rows(range(5), 2, 3, (1,))]
    [[4], [0, 1], [2, 3]]
    """
    parts = -(-len(rows) // size)
    for k in range(steps):
        epoch, part = divmod(k, parts)
        order = np.random.default_rng([*seed, epoch]).permutation(len(rows))
        yield [rows[i] for i in order[part * len(rows) // parts : (part + 1) * len(rows) // parts]]


def as_example(kind: Any, row: Any, label: int) -> Any:
    """A stored row as transforms see it. Raises `UsageError` and `OSError` for unreadable images."""
    if not kind.pair:
        return row
    source, target = (row[name] for name in kind.pair)
    if "image" in row:
        return ImageExample(decode(row["image"]), target, label)
    return TextExample(source, target, label)


def as_row(kind: Any, example: Any) -> Any:
    """The row of what `as_example` has made, and transforms have changed."""
    if isinstance(example, ImageExample):
        return {"image": EncodedImage("an image", array_bytes(example.pixels)), "weight": example.weight}
    if isinstance(example, TextExample):
        row = dict(zip(kind.pair, (example.text, example.target), strict=True))
        return {**row, "weight": example.weight}
    return example


def checked(name: str, transform: Callable[..., Any], value: Any, rng: np.random.Generator) -> Any:
    """`transform(value, rng)`. Raises `UsageError` if it fails or returns another type or an empty text."""
    with usage_errors(f"transform {name} failed", "fix it or leave it out"):
        made = transform(value, rng)
    if type(made) is not type(value):
        raise UsageError(
            f"transform {name} returned {type(made).__name__} for a {type(value).__name__}; return one"
        )
    examples = [*made.support, *made.query] if isinstance(made, EpisodeRows) else [made]
    for example in examples:
        if isinstance(example, ImageExample):
            check_array(example.pixels, f"transform {name} left pixels")
    texts = [example for example in examples if isinstance(example, TextExample)]
    if not all(isinstance(example.text, str) and example.text for example in texts):
        raise UsageError(f"transform {name} left an example without text; return it as it was instead")
    if not all(0 < getattr(example, "weight", 1.0) < math.inf for example in examples):
        raise UsageError(f"transform {name} left a weight that is no positive number; leave out such rows")
    return made
