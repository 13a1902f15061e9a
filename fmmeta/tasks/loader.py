"""Episodes of a run, ready before they are needed: drawn, transformed and cut into micro-batches by loader processes.

    tasks in the order of the schedule --> DataLoader (num_workers processes, each prefetch_factor ahead) --> Loaded

A task that cannot be had does not disturb the others: it comes out as `Loaded` with an error. I/O errors are tried
again first. A loader process that dies is replaced, and its death is reported with its cause. Nothing here raises
because of data, and nothing communicates: what to do about a bad task is for all ranks to decide (train.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.utils.data

from fmmeta.config import UsageError
from fmmeta.tasks.batch import Batches, Dealer
from fmmeta.tasks.schedule import Task
from fmmeta.tasks.source import Draw, Episode, TaskSource

BACK_OFF_S = (0.1, 0.5, 2.0)  # waits before I/O is tried again
DEATHS = 3  # deaths of loader processes in a row, without an episode between them, that are put up with
WAIT_SHARE = 0.01  # of an outer step: `auto` starts loader processes if loading takes more
MEASURED = 3  # outer steps loaded in the training process before `auto` decides


@dataclass(frozen=True)
class Loaded:
    """An episode as this rank's micro-batches, or why there is none. crash: an error that is nobody's data."""

    task: Task
    batches: Batches | None
    error: str = ""
    crash: bool = False
    seconds: float = 0.0  # that loading took, wherever it was done

    def pin_memory(self) -> Loaded:
        return replace(self, batches=self.batches and self.batches.pin_memory())


@dataclass
class Load:
    """From a task to its micro-batches; picklable. `transform` turns draws into episodes (default: their tokens)."""

    source: TaskSource
    dealer: Dealer
    transform: Callable[[Draw], Episode] | None = None
    most_classes: int = 0
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, task: Task) -> Loaded:
        began = time.perf_counter()
        try:
            loaded = Loaded(task, self.batches(task))
        except UsageError as error:
            loaded = Loaded(task, None, str(error))
        except Exception as error:  # it must reach the ranks that wait, not end this one
            loaded = Loaded(task, None, f"{type(error).__name__}: {error}", crash=not isinstance(error, OSError))
        return replace(loaded, seconds=time.perf_counter() - began)

    def batches(self, task: Task) -> Batches:
        for wait_s in (*BACK_OFF_S, None):
            try:
                draw = self.source.draw(task)
                episode = self.transform(draw) if self.transform else draw.episode()
                break
            except OSError:
                if wait_s is None:
                    raise
                self.sleep(wait_s)
        classes = len(episode.classes) if len(episode.classes) < self.most_classes else 0
        return Batches(self.dealer.deal(episode.support, classes), self.dealer.deal(episode.query, classes))


class Tasks(torch.utils.data.Dataset[Loaded]):
    """What DataLoader asks for; an index is a task."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def __getitem__(self, task: Task) -> Loaded:  # type: ignore[override]
        return self.load(task)


class EpisodeLoader:
    """Gives the episodes of this rank in the order of `upcoming`: from a task to it and all that follow it.

    num_workers: a number, or "auto". budget: most loader processes of this rank that `auto` may start.
    """

    def __init__(self, load: Load, upcoming: Callable[[Task], Iterable[Task]], num_workers: str = "0", prefetch_factor: int = 4,
                 pin: bool = False, budget: int | None = None) -> None:  # fmt: skip
        self.load, self.upcoming, self.prefetch, self.pin = load, upcoming, prefetch_factor, pin
        self.auto = num_workers == "auto"
        self.num_workers = 0 if self.auto else int(num_workers)
        self.budget = (os.cpu_count() or 1) - 1 if budget is None else budget
        self.stream: Iterator[Loaded] | None = None
        self.deaths: list[str] = []  # causes, since they were last asked for
        self.wait_s = self.load_s = 0.0
        self.rounds = 0

    def fetch(self, tasks: Sequence[Task]) -> list[Loaded]:
        """The next episodes. `wait_s` and `load_s` add up what this process waited, and what loading cost."""
        began = time.perf_counter()
        loaded = [self._next(task) for task in tasks]
        if self.pin and not self.num_workers:
            loaded = [one.pin_memory() for one in loaded]
        self.wait_s += time.perf_counter() - began
        self.load_s += sum(one.seconds for one in loaded)
        return loaded

    def decide(self, step_seconds: float) -> int | None:
        """`auto`: after a few outer steps, which took `step_seconds` in all, say how many processes it takes, and use them."""
        self.rounds += 1
        if not self.auto or self.rounds < MEASURED:
            return None
        self.auto = False
        if self.load_s <= WAIT_SHARE * step_seconds:
            return 0
        compute = max(step_seconds - self.load_s, 1e-9)
        self.num_workers = max(0, min(self.budget, math.ceil(2 * self.load_s / compute)))
        return self.num_workers

    def close(self) -> None:
        """End the loader processes."""
        stream, self.stream = self.stream, None
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown:
            shutdown()

    def _next(self, task: Task) -> Loaded:
        if not self.num_workers:
            return self.load(task)
        for deaths in range(DEATHS):
            try:
                self.stream = self.stream or self._start(task)
                loaded = next(self.stream)
                assert loaded.task == task, f"asked for {task}, but the loader is at {loaded.task}"
                return loaded
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                self.deaths.append(" ".join(str(error).split()))
                self.close()
                self.load.sleep(BACK_OFF_S[min(deaths, len(BACK_OFF_S) - 1)])
        return Loaded(task, None, f"task {task.name}: loader processes died {DEATHS} times in a row, last: {self.deaths[-1]}")

    def _start(self, task: Task) -> Iterator[Loaded]:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")  # a fork of this process would copy its threads' locks
        context.set_forkserver_preload(["fmmeta.tasks.loader"])
        sampler: Any = self.upcoming(task)
        loader = torch.utils.data.DataLoader(
            Tasks(self.load), batch_size=None, sampler=sampler, num_workers=self.num_workers, prefetch_factor=self.prefetch,
            pin_memory=self.pin, persistent_workers=True, multiprocessing_context=context, worker_init_fn=quiet,
        )  # fmt: skip
        return iter(loader)


def quiet(worker: int) -> None:
    """A loader process leaves Ctrl-C to the process that it works for, and computes on one thread."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
