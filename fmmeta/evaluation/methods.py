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

R distinct rows, S support rows, Q query rows, D features, C classes.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import FewShotConfig
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import HEAD, RATES_FILE, Rates
from fmmeta.metrics.scores import STATS, EpisodeScore, episode_score, prediction_stats
from fmmeta.models.files import cached_file, remembered
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Batcher, Episode, Example, MicroBatch
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import Draw


def query_score(
    worker: Worker, slot: int, task: Task, query: Sequence[MicroBatch], has_classes: bool
) -> EpisodeScore:
    """Loss and accuracy, and confidences where each rank has the logits of classes. Collective: group."""
    if not (has_classes and isinstance(worker, FullModelWorker)):
        result = worker.forward(query)
        loss = math.inf if math.isnan(result.loss) else result.loss
        return EpisodeScore(slot, task.name, task.stratum, loss, result.accuracy)
    stats = torch.zeros(STATS, dtype=torch.float64)
    for batch, logits in zip(query, worker.logits(query), strict=True):
        real = batch.weights > 0
        if worker.counts_rows and bool(real.any()):
            log_probabilities = F.log_softmax(logits.cpu()[:, : batch.classes or None], dim=1)
            stats += prediction_stats(log_probabilities[real], batch.labels.cpu()[real])
    return episode_score(slot, task.name, task.stratum, worker.group.sum_(stats))


def scores_by_step(inner: InnerLoop, worker: Worker, theta: Tensor, episode: Episode) -> Tensor:
    """Loss (inf if not finite) and accuracy of the query set after 0 to K inner steps, float64 [2, K + 1].

    The worker holds theta before and after. Collective: group.
    """
    passes = inner.scores_after_each_step(worker, theta, episode)
    worker.write(theta)
    losses = [one.loss if one.finite else math.inf for one in passes]
    return torch.tensor([losses, [one.accuracy for one in passes]], dtype=torch.float64)


