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

Metrics of a language model, which need the whole model on one rank:

    rouge_l   F of the longest common subsequence of words, greedy answer against the reference (Lin 2004,
              "ROUGE: A Package for Automatic Evaluation of Summaries", equations 2-4 with beta = 1)
    exact_match   whether the greedy answer is the reference, apart from spaces around it
    options   whether the right answer has the highest total log-likelihood among the row's options, or, where
              it has none, among the episode's answers
    rank      its place among them, from 1

R distinct rows, S support rows, Q query rows, D features, C classes.
"""

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import FewShotConfig
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import HEAD, RATES_FILE, Rates
from fmmeta.metrics.scores import STATS, EpisodeScore, episode_score, prediction_stats
from fmmeta.models.answers import AnswerRow
from fmmeta.models.files import cached_file, remembered
from fmmeta.models.load import max_positions
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Episode, Example, MicroBatch
from fmmeta.tasks.data.encode import AnswerReader, encode, labelled
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.loader import Prompted
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import Draw


def query_score(
    worker: Worker, slot: int, task: Task, query: Sequence[MicroBatch], has_classes: bool
) -> EpisodeScore:
    """Loss and accuracy, and confidences where each rank has the logits of classes. Collective: group."""
    if not (has_classes and isinstance(worker, FullModelWorker)):
        result = worker.forward(query)
        return EpisodeScore(
            slot,
            task.name,
            task.stratum,
            math.inf if math.isnan(result.loss) else result.loss,
            result.accuracy,
        )
    stats = torch.zeros(1 + STATS, dtype=torch.float64)  # the weighted loss before them
    for batch, logits in zip(query, worker.logits(query), strict=True):
        weights = batch.weights.cpu()
        real = weights > 0
        if worker.counts_rows and bool(real.any()):
            log_probabilities = F.log_softmax(logits.cpu()[:, : batch.classes or None], dim=1)[real]
            labels = batch.labels.cpu()[real]
            losses = F.nll_loss(log_probabilities.double(), labels, reduction="none")
            stats[0] += (weights[real] * losses).sum()
            stats[1:] += prediction_stats(log_probabilities, labels)
    weighted, stats = worker.group.sum_(stats).split([1, STATS])
    score = episode_score(slot, task.name, task.stratum, stats)
    return replace(score, loss=float(weighted)) if math.isfinite(score.loss) else score


def scores_by_step(inner: InnerLoop, worker: Worker, theta: Tensor, episode: Episode) -> Tensor:
    """Loss (inf if not finite) and accuracy of the query set after 0 to K inner steps, float64 [2, K + 1].

    The worker holds theta before and after. Collective: group.
    """
    passes = inner.scores_after_each_step(worker, theta, episode)
    worker.write(theta)
    return as_scores(passes)


def as_scores(passes: Sequence[PassStats]) -> Tensor:
    """Loss (inf if not finite) and accuracy of P passes, float64 [2, P]."""
    return torch.tensor(
        [[one.loss if one.finite else math.inf for one in passes], [one.accuracy for one in passes]],
        dtype=torch.float64,
    )


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
            rows = [stores[keys[i][0]].example(keys[i][1], i) for i in order[begin : begin + size]]
            micro_batches = batcher.split(rows)
        except (UsageError, OSError) as error:
            failure = UsageError(one_line(error))
        if ranks.group.sum_(torch.tensor([float(failure is not None)])).item():
            break
        for part, features in zip(micro_batches, worker.features(micro_batches), strict=True):
            real = part.weights > 0
            if worker.counts_rows:
                computed.append((part.labels[real], features.cpu()[real]))
    with ranks.world.raise_on_all("reading rows"):
        if failure is not None:
            raise failure
    width = computed[0][1].shape[1] if computed else 0  # 0: this rank computes none
    table = torch.zeros(len(keys), max(map(int, ranks.world.gather_bytes(str(width).encode()))))
    for rows, features in computed:
        table[rows] = features
    return dict(zip(keys, ranks.world.sum_(table), strict=True))


TEMPERATURE = 0.05  # of cosines; it changes probabilities, not the order of the classes
ROUNDS = 5  # in which transductive methods compute shares and means
TRANSDUCTIVE_TEMPERATURE = 0.1  # of cosines in their shares
SINKHORN_STEPS = 10
LINEAR_C = 30.0  # inverse of the regularisation; features have length 1 (docs/log.md)
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
        return replace(inner, rates=stored_rates(config, inner.rates, worker))


def stored_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    """The rates in the model's folder; `rates` if it has none.

    Raises `UsageError` for rates of other layers, and for a head of zeros that no rate would move.
    """
    memory = remembered(config.model_source)
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

    path = cached_file(config.model_source, RATES_FILE)
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
    support, query = (
        torch.stack([features[draw.store.path, row] for row, _ in rows])
        for rows in (draw.support, draw.query)
    )
    labels, truth = (torch.tensor([label for _, label in rows]) for rows in (draw.support, draw.query))
    finite = query.isfinite().all(1) & support.isfinite().all()  # [Q]; others count as wrong
    log_probabilities = torch.full((len(query), len(draw.classes)), math.nan)
    if finite.any():
        log_probabilities[finite] = CLASSIFIERS[method](support, labels, query[finite], len(draw.classes))
    return episode_score(slot, task.name, task.stratum, prediction_stats(log_probabilities, truth))


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L of an answer, between 0 and 1; of texts without letters and digits, whether they are equal.

    >>> rouge_l("police killed the gunman", "police kill the gunman")  # Lin 2004, section 3
    0.75
    """
    given, reference = (re.findall(r"[^\W_]+", text.lower()) for text in (answer, truth))
    common = longest_common(given, reference)
    if not given and not reference:  # of symbols alone
        return float(answer.strip() == truth.strip())
    return 2 * common / (len(given) + len(reference))


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for left in a:
        before = 0
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if left == right else max(row[j], row[j - 1])
    return row[-1]


