"""The trainer: connects the parts of a run, from a `Config` and a launch to a finished model."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

from fmmeta.common.errors import UsageError
from fmmeta.common.install import warn_untested
from fmmeta.common.processes import refuse_while_importing, restored_process
from fmmeta.common.progress import Progress, Warn, terminal_log
from fmmeta.common.text import shortened
from fmmeta.config.conflicts import of_training
from fmmeta.config.fields import refuse_first
from fmmeta.config.learners import GIVEN, give
from fmmeta.config.settings import Config
from fmmeta.elastic.controller import join, with_other_groups
from fmmeta.evaluation.tune import choose_at_the_end, section_of, tune_before_training
from fmmeta.learners.base import Learner
from fmmeta.learners.files import check_given_model, check_given_tokenizer, store_model
from fmmeta.learners.load import fitted_to_model, suggest_chat
from fmmeta.metrics.own import Metric, find_metrics
from fmmeta.parallel.deepspeed_config import quiet
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import watching
from fmmeta.report.goodput import began_at
from fmmeta.tasks.data.rows import IN_MEMORY, rows_in_memory
from fmmeta.tasks.loader import check_sent
from fmmeta.tasks.sources.own import Tasks
from fmmeta.training import build, loop
from fmmeta.training.callbacks import Callback, RunView
from fmmeta.training.final import Result, finish, read_result
from fmmeta.training.run import Run
from fmmeta.training.run_files import open_run, recorded_precision
from fmmeta.training.schedules import OpenStep
from fmmeta.training.trackers import check_installed


class MetaTrainer:
    """Meta-trains a model by the settings of `config`, in a notebook or on every rank of a launch.

    model: a `PreTrainedModel`, whose weights are theta_0, instead of `config.model_name_or_path`. It is
    written to the cache of Hugging Face once per node and content (HF_HOME/fmmeta/learners) and loaded from
    there, as any checkpoint, so that every layout works. Its pooling is the model's own, unless
    `config.pooling` names another. learner: a `fmmeta.Learner`, any module, whose weights are theta_0.
    tokenizer: of the model; needed with `model`. dataset: `fmmeta.Tasks`, a
    `datasets.Dataset`, a `DatasetDict` (the splits `config.dataset_split`), or a list of (text, class)
    pairs or of dictionaries, with the columns of a file, instead of `config.dataset`. callbacks: hooks
    around the outer loop (`fmmeta.Callback`). metrics: functions (predictions, references) -> numbers by
    name, beside those of `config.metrics`: called for each validation and held-out episode with the answers
    to the query set after adaptation, which are names of classes, or (causal_lm) texts of the most likely
    tokens after the right ones before. Means are `valid_NAME` in metrics.jsonl, and in
    `Result.held_out["metrics"]`. All of them must be the same on every rank, and in every
    process that resumes the run.

    signals: stop signals of the caller (default: those of this process while `train` runs).

    >>> import contextlib, io, tempfile
    >>> from fmmeta import Config, MetaTrainer
    >>> short = dict(outer_steps=1, inner_steps=1, meta_batch_size=1, eval_episodes=0, num_workers="0")
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     result = MetaTrainer(Config(**short, output_dir=tempfile.mkdtemp())).train()
    >>> result  # doctest: +ELLIPSIS
    Result(output_dir='...', outer_steps=1, log_history=[1 lines], held_out={0 episodes})
    """

    def __init__(
        self,
        config: Config,
        signals: Signals | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        model: Any = None,
        learner: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.config, self.signals, self.callbacks = config, signals, callbacks
        self.model, self.tokenizer, self.dataset, self.metrics = model, tokenizer, dataset, metrics
        self.learner = learner

    def __repr__(self) -> str:
        return f"MetaTrainer({self.config!r})"

    def train(self) -> Result:
        """Run to the end, or resume where an earlier process stopped; return the folder and the accuracies.

        Raises `UsageError` for settings and inputs that cannot work, `MachineFault` where a machine
        misbehaves, `PeerError` where another rank failed, and `Stopped` after a signal, with the state saved.
        Collective: world.
        """
        with self.prepare("MetaTrainer.train()") as prepared:
            if prepared.run is not None:
                loop.train(prepared.run)
            return prepared.finish()

    def prepare(self, call: str = "MetaTrainer.prepare()") -> "PreparedRun":
        """Everything up to the outer loop: groups, layout, weights, resume. Raises as `train`.

        Collective: world.
        """
        if not isinstance(self.config, Config):
            raise UsageError(f"config={shortened(self.config)} is no Config; give fmmeta.Config(...)")
        refuse_first(of_training(self.config))
        refuse_while_importing(call)
        with ExitStack() as closing:
            closing.enter_context(restored_process())
            closing.enter_context(terminal_log(self.config.log_level))
            run, result = self._open(Launch.from_env(os.environ), closing)
            return PreparedRun(run, result, closing.pop_all())

    def _open(self, launch: Launch, closing: ExitStack) -> tuple[Run | None, Result | None]:
        """The run, or the result of one that is finished. Collective: world."""
        config, progress = self.config, Progress(enabled=launch.global_rank == 0)
        began = began_at(self.signals is not None and self.signals.owns_process)
        warn_untested(launch.global_rank)
        small = config.builtin_model and self.model is None
        world, notice = World(launch, pick_device(launch, small)), progress.notice
        closing.callback(world.close)
        closing.callback(progress.close)
        with world.comm.raise_on_all("looking for trackers"):
            if config.tune is not None:
                section_of(config)
            if world.comm.rank == 0:
                check_installed(config)
        config, rows = self._read_objects(world)
        closing.callback(GIVEN.pop, config.task_type, None)  # the name means the class again
        model = build.local_model(config.model_name_or_path, world, notice, config.prepare_timeout)
        config = config.but(model_name_or_path=model)
        with world.comm.raise_on_all("looking for metrics"):
            metrics = find_metrics(config, config.metrics, self.metrics)
        cross = join(config, world.comm, began)
        config = world.run_on_first_rank_of_node(
            f"model_name_or_path={config.model_name_or_path} is being read",
            lambda: fitted_to_model(config),
            config.prepare_timeout,
        )
        inputs = build.read_inputs(config, world, notice, given_tokenizer=self.tokenizer, rows=rows)
        with world.comm.raise_on_all("looking at what loader processes receive"):
            if config.num_workers != "0":
                check_sent((inputs.sources.train, inputs.reading, inputs.collate), config.num_workers)
        suggest_chat(config, inputs.tokenizer, notice)
        with world.comm.raise_on_all("counting the outer steps"):
            config = build.with_outer_epochs(config, inputs.sources.train, notice)
        if config.warmup >= config.outer_steps:
            short = f"warmup_steps={config.warmup_steps:g} with outer_steps={config.outer_steps}"
            notice(Warn(f"{short}: the run ends before the rate is outer_lr={config.outer_lr}; lower it"))
        if config.bf16 is None:
            kept = recorded_precision(config, inputs.settings(config), world.comm)
            if kept != inputs.deepspeed.precision:
                deepspeed = build.read_deepspeed(config, kept == "bf16", world, quiet)
                inputs = replace(inputs, deepspeed=deepspeed)
        plan, ranks, signals = None, None, self.signals
        if config.tune is not None:
            signals = signals or closing.enter_context(Signals())
            plan = build.plan_parallel(config, inputs, world, notice)
            ranks = world.split(plan.group_size, plan.engine == "deepspeed")
            config = tune_before_training(config, inputs, plan, world, ranks, progress, signals)
        start = open_run(config, inputs.settings(config), world.comm)
        start = replace(start, started=min(began, start.started))
        if start.lock is not None:
            closing.callback(start.lock.close)
        for text in start.warnings:
            notice(Warn(text))
        if start.finished:
            notice(f"{start.folder} holds this run, finished; its model is in {start.folder / 'model'}")
            return None, read_result(start.folder, world.comm)
        plan = plan or build.plan_parallel(config, inputs, world, notice)
        ranks = ranks or world.split(plan.group_size, plan.engine == "deepspeed")
        parts = build.build(config, inputs, plan, ranks)
        ranks = with_other_groups(
            ranks,
            cross,
            config,
            inputs.settings(config),
            parts.worker,
            plan.deepspeed,
        )
        notice(f"output_dir {start.folder}")
        signals = signals or closing.enter_context(Signals())
        run = Run(config, inputs, ranks, parts, start, progress, signals, self.callbacks, metrics)
        run.resume()
        signals.run()
        closing.enter_context(watching(run.stage, world.shared_store(), ranks, signals))
        closing.callback(run.outer_schedule.close)
        closing.callback(run.callbacks.close, run.view)
        closing.callback(run.stage.begin, "ending")  # the ranks end one by one
        return run, None

    def _read_objects(self, world: World) -> tuple[Config, Any]:
        """The settings with the names of the given objects, and the rows of the given data set.

        Raises `UsageError`. Collective: world.
        """
        config, model, tokenizer, rows = self.config, self.model, self.tokenizer, None
        with world.comm.raise_on_all("reading the arguments of MetaTrainer"):
            refuse_first(
                [
                    (
                        not isinstance(self.callbacks, (list, tuple)),
                        f"callbacks={type(self.callbacks).__name__} is no list; give callbacks=[...]",
                    ),
                    (
                        not isinstance(self.metrics, (list, tuple)),
                        f"metrics={type(self.metrics).__name__} is no list; give metrics=[...]",
                    ),
                    (
                        model is not None and not config.builtin_model,
                        f"model_name_or_path={config.model_name_or_path} with model=: give one of them",
                    ),
                    (
                        self.dataset is not None and config.dataset != Config().dataset,
                        f"dataset={' '.join(config.dataset)} in the settings, and dataset=; give one of them",
                    ),
                ]
            )
            if model is not None:
                check_given_model(model)
                if tokenizer is None:
                    raise UsageError(
                        f"model={type(model).__name__} has no tokenizer; give"
                        " tokenizer=AutoTokenizer.from_pretrained(...)"
                    )
            if tokenizer is not None:
                check_given_tokenizer(tokenizer)
            if self.learner is not None:
                if not isinstance(self.learner, Learner):
                    raise UsageError(
                        f"learner={type(self.learner).__name__} is no fmmeta.Learner; subclass it"
                    )
                config = config.but(task_type=give(self.learner))
            if self.dataset is not None:
                rows = (
                    self.dataset if isinstance(self.dataset, Tasks) else rows_in_memory(self.dataset, config)
                )
                config = config.but(dataset=[IN_MEMORY])
        if model is not None:
            folder = world.run_on_first_rank_of_node(
                "the model is being written to the cache", lambda: store_model(model), config.prepare_timeout
            )
            if len(set(world.comm.gather(Path(folder).name))) > 1:
                raise UsageError(
                    f"model={type(model).__name__} has other weights on some ranks; load the same on all"
                )
            config = config.but(model_name_or_path=folder)
        return config, rows


class PreparedRun:
    """A run whose outer loop is the caller's: `fmmeta.prepare`.

    run: what it is made of; None where the folder holds the run, finished: there are no steps then. It ends
    with `finish`, with the `with` block, or with the process.
    """

    def __init__(self, run: Run | None, result: Result | None, closing: ExitStack) -> None:
        self.run, self.result, self.closing = run, result, closing
        self._release = finalize(self, closing.close)

    def __enter__(self) -> "PreparedRun":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._release.detach():
            self.closing.__exit__(*error)

    @property
    def view(self) -> RunView:
        """What callbacks see of the run. Raises `UsageError` for a finished one."""
        if self.run is None:
            raise UsageError(f"output_dir={self.result and self.result.output_dir} holds the run, finished")
        return self.run.view

    def steps(self) -> Iterator[OpenStep]:
        """The outer steps that are left; each needs `update()` before the next one.

        They validate, log and save as the settings say, the last one too. Raises `Stopped` after a signal,
        with the state saved: the same program resumes from there. Collective: world.
        """
        if self.run is not None:
            steps = self.run.outer_schedule.steps()
            self.closing.callback(steps.close)
            yield from steps

    def finish(self) -> Result:
        """Save, export and evaluate the model, as at the end of `MetaTrainer.train`. Collective: world."""
        if self.result is None:
            assert self.run is not None
            self.result = finish(self.run, choose_at_the_end)
        self.__exit__(None, None, None)
        return self.result


def prepare(
    learner: Any = None,
    tasks: Any = None,
    config: Config | None = None,
    *,
    tokenizer: Any = None,
    callbacks: Sequence[Callback] = (),
    metrics: Sequence[Metric] = (),
    signals: Signals | None = None,
) -> PreparedRun:
    """Prepare a run for a loop of the caller, on every rank of a launch.

    learner: a `fmmeta.Learner` or a model, and tasks: as `dataset` of `MetaTrainer`; None: those of the
    settings. The other arguments, the folder, resume, stop signals, the watchdog and the schedule of
    tasks are those of `MetaTrainer` too. The loop takes the place of the rule of `config.algorithm`, which
    says what the inner steps change, and whether they keep a trajectory for `backward(order=2)`. Collective:
    world.

    >>> import contextlib, io, tempfile, fmmeta
    >>> short = dict(outer_steps=1, meta_batch_size=1, eval_episodes=0, num_workers="0")
    >>> config = fmmeta.Config(**short, output_dir=tempfile.mkdtemp())
    >>> with contextlib.redirect_stdout(io.StringIO()), fmmeta.prepare(config=config) as meta:
    ...     for step in meta.steps():
    ...         for task in step.tasks():
    ...             with task:
    ...                 first = task.step(task.support, lr=0.1)
    ...                 result = task.backward(task.query)
    ...         outcome = step.update()
    ...     trained = meta.finish()
    >>> outcome.name, trained.outer_steps
    ('APPLIED', 1)
    """
    own = isinstance(learner, Learner)
    trainer = MetaTrainer(
        Config() if config is None else config,
        signals,
        callbacks,
        model=None if own else learner,
        learner=learner if own else None,
        tokenizer=tokenizer,
        dataset=tasks,
        metrics=metrics,
    )
    return trainer.prepare("fmmeta.prepare()")


def train(config: Config, signals: Signals | None = None) -> Result:
    """`fmmeta train` and `launch/train.py`."""
    return MetaTrainer(config, signals).train()
