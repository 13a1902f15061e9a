"""One run from its checkpoint to its model: the order of an outer step in verbs of a worker, and what follows
a step.

It knows nothing of files or sharding (state.py, journal.py, parallel/).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from fmmeta.checkpoint.hf_export import export
from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.multi_task import adapter_multi_task_rule, tasks_per_pass
from fmmeta.meta.outer_step import OuterStep
from fmmeta.meta.second_order.gradient_check import Checked, check
from fmmeta.meta.task_gradient import MultiTaskRule, Rule, TaskGradient
from fmmeta.metrics.scores import mean_ci95
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.stop import Guard
from fmmeta.report import page
from fmmeta.tasks.batching import Episode
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.training import build, run_record
from fmmeta.training.episodes import EpisodeReader, TrainingEpisodes
from fmmeta.training.final_table import against_start, show
from fmmeta.training.profiler import Profiler
from fmmeta.training.run_folder import RunStart, newest_whole
from fmmeta.training.run_log import RunLogger
from fmmeta.training.state import TrainingState
from fmmeta.training.step_metrics import StepMetrics
from fmmeta.training.trackers import Trackers
from fmmeta.training.validation import VALID, HeldOut


@dataclass
class Result:
    """What `MetaTrainer.train` returns on every rank. Accuracies are means over the held-out episodes."""

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None


class Steady:
    """All groups are there from the beginning to the end, or the run ends."""

    writes = True

    @contextmanager
    def step_attempt(self, run: Run) -> Iterator[None]:
        yield

    def goes(self, guard: Guard) -> bool:
        return False

    def count(self, tasks: int, wanted: int) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}

    def end(self, run: Run) -> None: ...

    def leave(self) -> None: ...


class Run:
    """The state of one run and the steps of its life: resume, loop, finish."""

    def __init__(
        self,
        config: Config,
        plan: build.Plan,
        ranks: ProcessGroups,
        parts: build.Parts,
        start: RunStart,
        progress: Progress,
        guard: Guard | None = None,
        controller: Any = None,
    ) -> None:
        self.config, self.plan, self.ranks, self.parts = config, plan, ranks, parts
        self.folder, self.start, self.progress = start.folder, start, progress
        self.worker, self.theta = parts.worker, parts.theta
        self.state = TrainingState(config, plan, ranks, parts, start.folder, progress.notice)
        self.spec = find(config.algorithm)
        self.trains = not self.spec.is_baseline
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
        self.held_out = HeldOut(
            config, self.worker, parts.load, ranks, progress, self.guard.rests, self.folder
        )
        self.trackers = Trackers(progress.notice)
        self.attendance = controller or Steady()
        self.profiler: Profiler | None = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """However the run ends, its report and its trackers say how far it came."""
        page.keep(self.folder, self.ranks.first and self.attendance.writes, self.progress.notice)
        try:
            yield
        finally:
            page.keep(self.folder, self.ranks.first and self.attendance.writes, self.progress.notice)
            self.trackers.finish()  # last: it may wait for a server

    def resume(self) -> None:
        """Go on from a checkpoint, if there is one. Collective: world."""
        found = self._load()
        with self.ranks.world.raise_on_all("opening the files of the run"):
            self.journal = RunLogger(
                self.config, self.state, self.folder, self.ranks, self.trackers, self.progress
            )
            if self.attendance.writes:
                self.begin_writing()
        if found is not None:
            self.worker.write(self.theta)
            self.progress.notice(f"resumed from {found}, outer step {self.state.outer_step}")

    def _load(self) -> Path | None:
        """Take the state of the chosen checkpoint, or of a newer one where another group has removed it;
        returns which.

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
                if (
                    not self.config.elastic
                    or (found := newest_whole(self.folder, self.ranks.world)[0]) in tried
                ):
                    raise
        return found

    def begin_writing(self) -> None:
        """From here on the files of the run are this group's to write. Local."""
        self.journal.open()
        if self.ranks.first:
            self.write_run(finished=False)
            self.trackers.start(self.config, self.folder, self.state.outer_step)

    def loop(self) -> None:
        """Outer steps until the last one. Collective: world."""
        config, state = self.config, self.state
        if self.rule_at is None:
            self.progress.notice(
                f"algorithm={config.algorithm} trains nothing: the weights are evaluated as they are"
            )
            state.outer_step = config.outer_steps
            return
        load = self.parts.load(self.plan.sources.train, self.plan.transforms)
        self.feed = TrainingEpisodes(
            self.schedule, load, state.outer_step, state.tasks, self.ranks, config, self.progress.notice
        )
        if config.check_meta_gradient:
            self._check(load)
        if config.profile:
            self.profiler = Profiler(self.folder, self.ranks, state.outer_step, config.outer_steps)
        self.progress.start("outer step")
        began = time.monotonic()
        try:
            self._validate_if_due()  # a stop has left it out
            while state.outer_step < config.outer_steps and not self.guard.stop:
                with self.attendance.step_attempt(self):
                    if state.outer_step == config.outer_steps:
                        break  # this group has missed the end
                    tally, rule = (
                        StepMetrics(self.spec.numbers),
                        self.rule_at(state.outer_step),
                    )
                    self.guard.begin(state.outer_step)
                    if self.profiler:
                        self.profiler.begin(state.outer_step, self)
                    for direction, tokens in self._directions(
                        rule, self.feed.episodes(state.outer_step, tally)
                    ):
                        direction = self.guard.fit(direction)
                        state.updates.meta.add(direction)
                        tally.add(direction, tokens if self.worker.counts_rows else 0)
                        del direction  # its shard would lie beside the next one's
                    if self.attendance.goes(self.guard):
                        break
                    self.guard.watch.enter("waiting for the other groups")
                    weight = tally.agree(self.ranks)
                    self.attendance.count(tally.tasks, self.schedule.tasks_per_step)
                    if self.guard.agree(state.saver):
                        break
                    self._judge(tally)
                    unread, last = self._unread(tally), state.outer_step + 1 == config.outer_steps
                    moved = state.updates.move(weight, state.outer_step, unread, last)
                    if moved is not None and moved.applied:
                        self.worker.write(self.theta)
                    state.outer_step += 1
                    self.guard.settled(state.outer_step, self.theta)
                    if self.profiler:
                        self.profiler.end(state.outer_step - 1)
                    self._after_step(moved, tally)
                    self.feed.settle(time.monotonic() - began)
            self.attendance.end(self)
        finally:
            if self.profiler:
                self.profiler.close()
            self.feed.loader.close()
            state.saver.close()
            self.attendance.leave()
        self._stop_if_asked()

    def _directions(self, rule: Rule, episodes: list[Episode]) -> Iterator[tuple[TaskGradient, int]]:
        """What each of this group's tasks says, and its tokens, until the group is to leave.

        Collective: group.
        """
        most, total = tasks_per_pass(self.config), self.state.updates.meta.sum if self.guard.trusts else None
        several = self.together or rule
        for begin in range(0, len(episodes), most):
            if self.guard.leaves():
                return
            some = episodes[begin : begin + most]
            found = (
                cast(MultiTaskRule, several).directions(self.worker, self.theta, some, total)
                if most > 1
                else [rule.direction(self.worker, self.theta, some[0], total)]
            )
            for episode in some:
                yield found.pop(0), sum(episode.tokens)  # held nowhere else

    def _stop_if_asked(self) -> None:
        """End the run if a signal has asked for it. Raises `Stopped` on all ranks. Collective: world."""
        if not self.guard.stops():
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

    def _judge(self, tally: StepMetrics) -> None:
        """Go on without the tasks that could not be had, or stop, the work so far saved.

        Collective: world.
        """
        try:
            left_out = self.feed.judge(self.schedule.tasks_per_step, int(tally.failures))
        except UsageError:
            if self.config.save_steps:
                self.save(last=True)
            raise
        if left_out:
            tally.values["bad_tasks"] = left_out
        self.state.tasks = self.feed.counts

    def _check(self, load: LoadEpisode) -> None:
        """Say how exact the meta-gradient is; every group looks at the same task. Collective: world."""
        task = self.schedule.meta_batch(self.state.outer_step)[0]
        found = EpisodeReader.of(load, self.ranks, self.config, self.progress.notice).alike(task)
        precision = "bf16" if self.plan.precision.bf16 else "fp32"
        assert self.rule_at is not None
        rule = self.rule_at(self.config.outer_steps)  # after any steps of first order
        for _, episode in found:
            self.progress.notice(check(cast(Checked, rule), self.worker, self.theta, episode, precision).text)

    def _unread(self, tally: StepMetrics) -> bool:
        """Whether no task of the outer step could be had."""
        return len(tally.values.get("bad_tasks", ())) == self.schedule.tasks_per_step

    def _after_step(self, moved: OuterStep | None, tally: StepMetrics) -> None:
        """Count, tell, validate, save.

        Raises `UsageError` where nothing is learned any more. Collective: world.
        """
        config, state = self.config, self.state
        if moved is not None:
            state.bad_steps = 0 if moved.applied else state.bad_steps + (not moved.unread)
        epoch = self.schedule.position(state.outer_step)[0]
        self.journal.step(moved, tally, epoch, self.guard.exploded, self.attendance.facts())
        if state.bad_steps >= config.max_bad_steps:
            steps = f"{state.bad_steps} outer steps in a row (the last is {state.outer_step})"
            raise UsageError(
                f"inner_lr={config.inner_lr}: no task was finite in {steps}; lower --inner_lr or --outer_lr,"
                " and continue from the last checkpoint"
            )
        self._validate_if_due()
        if (
            config.save_steps and state.outer_step < config.outer_steps
        ):  # validated already: a checkpoint knows the best weights
            state.warm()
            if state.outer_step % config.save_steps == 0:
                self.save()

    def _validate_if_due(self) -> None:
        """Scores on validation tasks; a stop leaves them for the resumed run. Collective: world."""
        state, source = self.state, self.plan.sources.valid
        if source is None or not state.validation_due:
            return
        meta = state.evaluated(state.live)
        scores = self.held_out.scores(
            source, VALID, "validation", meta.theta, self.parts.setup.learning(meta.rates)
        )
        if meta is not state.live:
            self.worker.write(self.theta)
        if self.guard.stops():
            return  # the scores are incomplete
        state.validated = state.outer_step
        accuracy, loss = (
            mean_ci95([s.accuracy_after for s in scores])[0],
            mean_ci95([s.loss_after for s in scores])[0],
        )
        self.journal.validated(accuracy, loss)
        if state.best is not None:
            state.best.meet(state.outer_step, accuracy, loss)

    def save(self, last: bool = False) -> None:
        """Begin to write checkpoint-N, unless it is there; with `last` wait until it is whole.

        Collective: world.
        """
        state = self.state
        if not self.attendance.writes:
            return
        if (
            self.ranks.crew is None and not state.is_saved()
        ):  # other groups do not save; a crew compares when it meets
            self.guard.begin_stage(
                f"outer step {state.outer_step}, comparing theta"
            )  # with a step's bound: it waits for others
            self.guard.check_replicas(state.outer_step, self.theta)
        self.guard.begin_stage(f"saving after outer step {state.outer_step}")
        if last:
            state.saver.wait()
        if not state.is_saved():
            state.save(last)

    def finish(self) -> Result:
        """Export, evaluate on held-out tasks, show the table, close run.json. Collective: world."""
        config, state, test = self.config, self.state, self.plan.sources.test
        if not self.attendance.writes:
            self.progress.notice("another group writes the model, or has written it")
            return Result(self.folder, state.outer_step)
        if config.save_steps and self.trains:
            self.save(last=True)
        if state.best is not None:
            self.progress.notice(state.best.text)
        final = state.final() if self.trains else state.live
        if self.trains and config.init_interpolation < 1:
            self.progress.notice(
                f"init_interpolation={config.init_interpolation:g}: the exported weights are"
                f" {1 - config.init_interpolation:g} * initial + {config.init_interpolation:g} * trained"
            )
        self.guard.begin_stage("exporting the model")
        export(
            self.folder / "model",
            final.theta,
            self.worker,
            self.parts.frozen,
            config,
            self.plan.description,
            self.plan.tokenizer,
            self.ranks,
            self.parts.setup.inner.rates.variant(final.rates),
            trained=[*self.plan.trained, *(self.plan.sources.used if self.trains else ())],
        )
        result, facts = Result(self.folder, state.outer_step), dict[str, Any]()
        if test is None:
            self.progress.notice("no held-out tasks: nothing to compare")
        elif config.test_episodes:
            initial = state.initial if self.trains else None
            gains, facts = against_start(
                self.held_out, self.plan.sources, final, initial, self.parts.setup, self._stop_if_asked
            )
            show(gains, config, self.progress.table)
            result.before, result.after, result.after_from_start = gains.accuracies
            self.trackers.log({"step": state.outer_step, "held_out_accuracy": gains.accuracies._asdict()})
        profile = self.profiler.told(self.progress.table) if self.profiler else {}
        with self.ranks.world.raise_on_all("closing the run"):
            if self.ranks.first:
                self.write_run(finished=True, held_out=facts, **profile)
                self.held_out.clear()
        self.progress.notice(f"model {self.folder / 'model'}")
        return result

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
