"""A run: its state and its parts, and what every outer schedule needs of them: resume, stops, checkpoints.

Files belong to state.py and run_files.py, sharding to parallel/, actions after a step to callbacks.py.
"""

import pkgutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint.write import Saver
from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import import_named
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.multi_task import multi_task_rule, tasks_per_pass
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import TaskRun
from fmmeta.metrics.own import Metric
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.checks import SupportLosses
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import WatchdogStage
from fmmeta.tasks.batching import Episode
from fmmeta.training import build, callbacks
from fmmeta.training.profiler import Profiler
from fmmeta.training.run_files import RunLogger, RunStart, manifests, promise_of, write_config, write_run
from fmmeta.training.scoring import FINISHED, HeldOut, Scoring, Validation, metrics_of
from fmmeta.training.state import TrainingState
from fmmeta.training.trackers import Trackers

SCHEDULES = {
    "static": "fmmeta.training.schedules:StaticSchedule",
    "dynamic": "fmmeta.training.schedules:DynamicSchedule",
    "stale": "fmmeta.training.bounded_staleness:StaleSchedule",
    "elastic": "fmmeta.elastic.controller:ElasticSchedule",
}
"""Name -> module:class."""


def schedule_of(config: Config) -> Any:
    """The class of the outer schedule that the settings ask for. Raises `UsageError`."""
    name = "elastic" if config.elastic else "stale" if config.max_staleness else config.task_schedule
    if name in SCHEDULES:
        return pkgutil.resolve_name(SCHEDULES[name])
    found = import_named("task_schedule", name, "an outer schedule")
    if not (isinstance(found, type) and hasattr(found, "steps")):
        raise UsageError(
            f"task_schedule={name} is no class with `steps`; name a subclass of"
            " fmmeta.training.schedules.StaticSchedule"
        )
    return found


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
        names = [name for name in self.ranks.world.gather(self.signals.asked) if name]
        self.requested = self.requested or bool(names)
        if names:
            self.signals.adopt(names[0])
        return self.requested


class Run:
    """One run. writes: whether this group writes the files of the run (with --elastic it is agreed later)."""

    def __init__(
        self,
        config: Config,
        inputs: build.RunInputs,
        ranks: ProcessGroups,
        parts: build.Runtime,
        start: RunStart,
        progress: Progress,
        signals: Signals | None = None,
        user_callbacks: Sequence[callbacks.Callback] = (),
        metrics: Sequence[tuple[str, Metric | None]] = (),
        writes: bool = True,
    ) -> None:
        self.config, self.inputs, self.ranks, self.parts = config, inputs, ranks, parts
        self.folder, self.start, self.progress = start.folder, start, progress
        self.worker = parts.worker
        self.state = TrainingState(config, inputs, ranks, parts, start.folder, progress.notice, start.started)
        self.view = callbacks.RunView(
            config, start.folder, ranks, self.worker, self.state, progress, writes=writes
        )
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
        self.stop = StopAgreement(ranks, signals or Signals())
        self.stage = WatchdogStage(
            config.step_timeout, (ranks.cross, ranks.world), lambda: list(manifests(self.folder).values())
        )
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
        self.profiler, self.trackers = Profiler(), Trackers(progress.notice)
        self.logger = RunLogger(lambda line: self.callbacks.on_log(self.view, line))
        self.validation = Validation(
            inputs.sources.valid if self.trains else None,
            self.held_out,
            parts.setup,
            self.stop.agree,
            lambda scores: self.callbacks.on_evaluate(self.view, scores),
        )
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
        with ranks.world.raise_on_all("looking for the outer schedule"):
            schedule = schedule_of(config)
        self.outer_schedule: Any = schedule(self)  # schedules.StaticSchedule

    @property
    def theta(self) -> Tensor:
        """The live meta-parameters of the model, fp32 [S]: this rank's part."""
        return self.state.meta_params.theta

    @property
    def is_over(self) -> bool:
        """Whether no outer step follows; equal on all ranks."""
        is_last = self.state.outer_step >= self.config.outer_steps
        return is_last or self.stop.requested or self.state.ends_early

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
                failed, found = found, self.outer_schedule.newer_than(found)
                if found == failed:
                    raise
        with self.ranks.world.raise_on_all("opening the files of the run"):
            if self.view.writes:
                self.begin_writing()
        if found is not None:
            self.worker.write(self.theta)
            text = f"resumed from {found}, outer step {self.state.outer_step}"
            if self.config.task_schedule != "static" or self.config.max_staleness:
                text += f"; {promise_of(self.config.as_dict(), self.ranks.device.type)}"
            self.progress.notice(text)

    def begin_writing(self) -> None:
        """From here on this group writes the files of the run. Local."""
        self.logger.open(self.view)
        if self.ranks.first:
            self.write_run(finished=False)
            write_config(self.folder, self.config)
            self.trackers.start(self.config, self.folder, self.state.outer_step)

    def skip_training(self) -> None:
        """Go to the end of a run that trains nothing. Collective: world."""
        why = "init_interpolation=0 keeps the initial weights"
        if self.spec.trains_nothing:
            why = f"algorithm={self.config.algorithm} trains nothing"
        self.progress.notice(f"{why}: they are evaluated as they are")
        self.state.outer_step = self.config.outer_steps
        self.callbacks.on_train_begin(self.view)

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
        support, before = episode.support, (self.stage.phase, self.stage.passes)
        self.stage.begin_phase("checking the inner loop")
        losses = SupportLosses(self.config)
        learned = self.parts.setup.inner.adapt(self.worker, self.theta, support)
        losses.add(self.worker, learned, support)
        self.worker.write(self.theta)
        if warning := losses.warning():
            self.progress.notice(Warn(f"outer step 1: {warning}"))
        self.stage.begin_phase(*before)

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
        if state.outer_step and not self.view.writes:
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
        if not self.view.writes:
            return
        if not state.is_saved():
            self.stage.begin(f"outer step {step}, comparing theta", is_step=True)
            self.outer_schedule.compare_theta()
        self.stage.begin(f"saving after outer step {step}")
        if last:
            state.saver.wait()
        if not state.is_saved():
            state.queue = self.outer_schedule.unfinished()
            state.save(last)
            self.callbacks.on_save(self.view, state.checkpoint_path)

    def write_run(self, **facts: Any) -> None:
        """Write run.json. Local: the first rank's."""
        write_run(
            self.folder,
            self.inputs.settings(self.config),
            str(self.ranks.layout),
            self.ranks.device.type,
            begun_from=self.start.begun_from or None,
            of_classes=self.config.learner.of_classes,
            shape=self.inputs.shape(self.config),
            started=self.state.goodput.started,
            **facts,
        )
