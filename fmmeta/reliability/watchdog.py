"""A watchdog: names the ranks that keep an outer step from ending, and ends the job instead of waiting.

Each rank has two threads. The heartbeat thread writes the phase of the rank into the shared store every few
seconds and looks whether a rank was asked to stop. The watchdog thread compares the time of its own rank's
phase with its bound, and when a step takes longer:

    ask all ranks for a heartbeat with their stack -> compare the heartbeats of all ranks
    -> the lowest rank that still answers logs the silent ranks and where the others are
    -> frozen processes of the node are killed -> every rank leaves with exit code 70

The threads need no answer from the ranks they watch, and the watchdog thread none from the store.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fmmeta.parallel.nodes import link_of
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.rendezvous import SharedStore
from fmmeta.reliability.signals import EXIT_FAULT, Launcher, Signals, born

FIRST_S, FLOOR_S, TIMES = (
    1800.0,
    300.0,
    10.0,
)  # bound before a step is measured; least bound; times the slowest step
BEAT_S, TICK_S, GRACE_S = 5.0, 0.5, 3.0
MARGIN_S = 60.0  # that communicators wait longer than the watchdog
SHOWN = 8  # ranks that are named one by one


class WatchdogStage:
    """Where this rank is, told by the main thread in a few words, and how long it may stay there."""

    def __init__(self, step_timeout: float | None) -> None:
        self.step_timeout, self.slowest = step_timeout, 0.0
        self.began = time.monotonic()
        self.stage, self.at = "starting", ""

    def begin(self, stage: str) -> None:
        """Something that has to end within the bound begins: an outer step, a save, an episode of an
        evaluation.
        """
        self.began, self.stage, self.at = time.monotonic(), stage, ""

    def set_phase(self, phase: str) -> None:
        self.at = phase

    def record(self, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)

    @property
    def bound_s(self) -> float:
        """Seconds that a stage may take."""
        if not self.stage.startswith("outer step"):
            return max(FIRST_S, TIMES * self.slowest, self.step_timeout or 0)
        return self.step_timeout or (max(FLOOR_S, TIMES * self.slowest) if self.slowest else FIRST_S)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.began > self.bound_s

    @property
    def text(self) -> str:
        return f"{self.stage}, {self.at}" if self.at else self.stage


class Watchdog:
    """The two threads of a rank.

    `peers`: process, start time and node of every rank. board: None for a process alone.
    """

    def __init__(
        self,
        watch: WatchdogStage,
        board: SharedStore | None,
        peers: Sequence[dict[str, Any]],
        ranks: ProcessGroups,
        signals: Signals,
        launcher: Launcher,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.watch, self.board, self.peers, self.ranks = watch, board, peers, ranks
        self.signals, self.launcher, self.leave = signals, launcher, leave
        self.rank = ranks.layout.launch.global_rank
        self.main = threading.main_thread().ident
        self.closed, self.asked = threading.Event(), threading.Event()
        self.beats: list[str] = []  # of all ranks, as last read
        self.heard: list[float] = []  # when each of them last changed
        self.count, self.pinned = 0, 0.0

    @property
    def every_s(self) -> float:
        """Seconds between beats."""
        return min(BEAT_S, self.watch.bound_s / 4)

    def start(self) -> None:
        if self.board is not None:
            self.board.set(f"beat/{self.rank}", "")
        for target in (self._clock, self._herald) if self.board is not None else (self._clock,):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self.closed.set()

    def _herald(self) -> None:
        """Beats and notes of this rank, in a thread that the board may keep waiting."""
        assert self.board is not None
        told = False
        try:
            while not self.closed.wait(TICK_S):
                if self.signals.asked and not told:
                    self.board.set("stop", self.signals.asked)
                    told = True
                elif not told and (asked := self.board.get("stop")):
                    self.signals.asked = self.signals.asked or asked
                    self.signals.at = self.signals.at or time.monotonic()
                    told = True
                self._beat()
        except Exception:  # the keeper is gone; whoever waits for it will be told by their own communicators
            return

    def _beat(self) -> None:
        assert self.board is not None
        now = time.monotonic()
        if now - self.pinned >= self.every_s or self.asked.is_set():
            self.count, self.pinned = self.count + 1, now
            words = {"count": self.count, "words": self.watch.text}
            if self.asked.is_set():
                words["stack"] = stack_of(self.main)
            self.board.set(f"beat/{self.rank}", json.dumps(words))
        if self.asked.is_set():
            beats = self.board.get_existing([f"beat/{rank}" for rank in range(self.ranks.world.size)])
            self.heard = self.heard or [now] * len(beats)
            before = self.beats or beats
            self.heard = [
                now if beat != old else then
                for beat, old, then in zip(beats, before, self.heard, strict=True)
            ]
            self.beats = beats

    def _clock(self) -> None:
        told = False
        while not self.closed.wait(TICK_S):
            if not told and self.launcher.gone:
                told = True
                self.signals.receive("the end of the launcher", 128 + signal.SIGTERM)
            if self.watch.overdue:
                self._end()
                return

    def _end(self) -> None:
        """Say who and where, then leave."""
        watch, took = self.watch, time.monotonic() - self.watch.began
        self.asked.set()
        if self.board is not None:
            time.sleep(2 * (self.every_s + GRACE_S))
        if not watch.overdue or self.closed.is_set():  # it has ended in the meantime
            self.asked.clear()
            threading.Thread(target=self._clock, name="watchdog", daemon=True).start()
            return
        silent = self.silent()
        node = platform.node()
        here = [rank for rank, peer in enumerate(self.peers) if peer["node"] == node and rank not in silent]
        speaks = here if not self.beats else [rank for rank in range(len(self.peers)) if rank not in silent]
        if self.rank == min(speaks, default=self.rank):
            self.report(silent, took)
        time.sleep(0 if self.rank else 1)  # rank 0 keeps the board for the others
        if self.rank == min(here, default=self.rank):
            for rank in silent:
                peer = self.peers[rank]
                if peer["node"] == node and peer["born"] and identity_of(peer["pid"]) == peer["born"]:
                    os.kill(peer["pid"], signal.SIGKILL)  # a stopped process cannot end itself
        self.leave(EXIT_FAULT)

    def silent(self) -> list[int]:
        """Ranks whose beat has not changed while this one asked; the keeper of the board if nothing could be
        read.
        """
        if self.board is None:
            return []
        if not self.beats:
            return [0]
        patience = self.every_s + GRACE_S
        return [
            rank
            for rank, then in enumerate(self.heard)
            if rank != self.rank and time.monotonic() - then > patience
        ]

    def report(self, silent: Sequence[int], took: float) -> None:
        watch = self.watch
        bound = f"and its bound is {watch.bound_s:.0f} s (--step_timeout)"
        lines = [
            f"{watch.stage} has taken {took:.0f} s, {bound}; the job ends, the same command goes on from the"
            " last checkpoint"
        ]
        for rank in silent:
            known = json.loads(self.beats[rank] or "{}") if self.beats else {}
            last = f"last heard in {known['words']}" if "words" in known else "not heard of"
            lines.append(f"{self.name(rank)} is silent (stopped, frozen or cut off), {last}")
        others: dict[str, list[int]] = {}
        for rank, beat in enumerate(self.beats):
            if rank not in silent:
                told = json.loads(beat or "{}")
                others.setdefault(
                    f"{told.get('words', 'unknown')}; stack: {told.get('stack', 'unknown')}", []
                ).append(rank)
        if not self.beats:
            others[f"{watch.text}; stack: {stack_of(self.main)}"] = [self.rank]
        for where, named in others.items():
            who = (
                self.name(named[0])
                if len(named) == 1
                else f"ranks {', '.join(map(str, named[:SHOWN]))}"
                + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")
            )
            lines.append(f"{who}: in {where}")
        print("\n".join(f"fmmeta: watchdog: {line}" for line in lines), file=sys.stderr, flush=True)

    def name(self, rank: int) -> str:
        peer = self.peers[rank]
        return f"rank {rank} (process {peer['pid']} on {peer['node']})"


def myself() -> dict[str, Any]:
    """What the others have to know of this process."""
    return {"pid": os.getpid(), "born": identity_of(os.getpid()), "node": platform.node()}


def identity_of(pid: int) -> list[str]:
    """Start time of a process and the PID namespace in which it has this number; empty if there is none."""
    since = born(pid).split()[-1:]
    return [*since, link_of("/proc/self/ns/pid")] if since else []


def stack_of(thread: int | None) -> str:
    """Where a thread of this process is, innermost first, in one line."""
    frame = sys._current_frames().get(thread or 0)
    found = traceback.extract_stack(frame)[::-1] if frame else []
    return " < ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in found[:12])
