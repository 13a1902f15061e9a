"""The evaluation engine: scores of episodes, for validation, the final table, `evaluate` and `tune`.

    tasks --(less those that are finished)--> this group's share --(read)--> episodes --(score)--> scores
          --> of all groups, in the order of the tasks, on every rank

How an episode is learned and scored is the caller's. The scores do not depend on the layout. Groups meet
after their shares only; a group that stops, or whose metric fails, leaves out the rest of its share.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
from fmmeta.config.settings import MAX_NEW_TOKENS, Config
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.outer_step import Outcome
from fmmeta.meta.task import Setup
from fmmeta.metrics.language import LanguageMetrics
from fmmeta.metrics.own import EpisodeMetrics, Metric
from fmmeta.metrics.scores import EpisodeScore, means_by_step, metric_means
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.reliability.checks import hash_vector
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import EpisodeTransform, TaskSource
from fmmeta.tasks.sources.own import refuse_drawn
from fmmeta.training import build
from fmmeta.training.callbacks import Callback, RunView
from fmmeta.training.episodes import EpisodeReader

VALID, TEST = 1, 2  # streams of the schedule; training is 0
FINISHED = "held_out.json"  # finished episodes of a final evaluation that was stopped

Read = Callable[[Sequence[Task]], Iterable[tuple[Task, Any]]]
"""From tasks to this group's share of them with its episodes. Collective: world."""
Score = Callable[[int, Task, Any], EpisodeScore]
"""From the slot, the task and its episode to the score.

The weights of the worker are theta before, and may be others afterwards. Raises `UsageError` for a metric
that fails, on one rank perhaps, after all collectives. Collective: group.
"""


@dataclass
class Scoring:
    """Scores tasks on the groups of a launch.

    file: finished scores, as JSON by the hash of all that determines them, until the evaluation is complete;
    None stores none. should_stop: whether this rank asks its group to leave out its remaining episodes;
    called before each. begin_stage: begins a stage of the watchdog. in_memory: most episodes of a group that
    are read at a time; 0: all. stopped: whether a group has left out episodes of the last call.
    """

    worker: Worker
    ranks: ProcessGroups
    progress: Progress
    file: Path | None = None
    should_stop: Callable[[], bool] = lambda: False
    begin_stage: Callable[[str], None] = lambda name: None
    in_memory: int = 0
    stopped = False

    def scores(
        self,
        tasks: Sequence[Task],
        read: Read,
        score: Score,
        what: str,
        theta: Tensor | None = None,
        key: str = "",
    ) -> list[EpisodeScore]:
        """The scores of all tasks, those that are finished read, this group's share of the others computed.

        what: for the progress line. theta: the worker holds it before every episode and afterwards; None:
        `score` does not change the weights. key: identifies all that determines the scores; with it finished
        ones are stored. Raises `UsageError` on all ranks if a metric fails. Collective: world.
        """
        self.begin_stage(f"{what}, loading its episodes")
        stored = self._read() if key else {}
        known, slots = scores_in(stored.get(key)), {task.seed: slot for slot, task in enumerate(tasks)}
        todo = [task for task in tasks if slots[task.seed] not in known]
        groups, done, self.stopped = self.ranks.layout.num_groups, 0, False
        size = self.in_memory * groups or max(1, len(todo))
        restore = partial(self.worker.write, theta) if theta is not None else lambda: None
        restore()
        for begin in range(0, len(todo), size):
            found, failed, stops = list[EpisodeScore](), "", False
            for task, episode in read(todo[begin : begin + size]):
                leaves = torch.tensor([float(self.should_stop() or bool(failed))])
                if stops := self.ranks.group.sum_(leaves).item() > 0:
                    break
                self.progress.line(what, done, math.ceil(len(todo) / groups))
                try:
                    found.append(score(slots[task.seed], task, episode))
                except UsageError as error:
                    failed = str(error)
                restore()
                done += 1
            self.begin_stage(f"{what}, waiting for the other groups")
            known |= self._gather(found, failed, stops)
            if self.stopped:
                break
        if key and todo:
            finished = [asdict(one) for one in known.values()]
            # JSON cannot hold numbers that are not finite
            self._write({**stored, key: [one for one in finished if strict(one) == one]})
        return [known[slot] for slot in sorted(known)]

    def _gather(self, found: Sequence[EpisodeScore], failed: str, stops: bool) -> dict[int, EpisodeScore]:
        """The scores of all groups by slot; sets `stopped`. Raises `UsageError`. Collective: world."""
        of_group = found if self.ranks.layout.group_rank == 0 else ()  # all of its ranks have the same scores
        parts = self.ranks.world.gather([[asdict(one) for one in of_group], failed, stops])
        if failures := [failed for _, failed, _ in parts if failed]:
            raise UsageError(failures[0])
        self.stopped = any(stops for _, _, stops in parts)
        return {one["slot"]: EpisodeScore(**one) for scores, _, _ in parts for one in scores}

    def counts(self) -> dict[str, int]:
        """Numbers of finished scores by key. Collective: world."""
        return {key: len(scores_in(scores)) for key, scores in self._read().items()}

    def clear(self) -> None:
        """Remove the finished scores; the evaluation is complete. Local."""
        if self.ranks.first and self.file is not None:
            self.file.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """The stored scores; empty if the file is missing or broken. Collective: world."""
        stored = {}
        if self.ranks.first and self.file is not None:
            with suppress(OSError, ValueError):
                found = json.loads(self.file.read_bytes())
                stored = found if isinstance(found, dict) else {}
        return self.ranks.world.broadcast(stored)

    def _write(self, stored: dict[str, Any]) -> None:
        """Store scores, on the first rank; an error of the disk is logged. Local."""
        if self.ranks.first and self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                publish_text(self.file, json.dumps(stored, allow_nan=False))
            except OSError as error:
                text = (
                    f"{self.file} cannot be written ({error.strerror}); a stopped evaluation would start over"
                )
                self.progress.notice(Warn(text))


