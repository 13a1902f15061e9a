"""Few-shot evaluation: adapt to held-out tasks, look at their query sets before and after.

Episodes are fixed by (seed, split) and spread over the groups; the scores do not depend on how.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config import Config
from fmmeta.feed import Reader
from fmmeta.fewshot.scores import gather, mean_ci95
from fmmeta.meta.inner import Learning
from fmmeta.parallel.communicator import Ranks
from fmmeta.parallel.worker import Worker
from fmmeta.progress import Progress
from fmmeta.tasks.loader import Load
from fmmeta.tasks.schedule import Schedule, Task
from fmmeta.tasks.source import TaskSource

VALID, TEST = 1, 2  # streams of the schedule; training is 0


@dataclass(frozen=True)
class Score:
    """One episode: loss and accuracy on its query set, at theta and at phi."""

    slot: int
    stratum: str
    loss_before: float
    accuracy_before: float
    loss_after: float
    accuracy_after: float


class HeldOut:
    """Scores the held-out episodes of a source from what theta holds at the moment. `load`: from a source to its `Load`."""

    def __init__(self, config: Config, worker: Worker, theta: Tensor, learning: Learning, load: Callable[[TaskSource], Load],
                 ranks: Ranks, progress: Progress) -> None:  # fmt: skip
        self.config, self.worker, self.theta, self.learning = config, worker, theta, learning
        self.load, self.ranks, self.progress = load, ranks, progress
        self.leaves: Callable[[], bool] = lambda: False  # whether this group leaves the rest out; then the scores are not all

    def scores(self, source: TaskSource, stream: int, what: str) -> list[Score]:
        """Scores of the episodes of a stream: the same ones every time. Collective: world."""
        self.progress.start(what)
        return evaluate_tasks(self.worker, self.theta, self.learning, self.tasks(source, stream), self.reader(source), self.ranks,
                              lambda done, total: self.progress.line(what, done, total), self.leaves)  # fmt: skip

    def tasks(self, source: TaskSource, stream: int) -> list[Task]:
        """The tasks of a stream's episodes, `eval_episodes` of validation or `test_episodes`."""
        config = self.config
        count = config.test_episodes if stream == TEST else config.eval_episodes
        schedule = Schedule(source.items, count, config.seed, stream, shuffle=False, sizes=source.size)
        return schedule.meta_batch(0)

    def reader(self, source: TaskSource) -> Reader:
        return Reader.of(self.load(source), self.ranks, self.config, self.progress.notice)


def evaluate_tasks(worker: Worker, theta: Tensor, learning: Learning, tasks: Sequence[Task], reader: Reader,
                   ranks: Ranks, progress: Callable[[int, int], None] = lambda done, total: None,
                   leaves: Callable[[], bool] = lambda: False) -> list[Score]:  # fmt: skip
    """Score every task; this group takes its share of them. Leaves `theta` in the worker. Collective: world.

    Before: theta with the head as each task starts it (class means, if head_init is prototype). After: phi.
    """
    worker.write(theta)
    slots = {task.seed: slot for slot, task in enumerate(tasks)}
    mine, scores = reader.dealt(tasks), []
    for done, (task, episode) in enumerate(mine):
        if leaves():
            break
        progress(done, len(mine))
        before, after = learning.score(worker, theta, episode)
        worker.write(theta)
        scores.append(Score(slots[task.seed], task.stratum, before.loss, before.accuracy, after.loss, after.accuracy))
    return gather(ranks, scores, Score)


def per_stratum(scores: Sequence[Score]) -> dict[str, float]:
    """Mean accuracy after adaptation by stratum."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        found[score.stratum].append(score.accuracy_after)
    return {stratum: mean_ci95(values)[0] for stratum, values in sorted(found.items())}
