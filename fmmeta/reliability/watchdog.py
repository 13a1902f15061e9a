"""A watchdog: names the ranks that keep a stage from ending, and ends the job instead of waiting for them.

Each rank has two threads: one sends heartbeats (heartbeats.py), one compares the time of its rank's stage
with its bound. When the stage takes longer:

    set `gathering`: this rank reads the heartbeats of all ranks, and adds its stack to its heartbeat
    -> the lowest rank that is not silent logs the silent ranks and where the others are
    -> frozen processes of the node are killed -> every rank exits with code 70

The threads need no answer from the ranks they watch, and this module's thread none from the store.
"""

import json
import os
import platform
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fmmeta.common.errors import EXIT_FAULT
from fmmeta.parallel.layout import link_of
from fmmeta.parallel.process_groups import ProcessGroups, SharedStore
from fmmeta.reliability.heartbeats import TICK_S, Heartbeats, stack_of
from fmmeta.reliability.signals import Launcher, Signals, process_stat
from fmmeta.reliability.stage import MARGIN_S, WatchdogStage

SHOWN = 8  # ranks with equal heartbeats that are named one by one


@contextmanager
def watching(
    stage: WatchdogStage, store: SharedStore | None, ranks: ProcessGroups, signals: Signals
) -> Iterator[None]:
    """Watch the ranks while the block runs. store: None in a launch of one process. Collective: world."""
    processes = [json.loads(part) for part in ranks.world.gather_bytes(json.dumps(this_process()).encode())]
    watchdog = Watchdog(stage, store, processes, ranks.layout.launch.global_rank, signals)
    ranks.world.barrier()
    try:
        yield
    except Exception:
        if watchdog.is_ending:  # other ranks have exited: this one exits with the same code
            time.sleep(MARGIN_S)
        raise
    finally:
        watchdog.close()


class Watchdog:
    """Ends this process when its stage exceeds its bound. processes: `this_process()` of every rank."""

    def __init__(
        self,
        stage: WatchdogStage,
        store: SharedStore | None,
        processes: Sequence[dict[str, Any]],
        rank: int,
        signals: Signals,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.stage, self.processes, self.rank = stage, processes, rank
        self.signals, self.leave, self.launcher = signals, leave, Launcher(len(processes) > 1)
        self.closed, self.is_ending = threading.Event(), False
        self.heartbeats = store and Heartbeats(stage, store, rank, len(processes), signals)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        if self.heartbeats:
            self.heartbeats.closed.set()

    def _watch(self) -> None:
        launched = True
        while not self.closed.wait(TICK_S):
            if launched and self.launcher.has_exited:
                launched = False
                self.signals.receive("the end of the launcher", 128 + signal.SIGTERM)
            if self.stage.is_overdue:
                self.is_ending = True
                self._gather_heartbeats()
                if self.stage.is_overdue and not self.closed.is_set():
                    self._end()
                    return
                self.is_ending = False

    def _gather_heartbeats(self) -> None:
        """Learn which ranks are silent; the stage may end meanwhile."""
        if self.heartbeats:
            self.heartbeats.gathering.set()
            time.sleep(2 * self.heartbeats.silent_after_s)
            if not self.stage.is_overdue:
                self.heartbeats.gathering.clear()

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
        self.leave(EXIT_FAULT)

    def _report(self, silent: Sequence[int], latest: Sequence[dict[str, Any]]) -> list[str]:
        """Lines that name the silent ranks and where the others are; ranks at one place share a line."""
        stage = self.stage
        lines = [
            f"{stage.name} has taken {stage.elapsed_s:.0f} s, and its bound is {stage.bound_s:.0f} s"
            " (--step_timeout); the job ends, the same command resumes from the last checkpoint"
        ]
        for rank in silent:
            phase = latest[rank].get("phase", "no known stage") if latest else "no known stage"
            lines.append(
                f"{self._name(rank)} is silent (stopped, frozen or cut off), last heartbeat in {phase}"
            )
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
    """Start time of a process and the PID namespace in which it has this number; empty if there is none."""
    start_time = process_stat(pid)[1][19:20]
    return [*start_time, link_of("/proc/self/ns/pid")] if start_time else []
