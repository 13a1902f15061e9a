"""Where the time of one outer step goes: a trace for Perfetto or chrome://tracing, and a table of shares.

For that one step the profiler wraps methods of the worker, and unwraps them after it; other steps are not
affected. The time of a nested region counts for the inner one only, so that the shares add up to the step. On
a GPU the end of each region waits for the device; otherwise a region would measure how long queueing takes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fmmeta.meta.outer_step import Outcome
from fmmeta.meta.parameters import MetaGradient
from fmmeta.parallel.process_groups import PendingWork
from fmmeta.training.callbacks import Callback, RunView
from fmmeta.training.episodes import EpisodeReader

KINDS = (
    "data",
    "forward",
    "backward",
    "group communication",
    "role switch",
    "cross-group",
    "outer step",
    "other",
)
STEP = 2  # outer steps of this process before the profiled one: they warm up


class Clock:
    """Seconds by kind, of the thread that created it; time counts for the innermost open region."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.thread = now, threading.get_ident()
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.open, self.since = ["other"], now()

    @contextlib.contextmanager
    def region(self, kind: str) -> Iterator[None]:
        """Count the time of the block for `kind`. A wait inside cross-group communication belongs to that."""
        if threading.get_ident() != self.thread:  # a save in the background
            yield
            return
        if kind == "group communication" and self.open[-1] == "cross-group":
            kind = "cross-group"
        self.stop()
        self.open.append(kind)
        try:
            with torch.profiler.record_function(kind):
                yield
        finally:
            self.stop()
            self.open.pop()

    def stop(self) -> dict[str, float]:
        """Count the time until now; return all seconds."""
        now = self.now()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now
        return self.seconds


class Profiler(Callback):
    """Profiles the outer step `STEP` after the first of this process, or the last (trace-rankN.json)."""

    def __init__(self) -> None:
        self.wrapped, self.facts = contextlib.ExitStack(), dict[str, Any]()
        self.clock: Clock | None = None

    def on_train_begin(self, run: RunView) -> None:
        self.first = run.state.outer_step

    def on_step_begin(self, run: RunView) -> None:
        """Wrap methods if this step is the chosen one."""
        chosen = min(self.first + STEP, run.config.outer_steps - 1)
        if not run.config.profile or run.state.outer_step != chosen or self.clock is not None:
            return
        on_gpu, activity = run.ranks.device.type == "cuda", torch.profiler.ProfilerActivity

        def now() -> float:
            if on_gpu:
                torch.cuda.synchronize(run.ranks.device)
            return time.perf_counter()

        self.trace = torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * on_gpu])
        self.trace.start()
        self.clock = Clock(now)
        for kind, owner, names in regions(run):
            for name in names:
                if hasattr(owner, name):  # a pipeline's worker has neither _loss nor backward
                    self.wrapped.enter_context(wrapped(owner, name, self.clock, kind))

    def on_step_end(self, run: RunView, outcome: Outcome) -> None:
        """Unwrap, write the trace, gather the shares. Collective: world, after the chosen step."""
        if self.clock is None or self.facts:
            return
        self.wrapped.close()
        seconds = self.clock.stop()
        self.trace.stop()
        world, file = run.ranks.world, run.folder / f"trace-rank{run.ranks.layout.launch.global_rank}.json"
        with world.raise_on_all("writing the trace"):
            self.trace.export_chrome_trace(str(file))
        by_rank = world.gather(seconds)
        self.facts = {
            "outer_step": run.state.outer_step,
            "seconds": {kind: sum(each[kind] for each in by_rank) / len(by_rank) for kind in KINDS},
            "seconds_by_rank": by_rank,
            "trace": file.name,
        }

    def close(self, run: RunView) -> None:
        """Unwrap, however the step ended."""
        self.wrapped.close()

    def show(self, table: Callable[[str, list[str], list[list[str]]], None]) -> dict[str, Any]:
        """Show the table (seconds are means over the ranks); return the entry of run.json, if any."""
        if not self.facts:
            return {}
        seconds = self.facts["seconds"]
        whole = sum(seconds.values())
        table(
            f"where the time of outer step {self.facts['outer_step']} went",
            ["", "seconds", "share %"],
            [[kind, f"{one:.3f}", f"{100 * one / whole:.1f}"] for kind, one in seconds.items()],
        )
        return {"profile": self.facts}


def regions(run: RunView) -> list[tuple[str, Any, list[str]]]:
    """Kind of time, and the methods of an object whose time it is."""
    worker: Any = run.worker
    model = getattr(worker, "model", None) or worker.stage
    found = [
        ("data", EpisodeReader, ["read"]),
        ("forward", getattr(model, "module", model), ["forward"]),
        ("forward", worker, ["_loss"]),
        ("backward", torch.autograd, ["backward", "grad"]),
        ("backward", worker, ["backward"]),
        ("role switch", worker, ["apply", "read", "write", "gradient", "displacement"]),
        ("outer step", run.state.outer, ["step"]),
        ("outer step", MetaGradient, ["add"]),
    ]
    if worker.group.size > 1:  # methods of a communicator of one rank return at once
        found += [
            ("group communication", worker.group, ["sum_"]),
            ("group communication", PendingWork, ["wait"]),
        ]
    if run.ranks.world.size > 1:
        found += [
            ("cross-group", run.state.updates, ["step"]),
            ("cross-group", run.ranks.world, ["sum_", "gather_bytes"]),
        ]
    return found


def wrapped(owner: Any, name: str, clock: Clock, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Count the time of `owner.name` for `kind` while the block runs."""
    return mock.patch.object(owner, name, clock.region(kind)(getattr(owner, name)))