@dataclass(frozen=True)
class Features:
    """Features of rows, fp32 [R, D] in host memory. `index`: row of the table by store and row."""

    table: Tensor
    index: dict[tuple[Path, int], int]

    def of(self, store: TokenStore, rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Features [N, D] and labels [N] of the N rows of a support or query set."""
        indices = [self.index[store.path, row] for row, _ in rows]
        return self.table[indices], torch.tensor([label for _, label in rows])


def embed(
    worker: Worker,
    draws: Sequence[Draw],
    batcher: Batcher,
    ranks: ProcessGroups,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Compute the features of every row of `draws` with the weights of the worker. Collective: world."""
    stores: dict[Path, TokenStore] = {draw.store.path: draw.store for draw in draws}
    keys = sorted(
        {(draw.store.path, row) for draw in draws for rows in (draw.support, draw.query) for row, _ in rows}
    )
    for store in stores.values():
        store.check()
    examples = [Example(stores[path].input_ids(row), index) for index, (path, row) in enumerate(keys)]
    examples.sort(key=lambda example: (len(example.input_ids), example.labels))
    size = batcher.micro_batch_size * batcher.group_size
    batches = [examples[begin : begin + size] for begin in range(0, len(examples), size)]
    share = batches[ranks.layout.group_index :: ranks.layout.num_groups]
    computed: list[tuple[Tensor, Tensor]] = []  # rows of the table, and their features
    for done, batch in enumerate(share):
        progress(done, len(share))
        micro_batches = batcher.split(batch)
        for part, features in zip(micro_batches, worker.features(micro_batches), strict=True):
            real = part.weights > 0
            if worker.counts_rows:
                computed.append((part.labels[real], features.cpu()[real]))
    width = computed[0][1].shape[1] if computed else 0  # 0: this rank computes none
    width = max(map(int, ranks.world.gather_bytes(str(width).encode())))
    table = torch.zeros(len(keys), width)
    for rows, features in computed:
        table[rows] = features
    return Features(ranks.world.sum_(table), {key: row for row, key in enumerate(keys)})


TEMPERATURE = 0.05  # of cosines; it changes probabilities, not the order of the classes
FLOOR = 1e-6  # least probability of a class without neighbours

Classifier = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Support features [S, D] and labels [S], query features [Q, D], C -> log-probabilities [Q, C]."""


def prototype(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Scaled cosines to the mean of each class."""
    sums = torch.zeros(classes, support.shape[1]).index_add_(0, labels, F.normalize(support))
    return F.log_softmax(F.normalize(query) @ F.normalize(sums).T / TEMPERATURE, dim=1)


def linear(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Logistic regression, C = 1."""
    from sklearn.linear_model import LogisticRegression

    model = fit(LogisticRegression(max_iter=1000), support, labels)
    scores = torch.from_numpy(model.predict_log_proba(F.normalize(query).numpy())).float()
    return add_missing_classes(model, scores, classes)


def knn(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Nearest neighbours by cosine, weighted by 1 / distance."""
    from sklearn.neighbors import KNeighborsClassifier

    nearest = max(1, len(labels) // classes)  # mean number of support rows per class
    model = fit(KNeighborsClassifier(nearest, metric="cosine", weights="distance"), support, labels)
    scores = torch.from_numpy(model.predict_proba(F.normalize(query).numpy())).float().clamp(min=FLOOR)
    return add_missing_classes(model, scores.log(), classes).log_softmax(1)


def fit(model: Any, support: Tensor, labels: Tensor) -> Any:
    """Fit without scikit-learn's warning that many distinct classes look like a regression."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
        return model.fit(F.normalize(support).numpy(), labels.numpy())


def add_missing_classes(model: Any, scores: Tensor, classes: int) -> Tensor:
    """Add columns for the classes without support rows, which scikit-learn leaves out."""
    out = torch.full((len(scores), classes), torch.log(torch.tensor(FLOOR)).item())
    out[:, torch.from_numpy(model.classes_)] = scores
    return out


CLASSIFIERS: dict[str, Classifier] = {"prototype": prototype, "linear": linear, "knn": knn}


def with_stored_rates(settings: FewShotConfig, config: Config, inner: InnerLoop, worker: Worker) -> InnerLoop:
    """The inner loop with the learned rates of the model, unless the user sets rates or the model has none.

    Raises `UsageError` for rates that do not fit. Collective: group.
    """
    if settings.sets_inner_lr:
        return inner
    with worker.group.raise_on_all("reading the inner rates"):
        return replace(inner, rates=stored_rates(config, inner.rates, worker))


def stored_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    """The rates in the model's folder; `rates` if it has none.

    Raises `UsageError` for rates of other layers, and for a head of zeros that no rate would move.
    """
    memory = remembered(config.model_name_or_path)
    stored = memory.get("inner_rates")
    if stored == RATES_FILE:
        return element_rates(config, rates, worker, float(memory.get("inner_rates_scale", 1.0)))
    if not isinstance(stored, dict):
        return rates
    columns = {name: column_of(stored, name, len(rates.table)) for name in rates.layers.names}
    if None in columns.values():
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: the inner rates in fmmeta.json are of other"
            f" layers than lora_r={config.lora_r} trains; leave --lora_r out, or give --inner_lr"
        )
    if config.head_init == "zero" and HEAD in columns and not any(columns[HEAD] or ()):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} does not train its head, which was learned for"
            f" {memory.get('classes', memory.get('n_way'))} classes, and a head of zeros would stay zero;"
            " give tasks of as many classes, --head_init prototype, or --inner_lr"
        )
    return replace(rates, table=torch.tensor([*columns.values()], dtype=torch.float64).T.contiguous())


def column_of(stored: dict[str, Any], layer: str, steps: int) -> list[float] | None:
    """The rates of a layer over `steps` inner steps; steps beyond the stored ones take the last rate."""
    column = stored.get(layer.removeprefix("hf."))
    if (
        not isinstance(column, list)
        or not column
        or not all(isinstance(rate, (int, float)) for rate in column)
    ):
        return None
    return [float(column[min(step, len(column) - 1)]) for step in range(steps)]


def element_rates(config: Config, rates: Rates, worker: Worker, scale: float) -> Rates:
    """Rates of single elements: this rank's slices of RATES_FILE, times `scale`. Raises `UsageError`."""
    from safetensors import SafetensorError, safe_open

    path = cached_file(config.model_name_or_path, RATES_FILE)
    try:
        vector = torch.zeros(worker.params.numel, device=worker.storage_device)
        with safe_open(path, "pt") as file:
            for fragment in worker.params.fragments:
                whole = file.get_tensor(fragment.name.removeprefix("hf."))
                vector[fragment.here] = fragment.take(whole).to(vector)
    except (OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: {RATES_FILE} does not fit ({error}); give"
            " --inner_lr to go without it"
        ) from None
    return Rates(rates.layers, torch.full_like(rates.table, scale), vector, "no")


def classifier_score(method: str, slot: int, task: Task, draw: Draw, features: Features) -> EpisodeScore:
    """The score of a classifier on frozen features. Local."""
    support, labels = features.of(draw.store, draw.support)
    query, truth = features.of(draw.store, draw.query)
    stats = prediction_stats(CLASSIFIERS[method](support, labels, query, len(draw.classes)), truth)
    return episode_score(slot, task.name, task.stratum, stats)
