"""Joins a launch to an elastic run; the schedule of a run whose groups come and go (--elastic).

    join, with_other_groups   lighthouse client, communicators across groups, secret and hash of the settings
    form                      quorum -> transfer state -> change of writer
    form_again                a group was lost: the same outer step again, its tasks assigned to the remaining
                              groups
    finish                    a last quorum, so that one of the remaining groups writes the model
    leave                     end the membership

A group takes its state from the group with the highest step (`transfer_state`): everything that a checkpoint
holds, rank by rank and bit for bit. It is used only when it is complete, so that a group lost meanwhile costs
another quorum and no more. No pickles: JSON and plain tensors. An outer step changes nothing before all its
sums have arrived, so an abandoned step needs no undoing. If a sum has arrived at some groups only, those are
a step ahead, and the others receive their state.

One group writes checkpoints, metrics and the model: the previous writer, else the first by name. It holds the
folder's lock.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import torch

from fmmeta import checkpoint
from fmmeta.common.errors import MachineFault, PeerLost, UsageError, usage_errors
from fmmeta.common.install import version
from fmmeta.config.resume import changed_settings
from fmmeta.config.settings import Config
from fmmeta.elastic.communicator import AllGroups, ElasticCommunicator, Membership
from fmmeta.elastic.lighthouse import LIGHTHOUSE_S, in_thread
from fmmeta.meta.outer_step import Outcome
from fmmeta.meta.parameters import StateDict
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.network import PROOF
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.reliability.checks import check_replicas
from fmmeta.report.page import read_run
from fmmeta.training.claims import ClaimedEpisodes, TaskClaims
from fmmeta.training.run import Run
from fmmeta.training.run_files import lock_folder, newest_complete
from fmmeta.training.schedules import OpenStep, StaticSchedule

CLAIM_S = 10.0  # timeout of a claim; then the first group is lost


def transfer_state(
    run: Run, cross: ElasticCommunicator, membership: Membership, log: Callable[[str], None]
) -> None:
    """Send the donor's state to the groups that need it. Raises `PeerLost`. Collective: all groups.

    Tensors have equal sizes on all groups, as their `config_hash` is: gloo ends the process on a message of
    another size. Vectors are like theta, tables like the learned rates.
    """
    donor, meta_params = membership.donor, run.state.meta_params
    sends = membership.here == donor
    state = run.state.state_dict() if sends else StateDict()
    header: dict[str, Any] = {
        "facts": state.facts,
        "lines": list(run.logger.lines),
        "vectors": list(state.vectors),
        "tables": list(state.tables),
    }
    header = cross.broadcast(header if sends else None, donor)
    parts: Any = (
        (state.vectors, header["vectors"], meta_params.theta),
        (state.tables, header["tables"], meta_params.rates),
    )
    for tensors, names, like in parts:
        for name in names:
            if not sends:
                tensors[name] = torch.empty_like(like, device="cpu")
            cross.broadcast_(tensors[name], donor)
    if membership.needs_state(membership.here):
        before = run.state.outer_step
        run.state.load_state_dict(StateDict(state.vectors, state.tables, header["facts"]))
        run.worker.write(meta_params.theta)
        run.logger.lines.clear()
        run.logger.lines.extend(header["lines"])
        log(
            f"state received from group {membership.members[donor].label}: outer step {before} ->"
            f" {run.state.outer_step}"
        )


SECRET = ".elastic-secret"


def join(config: Config, own: Communicator, began: float) -> ElasticCommunicator | None:
    """A communicator across groups, not connected yet; None without --elastic.

    began: when the processes were started, in seconds since 1970. Raises `UsageError`. Collective: world.
    """
    if not config.elastic:
        return None
    lighthouse = config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not lighthouse:
        raise UsageError(
            "elastic=True needs a lighthouse; start `fmmeta lighthouse` and give --lighthouse with what it"
            " prints, or use `fmmeta elastic`, which does both"
        )
    cross = ElasticCommunicator(own, lighthouse, config.group_name or f"{platform.node()}-{os.getpid()}")
    cross.began = began
    return cross


def with_other_groups(
    ranks: ProcessGroups,
    cross: ElasticCommunicator | None,
    config: Config,
    settings: Mapping[str, Any],
    worker: Worker,
    precision: DeepSpeedSettings,
) -> ProcessGroups:
    """Add the communicators across groups to those of this group; without --elastic return `ranks`.

    settings: those of the run (RunInputs.settings). Collective: world.
    """
    if cross is None:
        return ranks
    with ranks.world.raise_on_all("reading the secret of the run"):
        if ranks.world.rank == 0:
            cross.secret = run_secret(Path(str(config.output_dir)))
    cross.config_hash = config_hash(settings, str(ranks.layout), worker.params.numel, precision)
    return replace(ranks, cross=cross, all_groups=AllGroups(ranks.world, cross))


def run_secret(folder: Path) -> bytes:
    """The secret of the run: random hex digits in a file of its folder (mode 0600), created by the first
    group. Raises `UsageError`.
    """
    file, deadline = folder / SECRET, time.monotonic() + 10
    with usage_errors(
        f"output_dir={folder}: {SECRET} cannot be read", "start all groups of a run as one user"
    ):
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened,
        ):
            opened.write(token_hex(PROOF // 2).encode())
        while len(found := file.read_bytes()) < PROOF and time.monotonic() < deadline:
            time.sleep(0.05)  # another group is writing it
    if len(found) < PROOF:
        raise UsageError(
            f"output_dir={folder}: {SECRET} has {len(found)} bytes instead of {PROOF}; remove it, no group"
            " running"
        )
    return found


def config_hash(settings: Mapping[str, Any], layout: str, numel: int, precision: DeepSpeedSettings) -> str:
    """Hash of what the groups of one run must share: settings that change theta, layout and versions."""
    fixed = {name: settings[name] for name in changed_settings(dict.fromkeys(settings, ...), dict(settings))}
    fixed["task_schedule"] = settings["task_schedule"]  # groups must claim alike
    shared = [fixed, layout, numel, precision.zero_stage, precision.bf16, version("fmmeta"), version("torch")]
    return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


MAX_ATTEMPTS = 100  # at one outer step
LOCK_S, LAST_LOCK_S = 2.0, 120.0  # timeouts of the folder's lock: at an outer step, and at the end of the run


class ElasticSchedule(StaticSchedule):
    """Static shares or claimed tasks, among the groups that are members at an outer step."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.config, self.log = run.config, run.progress.notice
        if self.config.task_schedule == "dynamic":
            self.episodes = ClaimedEpisodes
        self.cross = cast(ElasticCommunicator, run.ranks.cross)
        self.cross.waited = run.stage.leave_out
        self.membership: Membership | None = None
        self.lock: Any = None
        self.refusal = ""  # of the lock, which is tried at every step
        self.over = run.view.writes = False
        self.quorum_step: int | None = None  # the outer step of the last quorum
        self.began_step: float | None = None  # the first attempt at this outer step
        self.lost: PeerLost | None = None  # by a claim
        self.retries, self.lost_s = 0, 0.0

    def begin_step(self) -> OpenStep | None:
        self.form_until_complete()
        if self.run.state.outer_step == self.config.outer_steps:
            return None  # the other groups have finished the run meanwhile
        return super().begin_step()

    def passes(self, number: int, size: int) -> Iterator[list[TaskRun]]:
        try:
            yield from super().passes(number, size)
        except PeerLost as lost:
            self.lost = lost

    def update(self, number: int) -> Outcome:
        """A step that a group has left, or during which one was lost, is attempted again by the others."""
        self.settle()
        if self.left_tasks:
            self.run.stop.requested = True
            return Outcome.STOP
        try:
            if self.lost is not None:
                raise self.lost
            return self.reduce()
        except PeerLost as lost:
            self.form_again(lost)
            return Outcome.STOP

    def form_until_complete(self) -> None:
        """`form`, again and again where a group is lost meanwhile."""
        while True:
            try:
                return self.form()
            except PeerLost as lost:
                self.form_again(lost)

    def form(self) -> None:
        """Form the groups of this outer step; receive the donor's state if this group needs it.

        Raises `PeerLost`. Collective: all groups.
        """
        run = self.run
        wait = partial(run.stage.begin, "waiting for the other groups")
        wait()
        self.began_step, step = self.began_step or time.monotonic(), run.state.outer_step
        members = self.cross.form(step, LIGHTHOUSE_S, wait)  # the lighthouse answers meanwhile
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
        if members.needs_state(members.here):
            self.forget_tasks()  # they were of another theta
        if any(members.needs_state(number) for number in range(len(groups))):
            transfer_state(run, self.cross, members, self.log)
            step = run.state.outer_step
            self.cross.attempt, self.cross.computed_by = (step, self.cross.connection), donor.computed_by
            if run.view.writes:
                run.logger.write_pending_lines(run.view)
        for member in groups if not donor.fresh else ():
            if member.fresh:
                run.state.goodput.count_start(member.began, run.ranks.world.size)
        self.cross.fresh, self.quorum_step = False, step
        self.cross.bytes_sent = 0  # bytes of a lost attempt and of the transfer do not count
        if members.restarted or self.retries:
            self.feed.restart(run.state.tasks)
            if isinstance(self.feed, ClaimedEpisodes):
                self.share_finished_tasks(self.feed)
            self.lost_s = time.monotonic() - self.began_step
        every = self.config.check_replicas_steps
        if members.restarted or (every and step % every == 0):
            check_replicas(run.ranks, run.theta, f"after outer step {step}", run.worker.params.replicated)
        if members.writer == members.here and not run.view.writes:
            self._become_writer(0.0 if self.refusal else LOCK_S)
        self.membership = members
        if members.restarted:
            noun, labels = "group" if len(groups) == 1 else "groups", ", ".join(one.label for one in groups)
            self.log(f"outer step {run.state.outer_step + 1}: {len(groups)} {noun} ({labels})")

    def share_finished_tasks(self, feed: ClaimedEpisodes) -> None:
        """Begin the claims of a quorum: which tasks of the outer step its groups have finished before.

        If two groups have finished the same task, the sum of the second one is dropped. Raises `PeerLost`.
        Collective: all groups.
        """
        cross, taken = self.cross, set[int]()
        feed.claims = TaskClaims(cross.own, cross.counters(), lambda ask: in_thread(ask).result(CLAIM_S))
        for group, slots in enumerate(cross.gather(feed.finished)):
            if taken.isdisjoint(slots):
                taken.update(slots)
            elif group == cross.rank:
                self.forget_tasks()
        feed.finished_before = taken
        if taken:
            step = self.run.state.outer_step + 1
            self.log(f"outer step {step}: {len(taken)} of its tasks are finished, and are kept")

    def forget_tasks(self) -> None:
        """Drop the gradients of the tasks that this group has finished in this outer step. Local."""
        self.is_open = False
        self.run.state.updates.meta.clear()
        self.feed.finished, self.feed.errors = [], []

    def form_again(self, lost: PeerLost) -> None:
        """Prepare another attempt at this outer step. Raises `MachineFault` after too many. Local."""
        self.retries, self.lost = self.retries + 1, None
        step = self.run.state.outer_step + 1
        if self.retries > MAX_ATTEMPTS:
            raise MachineFault(
                f"outer step {step} was attempted {MAX_ATTEMPTS} times in vain ({lost}); look at the network"
                " between the groups"
            ) from None
        self.log(f"outer step {step} is attempted again: a group is lost ({lost})")
        self.cross.disconnect()
        if not (self.is_open and self.feed.keeps_finished):
            self.forget_tasks()  # else the sum of finished tasks is complete, and is kept

    def check_task_count(self, tasks: int) -> None:
        wanted = self.run.schedule.tasks_per_step
        if tasks != wanted:
            raise MachineFault(
                f"{tasks} tasks were learned from in an outer step of {wanted}: the groups disagree which"
                " groups take part"
            )

    def numbers(self) -> dict[str, Any]:
        """The next step counts from zero."""
        values = {
            "groups": self.cross.size,
            "tasks": self.metrics.tasks,
            "retries": self.retries,
            "lost_seconds": round(self.lost_s, 3),
        }
        self.began_step, self.retries, self.lost_s = None, 0, 0.0
        return values

    def compare_theta(self) -> None:
        """The quorum compares it: only one group saves."""

    def newer_than(self, refused: Path) -> Path:
        return newest_complete(self.run.folder, self.run.ranks.world)[0]

    def finish(self) -> None:
        """All outer steps are done: agree which group writes the model. Collective: all groups."""
        run, last = self.run, self.config.outer_steps
        while run.state.outer_step == last and self.quorum_step != last and not self.over:
            self.form_until_complete()
        members = self.membership
        if self.over:
            self.log("the run is finished; nothing is left to do")
        elif members and members.writer == members.here and not (run.view.writes or run.stop.requested):
            self._become_writer(LAST_LOCK_S)

    def leave(self) -> None:
        self.cross.leave()

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()

    def _become_writer(self, timeout_s: float) -> None:
        """Lock the folder and open the files of the run; a locked folder is retried at the next step.

        Collective: group.
        """
        run, world = self.run, self.run.ranks.world
        first, finished = run.ranks.first, False
        try:
            with world.raise_on_all("locking the folder"):
                if first:
                    self.lock = lock_folder(run.folder, timeout_s, quiet=True)
                    if self.lock.warning:
                        self.log(self.lock.warning)
        except UsageError as refusal:
            if timeout_s == LAST_LOCK_S:
                raise
            if str(refusal) != self.refusal:
                self.log(f"cannot write yet: {refusal}")
            self.refusal = str(refusal)
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
        run.view.writes = self.cross.writes = True
        self.log(f"this group writes the files of the run, from outer step {run.state.outer_step + 1} on")
        run.logger.write_pending_lines(run.view)
