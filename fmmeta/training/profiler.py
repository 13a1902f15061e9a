"""Where the time of one outer step goes: a trace for Perfetto or chrome://tracing, and a table of shares.

For that one step the verbs are wrapped from outside, and unwrapped after it; nothing else in fmmeta knows of
it, and every other step runs as if this file did not exist. A region's time is its own: what a region inside
it takes counts there, so that the shares add up to the step. On a GPU each region's end waits for the device,
without which a region would be the time that it takes to queue its work.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fmmeta.meta.outer_step import MetaGradient
from fmmeta.parallel.process_groups import ProcessGroups, pending_type

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
STEP = 2  # outer steps before the one that is looked at: they warm up


class Clock:
    """Seconds by kind, of the thread that made it.

    Regions lie in each other; the innermost one's time it is.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.thread = now, threading.get_ident()
        self.seconds: dict[str, float] = {kind: 0.0 for kind in KINDS}
        self.open, self.since = ["other"], now()

    @contextlib.contextmanager
    def region(self, kind: str) -> Iterator[None]:
        if threading.get_ident() != self.thread:  # a save in the background
            yield
            return
        self._settle()
        self.open.append(kind)
        try:
            with torch.profiler.record_function(kind):
                yield
        finally:
            self._settle()
            self.open.pop()

    def stop(self) -> dict[str, float]:
        self._settle()
        return self.seconds

    def _settle(self) -> None:
        now = self.now()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now


class Profiler:
    """Of the outer step `STEP` after `first`, or the last one. folder: where trace-rankN.json goes."""

    def __init__(self, folder: Path, ranks: ProcessGroups, first: int, outer_steps: int) -> None:
        self.file = folder / f"trace-rank{ranks.layout.launch.global_rank}.json"
        self.ranks, self.chosen = ranks, min(first + STEP, outer_steps - 1)
        self.wrapped = contextlib.ExitStack()
        self.facts: dict[str, Any] | None = None

    def begin(self, outer_step: int, run: Any) -> None:
        """Wrap the verbs of `run` if it is this step that is looked at."""
        if outer_step != self.chosen:
            return
        device = self.ranks.device
        on_gpu = device.type == "cuda"

        def now() -> float:
            if on_gpu:
                torch.cuda.synchronize(device)
            return time.perf_counter()

        kinds = [
            torch.profiler.ProfilerActivity.CPU,
            *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else []),
        ]
        self.trace = torch.profiler.profile(activities=kinds)
        self.trace.start()
        self.clock = Clock(now)
        self._wrap(run)

    def end(self, outer_step: int) -> None:
        """Unwrap, write the trace, tell the shares. Collective: world, after the chosen step."""
        if outer_step != self.chosen:
            return
        self.wrapped.close()
        seconds = self.clock.stop()
        self.trace.stop()
        with self.ranks.world.raise_on_all("writing the trace"):
            self.trace.export_chrome_trace(str(self.file))
        told = [json.loads(part) for part in self.ranks.world.gather_bytes(json.dumps(seconds).encode())]
        mean = {kind: sum(each[kind] for each in told) / len(told) for kind in KINDS}
        self.facts = {
            "outer_step": outer_step + 1,
            "seconds": mean,
            "seconds_by_rank": told,
            "trace": self.file.name,
        }

    def close(self) -> None:
        """Leave nothing wrapped, however the step ended."""
        self.wrapped.close()

    def told(self, table: Callable[[str, list[str], list[list[str]]], None]) -> dict[str, Any]:
        """Show the table (seconds are means over the ranks) and return what run.json holds of it; neither
        without a profile.
        """
        if self.facts is None:
            return {}
        whole = sum(self.facts["seconds"].values())
        rows = [
            [kind, f"{seconds:.3f}", f"{100 * seconds / whole:.1f}"]
            for kind, seconds in self.facts["seconds"].items()
        ]
        table(
            f"where the time of outer step {self.facts['outer_step']} went", ["", "seconds", "share %"], rows
        )
        return {"profile": self.facts}

    def _wrap(self, run: Any) -> None:
        worker, model = run.worker, getattr(run.worker, "model", None) or run.worker.stage
        model = getattr(model, "module", model)
        parts = {
            "data": [(run.feed, "episodes")],
            "forward": [(model, "forward"), (worker, "_loss")],
            "backward": [(torch.autograd, "backward"), (worker, "backward")],
            "role switch": [
                (worker, name)
                for name in (
                    "apply",
                    "read",
                    "write",
                    "gradient",
                    "add_gradient",
                    "travelled",
                    "add_travelled",
                )
            ],
            "outer step": [(run.state.outer, "step"), (MetaGradient, "add")],
        }
        if worker.group.size > 1:  # verbs of a communicator of one rank return at once
            parts["group communication"] = [(worker.group, "sum_"), (pending_type(), "wait")]
        if self.ranks.world.size > 1:
            parts["cross-group"] = [
                (run.state.updates, "move"),
                (self.ranks.world, "sum_"),
                (self.ranks.world, "gather_bytes"),
            ]
        for kind, places in parts.items():
            for owner, name in places:
                if hasattr(
                    owner, name
                ):  # a pipeline's worker has neither _loss nor backward: its engine runs both
                    self.wrapped.enter_context(wrapped(owner, name, self.clock, kind))


@contextlib.contextmanager
def wrapped(owner: Any, name: str, clock: Clock, kind: str) -> Iterator[None]:
    """`owner.name` in a region of its own.

    What waits inside a region of the cross-group communication belongs to that.
    """
    own = vars(owner).get(
        name
    )  # as it is stored: what getattr gives of a compiled class is bound to nothing when it is put back
    original = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        with clock.region(
            "cross-group" if clock.open[-1] == "cross-group" and kind == "group communication" else kind
        ):
            return original(*arguments, **named)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