class LanguageMetrics:
    """The metrics in `names` of an episode, with the weights of the worker, which holds a whole model."""

    def __init__(
        self,
        names: Sequence[str],
        worker: Any,
        reader: AnswerReader,
        config: Config,
        batcher: Batcher,
        max_new_tokens: int,
        prompt: Prompted | None = None,
    ) -> None:
        """prompt: puts the support set before rows, for in-context learning."""
        self.prompt = prompt
        self.names, self.worker, self.reader, self.config = names, worker, reader, config
        self.batcher, self.max_new_tokens = replace(batcher, pack=None), max_new_tokens  # a row per sequence

    def of(self, draw: Draw) -> dict[str, float]:
        """The value of each metric: the mean over the queries."""
        found: dict[str, float] = {}
        truth = [draw.store.text("target", row) for row, _ in draw.query]
        if {"rouge_l", "exact_match"} & set(self.names):
            answers = self.greedy_answers(draw)
            found["rouge_l"] = sum(map(rouge_l, answers, truth)) / len(truth)
            same = [answer == right.strip() for answer, right in zip(answers, truth, strict=True)]
            found["exact_match"] = sum(same) / len(truth)
        if {"options", "rank"} & set(self.names):
            ranks = self.ranks_of_truth(draw, truth)
            found["options"] = sum(rank == 1 for rank in ranks) / len(truth)
            found["rank"] = sum(ranks) / len(truth)
        return {name: found[name] for name in self.names}

    def greedy_answers(self, draw: Draw) -> list[str]:
        query = draw.episode().query
        if self.prompt is not None:
            query = self.prompt(draw.episode().support, query)
        return generate(
            self.worker,
            self.reader,
            [row.prompt for row in query],
            self.max_new_tokens,
            self.batcher.micro_batch_size,
        )

    def ranks_of_truth(self, draw: Draw, truth: Sequence[str]) -> list[int]:
        """The place of each query's right answer, from 1, by total log-likelihood among the row's options; of
        a row without options, among the distinct answers of the episode. Others that are as likely, or whose
        likelihood is NaN, come before it.
        """
        store = draw.store
        answers = list(dict.fromkeys(store.text("target", row) for row, _ in (*draw.support, *draw.query)))
        options = [store.options(row) or answers for row, _ in draw.query]
        examples = encode(
            self.reader.tokenizer,
            self.config,
            [
                store.text("input", row)
                for (row, _), of_row in zip(draw.query, options, strict=True)
                for _ in of_row
            ],
            [option for of_row in options for option in of_row],
        )
        of_support = draw.episode().support if self.prompt else []
        found = iter(examples)
        rows = [self.behind_one_prompt([next(found) for _ in of_row], of_support) for of_row in options]
        scores = iter(self.log_likelihoods(list(itertools.chain(*rows))))
        ranks = []
        for of_row, right in zip(options, truth, strict=True):
            likelihoods = {option: next(scores) for option in of_row}
            of_right = likelihoods.pop(right)
            ranks.append(1 + sum(not score < of_right for score in likelihoods.values()))  # NaN: the last
        return ranks

    def behind_one_prompt(self, options: list[Example], support: Sequence[Example]) -> list[Example]:
        """The options of a row, all behind what is left of the input and of the support set before the
        longest of them.
        """
        longest = max(options, key=lambda one: one.label_tokens)
        if any(len(one.input_ids) >= self.config.max_length for one in options):
            before = longest.prompt
            answers = [one.input_ids[len(one.prompt) :] for one in options]
            options = [labelled([*before, *answer], len(before)) for answer in answers]
        if self.prompt is None:
            return options
        (row,) = self.prompt(support, [longest])
        # the first token of all, which may mark the start of the text, stays the first
        before = row.input_ids[: len(row.input_ids) - len(longest.input_ids) + 1]
        ignored = [IGNORE] * len(before)
        return [Example([*before, *one.input_ids[1:]], ignored + one.token_labels[1:]) for one in options]

    def log_likelihoods(self, examples: Sequence[Example]) -> list[float]:
        """Total log-likelihood of each example's answer, in nats."""
        answers = getattr(self.worker, "answers", None)
        if answers is not None and answers.can_score(()):
            rows = [AnswerRow.of(row.input_ids, row.token_labels) for row in examples]
            batcher = self.batcher
            return (-answers.losses(rows, batcher.micro_batch_size, batcher.max_tokens)[0]).tolist()
        losses: list[float] = []
        for batch in self.batcher.split(examples):  # one at a time: the logits of all would take much memory
            (logits,) = self.worker.logits([batch])
            targets = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE).to(logits.device)
            per_token = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
            )
            losses += per_token.view_as(targets).sum(1).tolist()
        # `Batcher.split` puts the longest rows first
        by_length = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
        return [-loss for _, loss in sorted(zip(by_length, losses, strict=True))]


