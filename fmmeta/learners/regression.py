"""Regression: one or several numbers for each text.

    {"text": "a fine film", "target": 4.5}        or a list of numbers under target

Targets are scaled by the mean and the standard deviation of the support set, and so is the loss; answers and
metrics are in the units of the data. The loss of a set is the mean over its rows and targets. An own loss
(LearnerSpec.loss) is of outputs [N] and scaled targets [N].
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened
from fmmeta.config.learners import REGRESSION
from fmmeta.config.settings import Config
from fmmeta.learners.base import RowLosses, at_least_fp32, row_losses
from fmmeta.learners.classification import Classifier, NativeClassifier, Outputs, PooledClassifier
from fmmeta.tasks.batching import Collated, Example, MicroBatch, padded
from fmmeta.tasks.data.columns import PairInput, Row, RowReader, pick
from fmmeta.tasks.data.encode import encode_texts

TARGETS = ("target", "score", "label", "value")


class Numbers(Classifier):
    """Rows, loss and answers; `labels` of a micro-batch are the scaled targets [B, number of targets]."""

    auto, pipeline = "AutoModelForSequenceClassification", "text-classification"
    problem_type = REGRESSION.name  # transformers' word too: a pipeline then returns the numbers
    of_numbers = True
    example: Mapping[str, Any] = {"text": "a fine film", "target": 4.5}
    pair = ()

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        text = str(pick(config, columns, "text_column"))
        target = pick(config, columns, "label_column", names=TARGETS, required=answered)
        pair = PairInput.of(config, text, columns, config.text_column is None)

        def read(row: Row) -> dict[str, Any]:
            found: dict[str, Any] = {"text": pair.read(row)[0]}
            return {**found, "target": numbers(row.values, str(target))} if answered else found

        return RowReader(read)

    @classmethod
    def facts(cls, support: Sequence[Any], query: Sequence[Any] = ()) -> dict[str, Any]:
        count = len(support[0]["target"])
        if wrong := [row["target"] for row in (*support, *query) if len(row["target"]) != count]:
            raise UsageError(f"a row has {len(wrong[0])} targets, and others {count}; give as many in each")
        values = np.array([row["target"] for row in support])
        spread = values.std(0)
        names = ["target"] if count == 1 else [f"target {number}" for number in range(count)]
        std = np.where(spread > 0, spread, 1.0)
        return {"names": names, "mean": values.mean(0).tolist(), "std": std.tolist()}

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        texts = encode_texts(tokenizer, [row["text"] for row in rows], config.max_length)
        examples, mean = list[Example](), facts["mean"]
        for row, ids in zip(rows, texts, strict=True):
            if not ids:
                raise UsageError(f"text={shortened(row['text'])} has no tokens; fix or remove it")
            scaled = (np.array(row.get("target", mean)) - mean) / facts["std"]
            examples.append(Example(ids, scaled.tolist(), losses=len(mean)))
        return examples

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        inputs, _ = padded([replace(row, labels=0) for row in rows], pad_token_id)
        return inputs, {"labels": torch.tensor([row.labels for row in rows], dtype=torch.float)}

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return row_losses(self.own_loss or squared, logits, targets)

    def losses(self, outputs: Outputs, batch: MicroBatch) -> RowLosses:
        targets = batch.targets["labels"]
        values = at_least_fp32(outputs[1])[:, : targets.shape[1]]
        return RowLosses.of(self.loss(values.flatten(), targets.flatten()).view_as(targets).sum(1))

    def answers(self, outputs: Outputs, batch: MicroBatch) -> Iterator[tuple[list[float], list[float]]]:
        targets = batch.targets["labels"]
        values = at_least_fp32(outputs[1])[:, : targets.shape[1]].tolist()
        rows = zip(values, targets.tolist(), batch.weights.tolist(), strict=True)
        return ((predicted, right) for predicted, right, weight in rows if weight > 0)

    @classmethod
    def present(
        cls, answer: Sequence[Any], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> Any:
        scales = zip(answer, facts["mean"], facts["std"], strict=True)
        # six digits of a standard deviation, since scaled targets are fp32
        found = [round(one * std + mean, 6 - math.floor(math.log10(std))) for one, mean, std in scales]
        return found[0] if len(found) == 1 else found

    @classmethod
    def metrics(cls, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Mean squared and absolute error, and the share of the variance that is explained (R squared, the
        mean over the targets; 0 where a target does not vary).
        """
        found, right = (
            np.array(rows, dtype=float).reshape(len(rows), -1) for rows in (predictions, references)
        )
        error, spread = ((found - right) ** 2).sum(0), ((right - right.mean(0)) ** 2).sum(0)
        explained = np.where(spread > 0, 1 - error / np.where(spread > 0, spread, 1.0), 0.0)
        mse, mae = ((found - right) ** 2).mean(), np.abs(found - right).mean()
        return {"mse": float(mse), "mae": float(mae), "r2": float(explained.mean())}


class PooledRegressor(Numbers, PooledClassifier):
    """An encoder with fmmeta's pooling and a linear head."""


class Regressor(Numbers, NativeClassifier):
    """AutoModelForSequenceClassification with an output for each target."""

    pooled = PooledRegressor


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2


def numbers(row: Mapping[str, Any], column: str) -> list[float]:
    """The numbers of a column: one, also as a text, or a list of them. Raises `UsageError`."""
    value: Any = row.get(column)
    several: Any = getattr(value, "tolist", lambda: value)()
    try:
        found = [float(one) for one in (several if isinstance(several, (list, tuple)) else [several])]
    except (TypeError, ValueError):
        found = []
    if not found or isinstance(value, bool) or not all(map(math.isfinite, found)):
        raise UsageError(f"has {column}={shortened(value)}, which is no number; fix the row")
    return found
