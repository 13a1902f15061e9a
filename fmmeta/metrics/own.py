"""Metrics of answers: those of the learner, and functions of the user (`--metrics module:name`,
`MetaTrainer(metrics=)`).

logits of the query set at phi, on all ranks of a group --> pairs of answers on its first rank, in an
order that does not depend on the layout --> metric(predictions, references) -> numbers by name
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_named
from fmmeta.common.text import any_of, nearest, shortened
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import METRICS, Config
from fmmeta.learners.base import Learner
from fmmeta.metrics.language import LanguageMetrics
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import MicroBatch
from fmmeta.tasks.sources.base import Draw

Metric = Callable[[list[Any], list[Any]], Mapping[str, float]]
"""(predictions, references) of an episode's query set after adaptation -> numbers by name.

classification: names of classes. causal_lm: texts of answers; each predicted token is the most
likely one after the input and the right tokens before it (teacher forcing). Other learners: what their
`present` returns. The pairs are sorted by reference, then by prediction.
"""

TAKEN = (  # by what is stored beside the numbers, in results.json too
    *("accuracy", "ci95", "loss", "loss_ci95", "ece", "episodes", "units", "kind", "per_stratum", "scores"),
    *("model", "dataset", "eval_split", "n_way", "n_way_max", "k_shot", "k_shot_max", "seed", "method"),
    *("episodes_fingerprint", "cells", "compare"),
)


def find_metrics(
    config: Config, names: Sequence[str], given: Sequence[Metric] = ()
) -> list[tuple[str, Metric | None]]:
    """The functions of metrics by name, None for those of METRICS.

    names: of the flag. Raises `UsageError` for names that mean nothing or cannot be used in such a run.
    """
    found: list[tuple[str, Metric | None]] = []
    for name in names:
        if name not in METRICS and ":" not in name:
            known = any_of([*METRICS, "module:name of a function"])
            raise UsageError(f"metrics={name} is unknown{nearest(name, METRICS)}; use {known}")
        found.append((name, None if name in METRICS else import_named("metrics", name, "a function")))
    found += [(getattr(one, "__name__", type(one).__name__), one) for one in given]
    for name, metric in found:
        if metric is not None and not callable(metric):
            raise UsageError(
                f"metrics={name} is a {type(metric).__name__} and cannot be called; give a function of"
                " (predictions, references)"
            )
    every = " ".join(name for name, _ in found)
    of_language = " ".join(name for name, metric in found if metric is None)
    refuse_first(
        [
            (
                bool(of_language) and not config.learner.generates,
                f"metrics={of_language} score generated answers, and task_type={config.task_type} has none;"
                " leave them out",
            ),
            (
                config.learner.loss is not None and bool({"options", "rank"} & {name for name, _ in found}),
                f"metrics={every} with task_type={config.task_type}: options and rank compare likelihoods,"
                " and its loss is another; leave them out",
            ),
            (
                bool(found) and config.pipeline_stages > 1,
                f"metrics={every} with pipeline_stages={config.pipeline_stages}: only the last stage has the"
                " model's answers; leave one out",
            ),
        ]
    )
    return found


Answered = tuple[list[Any], list[Any]]
"""Prediction and reference of a row, as classes, tokens or numbers."""


def answers_of_group(worker: Worker, query: Sequence[MicroBatch]) -> list[Answered]:
    """The answers of all ranks of the group to a query set. Collective: group."""
    assert isinstance(worker, FullModelWorker), "pipelines are refused"
    mine = list[Answered]()
    for batch in query:  # one at a time: the logits of all would take much memory
        found = worker.answers(batch)
        mine += found if worker.counts_rows else []
    return [(prediction, reference) for part in worker.group.gather(mine) for prediction, reference in part]


@dataclass(frozen=True)
class EpisodeMetrics:
    """The metrics of an episode: `language`, those that fmmeta has, and `own`, functions by name.

    learner: the class of the learner, which says what its answers are. reader: for them (`Learner.reader`).
    """

    own: Sequence[tuple[str, Metric]] = ()
    language: LanguageMetrics | None = None
    learner: Any = Learner
    reader: Any = None

    @property
    def names(self) -> list[str]:
        return [*(self.language.names if self.language else ()), *(name for name, _ in self.own)]

    @classmethod
    def of_learner(
        cls,
        learner: Any,
        reader: Any,
        own: Sequence[tuple[str, Metric]],
        language: LanguageMetrics | None = None,
    ) -> "EpisodeMetrics":
        """With the metrics of the learner first, if it has some."""
        if learner.metrics.__func__ is not Learner.metrics.__func__:
            own = [("of the learner", learner.metrics), *own]
        return cls(own, language, learner, reader)

    def of(self, worker: Worker, query: Sequence[MicroBatch], draw: Callable[[], Draw]) -> dict[str, float]:
        """The numbers of an episode from the weights of the worker, on the first rank of the group; others
        return none.

        query: as the model sees it. Raises `UsageError` on the first rank if a metric fails. Collective:
        group.
        """
        numbers = self.language.of(draw()) if self.language else {}
        if self.own:
            found = answers_of_group(worker, query)
            numbers |= self.of_answers(found, draw) if worker.group.rank == 0 else {}
        return numbers

    def of_answers(self, answered: Sequence[Answered], draw: Callable[[], Any]) -> dict[str, float]:
        """The numbers of own metrics. draw: returns the rows, with the names of the labels.

        Raises `UsageError`. Local.
        """
        numbers, pair, rows = dict[str, float](), self.learner.pair, draw()
        if not pair:  # facts are known once rows are read
            rows = rows.episode()
        read = partial(self.learner.present, names=rows.classes, facts=rows.facts, tokenizer=self.reader)
        texts = [[read(one) for one in pair] for pair in answered]
        pairs = sorted(((reference, prediction) for prediction, reference in texts), key=in_order)
        for name, metric in self.own:
            with usage_errors(f"metrics={name} failed", "correct the metric, or leave it out"):
                found = metric([prediction for _, prediction in pairs], [reference for reference, _ in pairs])
            numbers |= checked(name, found, (*numbers, *TAKEN, *(METRICS if pair else ())))
        return numbers


def in_order(pair: tuple[Any, Any]) -> list[str]:
    """What pairs of texts, or of other answers as JSON, are sorted by."""
    return [one if isinstance(one, str) else json.dumps(one) for one in pair]


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
