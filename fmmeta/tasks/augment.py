"""Transforms of training episodes: callables on an example or an episode, named `module:name` in flags.

    example   (TextExample, rng) -> TextExample      text augmentation
    episode   (TextEpisode, rng) -> TextEpisode      label-name prompts, anything that has to see the classes

They run where the data is loaded, in any loader process, on the texts and before the tokenizer; so they must
be importable. `rng` is keyed by the task's seed and the example's place: augmentation differs between tasks
and outer steps, and does not depend on who loads or how many do. Held-out episodes are left as they are.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.plugins import import_named
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import Draw, EpisodeRows

STREAM = 1 << 20  # keeps the random numbers of transforms apart from those that draw rows


@dataclass(frozen=True)
class TextExample:
    """A row as text. target: the class's name, or the output; label: number of the class in this episode, 0
    for causal_lm.
    """

    text: str
    target: str
    label: int


@dataclass(frozen=True)
class TextEpisode:
    """An episode as text. classes: name of each label, empty for causal_lm."""

    task: Task
    support: list[TextExample]
    query: list[TextExample]
    classes: tuple[str, ...]


def drop_words(example: TextExample, rng: np.random.Generator) -> TextExample:
    """Leave each word out with probability 0.1, but not all of them (Wei and Zou 2019, arXiv 1901.11196)."""
    words = example.text.split()
    kept = [word for word, u in zip(words, rng.random(len(words)), strict=True) if u >= 0.1]
    return replace(example, text=" ".join(kept or words))


def swap_words(example: TextExample, rng: np.random.Generator) -> TextExample:
    """Exchange two neighbouring words (Wei and Zou 2019, arXiv 1901.11196)."""
    words = example.text.split()
    if len(words) > 1:
        at = int(rng.integers(len(words) - 1))
        words[at], words[at + 1] = words[at + 1], words[at]
    return replace(example, text=" ".join(words))


def name_classes(episode: TextEpisode, rng: np.random.Generator) -> TextEpisode:
    """Put the names of the episode's classes before every text."""
    prompt = " | ".join(name.replace("_", " ") for name in episode.classes)
    support, query = (
        [replace(e, text=f"{prompt}: {e.text}") for e in rows] for rows in (episode.support, episode.query)
    )
    return replace(episode, support=list(support), query=list(query))


@dataclass(frozen=True)
class Transforms:
    """All transforms of a run, in order, with what turns their texts into tokens."""

    example: tuple[tuple[str, Callable[..., Any]], ...]
    episode: tuple[tuple[str, Callable[..., Any]], ...]
    config: Config
    tokenizer: Any

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> Transforms | None:
        """What the settings name; None if nothing.

        Raises `UsageError` for what cannot be found or sent to a loader process.
        """
        found = {
            setting: tuple((name, find(setting, name)) for name in getattr(config, setting))
            for setting in ("example_transforms", "episode_transforms")
        }
        if not any(found.values()):
            return None
        return cls(found["example_transforms"], found["episode_transforms"], config, tokenizer)

    @property
    def fingerprint(self) -> str:
        """Of the source of each callable, where it has one. What these call is not looked at."""
        return digest([[name, source_of(found)] for name, found in (*self.example, *self.episode)])

    def __call__(self, draw: Draw) -> EpisodeRows:
        """The episode of a draw, its texts transformed. Raises `UsageError` naming a transform that fails."""
        draw.store.check()
        sets = [
            [
                TextExample(draw.store.text("left", row), draw.store.text("right", row), label)
                for row, label in rows
            ]
            for rows in (draw.support, draw.query)
        ]
        for name, transform in self.example:
            sets = [
                [
                    self._run(name, transform, example, (*draw.task.seed, STREAM, part, place))
                    for place, example in enumerate(rows)
                ]
                for part, rows in enumerate(sets)
            ]
        episode = TextEpisode(draw.task, sets[0], sets[1], draw.classes)
        for name, transform in self.episode:
            episode = self._run(name, transform, episode, (*draw.task.seed, STREAM))
        return EpisodeRows(
            draw.task, self._encode(episode.support, draw), self._encode(episode.query, draw), draw.classes
        )

    def _run(self, name: str, transform: Callable[..., Any], value: Any, seed: Sequence[int]) -> Any:
        try:
            made = transform(value, np.random.default_rng(seed))
        except Exception as error:
            raise UsageError(
                f"transform {name} failed with {type(error).__name__}: {error}; fix it or leave it out"
            ) from error
        if type(made) is not type(value):
            raise UsageError(
                f"transform {name} returned {type(made).__name__} for a {type(value).__name__}; return one"
            )
        examples = [made] if isinstance(made, TextExample) else [*made.support, *made.query]
        if not all(isinstance(example.text, str) and example.text for example in examples):
            raise UsageError(f"transform {name} left an example without text; return it as it was instead")
        return made

    def _encode(self, rows: Sequence[TextExample], draw: Draw) -> list[Example]:
        examples = encode(
            self.tokenizer, self.config, [row.text for row in rows], [row.target for row in rows]
        )
        if not draw.classes:
            return examples
        if any(not 0 <= row.label < len(draw.classes) for row in rows):
            names = " ".join(name for name, _ in (*self.example, *self.episode))
            raise UsageError(
                f"transforms {names} left a label that is none of the episode's {len(draw.classes)} classes; "
                "leave labels alone"
            )
        return [replace(example, labels=row.label) for example, row in zip(examples, rows, strict=True)]


def source_of(found: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):
        return ""


def find(setting: str, name: str) -> Callable[..., Any]:
    """The callable that `module:name` says; modules beside the working folder count."""
    found = import_named(setting, name, "a function")
    if not callable(found):
        raise UsageError(
            f"{setting}={name} is a {type(found).__name__} and cannot be called; name a function"
        )
    try:
        pickle.dumps(found)
    except Exception as error:
        raise UsageError(
            f"{setting}={name} cannot be sent to a loader process ({error}); name a function of a module"
        ) from None
    return found