def scores_in(stored: Any) -> dict[int, EpisodeScore]:
    """Stored scores by slot; empty for something else."""
    try:
        return {one["slot"]: EpisodeScore(**one) for one in stored or ()}
    except (TypeError, KeyError):
        return {}


def tasks_of(source: TaskSource, count: int, seed: int, stream: int) -> list[Task]:
    """The first `count` tasks of a stream: the same ones every time."""
    return Schedule(source.items, count, seed, stream, shuffle=False, sizes=source.size).meta_batch(0)


def score_of(slot: int, task: Task, passes: Iterable[PassStats]) -> EpisodeScore:
    """The score of an episode from passes over its query set."""
    losses, accuracies = zip(*((one.loss, one.accuracy) for one in passes), strict=True)
    shares = [] if math.isnan(accuracies[-1]) else [*accuracies]
    return EpisodeScore(slot, task.name, task.stratum, [*losses], shares)


def metrics_of(
    found: Sequence[tuple[str, Metric | None]],
    config: Config,
    inputs: build.RunInputs,
    parts: build.Runtime,
    prompts: Sequence[EpisodeTransform],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> EpisodeMetrics:
    """The metrics that `find_metrics` has found. prompts: put the support set before queries, for in-context
    learning.

    Raises `UsageError` on a layout that cannot have them.
    """
    language, worker, kind = None, parts.worker, config.learner.kind
    names = [name for name, metric in found if metric is None]
    own = [(name, metric) for name, metric in found if metric is not None]
    reader = kind.reader(config, inputs.tokenizer, inputs.description.ends)
    if names:
        refuse_drawn(inputs.sources.first, f"metrics={' '.join(names)}", "give functions module:name")
        if worker.group.size > 1:
            raise UsageError(
                f"metrics={' '.join(names)} need the whole model on one rank, and group_size="
                f"{worker.group.size}; use --group_size 1, or leave them out"
            )
        language = LanguageMetrics(names, worker, reader, config, parts.batcher, max_new_tokens, prompts)
    return EpisodeMetrics.of_learner(kind, reader, own, language)


class HeldOut:
    """The held-out episodes of a run, and their scores before and after adaptation, or after each inner step.

    Episodes are fixed by (seed, split). load: from a source to its `LoadEpisode`. identity: all that
    identifies the run, its data included (default: the flags).
    """

    def __init__(
        self,
        config: Config,
        scoring: Scoring,
        load: Callable[[TaskSource], LoadEpisode],
        metrics: EpisodeMetrics | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.scoring, self.load = config, scoring, load
        self.metrics, self.identity = metrics or EpisodeMetrics(), identity or config.as_dict()

    def scores(
        self,
        source: TaskSource,
        stream: int,
        what: str,
        theta: Tensor,
        learning: Any,
        each_step: bool = False,
        count: int | None = None,
    ) -> list[EpisodeScore]:
        """Scores of the first `count` episodes of a stream: the same ones every time.

        learning: an EvaluationMethod; with `each_step` an InnerLoop, scored after every step, without
        metrics. Finished episodes of these and of the TEST stream are stored. Raises `UsageError` if a metric
        fails. Collective: world.
        """
        worker, metrics = self.scoring.worker, EpisodeMetrics() if each_step else self.metrics
        learn = learning.scores_after_each_step if each_step else learning.score

        def score(slot: int, task: Task, episode: Episode) -> EpisodeScore:
            found = score_of(slot, task, learn(worker, theta, episode))
            return replace(found, metrics=metrics.of(worker, episode.query, partial(source.draw, task)))

        key = self._key(theta, learning, each_step) if each_step or stream == TEST else ""
        read = self.reader(source).read_share
        return self.scoring.scores(self.tasks(source, stream, count), read, score, what, theta, key)

    def tasks(self, source: TaskSource, stream: int, count: int | None = None) -> list[Task]:
        """The first `count` tasks of a stream (default: test_episodes or eval_episodes)."""
        config = self.config
        count = count or (config.test_episodes if stream == TEST else config.eval_episodes)
        return tasks_of(source, count, config.seed, stream)

    def reader(self, source: TaskSource) -> EpisodeReader:
        scoring = self.scoring
        return EpisodeReader.of(self.load(source), scoring.ranks, self.config, scoring.progress.notice)

    def _key(self, theta: Tensor, learning: Any, each_step: bool) -> str:
        """Hash of all that determines the scores bit for bit, on every rank. Collective: world."""
        here: list[Any] = [hash_vector(theta), *self.metrics.names]
        if isinstance(learning, InnerLoop):
            rates = learning.rates
            here += [learning.steps, rates.table.tolist()]
            here += [] if rates.element is None else [hash_vector(rates.element)]
        settings = {name: value for name, value in self.identity.items() if name not in HIDDEN_ON_RESUME}
        everyone = self.scoring.ranks.world.gather(here)
        return sha256(json.dumps([each_step, everyone, settings], sort_keys=True).encode()).hexdigest()


class Validation(Callback):
    """Scores on validation tasks (--eval_steps).

    A resumed run repeats a validation that a stop cut short: a schedule calls `run_if_due` once training has
    begun for every callback. source: None without such tasks. has_stopped:
    whether any rank has received a stop signal. evaluated: called with complete scores.
    """

    def __init__(
        self,
        source: TaskSource | None,
        held_out: HeldOut,
        setup: Setup,
        has_stopped: Callable[[], bool],
        evaluated: Callable[[dict[str, float]], None],
    ) -> None:
        self.source, self.held_out, self.setup = source, held_out, setup
        self.has_stopped, self.evaluated = has_stopped, evaluated

    def on_step_end(self, run: RunView, outcome: Outcome) -> None:
        self.run_if_due(run)

    def run_if_due(self, run: RunView) -> None:
        """Validate if it is due. Collective: world."""
        state, every = run.state, run.config.eval_steps
        due = every and state.outer_step > state.validated and state.outer_step % every == 0
        if self.source is None or not due:
            return
        meta = state.interpolate_with_initial(state.meta_params, run.config.init_interpolation)
        learning = self.setup.evaluation_method(meta.rates)
        scores = self.held_out.scores(self.source, VALID, "validation", meta.theta, learning)
        if meta is not state.meta_params:
            run.worker.write(run.theta)
        if self.has_stopped():
            return  # the scores are incomplete
        state.validated = state.outer_step
        loss, accuracy = means_by_step(scores)[-1]
        own = {f"valid_{name}": mean for name, (mean, _) in metric_means(scores).items()}
        share = {} if math.isnan(accuracy) else {"valid_accuracy": accuracy}
        self.evaluated({**share, "valid_loss": loss, **own})
        if state.best is not None:
            state.best.update(state.meta_params, state.outer_step, accuracy, loss)
