"""Who is there for an outer step, and what a run does when groups come and go (--elastic).

    of_step    roll call -> heal -> change of writer -> the step
               if a group was lost meanwhile: the same step once more, with its tasks assigned to the others
    end        a last roll call, so that one of those who are there writes the model
    leave      be missed by nobody

A group heals from the one furthest on (healing.py). Nothing that a step computes counts before all its sums
have arrived, so that abandoning one needs no undoing. If a sum has arrived at some groups and not at others,
those that have it are a step ahead, and the others heal from them.

One group writes checkpoints, metrics and the model: the one that did so before, else the first by name. It
holds the folder's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fmmeta import checkpoint
from fmmeta.common.errors import MachineFault, UsageError
from fmmeta.config.settings import Config
from fmmeta.elastic.communicator import ElasticCommunicator, PeerLost
from fmmeta.elastic.join import SECRET
from fmmeta.elastic.membership import Membership
from fmmeta.elastic.state_transfer import ElasticRun, transfer_state
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.stop import Guard
from fmmeta.training.run_folder import lock_folder
from fmmeta.training.run_record import read_run

LIGHTHOUSE_S = 120.0  # that a silent lighthouse is put up with
MOST = 100  # attempts at one outer step
LOCK_S = 2.0  # that a group which is to write waits for the lock at an outer step; it asks again at the next


class ElasticController:
    """One for a run of a group."""

    def __init__(self, config: Config, crew: ElasticCommunicator, ranks: ProcessGroups, notice: Any) -> None:
        self.config, self.crew, self.ranks, self.notice = config, crew, ranks, notice
        self.roll: Membership | None = None
        self.lock: Any = None
        self.writes = self.over = False
        self.called: int | None = None  # the outer step of the last roll call
        self.began: float | None = None  # the first attempt at this outer step
        self.retries, self.lost_s, self.tasks = 0, 0.0, 0

    @contextmanager
    def step_attempt(self, run: ElasticRun) -> Iterator[None]:
        """An attempt at an outer step; a group that is lost meanwhile costs it, one lost at the roll call
        another roll call.

        Collective: everyone.
        """
        while True:
            try:
                self._call(run)
                break
            except PeerLost as lost:
                self._begin_anew(run, lost)
        counts = dict(run.state.tasks)
        try:
            yield
        except PeerLost as lost:
            self._begin_anew(run, lost)
            run.state.updates.meta.clear()
            run.state.tasks = counts
            run.feed.restart(counts)

    def _begin_anew(self, run: ElasticRun, lost: PeerLost) -> None:
        """One attempt more at this outer step. Raises `MachineFault` if there were too many."""
        self.retries += 1
        if self.retries > MOST:
            where = f"outer step {run.state.outer_step + 1} was begun {MOST} times in vain"
            raise MachineFault(f"{where} ({lost}); look at the network between the groups") from None
        self.notice(f"outer step {run.state.outer_step + 1} is begun anew: a group is lost ({lost})")

    def goes(self, guard: Guard) -> bool:
        """Whether this group, asked to stop, leaves the others its tasks of this step."""
        guard.stop = guard.stop or guard.left
        return guard.left

    def count(self, tasks: int, wanted: int) -> None:
        """The tasks of all groups must be the meta-batch, whoever was there. Raises `MachineFault`."""
        self.tasks = tasks
        if tasks != wanted:
            raise MachineFault(
                f"{tasks} tasks were learned from in an outer step of {wanted}: the groups disagree who"
                " they are"
            )

    def facts(self) -> dict[str, Any]:
        """Of the outer step that has ended, for metrics.jsonl."""
        told = {
            "groups": self.crew.size,
            "tasks": self.tasks,
            "retries": self.retries,
            "lost_seconds": round(self.lost_s, 3),
        }
        self.began, self.retries, self.lost_s = None, 0, 0.0
        return told

    def end(self, run: ElasticRun) -> None:
        """All outer steps are done: find out who writes. Collective: everyone."""
        while (
            run.state.outer_step == self.config.outer_steps
            and self.called != run.state.outer_step
            and not self.over
        ):
            with self.step_attempt(run):
                pass
        if self.over:
            self.notice("the run is finished; nothing is left to do")
        elif (
            self.roll is not None
            and self.roll.writer == self.roll.here
            and not self.writes
            and not run.guard.stop
        ):
            self._write_from_here(run, 120.0)

    def leave(self) -> None:
        self.crew.leave()

    def _call(self, run: ElasticRun) -> None:
        """Who is there; then be like the others. Collective: everyone."""
        run.guard.begin_stage("waiting for the other groups")
        self.began = self.began or time.monotonic()
        self.crew.writes, self.crew.bytes_sent = (
            self.writes,
            0,
        )  # what an attempt in vain has sent is not the step's
        roll = self.crew.form(run.state.outer_step, LIGHTHOUSE_S)
        if roll.strangers > (self.roll.strangers if self.roll else 0):
            self.notice(
                f"lighthouse={self.config.lighthouse} lists {roll.strangers} groups that do not know {SECRET}"
                " of this output_dir, and they are left out; give all groups of a run one output_dir, and"
                " each run its own lighthouse"
            )
        names = [member.name for member in roll.members]
        root, mine = roll.members[roll.root], roll.members[roll.here]
        if mine.mark != root.mark:
            raise UsageError(
                f"group_name={mine.name}: its settings, its layout (group_size, ZeRO stage) or its versions "
                f"of fmmeta or torch are not those of group {root.name}; start it with the same ones, or as "
                "another run"
            )
        if any(roll.heals(number) for number in range(len(names))):
            transfer_state(run, self.crew, roll, self.notice)
            if self.writes:
                run.journal.write_pending_line()
        self.crew.fresh, self.called = False, run.state.outer_step
        if roll.anew or self.retries:
            run.feed.restart(run.state.tasks)
            self.lost_s = time.monotonic() - self.began
        every = self.config.check_replicas_steps
        if roll.anew or (every and run.state.outer_step % every == 0):
            run.guard.check_replicas(run.state.outer_step, run.state.theta)
        if roll.writer == roll.here and not self.writes:
            self._write_from_here(run, LOCK_S)
        self.roll = roll
        if roll.anew:
            self.notice(
                f"outer step {run.state.outer_step + 1}: {len(names)}"
                f" {'group' if len(names) == 1 else 'groups'}"
                f" ({', '.join(name.rpartition(':')[0] for name in names)})"
            )

    def _write_from_here(self, run: ElasticRun, patience_s: float) -> None:
        """Take the folder's lock and write what the run writes; at the next step, if somebody still has it.

        Collective: group.
        """
        first, refused = self.ranks.first, ""
        if first:
            try:
                self.lock = lock_folder(run.folder, patience_s, quiet=True)
            except UsageError as error:
                refused = str(error)
        if any(self.ranks.world.gather_bytes(refused.encode())):
            if patience_s > LOCK_S:
                raise UsageError(refused or "another group holds the folder")
            self.notice(f"cannot write yet: {refused}")
            return
        with self.ranks.world.raise_on_all("beginning to write"):
            if first:
                checkpoint.undo_partial_save(run.folder)
                self.over = bool((read_run(run.folder) or {}).get("finished"))
        if any(
            self.ranks.world.gather_bytes(b"over" if self.over else b"")
        ):  # by groups that have left before this one came
            run.state.outer_step, self.over = self.config.outer_steps, True
            return
        with self.ranks.world.raise_on_all("beginning to write"):
            run.begin_writing()
        self.writes = self.crew.writes = True
        self.notice(f"this group writes the files of the run, from outer step {run.state.outer_step + 1} on")
        run.journal.write_pending_line()
