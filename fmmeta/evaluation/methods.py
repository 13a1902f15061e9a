"""Evaluation methods: inner loop, prompt or feature classifier, each from an episode to its score.

The worker holds theta before and after. Every method is a pure function of weights and episode, on
any rank.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.evaluation.episodes import Episodes, plan_evaluation
from fmmeta.evaluation.feature_classifiers import CLASSIFIERS
from fmmeta.evaluation.features import Features, embed
from fmmeta.evaluation.generation import LanguageMetrics
from fmmeta.evaluation.results import EvalCell, check_comparable
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.evaluation.stored_lrs import with_stored_rates
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.metrics.scores import STATS, EpisodeScore, episode_score, gather_scores, prediction_stats
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Episode, MicroBatch
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader


class EvaluatedModel:
    """A model on the ranks of a launch, with the episodes that it is scored on.

    models: all models of the comparison; the episodes avoid the training classes of each. others: cells of
    the other model, which must be of the same episodes. ranks: groups of an earlier model. Raises
    `UsageError`. Collective: world.
    """

    def __init__(
        self,
        settings: EvaluateConfig,
        world: World,
        progress: Progress,
        models: Sequence[str],
        others: Sequence[EvalCell] | None = None,
        ranks: ProcessGroups | None = None,
    ) -> None:
        self.settings, self.progress = settings, progress
        self.config, self.inputs, self.episodes = plan_evaluation(settings, world, progress.notice, models)
        with world.comm.raise_on_all("comparing episodes"):
            self.prints = {k: episodes.fingerprint() for k, episodes in self.episodes.items()}
            check_comparable(settings, self.prints, others)
        if ranks is None:
            plan = build.plan_parallel(self.config, self.inputs, world, progress.notice)
            ranks = world.split(plan.group_size, plan.engine == "deepspeed")
        else:
            plan = self.inputs.parallel_plan(self.config, ranks.layout.group_size, world.device.type)
        self.ranks = ranks
        if settings.metrics and self.ranks.layout.group_size > 1:
            raise UsageError(
                f"metrics={' '.join(settings.metrics)} need the whole model on one rank, and group_size="
                f"{self.ranks.layout.group_size}; use --group_size 1, or leave them out"
            )
        self.parts = build.build(self.config, self.inputs, plan, self.ranks)

    def cells(self) -> list[EvalCell]:
        """The scores of every method and k_shot. Collective: world."""
        parts, classifiers, cells = self.parts, CLASSIFIERS.keys() & self.settings.method, []
        if classifiers:
            draws = [draw for episodes in self.episodes.values() for draw in episodes.draws()]
            on_progress = partial(self.progress.line, "rows embedded")
            features = embed(parts.worker, draws, parts.batcher, self.ranks, on_progress)
        layout = self.ranks.layout
        for k, episodes in self.episodes.items():
            share = range(layout.group_index, len(episodes.tasks), layout.num_groups)
            for method in self.settings.method:
                if method in classifiers:
                    scores = [classifier_score(method, slot, episodes, features) for slot in share]
                else:
                    scores = self.scores_of_share(method, k, episodes)
                gathered = gather_scores(self.ranks, scores, EpisodeScore)
                cells.append(EvalCell(method, k, self.prints[k], gathered))
        return cells

    def scores_of_share(self, method: str, k_shot: int, episodes: Episodes) -> list[EpisodeScore]:
        """This group's scores by the inner loop, or with the support set in the prompt. Collective: world."""
        settings, worker, tokenizer = self.settings, self.parts.worker, self.inputs.tokenizer
        what = f"{k_shot}-shot {method}"
        slots = {task.seed: slot for slot, task in enumerate(episodes.tasks)}
        self.progress.start(what)
        load = self.parts.load(episodes.source)
        if method == "in_context":
            positions = getattr(self.inputs.description.hf_config, "max_position_embeddings", None)
            load.prompt = partial(prompted, bos_token_id=tokenizer.bos_token_id, positions=positions)
        reader = EpisodeReader.of(load, self.ranks, self.config, self.progress.notice)
        share = reader.read_share(episodes.tasks)
        inner = with_stored_rates(settings, self.config, self.parts.setup.inner, worker)
        metrics = LanguageMetrics(
            settings.metrics, worker, tokenizer, self.config, self.parts.batcher, settings.max_new_tokens
        )
        scores = []
        for done, (task, episode) in enumerate(share):
            self.progress.line(what, done, len(share))
            if method == "in_context":
                score = query_score(worker, slots[task.seed], task, episode.prompted, has_classes=False)
            else:
                inner.adapt(worker, self.parts.meta_params.theta, episode.support)
                score = query_score(worker, slots[task.seed], task, episode.query, bool(inner.head.names))
                if settings.metrics:
                    score.metrics.update(metrics.of(episodes.source.draw(task)))
                worker.write(self.parts.meta_params.theta)
            scores.append(score)
        return scores


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


def classifier_score(method: str, slot: int, episodes: Episodes, features: Features) -> EpisodeScore:
    """The score of a classifier on frozen features. Local."""
    task = episodes.tasks[slot]
    draw = episodes.source.draw(task)
    support, labels, query, truth = features.of(draw)
    stats = prediction_stats(CLASSIFIERS[method](support, labels, query, len(draw.classes)), truth)
    return episode_score(slot, task.name, task.stratum, stats)


def scores_by_step(inner: InnerLoop, worker: Worker, theta: Tensor, episode: Episode) -> Tensor:
    """Loss (inf if not finite) and accuracy of the query set after 0 to K inner steps, float64 [2, K + 1].

    The worker holds theta before and after. Collective: group.
    """
    passes = inner.scores_after_each_step(worker, theta, episode.support, episode.query)
    worker.write(theta)
    losses = [one.loss if one.finite else math.inf for one in passes]
    return torch.tensor([losses, [one.accuracy for one in passes]], dtype=torch.float64)
