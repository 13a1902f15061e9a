"""The outer loop of a run: resume, outer steps, stop and save; finish.py exports and evaluates the result.

Files belong to state.py and run_log.py, sharding to parallel/, actions after a step to callbacks.py.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint.write import Saver
from fmmeta.common.errors import MachineFault, PeerLost, Stopped, UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.gradient_check import check
from fmmeta.meta.multi_task import multi_task_rule, tasks_per_pass
from fmmeta.meta.noise_scale import local_square
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import TaskRun
from fmmeta.metrics.own import Metric
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.checks import SupportLosses, check_replicas
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import WatchdogStage
from fmmeta.tasks.batching import Episode
from fmmeta.training import build, callbacks
from fmmeta.training.bounded_staleness import StaleSteps
from fmmeta.training.callbacks import Outcome
from fmmeta.training.episodes import EpisodeReader, TrainingEpisodes
from fmmeta.training.profiler import Profiler
from fmmeta.training.run_folder import (
    RunStart,
    manifests,
    newest_complete,
    promise_of,
    write_config,
    write_run,
)
from fmmeta.training.run_log import RunLogger, StepMetrics
from fmmeta.training.scoring import FINISHED, HeldOut, Scoring, metrics_of
from fmmeta.training.state import TrainingState
from fmmeta.training.trackers import Trackers


class StaticController:
    """Which groups take part in an outer step: without --elastic all of them, from the first to the last.

    ElasticController overrides all of it. run: the run that calls.

    writes: whether this group writes the files of the run.
    """

    writes = True

    def begin_step(self, run: "Run") -> None:
        """Form the groups of the next outer step. Raises `PeerLost`. Collective: all groups."""

    def form_again(self, run: "Run", lost: PeerLost) -> None:
        """Prepare another attempt at an outer step during which a group was lost. Local."""
        raise lost

    def check_task_count(self, run: "Run", tasks: int) -> None:
        """Raises `MachineFault` if the `tasks` that all groups have run are not the meta-batch. Local."""
        if run.feed.is_claiming and tasks != run.schedule.tasks_per_step:
            launch = run.ranks.layout.launch
            raise MachineFault(
                f"{tasks} tasks were claimed in an outer step of {run.schedule.tasks_per_step}: another"
                " program has changed the counters in the store of the launch; give it a port that no other"
                f" program uses, such as {launch.how_to_give('MASTER_PORT', launch.master_port + 1)}"
            )

    def metrics(self) -> dict[str, Any]:
        """Values of the outer step that has ended, for metrics.jsonl."""
        return {}

    def finish(self, run: "Run") -> None:
        """After the last outer step. Collective: all groups."""

    def leave(self) -> None:
        """End the membership of this group."""

    def close(self) -> None:
        """Release the folder of the run, after its last file is written. Local."""


class StopAgreement:
    """Lets all ranks agree to stop at a safe point. requested: whether all know that the run has to stop.

        should_leave_tasks()   between two tasks or episodes: does this group leave the remaining ones?  group
        agree_after_tasks()    after the tasks of an outer step: is the step abandoned? is a save done?  world
        agree()                has any rank received a stop signal?                                      world

    A stop costs at most one task of each group, these agreements and a save: tasks are left out, never cut in
    two. If one group leaves its tasks, all groups abandon the outer step, since theta is a function of whole
    meta-batches; if no group does, the step is finished.
    """

    def __init__(self, ranks: ProcessGroups, signals: Signals) -> None:
        self.ranks, self.signals, self.requested = ranks, signals, False

    def should_leave_tasks(self) -> bool:
        """Whether a rank of this group has received a stop signal. Collective: group."""
        return float(self.ranks.group.sum_(torch.tensor([float(bool(self.signals.asked))]))) > 0

    def agree_after_tasks(self, left_tasks: bool, saver: Saver) -> bool:
        """Whether all groups abandon this outer step, because one has left tasks of it.

        left_tasks: whether this group has. The ranks also learn whether a checkpoint in the background is
        done. Raises `UsageError` if too many checkpoints failed. Collective: world.
        """
        mine = [
            left_tasks,
            bool(self.signals.asked),
            saver.folder is not None and saver.done,
            bool(saver.failure),
        ]
        left, asked, done, failed = self.ranks.world.sum_(torch.tensor(mine, dtype=torch.float64)).tolist()
        self.requested = asked > 0 or left > 0
        if done == self.ranks.world.size:
            saver.judge(failed > 0)
        return left > 0

    def agree(self) -> bool:
        """Whether any rank has received a stop signal; all then have one's name. Collective: world."""
        names = [name.decode() for name in self.ranks.world.gather_bytes(self.signals.asked.encode()) if name]
        self.requested = self.requested or bool(names)
        if names:
            self.signals.adopt(names[0])
        return self.requested


