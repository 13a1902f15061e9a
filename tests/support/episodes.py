"""Compares loaded episodes, and sums the losses of their micro-batches."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.learners import CLASSIFICATION, LearnerSpec
from fmmeta.learners.base import loss_of
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import Classifier
from fmmeta.tasks.batching import MicroBatch
from fmmeta.tasks.loader import LoadResult


def without_model(spec: LearnerSpec) -> Any:
    """What `losses` of a learner reads of it, beside the outputs."""
    found: Any = SimpleNamespace(loss=loss_of(spec), router_loss=None)
    found.per_row = partial(CausalLearner.per_row, found)
    return found


def objective(outputs: Any, batch: MicroBatch) -> list[Tensor]:
    """A micro-batch's part of the mean loss over its set, its right answers and its answers.

    outputs: of a learner, or logits alone.
    """
    no_model: Any = without_model(CLASSIFICATION)
    kind = Classifier if isinstance(outputs, tuple) or outputs.ndim == 2 else CausalLearner
    if isinstance(outputs, Tensor) and kind is Classifier:
        outputs = outputs, outputs
    rows = kind.losses(no_model, outputs, batch)
    return [part.sum() for part in rows.weighted(batch.weights)]


def same_episodes(a: list[LoadResult], b: list[LoadResult]) -> bool:
    """Whether the tasks and all tensors of their batches are equal."""

    def tensors(loaded: LoadResult):
        assert loaded.batches is not None, loaded.error
        return [
            t
            for batch in (*loaded.batches.support, *loaded.batches.query)
            for t in (*batch.inputs.values(), *batch.targets.values(), batch.weights)
        ]

    return all(
        x.task == y.task and all(map(torch.equal, tensors(x), tensors(y))) for x, y in zip(a, b, strict=True)
    )
