"""Episodes of a run, ready before they are needed: drawn, transformed and cut into micro-batches by loader processes.

    tasks in the order of the schedule --> DataLoader (num_workers processes, each prefetch_factor ahead) --> Loaded

A task that cannot be had does not disturb the others: it comes out as `Loaded` with an error. I/O errors are tried
again first. A loader process that dies is replaced, and its death is reported with its cause. Nothing here raises
because of data, and nothing communicates: what to do about a bad task is for all ranks to decide (feed.py).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.utils.data

from fmmeta.config import UsageError
from fmmeta.safety import one_line
from fmmeta.tasks.batch import Batches, Dealer, Example
from fmmeta.tasks.schedule import Task
from fmmeta.tasks.source import Draw, Episode, TaskSource

OWN, SHM = "fmmeta-loader-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
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


Prompted = Callable[[Sequence[Example], Sequence[Example]], list[Example]]
"""From support and query rows to query rows with the support set before them, for in-context learning."""


@dataclass
class Load:
    """From a task to its micro-batches; picklable. `transform` turns draws into episodes (default: their tokens)."""

    source: TaskSource
    dealer: Dealer
    transform: Callable[[Draw], Episode] | None = None
    most_classes: int = 0
    prompt: Prompted | None = None
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
        support, query = (self.dealer.deal(rows, classes) for rows in (episode.support, episode.query))
        return Batches(support, query, self.dealer.deal(self.prompt(episode.support, episode.query)) if self.prompt else [])


class Tasks(torch.utils.data.Dataset[str]):
    """What DataLoader asks for; an index is a task, and what comes back is a file in memory that holds the episode.

    Files, because a process may be killed at any moment: a tensor on its way would be lost with the process that sent
    it, and half a large message would let the reader wait for ever. A name is written to the pipe whole or not at all.
    """

    def __init__(self, load: Load, folder: str) -> None:
        self.load, self.folder = load, folder

    def __getitem__(self, task: Task) -> str:  # type: ignore[override]
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            pickle.dump(self.load(task), file)
        return file.name


def receive(name: str) -> Loaded:
    """Take an episode that a process of ours has left."""
    file = Path(name)
    loaded = pickle.loads(file.read_bytes())
    file.unlink()
    return loaded


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
        self.stream: Iterator[str] | None = None
        self.folder: str | None = None  # of episodes on their way
        self.deaths: list[str] = []  # causes, since they were last asked for
        self.wait_s = self.load_s = 0.0
        self.rounds, self.warm = 0, (0.0, 0.0)  # outer steps, and what the first of them took: it warms up

    def fetch(self, tasks: Sequence[Task]) -> list[Loaded]:
        """The next episodes. `wait_s` and `load_s` add up what this process waited, and what loading cost."""
        began = time.perf_counter()
        loaded = [self._next(task) for task in tasks]
        if self.pin:
            loaded = [one.pin_memory() for one in loaded]
        self.wait_s += time.perf_counter() - began
        self.load_s += sum(one.seconds for one in loaded)
        return loaded

    def decide(self, step_seconds: float) -> int | None:
        """`auto`: after a few outer steps, which took `step_seconds` in all, say how many processes it takes, and use them."""
        self.rounds += 1
        if self.rounds == 1:
            self.warm = self.load_s, step_seconds
        if not self.auto or self.rounds < MEASURED:
            return None
        self.auto = False
        load, step = self.load_s - self.warm[0], step_seconds - self.warm[1]
        if load > WAIT_SHARE * step:
            self.num_workers = min(self.budget, math.ceil(2 * load / max(step - load, 1e-9)))
        return self.num_workers

    def close(self) -> None:
        """End the loader processes."""
        stream, self.stream = self.stream, None
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown:
            shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _next(self, task: Task) -> Loaded:
        if not self.num_workers:
            return self.load(task)
        for deaths in range(DEATHS):
            try:
                if self.stream is None:
                    self.stream = self._start(task)
                loaded = receive(next(self.stream))
                assert loaded.task == task, f"asked for {task}, but the loader is at {loaded.task}"
                return loaded
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                self.deaths.append(cause_of_death(self.stream, error))
                self.close()
                self.load.sleep(BACK_OFF_S[min(deaths, len(BACK_OFF_S) - 1)])
        return Loaded(task, None, f"task {task.name}: loader processes died {DEATHS} times in a row, last: {self.deaths[-1]}")

    def _start(self, task: Task) -> Iterator[str]:
        self.folder = tempfile.mkdtemp(prefix=f"{OWN}{os.getpid()}-", dir=SHM)  # for this user alone (0700)
        clear_up()
        context = multiprocessing.get_context("forkserver")  # a fork of this process would copy its threads' locks
        context.set_forkserver_preload(["fmmeta.tasks.loader"])
        sampler: Any = self.upcoming(task)
        loader = torch.utils.data.DataLoader(
            Tasks(self.load, self.folder), batch_size=None, sampler=sampler, num_workers=self.num_workers,
            prefetch_factor=self.prefetch, persistent_workers=True, multiprocessing_context=context, worker_init_fn=quiet,
        )  # fmt: skip
        return iter(loader)


def clear_up() -> None:
    """Remove what trainers of this user that were killed have left in memory."""
    for folder in Path(SHM or tempfile.gettempdir()).glob(f"{OWN}*-*"):
        pid = folder.name.removeprefix(OWN).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def quiet(worker: int) -> None:
    """A loader process leaves Ctrl-C to the process that it works for, and computes on one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def cause_of_death(stream: Any, error: RuntimeError) -> str:
    """How the processes of a stream ended, by number or signal; what DataLoader says where that is not known."""
    deadline = time.monotonic() + 1.0
    while True:
        ended = {worker.pid: worker.exitcode for worker in getattr(stream, "_workers", ()) if worker.exitcode}
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    said = [f"process {pid} " + (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")
            for pid, code in ended.items()]  # fmt: skip
    return ", ".join(said) or one_line(error)
