"""Evaluation methods: inner loop, prompt or feature classifier, each from an episode to its score.

The worker holds theta before and after. Every method is a pure function of weights and episode, on any rank.

Features of a frozen model: each distinct row of all episodes is computed once, in batches that depend on the
rows alone, so that any number of groups computes the same table.

    rows of all episodes --> distinct rows, by length --> fixed batches, split over groups --> table [R, D]

Classifiers on features that are scaled to unit length: fit on the support set, return log-probabilities of
the query set.

    prototype  log softmax (cos(f, mu_c) / tau), mu_c the mean of class c (Snell et al. 2017, with cosine)
    linear     logistic regression (scikit-learn)
    knn        share of each class among the nearest support rows, weighted by cosine (scikit-learn)

Transductive ones also look at the other queries of the episode: class means and the shares z of queries in
classes are computed in turn, mu_c the mean of the support rows of c and of all queries, weighted by z_qc.

    soft_kmeans  z = softmax (cos(f, mu) / tau) (after Ren et al. 2018, arXiv 1803.00676, section 3.1.1)
    sinkhorn     z scaled until every class has as many queries (Cuturi 2013, arXiv 1306.0895, section 4;
                 in few-shot learning Hu et al. 2021, arXiv 2006.03806)

R distinct rows, S support rows, Q query rows, D features, C classes.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.common.progress import Progress
from fmmeta.config.fields import shown
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import FewShotConfig
from fmmeta.learners.files import cached_file, remembered
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import FIXED, RATES_FILE, Rates
from fmmeta.metrics.own import EpisodeMetrics
from fmmeta.metrics.scores import STATS, EpisodeScore, episode_score, prediction_stats
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Batcher, MicroBatch
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import Draw
from fmmeta.training.scoring import score_of


def query_score(
    worker: Worker, slot: int, task: Task, query: Sequence[MicroBatch], has_classes: bool
) -> EpisodeScore:
    """Loss and accuracy, and confidences where each rank has the logits of classes. Collective: group."""
    if not (has_classes and isinstance(worker, FullModelWorker)):
        score = score_of(slot, task, [worker.forward(query)])
        return replace(score, losses=[math.inf]) if math.isnan(score.loss) else score
    stats = torch.zeros(1 + STATS, dtype=torch.float64)  # the weighted loss before them
    for batch, logits in zip(query, worker.logits(query), strict=True):
        weights = batch.weights.cpu()
        real = weights > 0
        if worker.counts_rows and bool(real.any()):
            classes = int(batch.targets["classes"][0])
            logits, labels = logits.cpu()[real, :classes], batch.targets["labels"].cpu()[real]
            stats[0] += (weights[real] * worker.learner.loss(logits.double(), labels)).sum()
            stats[1:] += prediction_stats(F.log_softmax(logits, dim=1), labels)
    weighted, stats = worker.group.sum_(stats).split([1, STATS])
    score = episode_score(slot, task.name, task.stratum, stats)
    return replace(score, losses=[float(weighted)]) if math.isfinite(score.loss) else score


Features = dict[tuple[Path, int], Tensor]
"""Features of rows, fp32 [D] in host memory, by path of the store and row."""


def embed(
    worker: Worker, draws: Sequence[Draw], batcher: Batcher, ranks: ProcessGroups, progress: Progress
) -> Features:
    """Compute the features of every row of `draws` with the weights of the worker.

    Raises `UsageError` on all ranks for a row that one of them cannot read. Collective: world.
    """
    stores: dict[Path, TokenStore] = {draw.store.path: draw.store for draw in draws}
    keys = sorted(
        {(draw.store.path, row) for draw in draws for rows in (draw.support, draw.query) for row, _ in rows}
    )
    for store in stores.values():
        store.check()
    lengths = {path: store.lengths() for path, store in stores.items()}
    order = sorted(range(len(keys)), key=lambda index: (lengths[keys[index][0]][keys[index][1]], index))
    size = batcher.micro_batch_size * batcher.group_size
    begins = range(0, len(order), size)[ranks.layout.group_index :: ranks.layout.num_groups]
    computed: list[tuple[Tensor, Tensor]] = []  # rows of the table, and their features
    failure: UsageError | None = None
    for done, begin in enumerate(begins):
        progress.line("rows embedded", done, len(begins))
        try:
            rows = [
                replace(one, labels=i)
                for i in order[begin : begin + size]
                for one in stores[keys[i][0]].examples([keys[i][1]], {})
            ]
            micro_batches = batcher.split(rows)
        except (UsageError, OSError) as error:
            failure = UsageError(one_line(error))
        if ranks.group.sum_(torch.tensor([float(failure is not None)])).item():
            break
        for part, features in zip(micro_batches, worker.features(micro_batches), strict=True):
            real = part.weights > 0
            if worker.counts_rows:
                computed.append((part.targets["labels"][real], features.cpu()[real]))
    with ranks.world.raise_on_all("reading rows"):
        if failure is not None:
            raise failure
    width = computed[0][1].shape[1] if computed else 0  # 0: this rank computes none
    table = torch.zeros(len(keys), max(ranks.world.gather(width)))
    for rows, features in computed:
        table[rows] = features
    return dict(zip(keys, ranks.world.sum_(table), strict=True))


TEMPERATURE = 0.05  # of cosines; it changes probabilities, not the order of the classes
ROUNDS = 5  # in which transductive methods compute shares and means
TRANSDUCTIVE_TEMPERATURE = 0.1  # of cosines in their shares
SINKHORN_STEPS = 10
LINEAR_C = 30.0  # inverse of the regularisation; features have length 1 (docs/log/2026.md)
FLOOR = 1e-6  # least probability of a class without neighbours

Classifier = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Support features [S, D] and labels [S], query features [Q, D], C -> log-probabilities [Q, C]."""


