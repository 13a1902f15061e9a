"""Evaluation methods: inner loop, prompt or feature classifier, each from an episode to its score.

The worker holds theta before and after. Every method is a pure function of weights and episode, on
any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.evaluation.feature_classifiers import METHODS as FROZEN
from fmmeta.evaluation.features import Features
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.metrics.scores import BINS, EpisodeScore, counted, score_of
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Episode, MicroBatch
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import Draw

Extra = Callable[[], dict[str, float]]
"""Further numbers of an episode from the weights that the worker holds."""


@dataclass(frozen=True)
class Finetune:
    """The inner loop on the support set, then the query set. With pipeline stages: loss and accuracy only."""

    worker: Worker
    theta: Tensor
    inner: InnerLoop

    def score(self, slot: int, task: Task, episode: Episode, extra: Extra = dict) -> EpisodeScore:
        """Collective: group."""
        self.inner.adapt(self.worker, self.theta, episode.support)
        score = query_score(self.worker, slot, task, episode.query, bool(self.inner.head.names))
        score.metrics.update(extra())
        self.worker.write(self.theta)
        return score


@dataclass(frozen=True)
class InContextMethod:
    """The support set in the prompt of every query; nothing is adapted."""

    worker: Worker

    def score(self, slot: int, task: Task, episode: Episode, extra: Extra = dict) -> EpisodeScore:
        """Collective: group."""
        return query_score(self.worker, slot, task, episode.prompted, False)


def query_score(
    worker: Worker, slot: int, task: Task, query: Sequence[MicroBatch], classes: bool
) -> EpisodeScore:
    """Loss, accuracy and, where each rank has logits of classes, confidences. Collective: group."""
    if not (classes and isinstance(worker, FullModelWorker)):
        result = worker.forward(query)
        loss = math.inf if math.isnan(result.loss) else result.loss
        return EpisodeScore(slot, task.name, task.stratum, loss, result.accuracy)
    numbers = torch.zeros(2 + 3 * BINS, dtype=torch.float64)
    for batch, logits in zip(query, worker.logits(query), strict=True):
        real = batch.weights > 0
        if worker.counts_rows and bool(real.any()):
            shown = F.log_softmax(logits.cpu()[:, : batch.classes or None], dim=1)
            numbers += counted(shown[real], batch.labels.cpu()[real])
    return score_of(slot, task.name, task.stratum, worker.group.sum_(numbers))


def frozen_score(method: str, slot: int, task: Task, draw: Draw, features: Features) -> EpisodeScore:
    """A classifier on features. Local."""
    support, labels, query, truth = features.of(draw)
    return score_of(
        slot,
        task.name,
        task.stratum,
        counted(FROZEN[method](support, labels, query, len(draw.classes)), truth),
    )
