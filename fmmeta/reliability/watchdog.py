"""A watchdog: names the ranks that keep a stage from ending, and ends the job instead of waiting for them.

Each rank has two threads: one sends heartbeats, one compares the time of its rank's stage
with its bound. When the stage takes longer:

    set `gathering`: this rank reads the heartbeats of all ranks, and adds its stack to its heartbeat
    -> the lowest rank that is not silent logs the silent ranks and where the others are
    -> frozen processes of the node are killed -> every rank exits with code 70

The threads need no answer from the ranks they watch, and this module's thread none from the store.

They also end the job when a process of this node has died, or a communicator has lost its connection to a
rank: no collective can end then. A rank that fails by itself tells the others first, as of a stop signal.
"""

import json
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fmmeta.common.errors import EXIT_FAULT, MachineFault, PeerError, PeerLost, Stopped, UsageError
from fmmeta.common.processes import native_thread
from fmmeta.parallel.layout import link_of
from fmmeta.parallel.process_groups import Communicator, ProcessGroups, SharedStore
from fmmeta.reliability.signals import Launcher, Signals, process_stat

FIRST_S, FLOOR_S, TIMES = 1800.0, 300.0, 10.0
MARGIN_S = 60.0  # that communicators wait longer than the watchdog
LOST_S = 10.0  # in which the main thread finds out by itself that a rank has died
FAILURE = "the failure of rank "
LOST = re.compile(
    "onnection (was likely )?(closed|reset)|Broken pipe|remote process exited|failed to recv, got 0"
)
"""In errors of gloo, of torch's store and of NCCL, where another process has died."""


