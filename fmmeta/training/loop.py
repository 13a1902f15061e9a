"""The outer loop of a run: resume, outer steps, stop and save; finish.py exports and evaluates the result.

It knows nothing of files or sharding (state.py, run_log.py, parallel/); callbacks.py has what follows a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from fmmeta.common.errors import PeerLost, Stopped, UsageError
from fmmeta.common.progress import Progress
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.meta_gradient import MetaGradient
from fmmeta.meta.multi_task import adapter_multi_task_rule, tasks_per_pass
from fmmeta.meta.outer_step import OuterStep
from fmmeta.meta.rule import MultiTaskRule, Rule, TaskResult
from fmmeta.meta.second_order.gradient_check import FiniteDifferenceRule, check
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.stop import Guard
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.training import build, callbacks, run_record
from fmmeta.training.episodes import EpisodeReader, TrainingEpisodes
from fmmeta.training.profiler import Profiler
from fmmeta.training.run_folder import RunStart, newest_whole
from fmmeta.training.run_log import RunLogger
from fmmeta.training.state import TrainingState
from fmmeta.training.static_controller import StaticController
from fmmeta.training.step_metrics import Outcome, StepMetrics
from fmmeta.training.trackers import Trackers
from fmmeta.training.validation import HeldOut


class Run:
    """One run: its state, its parts, and the outer loop over them."""

    def __init__(
        self,
        config: Config,
        plan: build.Plan,
        ranks: ProcessGroups,
        parts: build.Parts,
        start: RunStart,
        progress: Progress,
        guard: Guard | None = None,
        controller: StaticController | None = None,
        user_callbacks: Sequence[callbacks.Callback] = (),
    ) -> None:
        self.config, self.plan, self.ranks, self.parts = config, plan, ranks, parts
        self.folder, self.start, self.progress = start.folder, start, progress
        self.worker, self.theta = parts.worker, parts.theta
        self.state = TrainingState(config, plan, ranks, parts, start.folder, progress.notice)
        self.spec = find(config.algorithm)
        self.trains = not self.spec.trains_nothing
        self.rule_at = partial(self.spec.rule, parts.setup) if self.spec.rule else None
        with ranks.world.raise_on_all("making room for several tasks"):
            self.together = adapter_multi_task_rule(config, self.worker, parts.setup.inner)
        if config.tasks_per_pass == "auto":
            progress.notice(
                f"tasks_per_pass auto: {tasks_per_pass(config)} task(s) in a pass, as many as fit into"
                f" micro_batch_size={config.micro_batch_size} rows"
            )
        self.schedule = build.training_schedule(config, plan, ranks.layout)
        self.guard = guard or Guard(config, ranks, parts.worker)
        self.controller = controller or StaticController()
        self.metrics, self.update = StepMetrics(), cast("OuterStep | None", None)  # of the last outer step
        self.held_out = HeldOut(
            config, self.worker, parts.load, ranks, progress, self.guard.should_stop_evaluation, self.folder
        )
        self.profiler = Profiler(config.profile and self.trains)
        self.logger, self.trackers = RunLogger(), Trackers(progress.notice)
        self.callbacks = callbacks.CallbackList(
            [
                self.profiler,
                self.logger,
                self.trackers,
                callbacks.ReportPage(),
                callbacks.NonfiniteLimit(),
                callbacks.Validation(self.held_out),
                callbacks.Saving(),
            ],
            user_callbacks,
        )

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one, and open the files of the run. Collective: world."""
        found = self._load()
        with self.ranks.world.raise_on_all("opening the files of the run"):
            if self.controller.writes:
                self.begin_writing()
        if found is not None:
            self.worker.write(self.theta)
            self.progress.notice(f"resumed from {found}, outer step {self.state.outer_step}")

    def _load(self) -> Path | None:
        """Load the chosen checkpoint, or a newer one where another group has removed it; return its folder.

        Collective: world.
        """
        found, tried = self.start.checkpoint, list[Path]()
        while found is not None:
            try:
                with self.ranks.world.raise_on_all("reading the checkpoint"):
                    self.state.load(found)
                break
            except UsageError:
                tried.append(found)
                if not self.config.elastic:
                    raise
                found = newest_whole(self.folder, self.ranks.world)[0]
                if found in tried:
                    raise
        return found

    def begin_writing(self) -> None:
        """From here on this group writes the files of the run. Local."""
        self.logger.open(self)
        if self.ranks.first:
            self.write_run(finished=False)
            self.trackers.start(self.config, self.folder, self.state.outer_step)

    def loop(self) -> None:
        """Outer steps until the last one. Raises `Stopped` after a signal. Collective: world."""
        config, state = self.config, self.state
        if not self.trains:
            self.progress.notice(
                f"algorithm={config.algorithm} trains nothing: the weights are evaluated as they are"
            )
            state.outer_step = config.outer_steps
            self.callbacks.on_train_begin(self)
            return
        self._open_episodes()
        began = time.monotonic()
        try:
            self.callbacks.on_train_begin(self)
            while state.outer_step < config.outer_steps and not self.guard.stop_requested:
                try:
                    outcome = self.run_step()
                except PeerLost as lost:
                    self.controller.form_again(self, lost)
                    continue  # the same meta-batch once more
                if outcome is Outcome.STOP:
                    break
                state.outer_step += 1  # last: theta is written, so that a lost group repeats its meta-batch
                state.count(outcome, self.feed.counts)
                self.callbacks.on_step_end(self, outcome)
                self.feed.tune_workers(time.monotonic() - began)
            self.controller.finish(self)
        finally:
            self.feed.loader.close()
            state.saver.close()
            self.controller.leave()
        self.raise_if_stopped()

    def run_step(self) -> Outcome:
        """One outer step: this group's tasks, the reduction over all groups, the update of theta.

        Raises `PeerLost` with --elastic; theta is then as before. Collective: all groups.
        """
        state, guard = self.state, self.guard
        self.controller.begin_step(self)
        step = state.outer_step
        if step == self.config.outer_steps:
            return Outcome.STOP  # the other groups have finished the run meanwhile
        assert self.rule_at is not None
        metrics, rule = StepMetrics(self.spec.numbers), self.rule_at(step)
        guard.begin_step(step)
        self.callbacks.on_step_begin(self)
        for result, tokens in self._task_gradients(rule, self.feed.episodes(step, metrics)):
            metrics.add(result, tokens if self.worker.counts_rows else 0)
        if self.controller.should_leave(guard):
            return Outcome.STOP
        guard.watch.set_phase("waiting for the other groups")
        weight = metrics.all_reduce(self.ranks)
        self.controller.check_task_count(metrics.tasks, self.schedule.tasks_per_step)
        if guard.agree_to_abandon(state.saver):
            return Outcome.STOP
        no_data = self._apply_bad_task_policy(metrics)
        update = state.updates.move(weight, step, no_data, step + 1 == self.config.outer_steps)
        if update is not None and update.applied:
            self.worker.write(self.theta)
        guard.end_step(step + 1, self.theta)
        self.metrics, self.update = metrics, update
        return Outcome.of(update)

    def _open_episodes(self) -> None:
        """Start loading training episodes; check the meta-gradient where asked. Collective: world."""
        config, state = self.config, self.state
        load = self.parts.load(self.plan.sources.train, self.plan.transforms)
        self.feed = TrainingEpisodes(
            self.schedule, load, state.outer_step, state.tasks, self.ranks, config, self.progress.notice
        )
        if config.check_meta_gradient:
            self._check(load)
        self.progress.start("outer step")

    def _task_gradients(self, rule: Rule, episodes: list[Episode]) -> Iterator[tuple[TaskResult, int]]:
        """Add the meta-gradients of this group's tasks, until the group has to abandon the step; yields the
        numbers and the tokens of each task.

        With outlier bounds every task has a separate MetaGradient, which is added once it is accepted.
        Collective: group.
        """
        total, most = self.state.updates.meta, tasks_per_pass(self.config)
        into = total if self.guard.no_outlier_bounds else MetaGradient(self.theta, total.extra)
        several = self.together
        if several is None and most > 1 and into is total:
            several = cast(MultiTaskRule, rule)
        for begin in range(0, len(episodes), most):
            if self.guard.should_abandon_step():
                return
            some, meta = episodes[begin : begin + most], self.state.meta_params
            if several is None:
                results = (rule.task_gradient(self.worker, meta, episode, into) for episode in some)
            else:
                results = several.task_gradients(self.worker, meta, some, into)
            for episode, result in zip(some, results, strict=True):
                if into is not total:
                    result = self.guard.reject_outlier(result, into.sum)
                    if result.finite:
                        total.merge(into)
                    into.clear()
                yield result, sum(episode.tokens)

    def raise_if_stopped(self) -> None:
        """Save and end the run if a signal asked for it. Raises `Stopped` on all ranks. Collective: world."""
        if not self.guard.agree_on_stop():
            return
        if self.trains:
            self.save(last=True)
        self.guard.signals.end()
        state = self.state
        kept = f"saved in {state.saver.last}" if state.saver.last else "nothing was learned yet"
        why = self.guard.signals.asked
        raise Stopped(
            f"stopped by {why} after outer step {state.outer_step}, {kept}; the same command goes on from"
            " there"
        )

    def _apply_bad_task_policy(self, metrics: StepMetrics) -> bool:
        """Skip tasks that failed to load, or save a checkpoint and stop if there are too many.

        Returns whether no task of the outer step was loaded. Collective: world.
        """
        try:
            left_out = self.feed.apply_bad_task_policy(self.schedule.tasks_per_step, int(metrics.failures))
        except UsageError:
            if self.config.save_steps:
                self.save(last=True)
            raise
        if left_out:
            metrics.values["bad_tasks"] = left_out
        return len(left_out) == self.schedule.tasks_per_step

    def _check(self, load: LoadEpisode) -> None:
        """Log how exact the meta-gradient is; every group looks at the same task. Collective: world."""
        task = self.schedule.meta_batch(self.state.outer_step)[0]
        reader = EpisodeReader.of(load, self.ranks, self.config, self.progress.notice)
        precision = "bf16" if self.plan.precision.bf16 else "fp32"
        assert self.rule_at is not None
        rule, meta = (
            self.rule_at(self.config.outer_steps),
            self.state.meta_params,
        )  # after any steps of first order
        for _, episode in reader.read_same_task(task):
            self.progress.notice(
                check(cast(FiniteDifferenceRule, rule), self.worker, meta, episode, precision).text
            )

    def save(self, last: bool = False) -> None:
        """Begin to write checkpoint-N, unless it is there; with `last` wait until it is complete.

        Collective: world.
        """
        state, step = self.state, self.state.outer_step
        if not self.controller.writes:
            return
        if self.ranks.crew is None and not state.is_saved():
            # other groups do not save; with --elastic they are compared at the roll call
            self.guard.begin_stage(
                f"outer step {step}, comparing theta"
            )  # has a step's bound: it waits for others
            self.guard.check_replicas(step, self.theta)
        self.guard.begin_stage(f"saving after outer step {step}")
        if last:
            state.saver.wait()
        if not state.is_saved():
            state.save(last)
            self.callbacks.on_save(self, state.checkpoint_path)

    def write_run(self, **facts: Any) -> None:
        """Write run.json. Local: the first rank's."""
        run_record.write_run(
            self.folder,
            self.config,
            self.plan.sources.fingerprint,
            str(self.ranks.layout),
            self.plan.resolved,
            **facts,
        )
