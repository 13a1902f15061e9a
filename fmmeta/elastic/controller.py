"""Which groups take part in an outer step, and what a run does when groups come and go (--elastic).

    begin_step     quorum -> transfer state -> change of writer
    form_again     a group was lost: the same outer step again, its tasks assigned to the remaining groups
    finish         a last quorum, so that one of the remaining groups writes the model
    leave          end the membership

A group takes its state from the group with the highest step (state_transfer.py). An outer step changes
nothing before all its sums have arrived, so an abandoned step needs no undoing. If a sum has arrived at some
groups only, those are a step ahead, and the others receive their state.

One group writes checkpoints, metrics and the model: the previous writer, else the first by name. It holds the
folder's lock.
"""

import time
from collections.abc import Callable
from typing import Any

from fmmeta import checkpoint
from fmmeta.common.errors import MachineFault, PeerLost, UsageError
from fmmeta.config.settings import Config
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.join import SECRET
from fmmeta.elastic.membership import Membership
from fmmeta.elastic.state_transfer import transfer_state
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.checks import check_replicas
from fmmeta.report.data import read_run
from fmmeta.training.loop import Run, StaticController
from fmmeta.training.run_folder import lock_folder

LIGHTHOUSE_S = 120.0  # timeout of a lighthouse that does not answer
MAX_ATTEMPTS = 100  # at one outer step
LOCK_S, LAST_LOCK_S = 2.0, 120.0  # timeouts of the folder's lock: at an outer step, and at the end of the run


class ElasticController(StaticController):
    """One for a run of a group."""

    def __init__(
        self, config: Config, cross: ElasticCommunicator, ranks: ProcessGroups, log: Callable[[str], None]
    ) -> None:
        self.config, self.cross, self.ranks, self.log = config, cross, ranks, log
        self.membership: Membership | None = None
        self.lock: Any = None
        self.writes = self.over = False
        self.quorum_step: int | None = None  # the outer step of the last quorum
        self.began: float | None = None  # the first attempt at this outer step
        self.retries, self.lost_s, self.tasks = 0, 0.0, 0

    def begin_step(self, run: Run) -> None:
        """Form the groups of this outer step; receive the donor's state if this group needs it.

        Raises `PeerLost`. Collective: all groups.
        """
        run.stage.begin("waiting for the other groups")
        self.began = self.began or time.monotonic()
        self.cross.writes, self.cross.bytes_sent = self.writes, 0  # bytes of a lost attempt do not count
        step, members = run.state.outer_step, self.cross.form(run.state.outer_step, LIGHTHOUSE_S)
        if members.unknown_groups > (self.membership.unknown_groups if self.membership else 0):
            self.log(
                f"lighthouse={self.config.lighthouse} lists {members.unknown_groups} groups that do not know"
                f" {SECRET} of this output_dir, and they are left out; give all groups of a run one"
                " output_dir, and each run its own lighthouse"
            )
        groups = members.members
        mine, donor = groups[members.here], groups[members.donor]
        if mine.config_hash != donor.config_hash:
            raise UsageError(
                f"group_name={mine.name}: its settings, its layout (group_size, ZeRO stage) or its versions "
                f"of fmmeta or torch are not those of group {donor.name}; start it with the same ones, or as "
                "another run"
            )
        if any(members.needs_state(number) for number in range(len(groups))):
            transfer_state(run, self.cross, members, self.log)
            step = run.state.outer_step
            if self.writes:
                run.logger.write_pending_line(run)
        self.cross.fresh, self.quorum_step = False, step
        if members.restarted or self.retries:
            run.feed.restart(run.state.tasks)
            self.lost_s = time.monotonic() - self.began
        every = self.config.check_replicas_steps
        if members.restarted or (every and step % every == 0):
            check_replicas(run.ranks, run.theta, f"after outer step {step}")
        if members.writer == members.here and not self.writes:
            self._become_writer(run, LOCK_S)
        self.membership = members
        if members.restarted:
            noun, labels = "group" if len(groups) == 1 else "groups", ", ".join(one.label for one in groups)
            self.log(f"outer step {run.state.outer_step + 1}: {len(groups)} {noun} ({labels})")

    def form_again(self, run: Run, lost: PeerLost) -> None:
        """Prepare another attempt at this outer step. Raises `MachineFault` after too many. Local."""
        self.retries += 1
        step = run.state.outer_step + 1
        if self.retries > MAX_ATTEMPTS:
            raise MachineFault(
                f"outer step {step} was attempted {MAX_ATTEMPTS} times in vain ({lost}); look at the network"
                " between the groups"
            ) from None
        self.log(f"outer step {step} is attempted again: a group is lost ({lost})")
        run.state.updates.meta.clear()

    def check_task_count(self, tasks: int, expected: int) -> None:
        """The tasks of all groups must be the meta-batch. Raises `MachineFault`."""
        self.tasks = tasks
        if tasks != expected:
            raise MachineFault(
                f"{tasks} tasks were learned from in an outer step of {expected}: the groups disagree which"
                " groups take part"
            )

    def metrics(self) -> dict[str, Any]:
        """Values of the outer step that has ended, for metrics.jsonl; the next step counts from zero."""
        values = {
            "groups": self.cross.size,
            "tasks": self.tasks,
            "retries": self.retries,
            "lost_seconds": round(self.lost_s, 3),
        }
        self.began, self.retries, self.lost_s = None, 0, 0.0
        return values

    def finish(self, run: Run) -> None:
        """All outer steps are done: agree which group writes the model. Collective: all groups."""
        last = self.config.outer_steps
        while run.state.outer_step == last and self.quorum_step != last and not self.over:
            try:
                self.begin_step(run)
            except PeerLost as lost:
                self.form_again(run, lost)
        members = self.membership
        if self.over:
            self.log("the run is finished; nothing is left to do")
        elif members and members.writer == members.here and not (self.writes or run.stop.requested):
            self._become_writer(run, LAST_LOCK_S)

    def leave(self) -> None:
        self.cross.leave()

    def _become_writer(self, run: Run, timeout_s: float) -> None:
        """Lock the folder and open the files of the run; a locked folder is retried at the next step.

        Collective: group.
        """
        world, first, finished = self.ranks.world, self.ranks.first, False
        try:
            with world.raise_on_all("locking the folder"):
                if first:
                    self.lock = lock_folder(run.folder, timeout_s, quiet=True)
        except UsageError as refusal:
            if timeout_s == LAST_LOCK_S:
                raise
            self.log(f"cannot write yet: {refusal}")
            return
        with world.raise_on_all("beginning to write"):
            if first:
                checkpoint.undo_partial_save(run.folder)
                finished = bool((read_run(run.folder) or {}).get("finished"))
        if any(world.gather_bytes(b"finished" if finished else b"")):  # by groups that have left
            run.state.outer_step, self.over = self.config.outer_steps, True
            return
        with world.raise_on_all("beginning to write"):
            run.begin_writing()
        self.writes = self.cross.writes = True
        self.log(f"this group writes the files of the run, from outer step {run.state.outer_step + 1} on")
        run.logger.write_pending_line(run)
