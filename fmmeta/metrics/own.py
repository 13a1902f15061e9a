"""Metrics of the user: functions of an episode's answers (`--metrics module:name`, `MetaTrainer(metrics=)`).

logits of the query set at phi, on all ranks of a group --> pairs of answers on its first rank, in an
order that does not depend on the layout --> metric(predictions, references) -> numbers by name
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.security import import_named
from fmmeta.common.text import shortened
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, MicroBatch
from fmmeta.tasks.data.encode import AnswerReader

Metric = Callable[[list[str], list[str]], Mapping[str, float]]
"""(predictions, references) of an episode's query set after adaptation -> numbers by name.

classification: names of classes. causal_lm: texts of answers; each predicted token is the most
likely one after the input and the right tokens before it (teacher forcing). The pairs are sorted by
reference, then by prediction.
"""

TAKEN = ("accuracy", "loss")


def find_metrics(names: Sequence[str], given: Sequence[Metric]) -> list[tuple[str, Metric]]:
    """Metrics with their names for messages. names: `module:name`, of the flag. Raises `UsageError`."""
    found = [(name, import_named("metrics", name, "a function")) for name in names]
    found += [(getattr(one, "__name__", type(one).__name__), one) for one in given]
    for name, metric in found:
        if not callable(metric):
            raise UsageError(
                f"metrics={name} is a {type(metric).__name__} and cannot be called; give a function of"
                " (predictions, references)"
            )
    return found


def answers(batch: MicroBatch, logits: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """(prediction, reference) of each row of a micro-batch as classes or tokens; -1 where logits are NaN."""
    guess = logits.argmax(-1).masked_fill_(logits.isnan().any(-1), -1).cpu()
    labels, real = batch.labels.cpu(), (batch.weights > 0).tolist()
    if logits.ndim == 2:
        yield from (([int(p)], [int(r)]) for p, r, counts in zip(guess, labels, real, strict=True) if counts)
        return
    single = torch.arange(labels.shape[1]).expand_as(labels)
    rows = (batch.inputs.get("position_ids", single).cpu() == 0).cumsum(1)  # of packed sequences
    for i in (i for i, counts in enumerate(real) if counts):
        here, target = rows[i, 1:], labels[i, 1:]
        for row in here.unique():
            where = (here == row) & (target != IGNORE)
            yield guess[i, :-1][where].tolist(), target[where].tolist()


@dataclass(frozen=True)
class OwnMetrics:
    """Calls the metrics. reader: reads the texts of answers that are no classes."""

    metrics: Sequence[tuple[str, Metric]] = ()
    reader: AnswerReader | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.metrics]

    def of(
        self, worker: Worker, query: Sequence[MicroBatch], classes: Callable[[], Sequence[str]]
    ) -> tuple[dict[str, float], str]:
        """The numbers of an episode from the weights of the worker, and a line if a metric fails; both are
        empty on all ranks of the group but the first.

        classes: returns the names of the labels, none for causal_lm. Collective: group.
        """
        assert isinstance(worker, FullModelWorker), "pipelines are refused"
        mine = list[tuple[list[int], list[int]]]()
        for batch in query:  # one at a time: the logits of all would take much memory
            (logits,) = worker.logits([batch])
            if worker.counts_rows:
                mine += answers(batch, logits[:, : batch.classes or None] if logits.ndim == 2 else logits)
        parts = worker.group.gather_bytes(json.dumps(mine).encode())
        if worker.group.rank:
            return {}, ""
        numbers, name = dict[str, float](), " ".join(self.names)
        try:
            names = classes()
            texts = [[self._text(one, names) for one in pair] for part in parts for pair in json.loads(part)]
            pairs = sorted((reference, prediction) for prediction, reference in texts)
            for name, metric in self.metrics:
                found = metric([prediction for _, prediction in pairs], [reference for reference, _ in pairs])
                numbers |= checked(name, found, (*numbers, *TAKEN))
        except UsageError as error:
            return {}, str(error)
        except Exception as error:  # the user's code may raise anything
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return {}, f"metrics={name} raised {text}; correct the metric, or leave it out"
        return numbers, ""

    def _text(self, answer: Sequence[int], names: Sequence[str]) -> str:
        known = [one for one in answer if one >= 0]
        if self.reader is not None:
            return self.reader.text(known)
        return names[known[0]] if known else ""


def checked(name: str, found: Any, taken: Iterable[str]) -> dict[str, float]:
    """What a metric returned, as floats. Raises `UsageError`."""
    if not isinstance(found, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Real) and not isinstance(value, bool)
        for key, value in found.items()
    ):
        raise UsageError(
            f"metrics={name} returned {shortened(found)}, no dictionary of numbers by name; return"
            ' {"f1": 0.5}, say'
        )
    if twice := sorted(set(found) & set(taken)):
        raise UsageError(f"metrics={name} returned {twice[0]}, a name that is taken; choose another one")
    return {key: float(value) for key, value in found.items()}
