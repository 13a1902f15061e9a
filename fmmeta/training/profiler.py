"""Where the time of one outer step goes: a trace for Perfetto or chrome://tracing, and a table of shares.

For that one step the profiler wraps the worker's verbs from outside and unwraps them after it; other steps
are not affected. The time of a nested region counts for the inner one only, so that the shares add up to the
step. On a GPU the end of each region waits for the device; otherwise a region would measure how long queueing
takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fmmeta.meta.meta_gradient import MetaGradient
from fmmeta.parallel.process_groups import pending_type
from fmmeta.training.callbacks import Callback

if TYPE_CHECKING:
    from fmmeta.training.loop import Run
    from fmmeta.training.step_metrics import Outcome

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


class Profiler(Callback):
    """Profiles the outer step `STEP` after the first of this process, or the last (trace-rankN.json)."""

    def __init__(self, enabled: bool) -> None:
        self.chosen: int | None = None
        self.enabled, self.wrapped = enabled, contextlib.ExitStack()
        self.clock: Clock | None = None
        self.facts: dict[str, Any] | None = None

    def on_train_begin(self, run: Run) -> None:
        if self.enabled:
            self.chosen = min(run.state.outer_step + STEP, run.config.outer_steps - 1)

    def on_step_begin(self, run: Run) -> None:
        """Wrap the verbs of `run` if this step is the chosen one."""
        if run.state.outer_step != self.chosen or self.clock is not None:
            return
        device = run.ranks.device
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
        self._wrap(run, self.clock)

    def on_step_end(self, run: Run, outcome: Outcome) -> None:
        """Unwrap, write the trace, gather the shares. Collective: world, after the chosen step."""
        if self.clock is None or self.facts is not None:
            return
        self.wrapped.close()
        seconds = self.clock.stop()
        self.trace.stop()
        world, file = run.ranks.world, run.folder / f"trace-rank{run.ranks.layout.launch.global_rank}.json"
        with world.raise_on_all("writing the trace"):
            self.trace.export_chrome_trace(str(file))
        by_rank = [json.loads(part) for part in world.gather_bytes(json.dumps(seconds).encode())]
        mean = {kind: sum(each[kind] for each in by_rank) / len(by_rank) for kind in KINDS}
        self.facts = {
            "outer_step": run.state.outer_step,
            "seconds": mean,
            "seconds_by_rank": by_rank,
            "trace": file.name,
        }

    def close(self, run: Run) -> None:
        """Leave nothing wrapped, however the step ended."""
        self.wrapped.close()

    def show(self, table: Callable[[str, list[str], list[list[str]]], None]) -> dict[str, Any]:
        """Show the table (seconds are means over the ranks); return the entry of run.json, if any."""
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

    def _wrap(self, run: Run, clock: Clock) -> None:
        worker: Any = run.worker
        model = getattr(worker, "model", None) or worker.stage
        model = getattr(model, "module", model)
        parts = {
            "data": [(run.feed, "episodes")],
            "forward": [(model, "forward"), (worker, "_loss")],
            "backward": [(torch.autograd, "backward"), (worker, "backward")],
            "role switch": [
                (worker, name) for name in ("apply", "read", "write", "gradient", "displacement")
            ],
            "outer step": [(run.state.outer, "step"), (MetaGradient, "add")],
        }
        if worker.group.size > 1:  # operations of a communicator of one rank return at once
            parts["group communication"] = [(worker.group, "sum_"), (pending_type(), "wait")]
        if run.ranks.world.size > 1:
            parts["cross-group"] = [
                (run.state.updates, "move"),
                (run.ranks.world, "sum_"),
                (run.ranks.world, "gather_bytes"),
            ]
        for kind, places in parts.items():
            for owner, name in places:
                if hasattr(
                    owner, name
                ):  # a pipeline's worker has neither _loss nor backward: its engine runs both
                    self.wrapped.enter_context(wrapped(owner, name, clock, kind))


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