class WatchdogStage:
    """A stage has one bound: an outer step, a save, an episode of an evaluation. Its phase is for messages,
    as are the `passes` of a task, 0 in other phases.

    An outer step may take `step_timeout` seconds; without it TIMES the slowest so far, FLOOR_S at least, and
    FIRST_S before one was measured. Any other stage may take FIRST_S, TIMES the slowest step or step_timeout,
    whichever is longest. communicators: those that wait for other groups; they wait MARGIN_S longer.
    checkpoints: lists those that are complete, the newest last.
    """

    def __init__(
        self,
        step_timeout: float | None,
        communicators: Sequence[Communicator] = (),
        checkpoints: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.step_timeout, self.communicators, self.checkpoints = step_timeout, communicators, checkpoints
        self.slowest_step_s = 0.0
        self.began = time.monotonic()
        self.name, self.phase, self.passes, self.is_step = "starting", "", 0, False

    def begin(self, name: str, phase: str = "", is_step: bool = False) -> None:
        """Begin a stage. is_step: whether the bound of an outer step holds."""
        self.began, self.name, self.is_step = time.monotonic(), name, is_step
        self.begin_phase(phase)
        for communicator in self.communicators:
            communicator.set_timeout(self.bound_s + MARGIN_S)

    def begin_phase(self, phase: str, passes: int = 0) -> None:
        """Begin a phase of the stage. passes: 1 for a task, whose later passes `count_pass` counts."""
        self.phase, self.passes = phase, passes

    def count_pass(self) -> None:
        """Count another pass of a task. Local."""
        self.passes += 1

    def leave_out(self, seconds: float) -> None:
        """Do not count `seconds` that have passed: this process, or another group, was suspended."""
        self.began = min(time.monotonic(), self.began + seconds)

    def record_step(self) -> None:
        """Record how long the outer step that is this stage has taken."""
        self.slowest_step_s = max(self.slowest_step_s, self.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def bound_s(self) -> float:
        slowest = TIMES * self.slowest_step_s
        if not self.is_step:
            return max(FIRST_S, slowest, self.step_timeout or 0)
        return self.step_timeout or (max(FLOOR_S, slowest) if slowest else FIRST_S)

    @property
    def is_overdue(self) -> bool:
        return self.elapsed_s > self.bound_s

    @property
    def text(self) -> str:
        parts = self.name, self.phase, f"pass {self.passes}" if self.passes else ""
        return ", ".join(filter(None, parts))


BEAT_S, TICK_S, GRACE_S = 5.0, 0.5, 3.0
SUSPENDED_S = 5.0  # between two ticks; less is a busy machine


class Heartbeats:
    """A thread that writes this rank's heartbeat every few seconds and passes stop signals to all ranks.

    While `gathering` is set it also writes the stack of the main thread, and reads the heartbeats of all
    ranks into `latest`: phase and stack by rank, {} for a rank that has written none. The store may keep this
    thread waiting, so no other thread uses it.
    """

    def __init__(
        self,
        stage: WatchdogStage,
        store: SharedStore,
        rank: int,
        size: int,
        signals: Signals,
        closed: threading.Event,
        host_runs: Callable[[], bool] = lambda: True,
    ) -> None:
        self.host_runs = host_runs
        self.stage, self.store, self.rank, self.size, self.signals = stage, store, rank, size, signals
        self.gathering, self.closed = threading.Event(), closed
        self.latest: list[dict[str, Any]] = []  # empty until the store has answered
        self.changed_at = [0.0] * size  # when the heartbeat of each rank last changed
        self.count, self.written_at = 0, 0.0
        store.set(f"beat/{rank}", "{}")
        self.thread = native_thread("heartbeats", self._beat_until_closed)

    @property
    def every_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(BEAT_S, self.stage.bound_s / 4)

    @property
    def silent_after_s(self) -> float:
        """Seconds without a new heartbeat after which a rank counts as silent."""
        return self.every_s + GRACE_S

    def silent(self) -> list[int]:
        """Other ranks without a new heartbeat; rank 0, which may host the store, if the store has not
        answered.
        """
        if not self.latest:
            return [0]
        now = time.monotonic()
        late = [rank for rank, at in enumerate(self.changed_at) if now - at > self.silent_after_s]
        return [rank for rank in late if rank != self.rank]

    def _beat_until_closed(self) -> None:
        passed_on = False
        # an error: the host of the store has exited; communicators raise in all ranks that wait for it
        with suppress(Exception):
            while not self.closed.wait(TICK_S) and self.host_runs():  # torch logs a stack if it does not
                passed_on = passed_on or self._pass_on_stop_signal()
                if self.gathering.is_set() or time.monotonic() - self.written_at >= self.every_s:
                    self._write()
                if self.gathering.is_set():
                    self._read()

    def _pass_on_stop_signal(self) -> bool:
        """Write this rank's stop signal into the store, or take over another's; whether there is one."""
        if self.signals.asked:
            self.store.set("stop", self.signals.asked)
        elif name := self.store.get("stop"):
            self.signals.adopt(name)
        return bool(self.signals.asked)

    def _write(self) -> None:
        self.count, self.written_at = self.count + 1, time.monotonic()
        beat = {"count": self.count, "phase": self.stage.text}
        if self.gathering.is_set():
            beat["stack"] = stack_of(threading.main_thread().ident)
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self) -> None:
        keys, now = [f"beat/{rank}" for rank in range(self.size)], time.monotonic()
        latest = [json.loads(text or "{}") for text in self.store.get_existing(keys)]
        beats = zip(self.changed_at, self.latest or [None] * self.size, latest, strict=True)
        self.changed_at = [at if beat == old else now for at, old, beat in beats]
        self.latest = latest  # last: the watchdog's thread reads `changed_at` if there are any


def stack_of(thread: int | None) -> str:
    """Where a thread of this process is, innermost frame first, in one line; empty if there is no such
    thread.
    """
    frame = sys._current_frames().get(thread or 0)
    found = traceback.extract_stack(frame)[::-1] if frame else []
    return " < ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in found[:12])


SHOWN = 8  # ranks with equal heartbeats that are named one by one


@contextmanager
def watching(
    stage: WatchdogStage, store: SharedStore | None, ranks: ProcessGroups, signals: Signals
) -> Iterator[None]:
    """Watch the ranks while the block runs. store: None in a launch of one process. Collective: world."""
    processes = ranks.world.gather(this_process())
    watchdog = Watchdog(stage, store, processes, ranks.layout.launch.global_rank, signals)
    ranks.world.barrier()
    try:
        yield
    except Exception as error:
        is_lost = isinstance(error, PeerLost) or LOST.search(str(error))
        watchdog.is_cut_off = bool(store and is_lost)
        if watchdog.is_ending or watchdog.is_cut_off:  # this rank exits with the same code as the others
            time.sleep(MARGIN_S)
        of_all = isinstance(error, (UsageError, PeerError, MachineFault, Stopped))
        if store and not of_all and signals.state == "running":
            signals.adopt(f"{FAILURE}{watchdog.rank}")
            time.sleep(4 * TICK_S)  # until the other ranks have read it
        raise
    finally:
        watchdog.closed.set()
        if watchdog.heartbeats:
            watchdog.heartbeats.thread.join(GRACE_S)  # longer only if the store does not answer


class Watchdog:
    """Ends this process when its stage exceeds its bound, or when another rank has died.

    processes: `this_process()` of every rank. is_cut_off: a communicator has lost its connection to a rank.
    """

    def __init__(
        self,
        stage: WatchdogStage,
        store: SharedStore | None,
        processes: Sequence[dict[str, Any]],
        rank: int,
        signals: Signals,
    ) -> None:
        self.stage, self.processes, self.rank = stage, processes, rank
        self.signals, self.launcher = signals, Launcher(len(processes) > 1)
        self.closed, self.is_ending, self.is_cut_off = threading.Event(), False, False
        self.visible = [other for other in range(len(processes)) if other != rank and self._runs(other)]
        self.lost, self.lost_at = list[int](), 0.0  # the first ranks that died, and when one was missed
        self.heartbeats = store and Heartbeats(
            stage,
            store,
            rank,
            len(processes),
            signals,
            self.closed,
            lambda: 0 not in self.visible or self._runs(0),
        )
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        while not self._wait_for_tick():
            if self.launcher.has_exited:
                self.launcher.watched = False
                self.signals.receive("the end of the launcher", 128 + signal.SIGTERM)
            if self._has_lost_a_rank():
                self._end_without_it()
            if self.stage.is_overdue:
                self.is_ending = True
                if self.heartbeats:  # learn which ranks are silent; the stage may end meanwhile
                    self.heartbeats.gathering.set()
                    time.sleep(2 * self.heartbeats.silent_after_s)
                    if not self.stage.is_overdue:
                        self.heartbeats.gathering.clear()
                if self.stage.is_overdue and not self.closed.is_set():
                    self._end()
                    return
                self.is_ending = False

    def _wait_for_tick(self) -> bool:
        """Wait for the next look at the stage; whether the watchdog is closed.

        A much longer wait means that this process was suspended: that time is not its stage's. Where one of
        several ranks is suspended, the others end the job.
        """
        before = time.monotonic()
        closed = self.closed.wait(TICK_S)
        now = time.monotonic()
        if now - before > SUSPENDED_S:
            self.stage.leave_out(now - before)
        return closed

    def _runs(self, rank: int) -> bool:
        """Whether the process of a rank can be seen running; False on other nodes, and without /proc."""
        return identity_of(self.processes[rank]["pid"]) == (self.processes[rank]["identity"] or None)

    def _has_lost_a_rank(self) -> bool:
        """Whether the job cannot continue because a rank has died.

        It waits for the main thread to notice, and after that for the process to end.
        """
        self.lost = self.lost or [rank for rank in self.visible if not self._runs(rank)]
        if not self.lost and not self.is_cut_off:
            return False
        self.lost_at = self.lost_at or time.monotonic()
        waited = time.monotonic() - self.lost_at
        if self.is_cut_off:
            return bool(self.lost) or waited > GRACE_S
        return self.stage.is_step and waited > LOST_S  # elsewhere the ranks may end one by one

    def _end_without_it(self) -> None:
        """Log which rank has died, and exit once the other ranks of the node have seen the same."""
        code, last = EXIT_FAULT, self.stage.checkpoints()
        hidden = set(range(len(self.processes))) - {self.rank, *self.visible}
        nodes = " or ".join(sorted({self.processes[rank]["node"] for rank in hidden}))
        who = " and ".join(map(self._name, self.lost)) or f"a rank on {nodes or 'this node'}"
        what = f"{who} {'have' if len(self.lost) > 1 else 'has'} died (killed, or out of memory)"
        if not self.lost:
            what += ", or its network is down"
        if self.signals.asked.startswith(FAILURE):
            code, what = PeerError.exit_code, f"{self.signals.asked} ends the job; its log has the traceback"
        resumes = f"resumes from {last[-1]}" if last else "starts over, as there is no checkpoint"
        print(f"fmmeta: error: {what}; the same command {resumes}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
        os._exit(code)

    def _end(self) -> None:
        """Log what is known, kill frozen processes of this node, and exit."""
        silent = self.heartbeats.silent() if self.heartbeats else []
        latest = self.heartbeats.latest if self.heartbeats else []
        node = platform.node()
        frozen = [rank for rank in silent if self.processes[rank]["node"] == node]
        answering = [rank for rank in range(len(self.processes)) if rank not in silent]
        here = [rank for rank in answering if self.processes[rank]["node"] == node]
        if self.rank == min(answering if latest else here, default=self.rank):
            lines = self._report(silent, latest)
            print("\n".join(f"fmmeta: watchdog: {line}" for line in lines), file=sys.stderr, flush=True)
        time.sleep(0 if self.rank else 1)  # rank 0 hosts the store of the others
        if self.rank == min(here, default=self.rank):
            for process in (self.processes[rank] for rank in frozen):
                if process["identity"] and identity_of(process["pid"]) == process["identity"]:
                    os.kill(process["pid"], signal.SIGKILL)  # a stopped process cannot end itself
        os._exit(EXIT_FAULT)

    def _report(self, silent: Sequence[int], latest: Sequence[dict[str, Any]]) -> list[str]:
        """Lines that name the silent ranks and where the others are; ranks at one place share a line."""
        stage = self.stage
        lines = [
            f"{stage.name} has taken {stage.elapsed_s:.0f} s, and its bound is {stage.bound_s:.0f} s"
            " (--step_timeout); the job ends, the same command resumes from the last checkpoint, or starts"
            " over if there is none"
        ]
        lines += [
            f"{self._name(rank)} is silent (stopped, frozen or cut off), last heartbeat in"
            f" {latest[rank].get('phase', 'no known stage') if latest else 'no known stage'}"
            for rank in silent
        ]
        own = {"phase": stage.text, "stack": stack_of(threading.main_thread().ident)}
        places = defaultdict[str, list[int]](list)
        for rank, beat in enumerate(latest) if latest else [(self.rank, own)]:
            if rank not in silent:
                where = f"{beat.get('phase', 'unknown')}; stack: {beat.get('stack', 'unknown')}"
                places[where].append(rank)
        for where, ranks in places.items():
            more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
            several = f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more}"
            lines.append(f"{self._name(ranks[0]) if len(ranks) == 1 else several}: in {where}")
        return lines

    def _name(self, rank: int) -> str:
        process = self.processes[rank]
        return f"rank {rank} (process {process['pid']} on {process['node']})"


def this_process() -> dict[str, Any]:
    """What other ranks need to name this process, or to kill it and no other."""
    return {"pid": os.getpid(), "identity": identity_of(os.getpid()), "node": platform.node()}


def identity_of(pid: int) -> list[str]:
    """Start time of a process and the PID namespace in which it has this number; empty if there is none, or
    if it has exited and its parent has not asked for the exit code.
    """
    fields = process_stat(pid)[1]
    return [fields[19], link_of("/proc/self/ns/pid")] if fields and fields[0] != "Z" else []
