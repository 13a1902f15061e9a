"""Provides this group's training episodes and lets all ranks agree how to handle tasks that failed to load.

share of the schedule -> loader.fetch -> read                    all ranks of a group skip a task that failed
                                                                  on one of them
                                      -> apply_bad_task_policy   gather the errors of all ranks; skip those
                                                                  tasks, or stop on all ranks
"""

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from fmmeta.common.errors import PeerError, UsageError
from fmmeta.common.progress import LOGGER, STDERR, Warn
from fmmeta.config.settings import Config
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import EpisodeLoader, LoadEpisode, LoadResult, TaskSampler
from fmmeta.tasks.schedule.meta_batches import Schedule, Task, assign_to_groups
from fmmeta.training.step_metrics import StepMetrics

# max_bad_fraction is of this many tasks at least, so that the first bad one does not stop a run
LEAST_SEEN = 100

Episodes = list[tuple[Task, Episode]]


class EpisodeReader:
    """Fetches the episodes of a group and decides about failures.

    counts: tasks over all groups so far, `seen` and `bad`, as in a checkpoint.
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[Task]], list[LoadResult]],
        ranks: ProcessGroups,
        config: Config,
        notice: Callable[[str], None],
    ) -> None:
        self.fetch, self.ranks, self.config, self.notice = fetch, ranks, config, notice
        self.voting_group = ranks.world  # ranks that decide together
        self.counts = {"seen": 0, "bad": 0}
        self.errors: list[dict[str, Any]] = []  # of this rank, not gathered yet
        # of an episode; several loader processes may read a file
        self.warn_once = cache(partial(LOGGER.warning, "%s", extra=STDERR))

    def read(self, tasks: Sequence[Task]) -> Episodes:
        """The episodes of `tasks` that every rank of the group has loaded; the group skips the others.

        `apply_bad_task_policy` decides about these at the end of the step. Collective: group.
        """
        loaded = self.fetch(tasks)
        self.errors += [
            {"slot": one.task.seed[-2:], "task": one.task.name, "error": one.error, "crash": one.crash}
            for one in loaded
            if one.batches is None
        ]
        if self.ranks.group.rank == 0:
            for text in itertools.chain.from_iterable(one.batches.notices for one in loaded if one.batches):
                self.warn_once(text)
        missing = (
            self.ranks.group.sum_(torch.tensor([float(one.batches is None) for one in loaded]))
            if tasks
            else []
        )
        return [
            (one.task, one.batches)
            for one, failed in zip(loaded, missing, strict=True)
            if not failed and one.batches is not None
        ]

    @classmethod
    def of(
        cls, load: LoadEpisode, ranks: ProcessGroups, config: Config, notice: Callable[[str], None]
    ) -> "EpisodeReader":
        """A reader that loads in this process."""
        return cls(lambda tasks: [load(task) for task in tasks], ranks, config, notice)

    def read_share(self, tasks: Sequence[Task]) -> Episodes:
        """The episodes of this group's share of `tasks`, which are divided among all groups.

        Raises as `apply_bad_task_policy` does, and `UsageError` if none of the tasks is loaded.

        Collective: world.
        """
        layout = self.ranks.layout
        found = self.read(assign_to_groups(tasks, layout.num_groups)[layout.group_index])
        left_out = self._judge_over_world(len(tasks))
        if len(left_out) == len(tasks):
            last = left_out[-1]
            raise UsageError(
                f"none of {len(tasks)} tasks was loaded, the last: task {last['task']}: {last['error']}"
            )
        return found

    def read_same_task(self, task: Task) -> Episodes:
        """The episode of one task on every group; empty if it failed to load.

        Raises as `apply_bad_task_policy` does. Collective: world.
        """
        found = self.read([task])
        return [] if self._judge_over_world(1) else found

    def _judge_over_world(self, tasks: int) -> list[dict[str, str]]:
        """`apply_bad_task_policy`, the failures of all ranks counted first. Collective: world."""
        return self.apply_bad_task_policy(
            tasks, int(self.ranks.world.sum_(torch.tensor([float(len(self.errors))])))
        )

    def apply_bad_task_policy(self, tasks: int, failures: int) -> list[dict[str, str]]:
        """Decide about the failures of the last `tasks` tasks of all groups; return those left out, by name
        and error.

        failures: sum over all ranks of the tasks that failed there. Raises the same on all ranks:
        `UsageError` with on_bad_task=raise or if too many tasks failed, `PeerError` for an error that is not
        the data's. Collective: all groups in training, world in evaluation; none without a failure.
        """
        self.counts["seen"] += tasks
        if not failures:
            return []
        gathered = self.voting_group.gather(self.errors)
        self.errors = []
        by_slot = {tuple(error["slot"]): error for errors in gathered for error in errors}
        found = [by_slot[slot] for slot in sorted(by_slot)]
        crash = next((error for error in found if error["crash"]), None)
        if crash:
            raise PeerError(
                f"loading task {crash['task']} failed: {crash['error']}; the log of the rank that loaded it"
                " has the traceback"
            )
        if self.config.on_bad_task == "raise":
            raise UsageError(
                f"task {found[0]['task']}: {found[0]['error']}; correct it, or skip such tasks by"
                " --on_bad_task skip"
            )
        self.counts["bad"] += len(found)
        for error in found:
            self.notice(Warn(f"left out: task {error['task']}: {error['error']}"))
        seen, bad = self.counts["seen"], self.counts["bad"]
        if bad > self.config.max_bad_fraction * max(seen, LEAST_SEEN):
            raise UsageError(
                f"max_bad_fraction={self.config.max_bad_fraction}: {bad} of {seen} tasks failed"
                f" to load, the last: task {found[-1]['task']}: {found[-1]['error']}"
            )
        return [{"task": error["task"], "error": error["error"]} for error in found]


class TrainingEpisodes(EpisodeReader):
    """The training tasks of this group from the outer step `first` to the last, prefetched: its share.

    counts: tasks seen and bad so far, as in a checkpoint. finished: slots of the tasks of this outer step
    that this group has finished. keeps_finished: whether their sum is kept if another group is lost
    (--elastic).
    """

    keeps_finished = False

    def __init__(
        self,
        schedule: Schedule,
        load: LoadEpisode,
        first: int,
        counts: dict[str, int],
        ranks: ProcessGroups,
        config: Config,
        notice: Callable[[str], None],
    ) -> None:
        self.schedule, self.layout, self.cross = schedule, ranks.layout, ranks.cross
        self.finished = list[int]()
        self.loader = EpisodeLoader(
            load,
            self.task_stream,
            config.num_workers,
            config.prefetch_factor,
            pin=ranks.device.type == "cuda",
            budget=max(0, (os.cpu_count() or 1) // ranks.layout.launch.local_world_size - 1),
            claiming_groups=self.claiming_groups,
        )
        super().__init__(self.loader.fetch, ranks, config, notice)
        self.voting_group = ranks.all_groups
        self.counts = dict(counts)
        if first == 0 and config.num_workers not in ("auto", "0"):
            notice(f"num_workers={config.num_workers}: loader processes per rank")

    @property
    def claiming_groups(self) -> int:
        """Groups that claim tasks of one queue; 0: tasks are assigned."""
        return 0

    def task_stream(self, task: Task) -> Iterable[Task]:
        """The tasks of this group from `task` to the end of the run."""
        schedule = copy.copy(self.schedule)  # a separate reader: it runs ahead of the loop
        sampler = TaskSampler(schedule, self.cross.size, self.cross.rank, task.seed[2])
        return itertools.dropwhile(
            lambda one: one != task,
            itertools.takewhile(lambda one: one.seed[2] < self.config.outer_steps, sampler),
        )

    def passes(self, outer_step: int, metrics: StepMetrics, size: int) -> Iterator[Episodes]:
        """This group's tasks of an outer step with their episodes, up to `size` at a time; run each list
        before the next.

        Tasks without an episode are counted in `metrics`. If tasks are claimed, raises `PeerLost`.
        Collective: group.
        """
        waited = self.loader.wait_s
        for asked in self._asked(outer_step, size):
            found = self.read(asked)
            metrics.count_missing(len(asked) - len(found), len(self.errors), self.loader.wait_s - waited)
            self.finished += [task.seed[-1] for task in asked]  # a loop may leave after the last of them
            for begin in range(0, len(found), size):
                yield found[begin : begin + size]

    def _asked(self, outer_step: int, size: int) -> Iterator[Sequence[Task]]:
        """This group's tasks of an outer step: its share at once, or `size` at a time as it claims them.

        Collective: group.
        """
        yield self.schedule.share(outer_step, self.cross.size, self.cross.rank)

    def note_failure(self, task: TaskRun, error: str) -> None:
        """Leave out a task that failed while it ran. error: empty if it failed on another rank. Local."""
        drawn = task.drawn
        assert drawn is not None
        if error:
            self.errors.append({"slot": drawn.seed[-2:], "task": drawn.name, "error": error, "crash": False})

    def describe(self, metrics: StepMetrics) -> None:
        """Set further values for metrics.jsonl. Local."""

    def abandon(self) -> None:
        """Let no group claim another task of this outer step. Local."""

    def complete_step(self) -> None:
        """All tasks of the outer step are finished, on all groups. Local."""
        self.finished = []

    def restart(self, counts: dict[str, int]) -> None:
        """Restart with other shares, or at another step: prefetched episodes are dropped.

        counts: tasks seen and bad before that step. Errors are those of finished tasks, if there are any.
        """
        self.loader.close()
        self.counts = dict(counts)
        if not self.finished:
            self.errors = []

    def tune_workers(self, step_seconds: float, steps_left: int) -> None:
        """Let the loader choose its number of processes; print its warnings."""
        chosen = self.loader.choose_num_workers(step_seconds, steps_left)
        if chosen is not None:
            share = 100 * (self.loader.load_s - self.loader.warm[0]) / (step_seconds - self.loader.warm[1])
            self.notice(f"num_workers=auto: {chosen} (loading takes {share:.2g} % of an outer step)")
        for text in self.loader.warnings:
            LOGGER.warning("rank %d: %s", self.layout.launch.global_rank, text, extra=STDERR)
        self.loader.warnings.clear()