class Run:
    """One run: its state, its parts, and the outer loop over them."""

    def __init__(
        self,
        config: Config,
        inputs: build.RunInputs,
        ranks: ProcessGroups,
        parts: build.Runtime,
        start: RunStart,
        progress: Progress,
        signals: Signals | None = None,
        controller: StaticController | None = None,
        user_callbacks: Sequence[callbacks.Callback] = (),
        metrics: Sequence[tuple[str, Metric | None]] = (),
    ) -> None:
        self.config, self.inputs, self.ranks, self.parts = config, inputs, ranks, parts
        self.folder, self.start, self.progress = start.folder, start, progress
        self.worker = parts.worker
        self.state = TrainingState(config, inputs, ranks, parts, start.folder, progress.notice)
        self.spec = find(config.algorithm)
        self.trains = not self.spec.trains_nothing and config.init_interpolation > 0
        self.rule: Any = self.spec.rule
        with ranks.world.raise_on_all("making room for several tasks"):
            self.multi_task_rule = multi_task_rule(config, self.worker, parts.setup.inner)
        if config.tasks_per_pass == "auto":
            progress.notice(
                f"tasks_per_pass auto: {tasks_per_pass(config)} task(s) in a pass, as many as fit into"
                f" micro_batch_size={config.micro_batch_size} rows"
            )
        self.schedule = build.training_schedule(config, inputs, ranks.layout)
        self.controller = controller or StaticController()
        self.stop = StopAgreement(ranks, signals or Signals())
        self.stage = WatchdogStage(
            config.step_timeout, (ranks.cross, ranks.world), lambda: list(manifests(self.folder).values())
        )
        self.stale_steps: StaleSteps | None = None  # with --max_staleness
        # of the tasks that this group has finished in this outer step; kept if another group is lost
        self.kept_metrics: StepMetrics | None = None
        scoring = Scoring(
            self.worker,
            ranks,
            progress,
            self.folder / FINISHED,
            self.should_leave_evaluation,
            self.stage.begin,
        )
        self.held_out = HeldOut(
            config,
            scoring,
            partial(parts.load, prompts=inputs.prompts(self.spec.method, alone=True)),
            metrics_of(metrics, config, inputs, parts, inputs.prompts(self.spec.method)),
            inputs.settings(config),
        )
        self.profiler, self.validation = Profiler(), callbacks.Validation()
        self.logger, self.trackers = RunLogger(), Trackers(progress.notice)
        self.callbacks = callbacks.CallbackList(
            (
                self.profiler,
                self.logger,
                self.trackers,
                callbacks.ReportPage(),
                callbacks.NonfiniteLimit(),
                self.validation,
            ),
            user_callbacks,
        )

    @property
    def theta(self) -> Tensor:
        """The live meta-parameters of the model, fp32 [S]: this rank's part."""
        return self.state.meta_params.theta

    @property
    def ends_early(self) -> bool:
        """Whether no outer step follows although `outer_steps` is not reached: set by callbacks, on all ranks
        alike, and kept in checkpoints.
        """
        return self.state.ends_early

    @ends_early.setter
    def ends_early(self, ends: bool) -> None:
        self.state.ends_early = ends

    def resume(self) -> None:
        """Load the chosen checkpoint, if there is one, and open the files of the run.

        With --elastic another group may have removed it: then a newer one is loaded. Collective: world.
        """
        found = self.start.checkpoint
        while found is not None:
            try:
                with self.ranks.world.raise_on_all("reading the checkpoint"):
                    self.state.load(found)
                break
            except UsageError:
                if not self.config.elastic:
                    raise
                failed, found = found, newest_complete(self.folder, self.ranks.world)[0]
                if found == failed:
                    raise
        with self.ranks.world.raise_on_all("opening the files of the run"):
            if self.controller.writes:
                self.begin_writing()
        if found is not None:
            self.worker.write(self.theta)
            text = f"resumed from {found}, outer step {self.state.outer_step}"
            if self.config.task_schedule == "dynamic" or self.config.max_staleness:
                text += f"; {promise_of(self.config.as_dict(), self.ranks.device.type)}"
            self.progress.notice(text)

    def forget_tasks(self) -> None:
        """Drop the gradients of the tasks that this group has finished in this outer step. Local."""
        self.kept_metrics = None
        self.state.updates.meta.clear()
        self.feed.finished, self.feed.errors = [], []

    def begin_writing(self) -> None:
        """From here on this group writes the files of the run. Local."""
        self.logger.open(self)
        if self.ranks.first:
            self.write_run(finished=False)
            write_config(self.folder, self.config)
            self.trackers.start(self.config, self.folder, self.state.outer_step)

    def loop(self) -> None:
        """Run the outer steps. Raises `Stopped` after a signal, with the state saved. Collective: world."""
        if not self.trains:
            why = "init_interpolation=0 keeps the initial weights"
            if self.spec.trains_nothing:
                why = f"algorithm={self.config.algorithm} trains nothing"
            self.progress.notice(f"{why}: they are evaluated as they are")
            self.state.outer_step = self.config.outer_steps
            self.callbacks.on_train_begin(self)
            return
        self._open_episodes()
        try:
            self.callbacks.on_train_begin(self)
            self.validation.run_if_due(self)
            self._run_steps()
            self.controller.finish(self)
        finally:
            self.feed.loader.close()
            self.state.saver.close()
            self.controller.leave()
        self.raise_if_stopped()

    def _run_steps(self) -> None:
        """Run outer steps until the last one or a stop. Collective: all groups."""
        self.began = time.monotonic()
        if self.stale_steps is not None and not self.is_over:
            self.stale_steps.run_steps()
        while not self.is_over:
            try:
                outcome = self.run_step()
            except PeerLost as lost:
                self.controller.form_again(self, lost)
                continue  # the same meta-batch once more
            if outcome is Outcome.STOP:
                break
            self.end_step(outcome)

    @property
    def is_over(self) -> bool:
        """Whether no outer step follows; equal on all ranks."""
        is_last = self.state.outer_step >= self.config.outer_steps
        return is_last or self.stop.requested or self.ends_early

    def end_step(self, outcome: Outcome) -> None:
        """Count an outer step whose update is applied; validate, save and log. Collective: all groups."""
        self.state.outer_step += 1  # last: theta is written, so that a lost group repeats its meta-batch
        self.state.count(outcome, dict(self.feed.counts))
        config, step = self.config, self.state.outer_step
        if config.check_replicas_steps and step % config.check_replicas_steps == 0 and not config.elastic:
            check_replicas(self.ranks, self.theta, f"after outer step {step}")  # elastic groups: the quorum
        self.callbacks.on_step_end(self, outcome)
        if config.save_steps and step < config.outer_steps:  # the last one is saved at the end of the run
            self.state.saver.warm(self.state.state_dict().vectors)
            if step % config.save_steps == 0:
                self.save()
        self.feed.tune_workers(time.monotonic() - self.began)

    def run_step(self) -> Outcome:
        """One outer step: this group's tasks, the reduction over all groups, the update of theta.

        Raises `PeerLost` with --elastic; theta is then as before. Collective: all groups.
        """
        state, stage = self.state, self.stage
        self.controller.begin_step(self)
        step = state.outer_step
        if step == self.config.outer_steps:
            return Outcome.STOP  # the other groups have finished the run meanwhile
        stage.begin(f"outer step {step + 1}", "waiting for its tasks", is_step=True)
        self.callbacks.on_step_begin(self)
        metrics = self.kept_metrics or StepMetrics(self.spec.numbers, self.worker.params.replicated)
        metrics.began = time.monotonic()
        if self.feed.claims is not None:
            self.kept_metrics = metrics
        left_tasks = self._add_task_gradients(step, metrics)
        if left_tasks and self.config.elastic:
            self.stop.requested = True
            return Outcome.STOP  # the other groups of an elastic run repeat the step without this one
        return self.finish_step(metrics, left_tasks)

    def finish_step(
        self,
        metrics: StepMetrics,
        left_tasks: bool,
        describe: Callable[[StepMetrics], None] = lambda metrics: None,
    ) -> Outcome:
        """The second half of an outer step: the reduction over all groups, and the update of theta.

        left_tasks: a stop has left out tasks of this group. describe: sets further values for metrics.jsonl.
        The worker holds theta afterwards. Collective: all groups.
        """
        state, step, stage = self.state, self.state.outer_step, self.stage
        stage.begin_phase("waiting for the other groups")
        weight = metrics.all_reduce(self.ranks)
        self.kept_metrics = None
        self.feed.complete_step()
        stage.begin_phase("agreeing with the other groups")
        if self.stop.agree_after_tasks(left_tasks, state.saver):
            return Outcome.STOP
        self.controller.check_task_count(self, metrics.tasks)
        if self.feed.is_claiming:
            metrics.values["tasks_by_group"] = metrics.tasks_by_group
        describe(metrics)
        no_data = self._apply_bad_task_policy(metrics)
        squares = metrics.squares if self.config.gradient_noise_scale else None
        update = state.updates.step(weight, step, squares)
        if update.applied or self.stale_steps is not None:  # the worker may hold phi of an interrupted task
            self.worker.write(self.theta)
        stage.record_step()
        self.metrics, self.update = metrics, update
        if update.applied:
            return Outcome.APPLIED
        return Outcome.NO_DATA if no_data else Outcome.SKIPPED_NONFINITE

    def _add_task_gradients(self, step: int, metrics: StepMetrics) -> bool:
        """Add the gradients of this group's tasks to the meta-gradient; whether a stop has left out tasks.

        To measure the noise scale, every task has a separate MetaGradient, which is added once it is
        measured. Collective: group.
        """
        meta, total = self.state.meta_params, self.state.updates.meta
        measures = self.config.gradient_noise_scale
        into = MetaGradient(meta.theta, total.extra) if measures else total
        first, begun = None, 0
        for some in self.feed.passes(step, metrics, tasks_per_pass(self.config)):
            if self.stop.should_leave_tasks():
                self.feed.abandon()
                return True
            self.stage.begin_phase(f"task {begun + 1} of group {self.ranks.cross.rank}", passes=1)
            begun, first = begun + len(some), some[0] if first is None else first
            tasks = [self.task_run(episode, into) for episode in some]
            results = map(self.rule, tasks) if self.multi_task_rule is None else self.multi_task_rule(tasks)
            for episode, result in zip(some, results, strict=True):
                square = local_square(self.worker, into.sum) if measures else 0.0
                if into is not total:
                    if result.finite:
                        total.merge(into)
                    into.clear()
                tokens = episode.tokens if self.worker.counts_rows else 0
                metrics.add(result, tokens, square)
            self.stage.begin_phase("waiting for its tasks")
        if step == 0 and first is not None:
            self.check_inner_loop(first)
        return False

    def task_run(self, episode: Episode, into: MetaGradient) -> TaskRun:
        """A task of the outer step that is open."""
        return TaskRun(
            self.parts.setup,
            self.worker,
            self.state.meta_params,
            episode,
            into,
            self.state.outer_step,
            self.stage.count_pass,
        )

    def check_inner_loop(self, episode: Episode) -> None:
        """Warn if the inner loop raises the loss of a support set, from theta. Collective: group."""
        if not episode.support or self.spec.all_classes:
            return
        support = episode.support
        self.stage.begin_phase("checking the inner loop")
        losses = SupportLosses(self.config)
        learned = self.parts.setup.inner.adapt(self.worker, self.theta, support)
        losses.add(self.worker, learned, support)
        self.worker.write(self.theta)
        if warning := losses.warning():
            self.progress.notice(Warn(f"outer step 1: {warning}"))

    def _apply_bad_task_policy(self, metrics: StepMetrics) -> bool:
        """Skip tasks that failed to load, or save a checkpoint and stop if there are too many.

        Returns whether no task of the outer step was loaded. Collective: world.
        """
        try:
            left_out = self.feed.apply_bad_task_policy(self.schedule.tasks_per_step, metrics.failures)
        except UsageError:
            if self.config.save_steps:
                self.save(last=True)
            raise
        if left_out:
            metrics.values["bad_tasks"] = left_out
        return len(left_out) == self.schedule.tasks_per_step

    def _open_episodes(self) -> None:
        """Start loading training episodes; check the meta-gradient where asked. Collective: world."""
        config, state, notice = self.config, self.state, self.progress.notice
        prompts = self.inputs.prompts(self.spec.method, learn_support=config.loss_on_support)
        load = self.parts.load(self.inputs.sources.train, prompts, self.inputs.reading)
        self.feed = TrainingEpisodes(
            self.schedule, load, state.outer_step, state.tasks, self.ranks, config, notice
        )
        if config.check_meta_gradient:  # of the same task on every group, after any first-order steps
            precision, reader = self.inputs.deepspeed.precision, EpisodeReader.of
            for _, episode in reader(load, self.ranks, config, notice).read_same_task(
                self.schedule.meta_batch(state.outer_step)[0]
            ):
                task = replace(self.task_run(episode, state.updates.meta), outer_step=config.outer_steps)
                notice(check(self.rule, task, precision).text)
        if config.max_staleness:
            self.stale_steps = StaleSteps(self)

    def should_leave_evaluation(self) -> bool:
        """Whether this rank has received a stop signal, so that its group leaves an evaluation. Local."""
        self.stage.begin("an episode of an evaluation")
        return bool(self.stop.signals.asked)

    def raise_if_stopped(self) -> None:
        """Save and end the run if a signal asked for it. Raises `Stopped` on all ranks. Collective: world."""
        if not self.stop.agree():
            return
        if self.trains:
            self.save(last=True)
        self.stop.signals.end()
        state, what = self.state, "nothing was learned yet"
        if state.outer_step and not self.controller.writes:
            what = "saved by the group that writes checkpoints"
        elif state.saver.last:
            what = f"saved in {state.saver.last}"
        raise Stopped(
            f"stopped by {self.stop.signals.asked} after outer step {state.outer_step}, {what}; the same"
            " command resumes from there"
        )

    def save(self, last: bool = False) -> None:
        """Begin to write checkpoint-N, unless it is there; with `last` wait until it is complete.

        Collective: world.
        """
        state, step = self.state, self.state.outer_step
        if not self.controller.writes:
            return
        if not self.config.elastic and not state.is_saved():
            # with --elastic only this group saves; the quorum compares the groups
            self.stage.begin(f"outer step {step}, comparing theta", is_step=True)
            check_replicas(self.ranks, self.theta, f"after outer step {step}")
        self.stage.begin(f"saving after outer step {step}")
        if last:
            state.saver.wait()
        if not state.is_saved():
            if self.stale_steps is not None:
                state.queue = self.stale_steps.unfinished()
            state.save(last)
            self.callbacks.on_save(self, state.checkpoint_path)

    def write_run(self, **facts: Any) -> None:
        """Write run.json. Local: the first rank's."""
        write_run(
            self.folder,
            self.inputs.settings(self.config),
            str(self.ranks.layout),
            self.ranks.device.type,
            begun_from=self.start.begun_from or None,
            of_classes=self.config.learner.of_classes,
            **facts,
        )
