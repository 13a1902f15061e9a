"""Every operation of some workers on fixed rows, on each rank of a launch (test_conformance.py).

Results by operation are vectors by parameter name ("gradient/model.layers.0...") and the numbers of the pass
("gradient/stats"), which do not depend on the layout. The rows are uneven: 7 support and 5 query rows of
different lengths, in micro-batches of at most 2, so that the ranks of a group get different numbers of rows.
Row i has label i, so that results by row can be put in order. Other learners than those of classes and of
language models have the sets of the first task of their data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.learners.load import empty_learner
from fmmeta.meta.classifier_head import class_means
from fmmeta.parallel.process_groups import World
from fmmeta.parallel.workers.base import PassStats, VjpInput, Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, Episode, Example, MicroBatch
from fmmeta.training import build
from tests.support.ranks import built, first_episode

ROWS, QUERY_ROWS, LR = 7, 5, 0.1
Shapes = dict[str, tuple[int, ...]]


def examples(count: int, causal: bool, seed: int) -> list[Example]:
    """Rows of 3 to 9 tokens; of a causal LM the last one or two tokens are the answer."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 259, (3 + 2 * number % 7,), generator=rng).tolist()
        prompt = len(ids) - 1 - number % 2
        rows.append(Example(ids, [IGNORE] * prompt + ids[prompt:] if causal else number))
    return rows


def made_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers that follow from the name alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


class Exercise:
    """The operations of one worker. results: tensors in host memory that do not depend on the layout."""

    def __init__(
        self, config: Config, parts: build.Runtime, shapes: Shapes, episode: Episode | None = None
    ) -> None:
        """episode: the sets, instead of those of this file."""
        self.worker: Worker = parts.worker
        self.theta, self.shapes = self.worker.read(), shapes
        self.of_classes = config.task_type == "classification"
        if episode is None:
            batcher, causal = replace(parts.batcher, micro_batch_size=2), not self.of_classes
            sets = [batcher.split(examples(*one)) for one in ((ROWS, causal, 0), (QUERY_ROWS, causal, 1))]
            episode = Episode(*sets)
        self.support, self.query = episode.support, episode.query
        self.results: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        for name, (operation, classification_only) in OPERATIONS.items():
            if self.of_classes or not classification_only:
                operation(self, name)
                self.keep(f"{name}, theta", self.worker.read())
                self.worker.write(self.theta)
        return self.results

    def keep(self, name: str, vector: Tensor | None = None, stats: PassStats | None = None) -> None:
        """Store a vector by parameter, and the numbers of a pass."""
        if vector is not None:
            for parameter, shape in self.shapes.items():
                value = self.worker.gather_param(vector, parameter, shape)
                self.results[f"{name}/{parameter}"] = value.cpu().clone()
        if stats is not None:
            accuracy = 0.0 if math.isnan(stats.accuracy) else stats.accuracy  # of numbers
            numbers = [stats.loss if stats.finite else 0.0, accuracy, float(stats.finite)]
            self.results[f"{name}/stats"] = torch.tensor(numbers, dtype=torch.float64)

    def made(self, name: str) -> Tensor:
        """A vector [S] of random numbers that are the same on every layout."""
        vector = self.worker.zeros()
        for parameter, shape in self.shapes.items():
            self.worker.params.put(vector, parameter, made_tensor(name + parameter, shape))
        return vector

    def by_row(self, batches: Sequence[MicroBatch], values: Sequence[Tensor], count: int) -> Tensor:
        """Values [B, D] of micro-batches of all ranks of the group as a table [count, D], by label."""
        table = torch.zeros(count, values[0].shape[1], device=self.worker.device)
        for batch, value in zip(batches, values, strict=True):
            for row in (batch.weights > 0).nonzero().flatten() if self.worker.counts_rows else ():
                table[batch.targets["labels"][row]] = value[row].float()
        return self.worker.group.sum_(table).cpu()

    def nonfinite_query(self) -> list[MicroBatch]:
        """The query set with an infinite loss on the last rank of the group alone."""
        last = self.worker.group.rank == self.worker.group.size - 1
        return [replace(b, weights=b.weights * math.inf) if last else b for b in self.query]

    def sgd_step(self, batches: Sequence[MicroBatch], everywhere: bool = False) -> PassStats:
        return self.worker.step(batches, sgd, everywhere)


def sgd(shard: Tensor, grad: Tensor, where: slice) -> None:
    shard.sub_(grad, alpha=LR)


def write(self: Exercise, name: str) -> None:
    self.worker.write(self.made("written"))


def forward(self: Exercise, name: str) -> None:
    self.keep(name, stats=self.worker.forward(self.query))


def gradient(self: Exercise, name: str) -> None:
    into = self.worker.zeros()
    stats = self.worker.gradient(self.query, into)
    self.keep(name, into, stats)


