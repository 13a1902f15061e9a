"""Outer schedules: which task is next, when an outer step closes, which groups are members.

    for step in schedule.steps():          forms the groups, validates, saves; ends after a stop
        for task in step.tasks():          those of this group
            ...                            a rule, or a loop over task.step and task.backward
        step.update()                      the reduction over all groups, clipping, the outer optimizer

`static`: each group runs its share of the meta-batch. `dynamic`: a group that is free claims the next task.
`stale` (bounded_staleness.py): a step closes without waiting for groups that are slower. `elastic`
(elastic/controller.py): groups come and go. A schedule is found by name (run.py) and gets the `Run`; an own
one is a subclass of the first or the second, `--task_schedule module:class`. `StaticSchedule` is the base:

    passes     the tasks of this group, until a stop: those of its share, or those that it claims
    end_task   adds the numbers of a task that has ended
    reduce     the sums of all groups; agreements about stops and about tasks that failed; the update of theta
    end_step   counts the step, then callbacks, then a checkpoint

No collective is entered by a part of the ranks. theta changes in `reduce` alone.
"""

import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.errors import MachineFault, PeerError, PeerLost, Stopped, UsageError
from fmmeta.meta.gradient_check import check
from fmmeta.meta.multi_task import tasks_per_pass
from fmmeta.meta.noise_scale import local_square
from fmmeta.meta.outer_step import Outcome, OuterStep
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import TaskRun
from fmmeta.reliability.checks import check_replicas
from fmmeta.report.goodput import PassClock
from fmmeta.training.claims import ClaimedEpisodes, TaskClaims
from fmmeta.training.episodes import EpisodeReader, TrainingEpisodes
from fmmeta.training.run import Run
from fmmeta.training.step_metrics import StepMetrics

ENDS_RUN = (UsageError, PeerError, PeerLost, MachineFault, Stopped)


class OpenStep:
    """An outer step that is open. number: of outer steps applied before it; outcome: of `update`."""

    def __init__(self, schedule: "StaticSchedule", number: int) -> None:
        self.schedule, self.number, self.outcome = schedule, number, None

    def tasks(self) -> Iterator[TaskRun]:
        """This group's tasks, to be run in `with task:` one after the other. Collective: group.

        A loop may leave the last ones out, if all ranks of the group do so. Where groups claim their tasks,
        the other groups run those that this one has not claimed. With --max_staleness all have to be run.

        A task whose block raises an error before `backward` has no part in the step, on all ranks of the
        group; `on_bad_task` decides about it as about one that fails to load. Errors of fmmeta end the run.
        """
        if (size := tasks_per_pass(self.schedule.run.config)) > 1:
            raise UsageError(f"tasks_per_pass={size} is for algorithms; leave it out where a loop runs tasks")
        for some in self.schedule.passes(self.number, 1):
            for task in some:
                task.on_end = self._end
                yield task

    def passes(self) -> Iterator[list[TaskRun]]:
        """The same tasks for a rule: those that share passes (--tasks_per_pass) in one list."""
        run, checks = self.schedule.run, self.number == 0
        for some in self.schedule.passes(self.number, tasks_per_pass(run.config)):
            if checks:
                run.check_inner_loop(some[0].episode)
                self.schedule.clock.begin(len(some))
            checks = False
            yield some

    def between_passes(self) -> None:
        """To be called between two passes outside of `TaskRun`, whose methods call it. Collective: group."""
        self.schedule.between_passes()

    def update(self) -> Outcome:
        """Reduce the meta-gradients of all groups and apply their mean, validate, save. Collective: world."""
        self.outcome = self.schedule.update(self.number)
        return self.outcome

    def _end(self, task: TaskRun, error: BaseException | None) -> bool:
        """End a task of a loop; one whose block failed has no part in the step. Collective: group."""
        leaves = error is not None and (isinstance(error, ENDS_RUN) or not isinstance(error, Exception))
        if task.result is not None or leaves:
            return self.schedule.end_task(task, error)
        if self.schedule.run.ranks.group.sum_(torch.tensor([float(error is not None)])).item():
            self.schedule.feed.note_failure(task, "" if error is None else described(error))
        task.restore()
        return self.schedule.end_task(task, None) or error is not None


