"""Few-shot evaluation during a run: scores on the query sets of held-out tasks, before and after adaptation.

Episodes are fixed by (seed, split) and divided among the groups; the scores do not depend on the layout. The
weights are passed in; the worker holds them afterwards.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import publish_text
from fmmeta.common.text import strict
from fmmeta.config.resume import HIDDEN_ON_RESUME
from fmmeta.config.settings import Config
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop
from fmmeta.metrics.own import OwnMetrics
from fmmeta.metrics.scores import gather_scores, mean_ci95
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.reliability.checks import hash_vector
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.training.episodes import EpisodeReader

VALID, TEST = 1, 2  # streams of the schedule; training is 0
FINISHED = "held_out.json"  # finished episodes of a final evaluation that was stopped


@dataclass(frozen=True)
class HeldOutScore:
    """One episode: losses and accuracies on its query set, at theta and at phi, or after 0, 1, ... K inner
    steps. task: the class or the task that the episode is drawn for. metrics: numbers of the user's metrics
    at phi.
    """

    slot: int
    task: str
    stratum: str
    losses: list[float]
    accuracies: list[float]
    metrics: dict[str, float] = field(default_factory=dict)


class FinishedScores:
    """Scores that a stopped evaluation had finished, as JSON by the hash of all that determines them.

    file: where they are until the evaluation is complete; None stores none.
    """

    def __init__(self, file: Path | None, ranks: ProcessGroups, notice: Callable[[str], None]) -> None:
        self.file, self.ranks, self.notice = file, ranks, notice

    def read(self) -> dict[str, Any]:
        """The stored scores; empty if the file is missing or broken. Collective: world."""
        stored = {}
        if self.ranks.first and self.file is not None:
            with suppress(OSError, ValueError):
                found = json.loads(self.file.read_bytes())
                stored = found if isinstance(found, dict) else {}
        return json.loads(self.ranks.world.broadcast_bytes(json.dumps(stored).encode()))

    def write(self, stored: dict[str, Any]) -> None:
        """Store scores, on the first rank; an error of the disk is logged. Local."""
        if self.ranks.first and self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                publish_text(self.file, json.dumps(stored, allow_nan=False))
            except OSError as error:
                text = (
                    f"{self.file} cannot be written ({error.strerror}); a stopped evaluation would start over"
                )
                self.notice(Warn(text))

    def clear(self) -> None:
        """Remove them; the evaluation is complete. Local."""
        if self.ranks.first and self.file is not None:
            self.file.unlink(missing_ok=True)


class HeldOut:
    """Scores the held-out episodes of a source.

    load: from a source to its `LoadEpisode`. folder: of the run, where finished episodes of the TEST stream
    are stored. should_stop: called between episodes; if it returns True, this group leaves out the rest of
    the pass, and the scores are incomplete. begin_stage: begins a stage of the watchdog. own: the user's
    metrics. identity: all that identifies the run, its data included (default: the flags).
    """

    def __init__(
        self,
        config: Config,
        worker: Worker,
        load: Callable[[TaskSource], LoadEpisode],
        ranks: ProcessGroups,
        progress: Progress,
        folder: Path,
        should_stop: Callable[[], bool] = lambda: False,
        own: OwnMetrics | None = None,
        begin_stage: Callable[[str], None] = lambda name: None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.worker, self.load, self.ranks, self.progress = config, worker, load, ranks, progress
        self.finished = FinishedScores(folder / FINISHED, ranks, progress.notice)
        self.should_stop, self.own = should_stop, own or OwnMetrics()
        self.begin_stage, self.identity = begin_stage, identity or config.as_dict()

    def scores(
        self,
        source: TaskSource,
        stream: int,
        what: str,
        theta: Tensor,
        learning: EvaluationMethod,
        each_step: bool = False,
        count: int | None = None,
    ) -> list[HeldOutScore]:
        """Scores of the first `count` episodes of a stream: the same ones every time. Collective: world."""
        tasks, keep = self.tasks(source, stream, count), each_step or stream == TEST
        return self.score_tasks(tasks, self.reader(source), what, theta, learning, each_step, keep, source)

    def tasks(self, source: TaskSource, stream: int, count: int | None = None) -> list[Task]:
        """The first `count` tasks of a stream (default: test_episodes or eval_episodes)."""
        config = self.config
        count = count or (config.test_episodes if stream == TEST else config.eval_episodes)
        return Schedule(
            source.items, count, config.seed, stream, shuffle=False, sizes=source.size
        ).meta_batch(0)

    def reader(self, source: TaskSource) -> EpisodeReader:
        return EpisodeReader.of(self.load(source), self.ranks, self.config, self.progress.notice)

    def score_tasks(
        self,
        tasks: Sequence[Task],
        reader: EpisodeReader,
        what: str,
        theta: Tensor,
        learning: Any,
        each_step: bool = False,
        keep: bool = False,
        source: TaskSource | None = None,
    ) -> list[HeldOutScore]:
        """Score the tasks that are not finished, this group its share of them; return all scores by slot.

        learning: an EvaluationMethod; with `each_step` an InnerLoop, scored after every step. keep: store
        finished episodes in the run's folder. source: of the tasks, to call the user's metrics (not with
        `each_step`). Raises `UsageError` if one fails. Collective: world.
        """
        self.begin_stage(f"{what}, loading its episodes")
        slots = {task.seed: slot for slot, task in enumerate(tasks)}
        key = self._key(theta, learning, each_step) if keep else ""
        stored = self.finished.read() if keep else {}
        known = {score["slot"]: HeldOutScore(**score) for score in stored.get(key, [])}
        todo = [task for task in tasks if slots[task.seed] not in known]
        self.worker.write(theta)
        mine, scores = reader.read_share(todo) if todo else [], list[HeldOutScore]()
        score = learning.scores_after_each_step if each_step else learning.score
        failed, own = "", self.own if source is not None and not each_step else OwnMetrics()
        for done, (task, episode) in enumerate(mine):
            if self.should_stop():
                break
            self.progress.line(what, done, len(mine))
            passes = score(self.worker, theta, episode)
            losses, accuracies = [one.loss for one in passes], [one.accuracy for one in passes]
            numbers = dict[str, float]()
            if own.metrics and source is not None:
                numbers, failed = own.of(self.worker, episode.query, partial(class_names, source, task))
            scores.append(
                HeldOutScore(slots[task.seed], task.name, task.stratum, losses, accuracies, numbers)
            )
            self.worker.write(theta)
            if own.metrics and float(self.ranks.group.sum_(torch.tensor([float(bool(failed))]))):
                break
        self.begin_stage(f"{what}, waiting for the other groups")
        with self.ranks.world.raise_on_all("calling the metrics") if own.metrics else nullcontext():
            if failed:
                raise UsageError(failed)
        known |= {one.slot: one for one in gather_scores(self.ranks, scores, HeldOutScore)}
        if keep and todo:
            finished = [asdict(one) for one in known.values()]
            # JSON cannot hold numbers that are not finite
            self.finished.write({**stored, key: [one for one in finished if strict(one) == one]})
        return [known[slot] for slot in sorted(known)]

    def _key(self, theta: Tensor, learning: Any, each_step: bool) -> str:
        """Hash of all that determines the scores bit for bit, on every rank. Collective: world."""
        here: list[Any] = [hash_vector(theta), *self.own.names]
        if isinstance(learning, InnerLoop):
            rates = learning.rates
            here += [learning.steps, rates.table.tolist()]
            here += [] if rates.element is None else [hash_vector(rates.element)]
        settings = {name: value for name, value in self.identity.items() if name not in HIDDEN_ON_RESUME}
        everyone = [part.decode() for part in self.ranks.world.gather_bytes(json.dumps(here).encode())]
        return sha256(json.dumps([each_step, everyone, settings], sort_keys=True).encode()).hexdigest()


def class_names(source: TaskSource, task: Task) -> tuple[str, ...]:
    """Names of the labels of a task's episode; none for causal_lm."""
    return source.draw(task).classes


def metric_values(scores: Sequence[HeldOutScore]) -> dict[str, list[float]]:
    """Values of the user's metrics by name, over the episodes that have them."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.metrics.items():
            found[name].append(value)
    return found


def per_stratum(scores: Sequence[HeldOutScore]) -> dict[str, float]:
    """Mean accuracy after adaptation by stratum."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        found[score.stratum].append(score.accuracies[-1])
    return {stratum: mean_ci95(values)[0] for stratum, values in sorted(found.items())}
