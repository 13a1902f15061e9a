"""The trainer: from a `Config` and a launch to a finished run.

It connects the parts and owns none of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext

from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.elastic.controller import ElasticController
from fmmeta.elastic.join import join, with_other_groups
from fmmeta.models.lengths import fitted
from fmmeta.models.load import describe
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.stop import Guard
from fmmeta.training import build
from fmmeta.training.callbacks import Callback
from fmmeta.training.finish import Result, finish
from fmmeta.training.loop import Run
from fmmeta.training.run_folder import open_run
from fmmeta.training.run_record import settings_of
from fmmeta.training.trackers import check_installed


class MetaTrainer:
    """Meta-train as `config` says: `MetaTrainer(Config(...)).train()`, in a notebook or on every rank of a
    launch.

    callbacks: hooks around the outer loop, the same on every rank (`fmmeta.Callback`).
    """

    def __init__(
        self, config: Config, signals: Signals | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.config, self.signals, self.callbacks = config, signals, callbacks

    def __repr__(self) -> str:
        return f"MetaTrainer({self.config!r})"

    def train(self) -> Result:
        """Run to the end, or resume where an earlier process stopped.

        Raises `UsageError`, `MachineFault` where a machine misbehaves, and `Stopped` after a signal.
        Collective: world.
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
        with world.comm.raise_on_all("looking for trackers"):
            if world.comm.rank == 0:
                check_installed(config)
        cross = join(config, world.comm)
        what = f"model_name_or_path={config.model_name_or_path} is being read"
        config = world.run_on_first_rank_of_node(
            what, lambda: fitted(config, describe(config).hf_config), config.prepare_timeout
        )
        plan = build.plan(config, world, notice)
        start = open_run(config, plan.sources.fingerprint, world.comm, plan.resolved)
        self.lock = start.lock
        for text in start.said:
            notice(text)
        if start.finished:
            notice(f"{start.folder} holds this run, finished; its model is in {start.folder / 'model'}")
            return Result(start.folder, config.outer_steps)
        ranks = build.form_groups(config, plan, world, notice)
        parts = build.build(config, plan, ranks)
        settings = settings_of(config, plan.sources.fingerprint, plan.resolved)
        ranks = with_other_groups(ranks, cross, config, settings, parts.worker, plan.precision)
        notice(f"output_dir {start.folder}")
        with nullcontext(self.signals) if self.signals else Signals() as signals:
            guard = Guard(config, ranks, parts.worker, signals, world.shared_store())
            elastic = cross and ElasticController(config, cross, ranks, notice)
            run = Run(config, plan, ranks, parts, start, self.progress, guard, elastic, self.callbacks)
            run.resume()
            signals.run()
            with guard.watching():
                try:
                    run.loop()
                    return finish(run)
                finally:
                    run.callbacks.close(run)


def train(config: Config, signals: Signals | None = None) -> Result:
    """`fmmeta train` and `launch/train.py`."""
    return MetaTrainer(config, signals).train()
