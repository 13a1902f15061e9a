"""Heartbeats: each rank writes its phase into the shared store, and learns which ranks are silent."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from fmmeta.parallel.process_groups import SharedStore
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.stage import WatchdogStage

BEAT_S, TICK_S, GRACE_S = 5.0, 0.5, 3.0


class Heartbeats:
    """A thread that writes this rank's heartbeat every few seconds and passes stop signals to all ranks.

    While `gathering` is set it also writes the stack of the main thread, and reads the heartbeats of all
    ranks into `latest`: phase and stack by rank, {} for a rank that has written none. The store may keep this
    thread waiting, so no other thread uses it.
    """

    def __init__(
        self, stage: WatchdogStage, store: SharedStore, rank: int, size: int, signals: Signals
    ) -> None:
        self.stage, self.store, self.rank, self.size, self.signals = stage, store, rank, size, signals
        self.gathering, self.closed = threading.Event(), threading.Event()
        self.latest: list[dict[str, Any]] = []  # empty until the store has answered
        self.changed_at: list[float] = []  # when the heartbeat of each rank last changed
        self.count, self.written_at = 0, 0.0
        store.set(f"beat/{rank}", "{}")
        threading.Thread(target=self._beat_until_closed, name="heartbeats", daemon=True).start()

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
        try:
            while not self.closed.wait(TICK_S):
                passed_on = passed_on or self._pass_on_stop_signal()
                if self.gathering.is_set() or time.monotonic() - self.written_at >= self.every_s:
                    self._write()
                if self.gathering.is_set():
                    self._read()
        except (
            Exception
        ):  # the host of the store has exited; communicators raise in all ranks that wait for it
            return

    def _pass_on_stop_signal(self) -> bool:
        """Write this rank's stop signal into the store, or take over another's; whether there is one."""
        if self.signals.asked:
            self.store.set("stop", self.signals.asked)
        elif name := self.store.get("stop"):
            self.signals.receive(name, 128 + signal.SIGTERM)
        return bool(self.signals.asked)

    def _write(self) -> None:
        self.count, self.written_at = self.count + 1, time.monotonic()
        beat = {"count": self.count, "phase": self.stage.text}
        if self.gathering.is_set():
            beat["stack"] = stack_of(threading.main_thread().ident)
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self) -> None:
        now, before = time.monotonic(), self.latest
        latest = [
            json.loads(text or "{}")
            for text in self.store.get_existing([f"beat/{rank}" for rank in range(self.size)])
        ]
        if not before:
            self.changed_at = [now] * self.size
        else:
            for rank, beat in enumerate(latest):
                if beat != before[rank]:
                    self.changed_at[rank] = now
        self.latest = latest


def stack_of(thread: int | None) -> str:
    """Where a thread of this process is, innermost frame first, in one line; empty if there is no such
    thread.
    """
    frame = sys._current_frames().get(thread or 0)
    found = traceback.extract_stack(frame)[::-1] if frame else []
    return " < ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in found[:12])
