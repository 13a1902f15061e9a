"""The training loop. It knows the verbs of a worker and the order of an outer step, and nothing of files or sharding."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from fmmeta import build, checkpoint, record
from fmmeta.best import Best, BestState
from fmmeta.checkpoint.saver import Saver
from fmmeta.config import Config, UsageError
from fmmeta.export import export
from fmmeta.feed import Feed, Reader
from fmmeta.fewshot.confusion import confusion
from fmmeta.fewshot.gains import compare, show
from fmmeta.fewshot.heldout import TEST, VALID, HeldOut
from fmmeta.fewshot.scores import mean_ci95
from fmmeta.guard import Guard, Spikes
from fmmeta.meta.algorithms import NUMBERS, RULES, imaml
from fmmeta.meta.check import Checked, check
from fmmeta.meta.direction import Direction, Rule
from fmmeta.meta.outer import MetaGradient, Outer, OuterState, OuterStep
from fmmeta.meta.tally import Tally
from fmmeta.meta.together import together
from fmmeta.parallel.communicator import Ranks, World, pick_device
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.worker import WholeWorker
from fmmeta.profiler import Profiler
from fmmeta.progress import Progress
from fmmeta.report import page
from fmmeta.signals import Signals, Stopped
from fmmeta.start import Start, open_run
from fmmeta.tasks.batch import Batches
from fmmeta.tasks.loader import Load
from fmmeta.tasks.source import TaskSource
from fmmeta.trackers import Trackers, check_installed


@dataclass
class Result:
    """What `MetaTrainer.train` returns on every rank. Accuracies are means over the held-out episodes."""

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None


class MetaTrainer:
    """Meta-train as `config` says: `MetaTrainer(Config(...)).train()`, in a notebook or on every rank of a launch."""

    def __init__(self, config: Config, signals: Signals | None = None) -> None:
        self.config, self.signals = config, signals

    def train(self) -> Result:
        """Run to the end, or go on where an earlier process stopped. Raises `UsageError`, `Fault` where a machine misbehaves, and
        `Stopped` after a signal. Collective: world.
        """
        launch = Launch.from_env(os.environ)
        self.progress = Progress(speaks=launch.global_rank == 0)
        world, self.lock = World(launch, pick_device(launch)), None
        try:
            return self._train(world)
        finally:
            world.close()
            if self.lock is not None:
                self.lock.close()

    def _train(self, world: World) -> Result:
        config, notice = self.config, self.progress.notice
        with world.comm.together("looking for trackers"):
            if world.comm.rank == 0:
                check_installed(config)
        plan = build.plan(config, world, notice)
        start = open_run(config, plan.sources.fingerprint, world.comm)
        self.lock = start.lock
        for text in start.said:
            notice(text)
        if start.finished:
            notice(f"{start.folder} holds this run, finished; its model is in {start.folder / 'model'}")
            return Result(start.folder, config.outer_steps)
        ranks = build.form_groups(config, plan, world, notice)
        parts = build.build(config, plan, ranks)
        notice(f"output_dir {start.folder}")
        with nullcontext(self.signals) if self.signals else Signals() as signals:
            guard = Guard(config, ranks, parts.worker, signals, world.board())
            run = Run(config, plan, ranks, parts, start, self.progress, guard)
            run.resume()
            signals.run()
            with guard.watching(), run.told():
                run.loop()
                return run.finish()


def train(config: Config, signals: Signals | None = None) -> Result:
    """`fmmeta train` and `launch/train.py`."""
    return MetaTrainer(config, signals).train()


class Run:
    """The state of one run and the steps of its life: resume, loop, finish."""

    def __init__(self, config: Config, plan: build.Plan, ranks: Ranks, parts: build.Parts, start: Start,
                 progress: Progress, guard: Guard | None = None) -> None:  # fmt: skip
        self.config, self.plan, self.ranks, self.parts = config, plan, ranks, parts
        self.folder, self.start, self.progress = start.folder, start, progress
        self.worker, self.theta = parts.worker, parts.theta
        self.rates = parts.setup.inner.rates.meta_parameter
        started = {"theta": self.theta} | ({} if self.rates is None else {"rates": self.rates})
        # for the table at the end; in host memory
        self.initial = {name: value.to("cpu", copy=True) for name, value in started.items()} if config.eval_episodes else None
        self.trains = config.algorithm in RULES
        self.rule_at = partial(RULES[config.algorithm], parts.setup) if self.trains else None
        with ranks.world.together("making room for several tasks"):
            rows = min(config.micro_batch_size, config.most_shots * (config.most_classes or 1))
            self.together = together(config, self.worker, parts.setup.inner, rows)
        self.outer = Outer(self.theta, self.worker, config, parts.setup.inner)
        self.held_out = HeldOut(config, self.worker, self.theta, parts.setup.learning, parts.load, ranks, progress)
        self.schedule = build.training_schedule(config, plan, ranks.layout)
        self.guard = guard or Guard(config, ranks, parts.worker)
        self.held_out.leaves = self.guard.rests
        self.saver = Saver(self.worker.params, config, ranks, progress.notice)
        self.outer_step, self.bad_steps, self.tasks, self.warned = 0, 0, {"seen": 0, "bad": 0}, False
        self.spikes = Spikes()
        self.trackers = Trackers(progress.notice)
        self.best = Best(started) if config.load_best_model_at_end else None
        self.profiler: Profiler | None = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """However the run ends, its report and its trackers say how far it came."""
        page.keep(self.folder, self.ranks.first, self.progress.notice)
        try:
            yield
        finally:
            page.keep(self.folder, self.ranks.first, self.progress.notice)
            self.trackers.finish()  # last: it may wait for a server

    def resume(self) -> None:
        """Take theta, the optimizer and the position from a checkpoint, if there is one. Collective: world."""
        found = self.start.checkpoint
        with self.ranks.world.together("reading the checkpoint"):
            if found is not None:
                state = checkpoint.read_state(found)
                checkpoint.same_size(found, self.worker.params)
                vectors = checkpoint.load(found, state["vectors"], self.worker.params, self.theta)
                tables = checkpoint.load_tables(found)
                self.theta.copy_(vectors.pop("theta"))
                if self.best is not None:
                    self.best.load_state(vectors, tables, state["best"])
                self.outer.load_state(OuterState(vectors, tables, state["numbers"]))
                self.outer_step, self.bad_steps, self.tasks = state["outer_step"], state["bad_steps"], state["tasks"]
                self.spikes = Spikes(state.get("losses"))
                if found.parent.resolve() == self.folder.resolve():
                    self.saver.last = self.folder / found.name
            self.metrics = record.Metrics(self.folder, self.outer_step, self.ranks.first, self.trackers.log)
            if self.ranks.first:
                self._write_run(finished=False)
                self.trackers.start(self.config, self.folder, self.outer_step)
        if found is not None:
            self.worker.write(self.theta)
            self.progress.notice(f"resumed from {found}, outer step {self.outer_step}")

    def loop(self) -> None:
        """Outer steps until the last one. Collective: world."""
        config = self.config
        if self.rule_at is None:
            self.progress.notice(f"algorithm={config.algorithm} trains nothing: the weights are evaluated as they are")
            self.outer_step = config.outer_steps
            return
        load = self.parts.load(self.plan.sources.train, self.plan.transforms)
        self.feed = Feed(self.schedule, load, self.outer_step, self.tasks, self.ranks, config, self.progress.notice)
        if config.check_meta_gradient:
            self._check(load)
        meta, first = MetaGradient(self.theta, self.outer.extras), self.outer_step
        if config.profile:
            self.profiler = Profiler(self.folder, self.ranks, first, config.outer_steps)
        self.progress.start("outer step")
        began = time.monotonic()
        try:
            while self.outer_step < config.outer_steps and not self.guard.stop:
                tally, rule = Tally(NUMBERS.get(config.algorithm, ())), self.rule_at(self.outer_step)
                self.guard.begin(self.outer_step)
                if self.profiler:
                    self.profiler.begin(self.outer_step, self)
                for direction, tokens in self._directions(rule, self.feed.episodes(self.outer_step, tally)):
                    direction = self.guard.fit(direction)
                    meta.add(direction)
                    tally.add(direction, tokens if self.worker.voice else 0)
                    del direction  # its shard would lie beside the next one's
                self.guard.watch.enter("waiting for the other groups")
                weight = tally.agree(self.ranks)
                if self.guard.agree(self.saver):
                    break
                self._judge(tally)
                moved = self.outer.step(meta.reduce(self.ranks.cross, weight), self.outer_step, meta.extra)
                if moved.applied:
                    self.worker.write(self.theta)
                meta.clear()
                self.outer_step += 1
                self.guard.settled(self.outer_step, self.theta)
                if self.profiler:
                    self.profiler.end(self.outer_step - 1)
                self._after_step(moved, tally, first)
                self.feed.settle(time.monotonic() - began)
        finally:
            if self.profiler:
                self.profiler.close()
            self.feed.loader.close()
            self.saver.close()
        self._stop_if_asked()

    def _directions(self, rule: Rule, episodes: list[Batches]) -> Iterator[tuple[Direction, int]]:
        """What each of this group's tasks says, and its tokens, until the group is to leave. Collective: group."""
        most = self.together.most if self.together else 1
        for begin in range(0, len(episodes), most):
            if self.guard.leaves():
                return
            some = episodes[begin : begin + most]
            found = (self.together.directions(cast(WholeWorker, self.worker), self.theta, some) if self.together
                     else [rule.direction(self.worker, self.theta, some[0])])  # fmt: skip
            for episode in some:
                yield found.pop(0), sum(episode.tokens)  # held nowhere else

    def _stop_if_asked(self) -> None:
        """End the run if a signal has asked for it. Raises `Stopped` on all ranks. Collective: world."""
        if not self.guard.stops():
            return
        if self.trains:
            self.save(last=True)
        self.guard.signals.end()
        kept = f"saved in {self.saver.last}" if self.saver.last else "nothing was learned yet"
        why = self.guard.signals.asked
        raise Stopped(f"stopped by {why} after outer step {self.outer_step}, {kept}; the same command goes on from there")

    def _judge(self, tally: Tally) -> None:
        """Go on without the tasks that could not be had, or stop, the work so far saved. Collective: world."""
        try:
            left_out = self.feed.judge(self.schedule.tasks_per_step, int(tally.failures))
        except UsageError:
            if self.config.save_steps:
                self.save(last=True)
            raise
        if left_out:
            tally.values["bad_tasks"] = left_out
        self.tasks = self.feed.counts

    def _check(self, load: Load) -> None:
        """Say how exact the meta-gradient is; every group looks at the same task. Collective: world."""
        task = self.schedule.meta_batch(self.outer_step)[0]
        found = Reader.of(load, self.ranks, self.config, self.progress.notice).alike(task)
        precision = "bf16" if self.plan.precision.bf16 else "fp32"
        rule = RULES[self.config.algorithm](self.parts.setup, self.config.outer_steps)  # after any steps of first order
        for _, episode in found:
            self.progress.notice(check(cast(Checked, rule), self.worker, self.theta, episode, precision).text)

    def _after_step(self, moved: OuterStep, tally: Tally, first: int) -> None:
        config, step = self.config, self.outer_step
        unread = len(tally.values.get("bad_tasks", ())) == self.schedule.tasks_per_step
        self.bad_steps = 0 if moved.applied else self.bad_steps + (not unread)
        values = {
            "step": step,
            "epoch": self.schedule.position(step)[0],
            "seconds": time.monotonic() - tally.began,  # the reduction and the outer step are part of it
            **tally.values,
            "grad_norm": moved.grad_norm,
            "lr": moved.lr,
            "comm_bytes": self.ranks.cross.bytes_sent,
        }
        if self.guard.exploded:
            values["exploded_tasks"] = self.guard.exploded
        if spike := self.spikes.mark(values["query_loss"]):
            values["loss_spike"] = spike
        self.ranks.cross.bytes_sent = 0
        last = step == config.outer_steps
        if step % config.logging_steps == 0 or last or step == 1 or tally.values["skipped_tasks"] or spike:
            self.metrics.write({key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()})
        text = f"loss {values['query_loss']:.4f}  accuracy {100 * values['accuracy']:.1f} %"
        skipped = f"  skipped {values['skipped_tasks']}" if values["skipped_tasks"] else ""
        self.progress.line("outer step", step, config.outer_steps, text + skipped, first)
        if config.algorithm == "imaml" and not self.warned:
            text = imaml.warning(config.proximal_weight, values)
            self.warned = text is not None
            if text is not None:
                self.progress.notice(text)
        if self.bad_steps >= config.max_bad_steps:
            raise UsageError(f"inner_lr={config.inner_lr}: no task was finite in {self.bad_steps} outer steps in a row (the last "
                             f"is {step}); lower --inner_lr or --outer_lr, and continue from the last checkpoint")  # fmt: skip
        if config.eval_steps and step % config.eval_steps == 0 and self.plan.sources.valid is not None:
            self._validate(self.plan.sources.valid)
        if config.save_steps and not last:  # validated already: a checkpoint knows the best weights so far
            self.saver.warm({"theta": self.theta, **self.outer.state().vectors})
            if step % config.save_steps == 0:
                self.save()

    def _validate(self, source: TaskSource) -> None:
        """Scores on validation tasks. Collective: world."""
        scores = self.held_out.scores(source, VALID, "validation")
        if self.guard.stops():
            return  # they are not all
        accuracy, loss = mean_ci95([s.accuracy_after for s in scores])[0], mean_ci95([s.loss_after for s in scores])[0]
        self.metrics.write({"step": self.outer_step, "valid_accuracy": accuracy, "valid_loss": loss})
        if self.best is not None:
            self.best.meet(self.outer_step, accuracy, loss)

    def save(self, last: bool = False) -> None:
        """Begin to write checkpoint-N, unless it is there; with `last` wait until it is whole. Collective: world."""
        folder = self.folder / f"checkpoint-{self.outer_step}"
        self.guard.begin_stage(f"saving after outer step {self.outer_step}")
        if last:
            self.saver.wait()
        if self.outer_step == 0 or folder in (self.saver.folder, self.saver.last):
            return
        self.guard.check_replicas(self.outer_step, self.theta)
        outer = self.outer.state()
        best = BestState() if self.best is None else self.best.state()
        vectors, tables = {"theta": self.theta, **outer.vectors, **best.vectors}, {**outer.tables, **best.tables}
        state = {"outer_step": self.outer_step, "numbers": outer.numbers, "bad_steps": self.bad_steps,
                 "tasks": self.tasks, "losses": self.spikes.state, "best": best.numbers, "vectors": list(vectors),
                 "layout": str(self.ranks.layout),
                 "settings": record.settings_of(self.config, self.plan.sources.fingerprint)}  # fmt: skip
        self.saver.save(folder, vectors, state, tables, last)

    def finish(self) -> Result:
        """Export, evaluate on held-out tasks, show the table, close run.json. Collective: world."""
        if self.config.save_steps and self.trains:
            self.save(last=True)
        if self.best is not None:
            self.progress.notice(self.best.take())
        self.guard.begin_stage("exporting the model")
        export(self.folder / "model", self.theta, self.worker, self.parts.frozen, self.config, self.plan.description,
               self.plan.tokenizer, self.ranks, self.parts.setup.inner.rates)  # fmt: skip
        result = Result(self.folder, self.outer_step)
        held_out: dict[str, Any] = {}
        if self.plan.sources.test is None:
            self.progress.notice("no held-out tasks: nothing to compare")
        elif self.initial is not None:
            held_out = self._compare(self.plan.sources.test, result)
        profile = self.profiler.told(self.progress.table) if self.profiler else {}
        with self.ranks.world.together("closing the run"):
            if self.ranks.first:
                self._write_run(finished=True, held_out=held_out, **profile)
        self.progress.notice(f"model {self.folder / 'model'}")
        return result

    def _compare(self, source: TaskSource, result: Result) -> dict[str, Any]:
        """The same episodes from theta and from the weights at the start. Collective: world."""
        trained = self.held_out.scores(source, TEST, "held-out tasks")
        self._stop_if_asked()
        confused = confusion(self.held_out, source)
        self.theta.copy_(self.initial["theta"])  # type: ignore[index]
        if self.rates is not None:
            self.rates.copy_(self.initial["rates"])  # type: ignore[index]
        started = trained
        if self.trains:
            started = self.held_out.scores(source, TEST, "held-out tasks, weights at the start")
            self._stop_if_asked()
        compared = compare(trained, started)
        show(compared, self.config, self.progress.table)
        result.before, result.after, result.after_from_start = compared.accuracies
        accuracies = {"before": result.before, "after": result.after, "after_from_start": result.after_from_start}
        self.trackers.log({"step": self.outer_step, "held_out_accuracy": accuracies})
        return {**compared.facts(), "confusion": confused}

    def _write_run(self, **facts: Any) -> None:
        record.write_run(self.folder, self.config, self.plan.sources.fingerprint, str(self.ranks.layout), **facts)