def prototype(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Scaled cosines to the mean of each class."""
    sums = torch.zeros(classes, support.shape[1]).index_add_(0, labels, F.normalize(support))
    return F.log_softmax(F.normalize(query) @ F.normalize(sums).T / TEMPERATURE, dim=1)


def with_query_means(
    support: Tensor, labels: Tensor, query: Tensor, classes: int, shares: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Scaled cosines of the queries to class means that queries count in, and the shares [Q, C] of queries in
    classes. shares: from scaled cosines.
    """
    own = torch.zeros(classes, support.shape[1]).index_add_(0, labels, F.normalize(support))
    query, sums = F.normalize(query), own
    for _ in range(ROUNDS):
        found = shares(query @ F.normalize(sums).T / TRANSDUCTIVE_TEMPERATURE)
        sums = own + found.T @ query
    return query @ F.normalize(sums).T / TEMPERATURE, found


def soft_kmeans(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Scaled cosines to class means that queries count in by their probabilities."""
    scores, _ = with_query_means(support, labels, query, classes, lambda scores: scores.softmax(1))
    return F.log_softmax(scores, dim=1)


def sinkhorn(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Shares of the queries in classes, where every class has as many queries."""
    _, shares = with_query_means(support, labels, query, classes, with_equal_classes)
    return shares.clamp(min=FLOOR).log().log_softmax(1)


def with_equal_classes(scores: Tensor) -> Tensor:
    """exp(scores) [Q, C], scaled by row and column so that rows sum to 1 and columns to about Q / C."""
    found = scores
    for _ in range(SINKHORN_STEPS):
        found = found.log_softmax(0).log_softmax(1)
    return found.exp()


def linear(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Logistic regression, C = LINEAR_C."""
    from sklearn.linear_model import LogisticRegression

    model = fit(LogisticRegression(C=LINEAR_C, max_iter=1000), support, labels)
    return torch.from_numpy(model.predict_log_proba(F.normalize(query).numpy())).float()


def knn(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Nearest neighbours by cosine, weighted by 1 / distance."""
    from sklearn.neighbors import KNeighborsClassifier

    nearest = max(1, len(labels) // classes)  # mean number of support rows per class
    model = fit(KNeighborsClassifier(nearest, metric="cosine", weights="distance"), support, labels)
    scores = torch.from_numpy(model.predict_proba(F.normalize(query).numpy())).float().clamp(min=FLOOR)
    return scores.log().log_softmax(1)


def fit(model: Any, support: Tensor, labels: Tensor) -> Any:
    """Fit without scikit-learn's warning that many distinct classes look like a regression."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
        return model.fit(F.normalize(support).numpy(), labels.numpy())


CLASSIFIERS: dict[str, Classifier] = {
    "prototype": prototype,
    "linear": linear,
    "knn": knn,
    "soft_kmeans": soft_kmeans,
    "sinkhorn": sinkhorn,
}


def with_stored_rates(settings: FewShotConfig, config: Config, inner: InnerLoop, worker: Worker) -> InnerLoop:
    """The inner loop with the learned rates of the model, unless the user sets rates or the model has none.

    Raises `UsageError` for rates that do not fit. Collective: group.
    """
    if settings.sets_inner_lr:
        return inner
    with worker.group.raise_on_all("reading the inner rates"):
        return replace(inner, rates=stored_rates(config, inner, worker))


def stored_rates(config: Config, inner: InnerLoop, worker: Worker) -> Rates:
    """The rates in the model's folder; those of `inner` if it has none.

    Raises `UsageError` for rates of other layers.
    """
    memory, rates = remembered(config.model_source), inner.rates
    stored = memory.get("inner_rates")
    if stored == RATES_FILE:
        return element_rates(config, rates, worker, float(memory.get("inner_rates_scale", 1.0)))
    if not isinstance(stored, dict):
        return rates
    columns = {name: column_of(stored, name, len(rates.table)) for name in rates.layers.names}
    if None in columns.values():
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: the inner rates in fmmeta.json are of other"
            f" layers than lora_r={config.lora_r} and inner_parameters={shown(config.inner_parameters)}"
            " change; leave --lora_r and --inner_parameters out, or give --inner_lr"
        )
    return replace(rates, table=torch.tensor([*columns.values()], dtype=torch.float64).T.contiguous())


def column_of(stored: dict[str, Any], layer: str, steps: int) -> list[float] | None:
    """The rates of a layer over `steps` inner steps; steps beyond the stored ones take the last rate."""
    column = [0.0] if layer == FIXED else stored.get(layer.removeprefix("hf."))
    if (
        not isinstance(column, list)
        or not column
        or not all(isinstance(rate, (int, float)) for rate in column)
    ):
        return None
    return [float(column[min(step, len(column) - 1)]) for step in range(steps)]


def element_rates(config: Config, rates: Rates, worker: Worker, scale: float) -> Rates:
    """Rates of single elements: this rank's slices of RATES_FILE, times `scale`. Raises `UsageError`."""
    from safetensors import safe_open

    with usage_errors(
        f"model_name_or_path={config.model_name_or_path}: {RATES_FILE} does not fit",
        "give --inner_lr to go without it",
    ):
        vector = torch.zeros(worker.params.numel, device=worker.storage_device)
        with safe_open(cached_file(config.model_source, RATES_FILE), "pt") as file:
            for fragment in worker.params.fragments:
                whole = file.get_tensor(fragment.name.removeprefix("hf."))
                vector[fragment.here] = fragment.take(whole).to(vector)
    return Rates(rates.layers, rates.layers.moving.expand(rates.table.shape) * scale, vector, "no")


def classifier_score(
    method: str, metrics: EpisodeMetrics, slot: int, task: Task, given: tuple[Draw, Features]
) -> EpisodeScore:
    """The score of a classifier on frozen features. Raises `UsageError` if a metric fails. Local."""
    draw, features = given
    support, query = (
        torch.stack([features[draw.store.path, row] for row, _ in rows])
        for rows in (draw.support, draw.query)
    )
    labels, truth = (torch.tensor([label for _, label in rows]) for rows in (draw.support, draw.query))
    finite = query.isfinite().all(1) & support.isfinite().all()  # [Q]; others count as wrong
    log_probabilities = torch.full((len(query), len(draw.classes)), math.nan)
    if finite.any():
        log_probabilities[finite] = CLASSIFIERS[method](support, labels, query[finite], len(draw.classes))
    score = episode_score(slot, task.name, task.stratum, prediction_stats(log_probabilities, truth))
    guesses = log_probabilities.argmax(1).where(finite, -1)
    answered = [([guess], [right]) for guess, right in zip(guesses.tolist(), truth.tolist(), strict=True)]
    return replace(score, metrics=metrics.of_answers(answered, lambda: draw))
