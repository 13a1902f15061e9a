"""The numbers of few-shot evaluation: of one episode, and over episodes with their intervals.

    one episode     loss (mean negative log-likelihood), accuracy, counts of rows by bin of confidence
    over episodes   mean and its 95 % interval (Student's t), also by stratum; expected calibration error;
                    paired differences

Expected calibration error: sum over bins of (rows in it / all rows) |accuracy - mean confidence| (Guo et al.
2017, arXiv 1706.04599, equation 3), BINS bins of equal width, rows of all episodes together.

Q query rows, C classes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from scipy.special import stdtrit
from torch import Tensor

from fmmeta.parallel.process_groups import ProcessGroups

BINS = 10
Interval = tuple[float, float]
"""Mean of n values and half its 95 % interval; NaN for n = 1, which has no interval."""


class Slotted(Protocol):
    """A score that knows which episode it is of."""

    @property
    def slot(self) -> int: ...


S = TypeVar("S", bound=Slotted)


@dataclass(frozen=True)
class EpisodeScore:
    """One episode. bins [3][BINS]: sum of confidences, right rows, rows; empty where no probabilities were
    had.
    """

    slot: int
    task: str
    stratum: str
    loss: float
    accuracy: float
    bins: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def counted(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Of [Q, C] and [Q]: float64 [2 + 3 BINS], the summed loss, the rows, then the bins; adds up over parts
    of a query set.

    A row that is not a number counts as wrong, with confidence 0 and an infinite loss.
    """
    sound = ~log_probabilities.isnan().any(1)
    confidence, guess = log_probabilities.double().exp().max(1)
    confidence, guess = confidence.where(sound, 0.0), guess.where(sound, -1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    bins = torch.zeros(3, BINS, dtype=torch.float64)
    bins.index_add_(
        1, place, torch.stack([confidence, (guess == labels).double(), torch.ones_like(confidence)])
    )
    losses = -log_probabilities.double().gather(1, labels[:, None])[:, 0]
    loss = losses.where(sound, math.inf).sum()
    return torch.cat(
        [torch.stack([loss, torch.tensor(float(len(labels)), dtype=torch.float64)]), bins.flatten()]
    )


def score_of(slot: int, task: str, stratum: str, numbers: Tensor) -> EpisodeScore:
    """An episode out of what `counted` gave for its whole query set."""
    loss, rows, bins = float(numbers[0]), float(numbers[1]), numbers[2:].view(3, BINS)
    return EpisodeScore(slot, task, stratum, loss / rows, float(bins[1].sum()) / rows, bins.tolist())


def mean_ci95(values: Sequence[float]) -> Interval:
    """Mean of n values, and half the width of its 95 % interval, t_{n-1, 0.975} s / sqrt(n), NaN for n = 1.

    s: standard deviation with n - 1 in the denominator; t: quantile of Student's distribution (Student 1908,
    "The probable error of a mean"), 12.7 for n = 2, 2.78 for 5, 1.96 for 600. Mean and half are infinite if a
    value is.
    """
    n = len(values)
    mean = sum(values) / n
    if math.isinf(mean):
        return mean, math.inf
    if n < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)


def shown(interval: tuple[float, float | None], form: str = ".4f", scale: float = 1.0) -> str:
    """`mean ± half`; - for numbers that are None or not finite: the interval of one value, a mean that
    diverged.
    """
    forms = form, form.lstrip("+")
    return " ± ".join(
        "-" if value is None or not math.isfinite(value) else format(scale * value, each)
        for value, each in zip(interval, forms, strict=True)
    )


def gather(ranks: ProcessGroups, scores: Sequence[S], kind: type[S]) -> list[S]:
    """The scores of all groups, by slot; `kind` is their dataclass. Collective: world."""
    spoken = scores if ranks.layout.group_rank == 0 else ()
    parts = ranks.world.gather_bytes(json.dumps([asdict(cast(Any, score)) for score in spoken]).encode())
    return sorted(
        (kind(**score) for part in parts for score in json.loads(part)), key=lambda score: score.slot
    )


def calibration_error(scores: Sequence[EpisodeScore]) -> float | None:
    if not scores or not all(score.bins for score in scores):
        return None
    confidence, right, rows = torch.tensor([score.bins for score in scores], dtype=torch.float64).sum(0)
    return float((confidence - right).abs().sum() / rows.sum())


def summary(scores: Sequence[EpisodeScore]) -> dict[str, Any]:
    """Over episodes, as results.json has it: shares between 0 and 1, losses in nats."""
    accuracy, loss = mean_ci95([s.accuracy for s in scores]), mean_ci95([s.loss for s in scores])
    strata: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        strata[score.stratum].append(score.accuracy)
    metrics = {name: mean_ci95([s.metrics[name] for s in scores]) for name in scores[0].metrics}
    return {
        "accuracy": accuracy[0],
        "ci95": accuracy[1],
        "episodes": len(scores),
        "loss": loss[0],
        "loss_ci95": loss[1],
        "ece": calibration_error(scores),
        **{name: {"mean": mean, "ci95": half} for name, (mean, half) in metrics.items()},
        "per_stratum": {name: mean_ci95(values)[0] for name, values in sorted(strata.items())},
    }


def paired(scores: Sequence[EpisodeScore], others: Sequence[EpisodeScore]) -> dict[str, Any]:
    """`scores` less `others`, over the episodes that both have."""
    by_slot = {other.slot: other for other in others}
    pairs = [(score, by_slot[score.slot]) for score in scores if score.slot in by_slot]
    gain = mean_ci95([a.accuracy - b.accuracy for a, b in pairs])
    fall = mean_ci95(
        [b.loss - a.loss if a.loss != b.loss else 0.0 for a, b in pairs]
    )  # infinite ones may be equal too
    return {
        "accuracy_gain": gain[0],
        "ci95": gain[1],
        "loss_gain": fall[0],
        "loss_ci95": fall[1],
        "episodes": len(pairs),
    }
