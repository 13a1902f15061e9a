"""Safety checks beside the training loop: stop at a safe point, watchdog, replica check, outlier bounds.

    should_abandon_step()     between two tasks: does this group leave the rest of the outer step?      group
    reject_outlier()          mark a task gradient beyond its bounds as not finite                      group
    agree_to_abandon()        after the tasks: abandon the step? stop after it? is a save done?         world
    end_step()                after the step: record its time, compare replicas every so often          world
    agree_on_stop()           has any rank been asked to stop?                                          world

A stop costs at most one task of each group, the agreement and the save: tasks are left out, never cut in two.
If one group leaves a step, all groups abandon it, since theta is a function of whole meta-batches; if none
does, the step is finished.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fmmeta.checkpoint.async_saver import Saver
from fmmeta.common.errors import MachineFault
from fmmeta.config.settings import Config
from fmmeta.meta.rule import TaskResult
from fmmeta.parallel.process_groups import ProcessGroups, SharedStore
from fmmeta.parallel.workers.base import Worker
from fmmeta.reliability.replicas import hash_vector
from fmmeta.reliability.signals import Launcher, Signals
from fmmeta.reliability.watchdog import MARGIN_S, Watchdog, WatchdogStage, myself


class Guard:
    """One for a run. board: None where no rank is to be watched from outside."""

    def __init__(
        self,
        config: Config,
        ranks: ProcessGroups,
        worker: Worker,
        signals: Signals | None = None,
        board: SharedStore | None = None,
    ) -> None:
        self.config, self.ranks, self.worker = config, ranks, worker
        self.signals, self.board = signals or Signals(), board
        self.watch = WatchdogStage(config.step_timeout)
        self.abandoned = self.stop_requested = False
        self.count = self.exploded = 0  # tasks of this group, in this outer step

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ranks while the block runs. Collective: world."""
        peers = [json.loads(part) for part in self.ranks.world.gather_bytes(json.dumps(myself()).encode())]
        launched = self.ranks.world.size > 1
        watchdog = Watchdog(self.watch, self.board, peers, self.ranks, self.signals, Launcher(launched))
        watchdog.start()
        self.ranks.world.barrier()
        try:
            yield
        except Exception:
            if watchdog.asked.is_set():  # other ranks have exited: the watchdog exits with the same code
                time.sleep(MARGIN_S)
            raise
        finally:
            watchdog.close()

    def begin_step(self, outer_step: int) -> None:
        """An outer step begins."""
        self.abandoned, self.count, self.exploded = False, 0, 0
        self.begin_stage(f"outer step {outer_step + 1}")
        self.watch.set_phase("waiting for its tasks")

    def begin_stage(self, stage: str) -> None:
        """Something that must end within its bound begins; the groups wait for each other accordingly."""
        self.watch.begin(stage)
        for communicator in (self.ranks.cross, self.ranks.world):
            communicator.set_timeout(self.watch.bound_s + MARGIN_S)

    def should_stop_evaluation(self) -> bool:
        """`should_abandon_step`, between two episodes of an evaluation. Collective: group."""
        self.begin_stage("an episode of an evaluation")
        return self.should_abandon_step()

    def should_abandon_step(self) -> bool:
        """Whether the group leaves its remaining tasks. Collective: group."""
        self.count += 1
        self.watch.set_phase(f"task {self.count} of group {self.ranks.cross.rank}")
        asked = torch.tensor([float(bool(self.signals.asked))])
        self.abandoned = float(self.ranks.group.sum_(asked)) > 0
        return self.abandoned

    def agree_to_abandon(self, saver: Saver) -> bool:
        """Whether all abandon this outer step; judges a save that is done.

        Raises `UsageError`. Collective: world.
        """
        self.watch.set_phase("agreeing with the other groups")
        exploded = self.exploded if self.ranks.layout.group_rank == 0 else 0
        mine = [
            self.abandoned,
            bool(self.signals.asked),
            saver.folder is not None and saver.done,
            bool(saver.failure),
            exploded,
        ]
        left, asked, done, failed, exploded = self.ranks.world.sum_(
            torch.tensor(mine, dtype=torch.float64)
        ).tolist()
        self.stop_requested, self.exploded = asked > 0 or left > 0, int(exploded)
        if self.ranks.crew is not None and (
            self.config.max_task_loss is not None or self.config.max_task_norm is not None
        ):
            self.exploded = int(self.ranks.cross.sum_(torch.tensor([exploded], dtype=torch.float64)))
        if done == self.ranks.world.size:
            saver.judge(failed > 0)
        return left > 0

    def agree_on_stop(self) -> bool:
        """Whether any rank was asked to stop; then all know by what. Collective: world."""
        names = [name.decode() for name in self.ranks.world.gather_bytes(self.signals.asked.encode()) if name]
        self.stop_requested = self.stop_requested or bool(names)
        self.signals.asked = names[0] if names else ""
        return self.stop_requested

    @property
    def no_outlier_bounds(self) -> bool:
        """Whether every finite task gradient counts, whatever its size."""
        return self.config.max_task_loss is None and self.config.max_task_norm is None

    def reject_outlier(self, task: TaskResult, gradient: Tensor) -> TaskResult:
        """Return the task, marked as not finite if its loss or the norm of `gradient` [S] exceeds a bound.

        Collective: group.
        """
        most_loss, most_norm = self.config.max_task_loss, self.config.max_task_norm
        if not task.finite or self.no_outlier_bounds:
            return task
        exploded = most_loss is not None and max(task.support.loss, task.query.loss) > most_loss
        if most_norm is not None:
            exploded = exploded or not math.sqrt(self.worker.dot(gradient, gradient)) <= most_norm
        self.exploded += exploded
        return replace(task, finite=False) if exploded else task

    def end_step(self, outer_step: int, theta: Tensor) -> None:
        """Record how long an outer step took; compare the replicas every check_replicas_steps.

        Raises `MachineFault`. Collective: world.
        """
        self.watch.record(time.monotonic() - self.watch.began)
        every = self.config.check_replicas_steps
        if (
            every and outer_step % every == 0 and self.ranks.crew is None
        ):  # with --elastic they are compared at the roll call
            self.check_replicas(outer_step, theta)

    def check_replicas(self, outer_step: int, theta: Tensor) -> None:
        """Ranks with the same shard must hold the same bits.

        Raises `MachineFault` on all, naming the odd ones. Collective: everyone.
        """
        size = self.ranks.layout.group_size
        if self.ranks.cross.size == 1:
            return
        hashes = self.ranks.all_groups.gather_bytes(str(hash_vector(theta)).encode())
        odd = []
        for member in range(size):
            (most, count), *others = Counter(hashes[member::size]).most_common()
            unclear = bool(others) and others[0][1] == count
            odd += [rank for rank in range(member, len(hashes), size) if unclear or hashes[rank] != most]
        if odd:
            named = ", ".join(map(str, sorted(odd)))
            text = f"theta is not the same in all groups after outer step {outer_step} (ranks {named} differ)"
            raise MachineFault(
                f"{text}; nothing of it is saved; check their machines, then run the same command again"
            )