def weighted_gradient_that_restores(self: Exercise, name: str) -> None:
    self.sgd_step(self.support)
    into = self.made("sum")
    stats = self.worker.gradient(self.query, into, 0.25, restore=self.theta)
    self.keep(name, into, stats)


def two_steps(self: Exercise, name: str) -> None:
    self.sgd_step(self.support)
    self.keep(name, stats=self.sgd_step(self.support))


def displacement(self: Exercise, name: str) -> None:
    self.sgd_step(self.support)
    into = self.made("sum")
    self.worker.displacement(self.theta, into)
    self.keep(name, into)


def nonfinite_step(self: Exercise, name: str) -> None:
    self.keep(name, stats=self.sgd_step(self.nonfinite_query(), everywhere=True))


def nonfinite_gradient(self: Exercise, name: str) -> None:
    into = self.made("sum")
    stats = self.worker.gradient(self.nonfinite_query(), into, restore=self.theta)
    self.keep(name, into, stats)


def dot(self: Exercise, name: str) -> None:
    a, b = self.made("a"), self.made("b")
    number = {parameter: index for index, parameter in enumerate(self.shapes)}
    segments = [
        (fragment.begin, fragment.begin + fragment.length, number[fragment.name])
        for fragment in self.worker.params.fragments
        if fragment.name in number
    ]
    self.results[f"{name}/whole"] = torch.tensor([self.worker.dot(a, b)], dtype=torch.float64)
    self.results[f"{name}/by parameter"] = self.worker.dot_by_layer(a, b, segments, len(number))


def features(self: Exercise, name: str) -> None:
    self.results[f"{name}/rows"] = self.by_row(self.query, self.worker.features(self.query), QUERY_ROWS)


def means_of_classes(self: Exercise, name: str) -> None:
    found = class_means(self.worker, self.support, self.worker.features(self.support), ROWS)
    self.results[f"{name}/rows"] = found.means.cpu()


def logits(self: Exercise, name: str) -> None:
    if isinstance(self.worker, FullModelWorker):
        self.results[f"{name}/rows"] = self.by_row(self.query, self.worker.logits(self.query), QUERY_ROWS)


def gradient_vjp(self: Exercise, name: str) -> None:
    if isinstance(self.worker, FullModelWorker) and self.worker.differentiates_twice:
        into, w = self.made("sum"), self.made("w")
        self.worker.gradient_vjp(self.query, w, into)
        stats = self.worker.gradient_vjp(self.support, lambda g: w + g, into)
        self.keep(name, into, stats)


def step_from_saved_forward(self: Exercise, name: str) -> None:
    saved = self.worker.forward_features(self.support)
    self.keep(name, stats=self.worker.step(self.support, sgd, saved=saved))


def vjp(self: Exercise, name: str) -> None:
    saved = self.worker.forward_features(self.support)

    def cotangents(batches: Sequence[MicroBatch], what: str) -> Callable[[int, Tensor], Tensor]:
        def of(number: int, rows: Tensor) -> Tensor:
            batch, table = batches[number], made_tensor(what, (ROWS, rows.shape[1]))
            return (table[batch.targets["labels"].cpu()] * (batch.weights.cpu() > 0)[:, None]).to(rows.device)

        return of

    parts = [
        VjpInput(self.query, lambda: cotangents(self.query, "of query rows")),
        VjpInput(self.support, lambda: cotangents(self.support, "of support rows"), saved),
    ]
    into = self.made("sum")
    stats = self.worker.vjp(parts, into)
    self.keep(name, into, stats)


OPERATIONS: dict[str, tuple[Callable[[Exercise, str], None], bool]] = {  # and whether it needs a classifier
    **{
        each.__name__.replace("_", " "): (each, False)
        for each in (
            write,
            forward,
            gradient,
            weighted_gradient_that_restores,
            two_steps,
            displacement,
            nonfinite_step,
            nonfinite_gradient,
            dot,
            gradient_vjp,
        )
    },
    **{
        each.__name__.replace("_", " "): (each, True)
        for each in (features, means_of_classes, logits, step_from_saved_forward, vjp)
    },
}


def exercise(world: World, listed: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Run every operation of the workers with these settings; results by case and name."""
    ranks, results = None, {}
    for case, settings in listed.items():
        config = Config(**settings)
        inputs, ranks, parts = built(world, config, ranks)
        named = empty_learner(config, inputs.description).named_parameters()
        shapes = {name: tuple(param.shape) for name, param in named if param.requires_grad}
        own = config.task_type not in ("classification", "causal_lm")
        episode = first_episode(config, inputs, ranks, parts) if own else None
        results[case] = Exercise(config, parts, shapes, episode).run()
    return results
