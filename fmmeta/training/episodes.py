"""Provides this group's training episodes and lets all ranks agree how to handle tasks that failed to load.

share of the schedule -> loader.fetch -> read                    all ranks of a group skip a task that failed
                                                                  on one of them
                                      -> apply_bad_task_policy   gather the errors of all ranks; skip those
                                                                  tasks, or stop on all ranks

With --task_schedule dynamic the loader prepares the tasks that this group may claim next, and the tasks of
each claim (claims.py) are fetched and read when it is made.
"""

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from fmmeta.common.errors import PeerError, UsageError
from fmmeta.common.progress import LOGGER, STDERR, Warn
from fmmeta.config.settings import Config
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import EpisodeLoader, LoadEpisode, LoadResult, TaskSampler
from fmmeta.tasks.schedule.meta_batches import Schedule, Task, assign_to_groups, claim_order
from fmmeta.training.claims import TaskClaims
from fmmeta.training.run_log import StepMetrics

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
        gathered = self.voting_group.gather_bytes(json.dumps(self.errors).encode())
        self.errors = []
        by_slot = {tuple(error["slot"]): error for errors in map(json.loads, gathered) for error in errors}
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
    """The training tasks of this group from the outer step `first` to the last, prefetched.

    counts: tasks seen and bad so far, as in a checkpoint. is_claiming: whether groups claim tasks. claims:
    those of an outer step; None if tasks are assigned, and with --max_staleness. finished: slots
    of the tasks of this outer step that this group has finished. finished_before: the same of all groups, in
    attempts that were abandoned (--elastic).
    """

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
        self.schedule, self.layout = schedule, ranks.layout
        dynamic = config.task_schedule == "dynamic" and not config.max_staleness
        self.is_claiming = dynamic or config.max_staleness > 0
        self.claims = TaskClaims(ranks.group, ranks.store) if dynamic else None
        self.finished, self.finished_before = list[int](), set[int]()
        self.head = self.stride = 0.0  # last position that this group has claimed, and from claim to claim
        self.loader = EpisodeLoader(
            load,
            self.task_stream,
            config.num_workers,
            config.prefetch_factor,
            pin=ranks.device.type == "cuda",
            budget=max(0, (os.cpu_count() or 1) // ranks.layout.launch.local_world_size - 1),
            claiming_groups=max(1, ranks.cross.size // schedule.nodes) if self.is_claiming else 0,
        )
        super().__init__(self.loader.fetch, ranks, config, notice)
        self.voting_group = ranks.all_groups
        self.counts = dict(counts)
        if first == 0 and config.num_workers not in ("auto", "0"):
            notice(f"num_workers={config.num_workers}: loader processes per rank")

    def task_stream(self, task: Task) -> Iterable[Task]:
        """The tasks of this group from `task` to the end of the run, or those that it may claim."""
        own = copy.copy(self.schedule)  # a separate reader: it runs ahead of the loop
        if self.is_claiming:
            return self._candidates(own, task)
        sampler = TaskSampler(own, self.ranks.cross.size, self.ranks.cross.rank, task.seed[2])
        return itertools.dropwhile(
            lambda one: one != task,
            itertools.takewhile(lambda one: one.seed[2] < self.config.outer_steps, sampler),
        )

    def _candidates(self, schedule: Schedule, first: Task) -> Iterator[Task]:
        """`first`, then tasks of the queue after those that are claimed when the loader asks for another.

        Of G equally fast groups each claims every G-th position. Where the loader prepares fewer episodes
        than G at a time, they are those around the position that this group will claim by its last claims.
        """
        yield first
        ahead = self.loader.num_workers * self.loader.prefetch_factor
        for outer_step in range(first.seed[2], self.config.outer_steps):
            for index, task in enumerate(schedule.queue(outer_step, self.part)):
                expected = self.head + max(1.0, self.stride - ahead // 2)
                if claim_order(task) > claim_order(first) and self._position(outer_step, index) >= expected:
                    yield task

    @property
    def part(self) -> int:
        """The node whose tasks this group claims; 0 unless nodes share the tasks (--task_sharding node)."""
        return self.ranks.cross.rank // max(1, self.ranks.cross.size // self.schedule.nodes)

    def _position(self, outer_step: int, index: int) -> int:
        """Position in the endless queue of this group's part of the tasks."""
        return outer_step * self.schedule.per_node + index

    def passes(self, outer_step: int, metrics: StepMetrics, size: int) -> Iterator[list[Episode]]:
        """This group's episodes of an outer step, up to `size` at a time; run each list before the next.

        Tasks without an episode are counted in `metrics`. If tasks are claimed, raises `PeerLost`.
        Collective: group.
        """
        waited = self.loader.wait_s
        for asked in self._asked(outer_step, size):
            found = self.read(asked)
            metrics.count_missing(len(asked) - len(found), len(self.errors), self.loader.wait_s - waited)
            for begin in range(0, len(found), size):
                yield [batches for _, batches in found[begin : begin + size]]
            self.finished += [task.seed[-1] for task in asked]

    def _asked(self, outer_step: int, size: int) -> Iterator[Sequence[Task]]:
        """This group's tasks of an outer step: its share at once, or `size` at a time as it claims them.

        Collective: group.
        """
        if self.claims is None:
            yield self.schedule.share(outer_step, self.ranks.cross.size, self.ranks.cross.rank)
            return
        queue = self.schedule.queue(outer_step, self.part)
        left = [index for index, task in enumerate(queue) if task.seed[-1] not in self.finished_before]
        self.claims.begin(f"{self.part}/{outer_step}")
        while (begin := size * self.claims.next()) < len(left):
            self.note_claim(self._position(outer_step, left[begin]))
            yield [queue[index] for index in left[begin : begin + size]]

    def note_claim(self, position: int) -> None:
        """Follow where in the queue this group is, and how far its claims are from each other."""
        gap, self.head = position - self.head, float(position)
        if self.stride:
            self.stride += (gap - self.stride) / 4
        else:
            self.stride = float(self.loader.claiming_groups)

    def abandon(self) -> None:
        """Let no group claim another task of this outer step. Local."""
        if self.claims is not None:
            self.claims.close()

    def complete_step(self) -> None:
        """All tasks of the outer step are finished, on all groups. Local."""
        self.finished, self.finished_before = [], set()

    def restart(self, counts: dict[str, int]) -> None:
        """Restart with other shares, or at another step: prefetched episodes are dropped.

        counts: tasks seen and bad before that step. Errors are those of finished tasks, if there are any.
        """
        self.loader.close()
        self.counts = dict(counts)
        if not self.finished:
            self.errors = []

    def tune_workers(self, step_seconds: float) -> None:
        """Let the loader choose its number of processes; print its warnings."""
        chosen = self.loader.choose_num_workers(step_seconds)
        if chosen is not None:
            share = 100 * (self.loader.load_s - self.loader.warm[0]) / (step_seconds - self.loader.warm[1])
            self.notice(f"num_workers=auto: {chosen} (loading takes {share:.2g} % of an outer step)")
        for text in self.loader.warnings:
            LOGGER.warning("rank %d: %s", self.layout.launch.global_rank, text, extra=STDERR)
        self.loader.warnings.clear()
