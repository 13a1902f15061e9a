"""Which groups take part in an outer step, and what a run does when groups come and go (--elastic).

    begin_step     roll call -> transfer state -> change of writer
    form_again     a group was lost: the same outer step once more, its tasks dealt to the remaining groups
    finish         a last roll call, so that one of the remaining groups writes the model
    leave          end the membership

A group takes its state from the group that is furthest on (state_transfer.py). An outer step changes nothing
before all its sums have arrived, so that an abandoned one needs no undoing. If a sum has arrived at some
groups only, those are a step ahead, and the others take over their state.

One group writes checkpoints, metrics and the model: the one that did so before, else the first by name. It
holds the folder's lock.
"""

from __future__ import annotations

import time
from typing import Any

from fmmeta import checkpoint
from fmmeta.common.errors import MachineFault, PeerLost, UsageError
from fmmeta.config.settings import Config
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.join import SECRET
from fmmeta.elastic.membership import Membership
from fmmeta.elastic.state_transfer import transfer_state
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.replicas import check_replicas
from fmmeta.report.data import read_run
from fmmeta.training.loop import Run
from fmmeta.training.run_folder import lock_folder
from fmmeta.training.static_controller import StaticController

LIGHTHOUSE_S = 120.0  # that a group waits for a silent lighthouse
MOST = 100  # attempts at one outer step
LOCK_S = 2.0  # that a group which is to write waits for the lock at an outer step; it asks again at the next


class ElasticController(StaticController):
    """One for a run of a group."""

    def __init__(self, config: Config, crew: ElasticCommunicator, ranks: ProcessGroups, notice: Any) -> None:
        self.config, self.crew, self.ranks, self.notice = config, crew, ranks, notice
        self.roll: Membership | None = None
        self.lock: Any = None
        self.writes = self.over = False
        self.called: int | None = None  # the outer step of the last roll call
        self.began: float | None = None  # the first attempt at this outer step
        self.retries, self.lost_s, self.tasks = 0, 0.0, 0

    def begin_step(self, run: Run) -> None:
        """Roll call: find the groups of this outer step, and take over their state where this one is behind.

        Raises `PeerLost`. Collective: all groups.
        """
        run.stage.begin("waiting for the other groups")
        self.began = self.began or time.monotonic()
        self.crew.writes, self.crew.bytes_sent = self.writes, 0  # bytes of a lost attempt do not count
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
                run.logger.write_pending_line(run)
        self.crew.fresh, self.called = False, run.state.outer_step
        if roll.anew or self.retries:
            run.feed.restart(run.state.tasks)
            self.lost_s = time.monotonic() - self.began
        every = self.config.check_replicas_steps
        if roll.anew or (every and run.state.outer_step % every == 0):
            check_replicas(run.ranks, run.state.theta, f"after outer step {run.state.outer_step}")
        if roll.writer == roll.here and not self.writes:
            self._write_from_here(run, LOCK_S)
        self.roll = roll
        if roll.anew:
            self.notice(
                f"outer step {run.state.outer_step + 1}: {len(names)}"
                f" {'group' if len(names) == 1 else 'groups'}"
                f" ({', '.join(name.rpartition(':')[0] for name in names)})"
            )

    def form_again(self, run: Run, lost: PeerLost) -> None:
        """Prepare another attempt at this outer step. Raises `MachineFault` if there were too many. Local."""
        self.retries += 1
        step = run.state.outer_step + 1
        if self.retries > MOST:
            raise MachineFault(
                f"outer step {step} was attempted {MOST} times in vain ({lost}); look at the network"
                " between the groups"
            ) from None
        self.notice(f"outer step {step} is attempted again: a group is lost ({lost})")
        run.state.updates.meta.clear()

    def check_task_count(self, tasks: int, expected: int) -> None:
        """The tasks of all groups must be the meta-batch, whichever took part. Raises `MachineFault`."""
        self.tasks = tasks
        if tasks != expected:
            raise MachineFault(
                f"{tasks} tasks were learned from in an outer step of {expected}: the groups disagree which"
                " groups take part"
            )

    def metrics(self) -> dict[str, Any]:
        """Of the outer step that has ended, for metrics.jsonl; the next step counts from zero."""
        values = {
            "groups": self.crew.size,
            "tasks": self.tasks,
            "retries": self.retries,
            "lost_seconds": round(self.lost_s, 3),
        }
        self.began, self.retries, self.lost_s = None, 0, 0.0
        return values

    def finish(self, run: Run) -> None:
        """All outer steps are done: agree which group writes the model. Collective: all groups."""
        last = self.config.outer_steps
        while run.state.outer_step == last and self.called != last and not self.over:
            try:
                self.begin_step(run)
            except PeerLost as lost:
                self.form_again(run, lost)
        if self.over:
            self.notice("the run is finished; nothing is left to do")
        elif (
            self.roll is not None
            and self.roll.writer == self.roll.here
            and not self.writes
            and not run.stop.requested
        ):
            self._write_from_here(run, 120.0)

    def leave(self) -> None:
        self.crew.leave()

    def _write_from_here(self, run: Run, patience_s: float) -> None:
        """Take the folder's lock and open the files of the run; retry at the next step if it is locked.

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
        ):  # finished by groups that have left
            run.state.outer_step, self.over = self.config.outer_steps, True
            return
        with self.ranks.world.raise_on_all("beginning to write"):
            run.begin_writing()
        self.writes = self.crew.writes = True
        self.notice(f"this group writes the files of the run, from outer step {run.state.outer_step + 1} on")
        run.logger.write_pending_line(run)
