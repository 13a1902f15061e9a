"""Few-shot evaluation: adapt to held-out tasks, look at their query sets before and after.

Episodes are fixed by (seed, split) and spread over the groups; the scores do not depend on how. The weights
are passed in; the worker holds them afterwards.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fmmeta.common.progress import Progress
from fmmeta.config.settings import HIDDEN_ON_RESUME, Config
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop
from fmmeta.metrics.scores import gather, mean_ci95
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.reliability.replicas import hash_vector
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.training.episodes import EpisodeReader

VALID, TEST = 1, 2  # streams of the schedule; training is 0
FINISHED = "held_out.json"  # episodes of a final evaluation that was stopped


@dataclass(frozen=True)
class HeldOutScore:
    """One episode: loss and accuracy on its query set, at theta and at phi."""

    slot: int
    stratum: str
    loss_before: float
    accuracy_before: float
    loss_after: float
    accuracy_after: float

    @classmethod
    def of(
        cls,
        learning: EvaluationMethod,
        worker: Worker,
        theta: Tensor,
        slot: int,
        task: Task,
        episode: Episode,
    ) -> HeldOutScore:
        """Collective: group."""
        before, after = learning.score(worker, theta, episode)
        return cls(slot, task.stratum, before.loss, before.accuracy, after.loss, after.accuracy)


@dataclass(frozen=True)
class StepScores:
    """One episode: loss and accuracy on its query set after 0, 1, ... K inner steps."""

    slot: int
    losses: list[float]
    accuracies: list[float]

    @classmethod
    def of(
        cls, inner: InnerLoop, worker: Worker, theta: Tensor, slot: int, task: Task, episode: Episode
    ) -> StepScores:
        """Collective: group."""
        passes = inner.scores_after_each_step(worker, theta, episode.support, episode.query)
        return cls(slot, [one.loss for one in passes], [one.accuracy for one in passes])


S = TypeVar("S", HeldOutScore, StepScores)


class HeldOut:
    """Scores the held-out episodes of a source. `load`: from a source to its `LoadEpisode`.

    leaves: whether this group leaves out the rest of a pass (asked between episodes); the scores are then
    incomplete. folder: of the run; episodes of the TEST stream that are finished when a pass is left are kept
    there.
    """

    def __init__(
        self,
        config: Config,
        worker: Worker,
        load: Callable[[TaskSource], LoadEpisode],
        ranks: ProcessGroups,
        progress: Progress,
        leaves: Callable[[], bool] = lambda: False,
        folder: Path | None = None,
    ) -> None:
        self.config, self.worker, self.load, self.ranks, self.progress = config, worker, load, ranks, progress
        self.leaves, self.folder = leaves, folder

    def scores(
        self, source: TaskSource, stream: int, what: str, theta: Tensor, learning: EvaluationMethod
    ) -> list[HeldOutScore]:
        """Scores of the episodes of a stream: the same ones every time. Collective: world."""
        return self.score_tasks(
            HeldOutScore,
            self.tasks(source, stream),
            self.reader(source),
            what,
            theta,
            learning,
            stream == TEST,
        )

    def step_scores(
        self, source: TaskSource, count: int, what: str, theta: Tensor, inner: InnerLoop
    ) -> list[StepScores]:
        """Scores after each inner step, of the first `count` validation episodes. Collective: world."""
        return self.score_tasks(
            StepScores, self.tasks(source, VALID, count), self.reader(source), what, theta, inner, True
        )

    def tasks(self, source: TaskSource, stream: int, count: int | None = None) -> list[Task]:
        """The tasks of a stream's episodes, `count` of them, else `eval_episodes` of validation or
        `test_episodes`.
        """
        config = self.config
        if count is None:
            count = config.test_episodes if stream == TEST else config.eval_episodes
        schedule = Schedule(source.items, count, config.seed, stream, shuffle=False, sizes=source.size)
        return schedule.meta_batch(0)

    def reader(self, source: TaskSource) -> EpisodeReader:
        return EpisodeReader.of(self.load(source), self.ranks, self.config, self.progress.notice)

    def clear(self) -> None:
        """Remove the kept episodes, on the first rank; the evaluation is complete. Local."""
        if self.folder is not None:
            (self.folder / FINISHED).unlink(missing_ok=True)

    def score_tasks(
        self,
        kind: type[S],
        tasks: Sequence[Task],
        reader: EpisodeReader,
        what: str,
        theta: Tensor,
        learning: Any,
        keep: bool = False,
    ) -> list[S]:
        """Score every task, this group its share of those that are not finished.

        `keep`: in `folder`. Collective: world.
        """
        self.progress.start(what)
        slots = {task.seed: slot for slot, task in enumerate(tasks)}
        key = self._key(kind, theta, learning) if keep and self.folder is not None else None
        known = {} if key is None else {score["slot"]: kind(**score) for score in self._read().get(key, [])}
        todo = [task for task in tasks if slots[task.seed] not in known]
        self.worker.write(theta)
        mine, scores = reader.read_share(todo) if todo else [], list[S]()
        for done, (task, episode) in enumerate(mine):
            if self.leaves():
                break
            self.progress.line(what, done, len(mine))
            scores.append(kind.of(learning, self.worker, theta, slots[task.seed], task, episode))
            self.worker.write(theta)
        known |= {score.slot: score for score in gather(self.ranks, scores, kind)}
        if key is not None and todo:
            self._write(key, list(known.values()))
        return [known[slot] for slot in sorted(known)]

    def _key(self, kind: type, theta: Tensor, learning: Any) -> str:
        """What the scores are a function of, bit for bit, on every rank of this layout. Collective: world."""
        rates = learning.rates if isinstance(learning, InnerLoop) else None
        here: list[Any] = [hash_vector(theta)]
        if rates is not None:
            here += [
                learning.steps,
                rates.table.tolist(),
                None if rates.element is None else hash_vector(rates.element),
            ]
        settings = {
            name: value for name, value in self.config.as_dict().items() if name not in HIDDEN_ON_RESUME
        }
        everyone = [part.decode() for part in self.ranks.world.gather_bytes(json.dumps(here).encode())]
        return sha256(json.dumps([kind.__name__, everyone, settings], sort_keys=True).encode()).hexdigest()

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        """The kept episodes by key; nothing where there is no file, or a broken one. Collective: world."""
        text = b""
        if self.ranks.first and self.folder is not None and (self.folder / FINISHED).is_file():
            try:
                text = (self.folder / FINISHED).read_bytes()
                json.loads(text)
            except (OSError, ValueError):
                text = b""
        text = self.ranks.world.gather_bytes(text)[0]
        return json.loads(text) if text else {}

    def _write(self, key: str, scores: Sequence[Any]) -> None:
        """Keep the finite scores of a pass beside those of others; a full disk costs them, not the run.

        Collective: world.
        """
        kept = self._read() | {key: [asdict(score) for score in scores if finite(asdict(score))]}
        if self.ranks.first and self.folder is not None:
            temporary = self.folder / f"{FINISHED}.tmp"
            try:
                temporary.write_text(json.dumps(kept, allow_nan=False), encoding="utf-8")
                temporary.replace(self.folder / FINISHED)
            except OSError as error:
                self.progress.notice(
                    f"{temporary} cannot be written ({error.strerror}); a stopped evaluation would start over"
                )


def finite(score: dict[str, Any]) -> bool:
    """Whether JSON can hold all numbers of a score."""
    values = [value for part in score.values() for value in (part if isinstance(part, list) else [part])]
    return all(math.isfinite(value) for value in values if isinstance(value, float))


def per_stratum(scores: Sequence[HeldOutScore]) -> dict[str, float]:
    """Mean accuracy after adaptation by stratum."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        found[score.stratum].append(score.accuracy_after)
    return {stratum: mean_ci95(values)[0] for stratum, values in sorted(found.items())}
