"""Several data sets as one source, and the shares of their tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fmmeta.config.settings import Config
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import ClassKey, Draw, TaskSource


class Mixture(TaskSource):
    """Several data sets as one source; each is a stratum."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        self.items = Items.of(
            Item(f"{name}/{item.name}", name, item.tokens)
            for name, source in sources.items()
            for item in source.items
        )
        self.starts = np.cumsum([0, *(len(source.items) for source in self.sources)])

    def size(self, item: int, seed: tuple[int, ...]) -> int:
        source, own = self._find(item)
        return self.sources[source].size(own, seed)

    def class_keys(self) -> list[ClassKey]:
        return [
            (name, *key)
            for name, source in zip(self.names, self.sources, strict=True)
            for key in source.class_keys()
        ]

    def class_key(self, item: int, name: str) -> ClassKey:
        source, own = self._find(item)
        return self.names[source], *self.sources[source].class_key(own, name)

    def draw(self, task: Task) -> Draw:
        source, own = self._find(task.item)
        return replace(self.sources[source].draw(replace(task, item=own)), task=task)

    def _find(self, item: int) -> tuple[int, int]:
        """The number of an item's source, and the number of the item in it."""
        source = int(np.searchsorted(self.starts, item, side="right")) - 1
        return source, item - int(self.starts[source])


def short_names(datasets: Sequence[str]) -> list[str]:
    """File names of the data sets without endings, or the names as given if two of these are equal."""
    short = [Path(name).name.split(".")[0] for name in datasets]
    return short if len(set(short)) == len(short) else list(datasets)


def stratum_shares(config: Config, items: Items) -> np.ndarray | None:
    """Share of each stratum (codes of `items`) in the tasks; None: in proportion to its items.

    `--mix_weights` names shares by data set; `--mix_temperature T` gives n items a share in proportion to
    n ** (1 / T).
    """
    if config.mix_weights:
        weights = dict(zip(short_names(config.dataset), config.mix_weights, strict=True))
        wanted = np.array([weights[name] for name in items.strata])
    elif config.mix_temperature != 1:
        wanted = np.bincount(items.stratum, minlength=len(items.strata)) ** (1 / config.mix_temperature)
    else:
        return None
    return wanted / wanted.sum()