@contextmanager
def greedy(hf: Any) -> Iterator[None]:
    """Leaves out what the model's generation_config.json asks for beside end tokens, such as a repetition
    penalty, which would count the tokens of the prompt.
    """
    from transformers import GenerationConfig

    stored, hf.generation_config = hf.generation_config, GenerationConfig()
    try:
        yield
    finally:
        hf.generation_config = stored


@torch.no_grad()
def generate(
    worker: FullModelWorker,
    reader: AnswerReader,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    around: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None,
) -> list[str]:
    """Greedy answers to prompts of tokens, in their order; an answer ends at an end token of `reader`, and
    where the model's positions end.

    Prompts of similar length are a batch, and share the computation of a common prefix. around: context of
    the pass over some prompts, by their numbers, which ascend; it may change the model by the prompt, so that
    the order of the prompts is kept and nothing is shared.

    Raises `UsageError` for a prompt that leaves no position.
    """
    hf: Any = worker.model.hf
    pad, most = hf.config.pad_token_id, max_positions(hf.config)
    room = [max_new_tokens if most is None else min(max_new_tokens, most - len(prompt)) for prompt in prompts]
    if min(room, default=1) < 1:
        raise UsageError(
            f"max_new_tokens={max_new_tokens}: an input of {max(map(len, prompts))} tokens leaves none of the"
            f" model's {most} positions for an answer; lower --max_length"
        )
    answers, shared = [""] * len(prompts), None if around else getattr(worker, "answers", None)
    for tokens in dict.fromkeys(room):  # in batches of equal room: no answer is shortened by another one
        indices = [index for index, one in enumerate(room) if one == tokens]
        if not around:
            indices.sort(key=lambda index: -len(prompts[index]))
        for begin in range(0, len(indices), batch_size):
            batch = indices[begin : begin + batch_size]
            cache = shared.prefix([prompts[index] for index in batch]) if shared else None
            start = cache.get_seq_length() if cache else 0  # padding is between the prefix and the rest
            rows = [torch.tensor(prompts[index][start:], device=worker.device) for index in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            if cache:
                prefix = torch.tensor([prompts[batch[0]][:start]] * len(batch), device=worker.device)
                ids, mask = torch.cat([prefix, ids], 1), torch.cat([torch.ones_like(prefix), mask], 1)
            with greedy(hf), around(batch) if around else nullcontext():
                out = hf.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=tokens,
                    do_sample=False,
                    num_beams=1,
                    pad_token_id=pad,
                    eos_token_id=[*reader.ends],
                    **({"past_key_values": cache} if cache else {}),
                )
            for index, answer in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
                answers[index] = reader.text(answer)
    return answers
