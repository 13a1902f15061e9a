"""Bounded staleness (--max_staleness S): an outer step closes without waiting for groups that are slower.

    endless queue: meta-batch after meta-batch, each largest first     a pure function of (seed, outer step)
      --claim-->  a group runs a task from a copy of theta, of version v = outer steps applied so far
      --count-->  its gradient is in the sum of the outer step t that is open when the task ends
    meta_batch_size gradients are counted: step t closes
      -->  every group enters the reduction between two passes of its task, with the sum of what it has
           counted, zeros included, and applies the mean; then it continues its task

Staleness of a gradient: t - v, at most S. A claim waits, and so does the gradient of a fast group, where the
places left in the open steps are needed by running tasks that would be older than S otherwise (stale
synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", 2013). With --drop_stale nothing waits and a gradient that is too old is dropped (backup workers:
Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, arXiv 1604.00981). Each
outer step has exactly meta_batch_size gradients, and its update is that of a synchronous step.

What groups share is one small value in the store of the launch, `Ledger`, changed by compare-and-set. No
collective is entered by a part of the ranks: the first rank of a group reads the ledger and tells the others,
and every group enters every reduction.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.meta.outer_step import Outcome, OuterStep
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.collectives import Communicator
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.training.claims import first_decides
from fmmeta.training.schedules import DynamicSchedule, OpenStep
from fmmeta.training.step_metrics import StepMetrics

POLL_S = 0.01  # between two looks of a group that waits
KEY = "ledger"
NOT_YET = -2  # the code of None in a broadcast
CLOSED, STOPPED = 1, 2  # codes of an outer step


@dataclass
class Ledger:
    """claimed: tasks that were begun; counted: gradients in outer steps, from the first step of the run.

    running: tasks that were begun and are not counted, by the version of theta with which they began.
    stopped: whether a group has received a stop signal.
    """

    claimed: int = 0
    counted: int = 0
    running: Counter[int] = field(default_factory=Counter)
    stopped: bool = False

    def to_json(self, writer: str) -> str:
        """writer: makes equal changes of two groups different values."""
        return json.dumps([self.claimed, self.counted, self.running, self.stopped, writer])

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        claimed, counted, running, stopped, _ = json.loads(text)
        return cls(claimed, counted, Counter({int(key): n for key, n in running.items()}), stopped)


@dataclass(frozen=True)
class Bound:
    """When tasks may begin and be counted. tasks: of an outer step; steps: outer steps of the run."""

    tasks: int
    max_staleness: int
    steps: int
    drops: bool = False

    def claim(self, ledger: Ledger, version: int) -> int | None:
        """The number of the claim of a task that begins with `version`; None if it must not begin yet."""
        running = ledger.running + Counter([version])
        is_over = ledger.counted >= self.tasks * self.steps
        if is_over or not (self.drops or self.leaves_places(ledger.counted, running)):
            return None
        ledger.running = running
        ledger.claimed += 1
        return ledger.claimed - 1

    def count(self, ledger: Ledger, version: int) -> int | None:
        """The outer step in which a task that began with `version` is counted; -1 if it is dropped.

        None if it has to wait: the remaining places are those of older tasks.
        """
        step, running = ledger.counted // self.tasks, ledger.running - Counter([version])
        is_dropped = self.drops and (step >= self.steps or step - version > self.max_staleness)
        if not self.drops and not self.leaves_places(ledger.counted + 1, running):
            return None
        ledger.running = running
        ledger.counted += not is_dropped
        return -1 if is_dropped else step

    def leaves_places(self, counted: int, running: Counter[int]) -> bool:
        """Whether each running task can be counted in an outer step for which it is not too old."""
        for version, tasks in sorted(running.items()):
            counted += tasks
            if counted > min(version + self.max_staleness + 1, self.steps) * self.tasks:
                return False
        return True

    def is_closed(self, ledger: Ledger, step: int) -> bool:
        return ledger.counted >= (step + 1) * self.tasks


class SharedLedger:
    """The ledger of all groups. store: a key-value store of torch; group: the ranks of this group.

    writer: number of this group. The first rank of a group uses the store.
    """

    def __init__(self, store: Any, group: Communicator, writer: int) -> None:
        self.store, self.group, self.writer, self.changes = store, group, writer, 0

    def begin(self, ledger: Ledger) -> None:
        """Set the first value, before any group uses the ledger. Local: one rank of the launch."""
        self.store.set(KEY, ledger.to_json("begin"))

    def read(self) -> Ledger:
        """The ledger of this moment. Local."""
        return Ledger.from_json(self.store.get(KEY).decode())

    def change(self, change: Callable[[Ledger], int | None]) -> int | None:
        """What `change` returns; the ledger that it has changed is stored unless that is None.

        Collective: group.
        """
        result = first_decides(self.group, partial(self._change, change))
        return None if result == NOT_YET else result

    def _change(self, change: Callable[[Ledger], int | None]) -> int:
        """As `change`, with `NOT_YET` for None. Local: the first rank."""
        before = self.store.get(KEY).decode()
        while (result := change(ledger := Ledger.from_json(before))) is not None:
            self.changes += 1
            wanted = ledger.to_json(f"{self.writer}/{self.changes}")
            before = self.store.compare_set(KEY, before, wanted).decode()
            if before == wanted:
                return result
        return NOT_YET


class StepsEnded(BaseException):
    """The last outer step has closed, or the run stops; raised on all ranks, also from a running task.

    No `Exception`, so that a loop which catches errors does not catch it.
    """


class StaleSchedule(DynamicSchedule):
    """The schedule of one group with bounded staleness: a step closes between two passes of any task.

    A step that closes while a task runs is applied, counted and saved there, and the next one opens; `update`
    returns the outcome of the last. again: positions in the queue of tasks that an earlier process began and
    whose gradients are not in theta; they are claimed first. claimed_before: tasks that were claimed before
    this process, `again` among them. current: position of the task that this group runs, or has not counted
    yet. in_sum: of those that it has counted in the open outer step, and the versions of theta with which
    they began. has_ended: whether no outer step follows.
    """

    def open(self) -> None:
        super().open()
        config, state, ranks = self.run.config, self.run.state, self.run.ranks
        self.bound = Bound(config.tasks_per_step, config.max_staleness, config.outer_steps, config.drop_stale)
        done = state.outer_step * config.tasks_per_step
        saved = state.queue or {"claimed": done, "again": [], "counted": {}, "dropped": {}}
        self.again, self.claimed_before = list[int](saved["again"]), int(saved["claimed"])
        self.counted, self.dropped = Counter(saved["counted"]), Counter(saved["dropped"])  # by stratum
        self.ledger = SharedLedger(ranks.store, ranks.group, ranks.cross.rank)
        if ranks.first:
            self.ledger.begin(Ledger(counted=done))
        ranks.world.barrier()
        self.current: int | None = None
        self.in_sum = list[tuple[int, int]]()
        self.is_running = self.is_stopping = self.has_ended = False
        self.queue = lru_cache(maxsize=self.bound.max_staleness + 2)(self.run.schedule.queue)
        meta = state.meta_params
        self.theta_begun = MetaParameters.from_named({name: x.clone() for name, x in meta.named().items()})
        self.into = MetaGradient(meta.theta, meta.extra)
        self.outcome = Outcome.STOP

    @property
    def version(self) -> int:
        """Outer steps that this group has applied to theta."""
        return self.run.state.outer_step

    def begin_step(self) -> OpenStep | None:
        """The open outer step, which may have been opened during a task."""
        if self.has_ended:
            return None
        return OpenStep(self, self.version) if self.is_open else super().begin_step()

    def new_metrics(self) -> StepMetrics:
        strata, ages = self.run.schedule.items.strata, range(self.bound.max_staleness + 1)
        names = ["staleness", *(f"staleness {age}" for age in ages)]
        names += [f"{what} {stratum}" for what in ("counted", "dropped") for stratum in strata]
        self.loaded_s = self.feed.loader.wait_s
        return StepMetrics(self.run.spec.numbers, self.run.worker.params.replicated, names)

    def passes(self, number: int, size: int) -> Iterator[list[TaskRun]]:
        """This group's tasks until the step has closed. Collective: group; all where a step has closed."""
        with suppress(StepsEnded):
            while not self.has_ended and self.version == number:
                self._look()
                if self.version != number:
                    break
                claimed = self.ledger.change(partial(self.bound.claim, version=number))
                if claimed is None:
                    self._wait()
                elif (task := self._begin_task(claimed)) is not None:
                    self.begun = [task]
                    yield self.begun
                    self.settle()
                    self.run.stage.begin_phase("waiting for its tasks")

    def update(self, number: int) -> Outcome:
        self.settle()
        if self.version == number and not self.has_ended:
            raise UsageError(
                f"max_staleness={self.bound.max_staleness}: outer step {number + 1} is open; run all tasks of"
                " step.tasks() before step.update()"
            )
        return self.outcome

    def finish(self) -> None:
        self.run.worker.write(self.run.theta)

    def unfinished(self) -> dict[str, Any]:
        """What a checkpoint stores of the queue. Collective: world, between two outer steps."""
        ranks = self.run.ranks
        mine = [position for position, _ in self.in_sum]
        mine += [] if self.current is None else [self.current]
        claimed = first_decides(ranks.world, lambda: self.ledger.read().claimed)
        begun = set[int]().union(*ranks.world.gather(mine))
        return {
            "claimed": self.claimed_before + max(0, claimed - len(self.again)),
            "again": sorted(begun.union(self.again[claimed:])),
            "counted": dict(self.counted),
            "dropped": dict(self.dropped),
        }

    def _begin_task(self, number: int) -> TaskRun | None:
        """The task of a claim; None if it was not loaded, and is counted without an episode.

        Collective: group; all where a step has closed.
        """
        run, feed, began = self.run, self.feed, self.version
        is_new = number >= len(self.again)
        self.current = self.claimed_before + number - len(self.again) if is_new else self.again[number]
        outer_step, index = divmod(self.current, self.bound.tasks)
        task = self.queue(outer_step)[index]
        feed.note_claim(self.current)
        before = len(feed.errors)
        found = feed.read([task])
        if not found:
            self._count_without_episode(task, began, before)
            return None
        run.stage.begin_phase(f"task {number + 1} of the queue", passes=1)
        for name, value in run.state.meta_params.named().items():
            self.theta_begun.named()[name].copy_(value)
        run.worker.write(self.theta_begun.theta)
        setup = replace(run.parts.setup, inner=run.parts.setup.inner.variant(self.theta_begun.rates))
        self.is_running = True
        self.clock.begin(1)
        return TaskRun(
            setup,
            run.worker,
            self.theta_begun,
            found[0][1],
            self.into,
            began,
            self.between_passes,
            task,
            self.end_task,
        )

    def _count_without_episode(self, task: Task, began: int, before: int) -> None:
        """Count a task that has failed. before: number of errors of this rank before it."""
        # a step that closes before this task is counted must not gather its error
        errors, self.feed.errors[before:] = self.feed.errors[before:], []

        def add(tasks: int = 1) -> None:
            self.feed.errors += errors
            self.metrics.count_missing(tasks, len(self.feed.errors), 0.0)

        if self._count(task, began, add) < 0:
            add(tasks=0)

    def end_task(self, task: TaskRun, error: BaseException | None) -> bool:
        self.is_running = False
        self.clock.of_a_task()  # what follows may wait
        if error is not None:
            return isinstance(error, StepsEnded)
        assert task.drawn is not None
        with suppress(StepsEnded):
            if task.result is None:
                slot = [*task.drawn.seed[-2:]]
                before = sum([*one["slot"]] != slot for one in self.feed.errors)  # its own is the last
                self._count_without_episode(task.drawn, task.outer_step, before)
            else:
                self._count(task.drawn, task.outer_step, lambda: self.add(task))
        self.into.clear()
        return False

    def _count(self, task: Task, began: int, add: Callable[[], None]) -> int:
        """Count a task that has ended, and `add` it in the outer step in which it counts; return that step,
        or -1 if it is dropped.

        Collective: group; all groups where a step has closed.
        """
        while (step := self.ledger.change(partial(self.bound.count, version=began))) is None:
            self._wait()
            self._look()
        while self.version < step:
            self._close_step()
        assert self.current is not None
        counts = self.metrics.counts
        if step < 0:
            counts[f"dropped {task.stratum}"] += 1
        else:
            self.in_sum.append((self.current, began))
            counts["staleness"] += step - began
            counts[f"staleness {step - began}"] += 1
            counts[f"counted {task.stratum}"] += 1
            add()
        self.current = None
        return step

    def between_passes(self) -> None:
        super().between_passes()
        self._look()

    def _look(self) -> None:
        """Enter the reductions of the outer steps that have closed. Raises `StepsEnded` after the last.

        Collective: group; all groups where a step has closed.
        """
        if not self.is_stopping and self.run.stop.should_leave_tasks():
            self.ledger.change(stop)
            self.is_stopping = True
        while seen := first_decides(self.run.ranks.group, self._see):
            self._close_step(abandon=seen == STOPPED)

    def _see(self) -> int:
        """What the ledger says of the open outer step: `CLOSED`, `STOPPED`, or 0. Local: the first rank."""
        ledger = self.ledger.read()
        return CLOSED if self.bound.is_closed(ledger, self.version) else STOPPED * ledger.stopped

    def _wait(self) -> None:
        self.run.stage.begin_phase("waiting for the other groups")
        began = time.monotonic()
        time.sleep(POLL_S)
        self.metrics.waited += time.monotonic() - began

    def _close_step(self, abandon: bool = False) -> None:
        """Reduce and apply what all groups have counted, and begin the next outer step; see `_look`.

        abandon: a group has received a stop signal. A task that runs continues afterwards from the weights
        that the worker holds now. Collective: world.
        """
        began, phi = time.monotonic(), self.run.worker.read() if self.is_running else None
        self.metrics.data_seconds = self.feed.loader.wait_s - self.loaded_s
        self.left_tasks = abandon
        self.outcome = self.reduce()
        if self.outcome is Outcome.STOP or self.run.is_over:
            self.has_ended = True
            raise StepsEnded
        if phi is not None:
            self.run.worker.write(phi)
        super().begin_step()
        self.clock.leave_out(time.monotonic() - began)

    def end_step(self, outcome: Outcome, metrics: StepMetrics, update: OuterStep) -> Outcome:
        self.in_sum = []
        return super().end_step(outcome, metrics, update)

    def describe(self, metrics: StepMetrics) -> None:
        """Set the values of metrics.jsonl from the counts of all groups. Local."""
        super().describe(metrics)
        counts, values, strata = metrics.counts, metrics.values, self.run.schedule.items.strata
        ages = [age for age in range(self.bound.max_staleness + 1) if counts[f"staleness {age}"]]
        values["staleness_mean"] = counts["staleness"] / self.bound.tasks
        values["staleness_max"] = max(ages, default=0)
        for stratum in strata:
            self.counted[stratum] += round(counts[f"counted {stratum}"])
            self.dropped[stratum] += round(counts[f"dropped {stratum}"])
        if self.bound.drops:
            values["dropped_tasks"] = round(sum(counts[f"dropped {stratum}"] for stratum in strata))
            values["dropped_share_by_stratum"] = {
                stratum: self.dropped[stratum] / (self.dropped[stratum] + self.counted[stratum])
                for stratum in strata
                if self.dropped[stratum]
            }


def stop(ledger: Ledger) -> int:
    """The change of the ledger by a group that has received a stop signal."""
    ledger.stopped = True
    return 0
