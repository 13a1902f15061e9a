"""Transforms of training episodes: callables on an example or an episode, named `module:name` in flags.

    example   (TextExample, rng) -> TextExample      text augmentation
              (ImageExample, rng) -> ImageExample    image augmentation
    episode   (TextEpisode, rng) -> TextEpisode      label-name prompts, transforms that need all classes

They run in the process that loads the episode, on the texts before they are tokenised, or on the pixels
before the image processor; so they must be importable. The seed of `rng` is the task's seed and the
example's index: augmentation differs between tasks and outer steps, and does not depend on the number of
loader processes. Held-out episodes are not transformed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_function, source_of
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.data.images import ImageReader, check_array, decode
from fmmeta.tasks.data.token_store import TokenStore, digest
from fmmeta.tasks.sources.base import Draw, EpisodeRows

STREAM = 1 << 20  # part of the seeds of transforms, which differ from the seeds that draw rows


@dataclass(frozen=True)
class TextExample:
    """A row as text. target: name of the class, or the output. label: number of the class in this episode, 0
    for causal_lm.
    """

    text: str
    target: str
    label: int


@dataclass(frozen=True)
class ImageExample:
    """A row of an image model. pixels: uint8 [H, W, 3]. target, label: as in `TextExample`."""

    pixels: np.ndarray
    target: str
    label: int


class TextEpisode(EpisodeRows):
    """An episode as text or images: its rows are `TextExample` or `ImageExample`."""


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


def name_classes(episode: TextEpisode, rng: np.random.Generator) -> TextEpisode:
    """Put the names of the episode's classes before every text."""
    prompt = " | ".join(name.replace("_", " ") for name in episode.classes)
    support, query = (
        [replace(e, text=f"{prompt}: {e.text}") for e in rows] for rows in (episode.support, episode.query)
    )
    return replace(episode, support=support, query=query)


@dataclass(frozen=True)
class Transforms:
    """All transforms of a run, in order, and the tokenizer for their texts."""

    example: tuple[tuple[str, Callable[..., Any]], ...]
    episode: tuple[tuple[str, Callable[..., Any]], ...]
    config: Config
    tokenizer: Any

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> "Transforms | None":
        """The transforms that the settings name; None if there are none.

        Raises `UsageError` for one that cannot be imported.
        """
        example, episode = (
            tuple((name, import_function(setting, name)) for name in getattr(config, setting))
            for setting in ("example_transforms", "episode_transforms")
        )
        return cls(example, episode, config, tokenizer) if example or episode else None

    @property
    def fingerprint(self) -> str:
        """A digest of the source of each callable, if it has one, without the functions that it calls."""
        return digest([[name, source_of(found)] for name, found in (*self.example, *self.episode)])

    def __call__(self, draw: Draw) -> EpisodeRows:
        """The transformed and tokenised episode. Raises `UsageError` naming a transform that fails."""
        draw.store.check()
        sets = [
            [as_example(draw.store, row, label) for row, label in rows] for rows in (draw.support, draw.query)
        ]
        for part, rows in enumerate(sets):
            for index in range(len(rows)):
                rng = np.random.default_rng((*draw.task.seed, STREAM, part, index))
                for name, transform in self.example:
                    rows[index] = transformed(name, transform, rows[index], rng)
        episode = TextEpisode(draw.task, sets[0], sets[1], draw.classes)
        rng = np.random.default_rng((*draw.task.seed, STREAM))
        for name, transform in self.episode:
            episode = transformed(name, transform, episode, rng)
        support, query = (self._encode(rows, len(draw.classes)) for rows in (episode.support, episode.query))
        return EpisodeRows(draw.task, support, query, draw.classes)

    def _encode(self, rows: Sequence[Any], classes: int) -> list[Example]:
        if isinstance(self.tokenizer, ImageReader):
            reader = self.tokenizer
            examples = [Example([0], -1, values={"pixel_values": reader.prepare(row.pixels)}) for row in rows]
        else:
            examples = encode(
                self.tokenizer, self.config, [row.text for row in rows], [row.target for row in rows]
            )
        if not classes:
            return examples
        if any(not 0 <= row.label < classes for row in rows):
            raise UsageError(
                f"transforms {' '.join(name for name, _ in (*self.example, *self.episode))} left a label that"
                f" is none of the episode's {classes} classes; leave labels alone"
            )
        return [replace(example, labels=row.label) for example, row in zip(examples, rows, strict=True)]


def as_example(store: TokenStore, row: int, label: int) -> TextExample | ImageExample:
    """A row as transforms see it. Raises `UsageError` and `OSError` for an image that cannot be read."""
    target = store.text("target", row)
    if store.images is None:
        return TextExample(store.text("input", row), target, label)
    return ImageExample(decode(store.image(row)), target, label)


def transformed(name: str, transform: Callable[..., Any], value: Any, rng: np.random.Generator) -> Any:
    """`transform(value, rng)`. Raises `UsageError` if it fails or returns another type or an empty text."""
    with usage_errors(f"transform {name} failed", "fix it or leave it out"):
        made = transform(value, rng)
    if type(made) is not type(value):
        raise UsageError(
            f"transform {name} returned {type(made).__name__} for a {type(value).__name__}; return one"
        )
    examples = [*made.support, *made.query] if isinstance(made, TextEpisode) else [made]
    for example in examples:
        if isinstance(example, ImageExample):
            check_array(example.pixels, f"transform {name} left pixels")
    texts = [example for example in examples if isinstance(example, TextExample)]
    if not all(isinstance(example.text, str) and example.text for example in texts):
        raise UsageError(f"transform {name} left an example without text; return it as it was instead")
    return made
