"""Scores of episodes, and their means with intervals over the classes or tasks of the episodes.

    one episode     loss (mean negative log-likelihood), accuracy, number of rows by bin of confidence
    over episodes   mean and 95 % interval (Student's t), also by stratum; expected calibration error;
                    paired differences, and what they say about two models (`verdict`)

Expected calibration error: sum over bins of (rows in the bin / all rows) |accuracy - mean confidence| (Guo et
al. 2017, arXiv 1706.04599, equation 3), BINS bins of equal width, rows of all episodes together.

Q query rows, C classes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from fmmeta.common.text import units_of

BINS = 10
FEW = 15  # classes or tasks below which an interval over them is doubtful
STATS = 2 + 3 * BINS  # summed loss, rows, then the bins: sum of confidences, correct rows, rows
Interval = tuple[float, float]
"""Mean of n values and half its 95 % interval; NaN for n = 1, which has no interval."""


@dataclass(frozen=True)
class EpisodeScore:
    """The score of an episode's query set.

    task: the class or the task that the episode is drawn for. losses (nats), accuracies: by how much was
    learned: before and after adaptation, after 0, 1, ... K inner steps, or once; no accuracies where no
    answer is right or wrong. bins [3][BINS]: sum of confidences, correct rows, rows; empty without
    probabilities of classes. metrics: numbers by name.
    """

    slot: int
    task: str
    stratum: str
    losses: list[float]
    accuracies: list[float]
    bins: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.losses[-1]

    @property
    def accuracy(self) -> float:
        """NaN where no answer is right or wrong."""
        return self.at(-1)[1]

    @property
    def merit(self) -> float:
        """What is higher for a better model: the accuracy; without one, minus the loss."""
        return self.accuracy if self.accuracies else -self.loss

    def at(self, place: int) -> tuple[float, float]:
        """Loss and accuracy of a place in the lists."""
        return self.losses[place], self.accuracies[place] if self.accuracies else math.nan

    @classmethod
    def of(
        cls, slot: int, task: str, stratum: str, loss: float | None, accuracy: float | None, **more: Any
    ) -> "EpisodeScore":
        """A score after adaptation, as results.json has it. loss: None if it is not finite. accuracy: None if
        there is none.
        """
        shares = [] if accuracy is None else [accuracy]
        return cls(slot, task, stratum, [math.inf if loss is None else loss], shares, **more)

    def as_result(self) -> dict[str, Any]:
        """The values of `of`, for results.json."""
        names = ("slot", "task", "stratum", "loss", "accuracy", "bins", "metrics")
        return {name: getattr(self, name) for name in names}


def prediction_stats(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Sums over query rows, from log-probabilities [Q, C] and labels [Q]: float64 [STATS].

    The sums of parts of a query set add up. A row with a NaN counts as wrong, with confidence 0 and an
    infinite loss.
    """
    valid = ~log_probabilities.isnan().any(1)
    confidence, guess = log_probabilities.double().exp().max(1)
    confidence, guess = confidence.where(valid, 0.0), guess.where(valid, -1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    bins = torch.zeros(3, BINS, dtype=torch.float64)
    bins.index_add_(
        1, place, torch.stack([confidence, (guess == labels).double(), torch.ones_like(confidence)])
    )
    loss = (-log_probabilities.double().gather(1, labels[:, None])[:, 0]).where(valid, math.inf).sum()
    rows = torch.tensor(float(len(labels)), dtype=torch.float64)
    return torch.cat([torch.stack([loss, rows]), bins.flatten()])


def episode_score(slot: int, task: str, stratum: str, stats: Tensor) -> EpisodeScore:
    """The score of an episode from the `prediction_stats` of its whole query set."""
    loss, rows, bins = float(stats[0]), float(stats[1]), stats[2:].view(3, BINS)
    return EpisodeScore(slot, task, stratum, [loss / rows], [float(bins[1].sum()) / rows], bins.tolist())


def mean_ci95(values: Sequence[float], units: Sequence[str] | None = None) -> Interval:
    """Mean of n values, and half the width of its 95 % interval, t_{n-1, 0.975} s / sqrt(n), NaN for n = 1.

    s: standard deviation with n - 1 in the denominator; t: quantile of Student's distribution (Student 1908,
    "The probable error of a mean"), 12.7 for n = 2, 2.78 for 5, 1.96 for 600. Mean and half are infinite if a
    value is.
    units: of each value, such as the class or the task of an episode, of which the values are repetitions.
    The half is then at least that over the m units, t_{m-1, 0.975} sqrt(m / (m - 1) sum_u d_u^2) / n, d_u the
    summed deviations of a unit's values from the mean (Liang and Zeger 1986, "Longitudinal data analysis
    using generalized linear models"), and NaN for m = 1.
    """
    n = len(values)
    mean = sum(values) / n
    if math.isinf(mean):
        return mean, math.inf
    sums = defaultdict[Any, float](float)
    for unit, value in zip(units or range(n), values, strict=True):
        sums[unit] += value - mean
    halves = list[float]()
    for deviations in ([value - mean for value in values], list(sums.values())):
        m = len(deviations)
        if m < 2:
            return mean, math.nan
        spread = math.sqrt(m / (m - 1) * sum(one**2 for one in deviations))
        halves.append(float(stdtrit(m - 1, 0.975)) * spread / n)
    return mean, max(halves)


def verdict(gain: Interval) -> str | None:
    """Whether the 95 % interval of a gain is above, below or around zero; None without an interval."""
    mean, half = gain
    if not math.isfinite(mean) or not math.isfinite(half):
        return None
    if mean > half:
        return "better"
    return "worse" if mean < -half else "no significant difference"


def warning_of_few(count: int, kind: str) -> str:
    """What an interval over few classes or tasks does not say; empty from FEW on."""
    return "" if count >= FEW else f"{units_of(count, kind)} say little about others; hold out {FEW} or more"


def format_interval(interval: tuple[float, float | None], form: str = ".4f", scale: float = 1.0) -> str:
    """Format as `mean ± half`; - for a number that is None or not finite, 0.0 for one that rounds to -0.0.

    >>> format_interval((0.5, 0.025), ".1f", 100)
    '50.0 ± 2.5'
    >>> format_interval((-0.0004, 0.1), ".1f")
    '0.0 ± 0.1'
    """
    form = form.replace(".", "z.")
    forms = form, form.lstrip("+")
    return " ± ".join(
        "-" if value is None or not math.isfinite(value) else format(scale * value, each)
        for value, each in zip(interval, forms, strict=True)
    )


def calibration_error(scores: Sequence[EpisodeScore]) -> float | None:
    """Expected calibration error over the rows of all episodes; None without probabilities."""
    if not scores or not all(score.bins for score in scores):
        return None
    confidence, right, rows = torch.tensor([score.bins for score in scores], dtype=torch.float64).sum(0)
    return float((confidence - right).abs().sum() / rows.sum())


def summary(scores: Sequence[EpisodeScore]) -> dict[str, Any]:
    """Means over episodes, as in results.json: shares between 0 and 1, losses in nats."""
    units = [score.task for score in scores]
    accuracy, loss = (mean_ci95([getattr(s, of) for s in scores], units) for of in ("accuracy", "loss"))
    return {
        "accuracy": accuracy[0],
        "ci95": accuracy[1],
        "episodes": len(scores),
        "units": len({*units}),
        "loss": loss[0],
        "loss_ci95": loss[1],
        "ece": calibration_error(scores),
        **{name: {"mean": mean, "ci95": half} for name, (mean, half) in metric_means(scores).items()},
        "per_stratum": per_stratum(scores),
    }


def metric_means(scores: Sequence[EpisodeScore]) -> dict[str, Interval]:
    """The mean of each metric over the episodes that have it."""
    found = defaultdict[str, list[EpisodeScore]](list)
    for score in scores:
        for name in score.metrics:
            found[name].append(score)
    return {
        name: mean_ci95([one.metrics[name] for one in each], [one.task for one in each])
        for name, each in found.items()
    }


def per_stratum(scores: Sequence[EpisodeScore]) -> dict[str, float]:
    """Mean accuracy by stratum."""
    found = defaultdict[str, list[float]](list)
    for score in scores:
        found[score.stratum].append(score.accuracy)
    return {name: mean_ci95(values)[0] for name, values in sorted(found.items())}


def means_by_step(scores: Sequence[EpisodeScore]) -> list[tuple[float, float]]:
    """Mean loss and mean accuracy by what was learned; see EpisodeScore."""
    found = []
    for place in range(len(scores[0].losses)):
        losses, accuracies = zip(*(score.at(place) for score in scores), strict=True)
        found.append((sum(losses) / len(scores), sum(accuracies) / len(scores)))
    return found


def common(
    scores: Sequence[EpisodeScore], others: Sequence[EpisodeScore]
) -> list[tuple[EpisodeScore, EpisodeScore]]:
    """The episodes that both have, in pairs."""
    by_slot = {other.slot: other for other in others}
    return [(score, by_slot[score.slot]) for score in scores if score.slot in by_slot]


def paired(scores: Sequence[EpisodeScore], others: Sequence[EpisodeScore]) -> dict[str, Any]:
    """Mean differences, `scores` minus `others`, over the episodes that both have."""
    pairs = common(scores, others)
    units = [score.task for score, _ in pairs]
    gain = mean_ci95([a.accuracy - b.accuracy for a, b in pairs], units)
    loss = mean_ci95([fall(b.loss, a.loss) for a, b in pairs], units)
    return {
        "accuracy_gain": gain[0],
        "ci95": gain[1],
        "loss_gain": loss[0],
        "loss_ci95": loss[1],
        "episodes": len(pairs),
        "units": len({*units}),
    }


def fall(before: float, after: float) -> float:
    """before - after; 0 of equal losses, which may both be infinite."""
    return 0.0 if before == after else before - after