def described(error: BaseException) -> str:
    """Type, text and place of an error."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


class StaticSchedule:
    """Each group runs its share of the meta-batch; one for a run.

    episodes: the class of `feed`. feed: provides the episodes, from `open` on. metrics: of the last step;
    is_open: whether its sums are not reduced. left_tasks: whether a stop has left out tasks of it.
    """

    episodes: type[TrainingEpisodes] = TrainingEpisodes
    feed: TrainingEpisodes
    metrics: StepMetrics

    def __init__(self, run: Run) -> None:
        self.run, self.is_open, self.left_tasks = run, False, False
        self.begun = list[TaskRun]()  # tasks that were given and may not have ended
        self.clock = PassClock()  # of these

    def steps(self) -> Generator[OpenStep]:
        """The outer steps that are left. Each needs `update` before the next one.

        Raises `Stopped` after a signal, with the state saved. Collective: world.
        """
        run = self.run
        if not run.trains:
            run.skip_training()
            return
        self.open()
        try:
            run.callbacks.on_train_begin(run.view)
            run.validation.run_if_due(run.view)
            self.began = time.monotonic()
            while not run.is_over and (step := self.begin_step()) is not None:
                yield step
                if step.outcome is None:
                    raise UsageError(
                        f"outer step {step.number + 1} has no update; call step.update() before the next step"
                    )
            self.finish()
        finally:
            self.feed.loader.close()
            run.state.saver.close()
            self.leave()
        run.raise_if_stopped()
        if run.config.save_steps:
            run.save(last=True)

    def open(self) -> None:
        """Start loading training episodes; check the meta-gradient where asked. Collective: world."""
        run, config, state, notice = self.run, self.run.config, self.run.state, self.run.progress.notice
        prompts = run.inputs.prompts(run.spec.method, learn_support=config.loss_on_support)
        load = run.parts.load(run.inputs.sources.train, prompts, run.inputs.reading)
        self.feed = self.episodes(
            run.schedule, load, state.outer_step, state.tasks, run.ranks, config, notice
        )
        if config.check_meta_gradient:  # of the same task on every group, after any first-order steps
            first, precision = run.schedule.meta_batch(state.outer_step)[0], run.inputs.deepspeed.precision
            for _, episode in EpisodeReader.of(load, run.ranks, config, notice).read_same_task(first):
                task = replace(run.task_run(episode, state.updates.meta), outer_step=config.outer_steps)
                notice(check(run.rule, task, precision).text)

    def begin_step(self) -> OpenStep | None:
        """Open the next outer step; None if the run is finished. Collective: all groups."""
        run, number = self.run, self.run.state.outer_step
        run.stage.begin(f"outer step {number + 1}", "waiting for its tasks", is_step=True)
        run.callbacks.on_step_begin(run.view)
        self.metrics = self.metrics if self.is_open else self.new_metrics()
        self.metrics.began, self.is_open = time.monotonic(), True
        return OpenStep(self, number)

    def new_metrics(self) -> StepMetrics:
        return StepMetrics(self.run.spec.numbers, self.run.worker.params.replicated)

    def passes(self, number: int, size: int) -> Iterator[list[TaskRun]]:
        """This group's tasks, up to `size` at a time, until a stop leaves them out. Collective: group.

        To measure the noise scale, every task has a separate MetaGradient, which is added once it is
        measured.
        """
        run, metrics, begun = self.run, self.metrics, 0
        meta, total = run.state.meta_params, run.state.updates.meta
        into = MetaGradient(meta.theta, total.extra) if run.config.gradient_noise_scale else total
        metrics.is_partial = True
        for some in self.feed.passes(number, metrics, size):
            if run.stop.should_leave_tasks():
                self.feed.abandon()
                self.left_tasks = True
                return
            run.stage.begin_phase(f"task {begun + 1} of group {run.ranks.cross.rank}", passes=1)
            begun += len(some)
            self.begun = [
                replace(run.task_run(episode, into), drawn=task, on_end=self.end_task)
                for task, episode in some
            ]
            self.clock.begin(len(some))
            yield self.begun
            self.settle()
            run.stage.begin_phase("waiting for its tasks")
        metrics.is_partial = False

    def between_passes(self) -> None:
        self.run.stage.count_pass()

    def end_task(self, task: TaskRun, error: BaseException | None) -> bool:
        """Add the numbers of a task that has ended; whether to suppress `error`, which has ended it.

        Collective: group (schedule `stale`).
        """
        if error is None:
            self.add(task)
            if task.into is not self.run.state.updates.meta:
                task.into.clear()
        return False

    def add(self, task: TaskRun) -> None:
        """Add a task to the sums of the open outer step; one without a result is skipped. Local."""
        run, metrics, result, square = self.run, self.metrics, task.result, 0.0
        if result is None:
            metrics.count_missing(1, len(self.feed.errors), metrics.data_seconds)
            return
        if run.config.gradient_noise_scale:
            square = local_square(run.worker, task.into.sum)
        if task.into is not run.state.updates.meta and result.finite:
            run.state.updates.meta.merge(task.into)
        tokens = task.episode.tokens if run.worker.counts_rows else 0
        metrics.add(result, tokens, square, self.clock.of_a_task())

    def settle(self) -> None:
        """End the tasks that a loop has not run."""
        for task in self.begun:
            if not task.has_ended:
                self.end_task(task, None)
        self.begun = []

    def update(self, number: int) -> Outcome:
        """See `OpenStep.update`; number: of the step. Collective: all groups."""
        self.settle()
        return self.reduce()

    def reduce(self) -> Outcome:
        """The reduction over all groups and the update of theta, which the worker holds afterwards.

        Collective: all groups.
        """
        run, state, stage, metrics = self.run, self.run.state, self.run.stage, self.metrics
        left_tasks, self.left_tasks = self.left_tasks, False
        stage.begin_phase("waiting for the other groups")
        weight = metrics.all_reduce(run.ranks)
        self.is_open = False
        self.feed.complete_step()
        stage.begin_phase("agreeing with the other groups")
        if run.stop.agree_after_tasks(left_tasks, state.saver):
            return Outcome.STOP
        if not metrics.is_partial:
            self.check_task_count(metrics.tasks)
        self.describe(metrics)
        no_data = self._apply_bad_task_policy(metrics)
        squares = metrics.squares if run.config.gradient_noise_scale else None
        update = state.updates.step(weight, state.outer_step, squares)
        run.worker.write(run.theta)
        stage.record_step()
        outcome = Outcome.NO_DATA if no_data else Outcome.SKIPPED_NONFINITE
        return self.end_step(Outcome.APPLIED if update.applied else outcome, metrics, update)

    def check_task_count(self, tasks: int) -> None:
        """Raises `MachineFault` if the `tasks` that all groups have run are not the meta-batch. Local."""

    def describe(self, metrics: StepMetrics) -> None:
        """Set further values for metrics.jsonl from the sums of all groups. Local."""
        self.feed.describe(metrics)

    def numbers(self) -> dict[str, Any]:
        """Values of the outer step that has ended, for metrics.jsonl."""
        return {}

    def _apply_bad_task_policy(self, metrics: StepMetrics) -> bool:
        """Skip tasks that failed to load, or save a checkpoint and stop if there are too many.

        Returns whether no task of the outer step was loaded. Collective: world.
        """
        run, tasks = self.run, self.run.schedule.tasks_per_step
        try:
            left_out = self.feed.apply_bad_task_policy(tasks, metrics.failures)
        except UsageError:
            if run.config.save_steps:
                run.save(last=True)
            raise
        if left_out:
            metrics.values["bad_tasks"] = left_out
        return len(left_out) == tasks

    def end_step(self, outcome: Outcome, metrics: StepMetrics, update: OuterStep) -> Outcome:
        """Count an outer step whose update is applied; log, validate, save. Collective: all groups."""
        run, config, state, cross = self.run, self.run.config, self.run.state, self.run.ranks.cross
        state.outer_step += 1  # last: theta is written, so that a lost group repeats its meta-batch
        state.count(outcome, dict(self.feed.counts))
        step = state.outer_step
        if config.check_replicas_steps and step % config.check_replicas_steps == 0:
            self.compare_theta()
        run.view.began = metrics.began
        run.view.metrics = {
            "step": step,
            "epoch": run.schedule.position(step)[0],
            "seconds": time.monotonic() - metrics.began,
            **metrics.values,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "comm_bytes": cross.bytes_sent,
            **state.goodput.count(
                metrics.useful_seconds if outcome is Outcome.APPLIED else 0.0,
                run.ranks.all_groups.size,
                metrics.tasks - metrics.values["skipped_tasks"],
                metrics.values["tokens"],
                time.monotonic() - metrics.began,
            ),
            **self.numbers(),
            **(state.updates.noise_scale.values if config.gradient_noise_scale else {}),
        }
        cross.bytes_sent = 0
        if spike := state.spikes.mark(run.view.metrics["query_loss"]):
            run.view.metrics["loss_spike"] = spike
        run.callbacks.on_step_end(run.view, outcome)
        if config.save_steps and step < config.outer_steps:  # the last one is saved at the end of the run
            state.saver.warm(state.state_dict().vectors)
            if step % config.save_steps == 0:
                run.save()
        self.feed.tune_workers(time.monotonic() - self.began, config.outer_steps - step)
        return outcome

    def compare_theta(self) -> None:
        """Raise `MachineFault` if theta is not the same on ranks that share it. Collective: world."""
        run, step = self.run, self.run.state.outer_step
        check_replicas(run.ranks, run.theta, f"after outer step {step}", run.worker.params.replicated)

    def newer_than(self, refused: Path) -> Path:
        """The checkpoint to load instead of one that cannot be read; `refused` if there is no other.

        Collective: world.
        """
        return refused

    def unfinished(self) -> dict[str, Any] | None:
        """What a checkpoint stores of tasks that run meanwhile. Collective: world."""
        return None

    def finish(self) -> None:
        """After the last outer step. Collective: all groups."""

    def leave(self) -> None:
        """End the membership of this group."""

    def close(self) -> None:
        """Release what the schedule holds, after the last file of the run is written. Local."""


class DynamicSchedule(StaticSchedule):
    """A group that is free claims the next task of the meta-batch (claims.py)."""

    episodes = ClaimedEpisodes
    feed: ClaimedEpisodes

    def open(self) -> None:
        super().open()
        self.feed.claims = TaskClaims(self.run.ranks.group, self.run.ranks.store)

    def check_task_count(self, tasks: int) -> None:
        if tasks != self.run.schedule.tasks_per_step:
            launch = self.run.ranks.layout.launch
            raise MachineFault(
                f"{tasks} tasks were claimed in an outer step of {self.run.schedule.tasks_per_step}: another"
                " program has changed the counters in the store of the launch; give it a port that no other"
                f" program uses, such as {launch.how_to_give('MASTER_PORT', launch.master_port + 1)}"
            )
