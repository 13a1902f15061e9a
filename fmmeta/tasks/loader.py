"""Prefetches episodes: loader processes sample, transform and split them into micro-batches.

    tasks in the order of the schedule --> DataLoader (num_workers processes, each prefetch_factor ahead)
        --> LoadResult

A task that fails to load becomes a `LoadResult` with an error and does not affect other tasks. I/O errors are
retried first. A loader process that dies is replaced; the task that it was preparing gets the error. A task
that takes longer than --load_timeout gets one too: a signal ends it where it loads, and a loader process that
does not react to the signal is killed.
Where groups claim tasks (--task_schedule dynamic), the stream is that of the tasks that this group may claim
next: an episode whose task another group has claimed is dropped, and a claimed task that is not in the stream
is loaded by the training process. Without shared memory the training process loads the episodes. No function
here raises or communicates: all ranks decide together how to handle a bad task (training/episodes.py).

Episodes pass from loader processes to their trainer as files of a folder in shared memory:

    <pid>_<seed>    an episode that loader process <pid> is preparing or writing
    <seed>          a complete episode

If a loader process dies, <pid>_<seed> names the episode it was preparing. A trainer holds the lock of its
folder until it ends, so that a folder with a free lock is left over, in every PID namespace.
"""

import fcntl
import io
import itertools
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch.utils.data
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fmmeta.common.errors import UsageError, one_line
from fmmeta.common.processes import MAIN, TimedOut, hidden_main_module, keep_output, time_limit
from fmmeta.tasks.batching import Batcher, Episode
from fmmeta.tasks.schedule.meta_batches import Schedule, Task, claim_order
from fmmeta.tasks.sources.base import Draw, EpisodeTransform, TaskSource, transformed


class TaskSampler(Sampler[Task]):
    """The tasks of one group, outer step after outer step, endless.

    first: the outer step to begin with.
    """

    def __init__(self, schedule: Schedule, num_groups: int = 1, group_index: int = 0, first: int = 0) -> None:
        self.schedule, self.first = schedule, first
        self.num_groups, self.group_index = num_groups, group_index

    def __iter__(self) -> Iterator[Task]:
        for outer_step in itertools.count(self.first):
            yield from self.schedule.share(outer_step, self.num_groups, self.group_index)


PREFIX, SHM = "fmmeta-loader-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

Seed = tuple[int, ...]  # of a task: no other task of the run has it


def root() -> Path:
    return Path(SHM or tempfile.gettempdir())


class EpisodeFolder:
    """A new folder for this user alone (0700), locked until `close` or the end of this process.

    Raises `OSError`.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root()))
            with suppress(FileNotFoundError):  # another process found it before it was locked, and removed it
                self.lock = os.open(self.path, os.O_RDONLY)
                with suppress(OSError):  # a file system without locks: no process can take it for stale
                    fcntl.flock(self.lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self.lock)

    def preparing(self) -> list[tuple[int, Seed]]:
        """The loader processes that prepare a task, or ended meanwhile, each with its task."""
        names = (file.name.split("_") for file in self.path.glob("*_*"))
        return [(int(pid), tuple(map(int, seed.split(".")))) for pid, seed in names]

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def stale() -> Iterator[Path]:
    """Folders of this user whose trainers have ended; each is locked until the next one is requested."""
    for path in root().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process has just removed it, or it is another user's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its trainer lives
                    yield path
            finally:
                os.close(lock)


def remove_stale() -> None:
    """Remove what trainers of this user that were killed have left in memory."""
    for path in stale():
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class EpisodeFile:
    """What a loader process returns: the file in memory that holds a `LoadResult`, or "" and the number of
    the error that writing met.
    """

    path: str
    errno: int = 0

    def take(self) -> "LoadResult":
        """Read and remove the file, in the trainer. Raises `OSError` where it is not there."""
        if not self.path:
            raise OSError(self.errno, os.strerror(self.errno))
        content = Path(self.path).read_bytes()
        os.unlink(self.path)
        return pickle.loads(content)

    def pin_memory(self) -> "LoadResult | EpisodeFile":
        """The result in pinned memory; DataLoader calls this in its thread. An error is left for `take`."""
        try:
            return self.take().pin_memory()
        except OSError as error:
            return EpisodeFile("", error.errno or 0)


BACK_OFF_S = (0.1, 0.5, 2.0)  # waits before I/O is tried again
# a task that ends so many loader processes is given up; so are loader processes that fail so often without
# one
DEATHS = 3
SHORT_MIB = 64  # free shared memory that may be the cause where loader processes fail
POLL_S = 1.0  # between looks at loader processes that prepare a task for too long
GRACE_S = 2.0  # after load_timeout, in which a loader process ends the task itself
WAIT_SHARE = 0.01  # of an outer step: `auto` starts loader processes if loading takes more
START_S = 5.0  # of a core, that a loader process takes to import what it runs: shorter loading stays here
MEASURED = 3  # outer steps loaded in the training process before `auto` decides


@dataclass(frozen=True)
class LoadResult:
    """An episode as this rank's micro-batches, or an error. crash: an error that is not caused by data."""

    task: Task
    batches: Episode | None
    error: str = ""
    crash: bool = False
    seconds: float = 0.0  # that loading took, wherever it was done

    def pin_memory(self) -> "LoadResult":
        return replace(self, batches=self.batches and self.batches.pin_memory())


@dataclass
class LoadEpisode:
    """From a task to its micro-batches; picklable.

    transforms: of the episode that the source draws, in order, to one of examples. timeout_s: of a task.
    """

    source: TaskSource
    batcher: Batcher
    transforms: Sequence[EpisodeTransform] = (Draw.episode,)
    sleep: Callable[[float], None] = time.sleep
    timeout_s: float | None = None

    def __call__(self, task: Task) -> LoadResult:
        began, batches, text, crash = time.perf_counter(), None, "", False
        try:
            with time_limit(self.timeout_s):
                batches = self.batches(task)
        except UsageError as error:
            text = str(error)
        except TimedOut:
            text = self.late
        except Exception as error:  # it must reach the ranks that wait, not end this one
            text, crash = f"{type(error).__name__}: {error}", not isinstance(error, OSError)
            if crash:
                traceback.print_exc()  # the ranks end with one line
        return LoadResult(task, batches, text, crash, time.perf_counter() - began)

    @property
    def late(self) -> str:
        """The error of a task that is still loading after `timeout_s`."""
        return f"it was still loading after load_timeout={self.timeout_s:g} s"

    def batches(self, task: Task) -> Episode:
        for wait_s in (*BACK_OFF_S, None):
            try:
                draw = self.source.draw(task)
                rows = transformed(draw, self.transforms)
                break
            except OSError:
                if wait_s is None:
                    raise
                self.sleep(wait_s)
        encoder, notices = draw.store.encoder, draw.notices
        if encoder is not None and (message := encoder.cut_message([*rows.support, *rows.query])):
            notices = (*notices, message)
        return replace(self.batcher.episode(rows), notices=notices)


class PreparedTasks(torch.utils.data.Dataset[EpisodeFile]):
    """Prepares episodes in loader processes. An index is a task.

    Files, because a process may be killed at any moment: a tensor in transit would be lost with the process
    that sent it, and half a large message would let the reader wait for ever. A name is written to the pipe
    whole or not at all.
    """

    def __init__(self, load: Callable[[Task], Any], folder: EpisodeFolder) -> None:
        self.load, self.path = load, folder.path

    def __getitem__(self, task: Task) -> EpisodeFile:  # type: ignore[override]
        name = ".".join(map(str, task.seed))
        part = self.path / f"{os.getpid()}_{name}"
        try:
            with part.open("wb") as file:
                pickle.dump(self.load(task), file)
            return EpisodeFile(str(part.rename(self.path / name)))
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            return EpisodeFile("", error.errno or 0)


class LoaderIterator(_MultiProcessingDataLoaderIter):
    """An iterator of DataLoader. One that could not be made, such as where /dev/shm is full, lacks attributes
    that its end looks for; Python would print a traceback for each.
    """

    def __del__(self) -> None:
        with suppress(AttributeError):
            super().__del__()


class EpisodeLoader:
    """Returns the episodes of this rank in the order of `task_stream`: from a task to it and all later ones.

    num_workers: a number, or "auto". budget: most loader processes of this rank that `auto` may start.
    claiming_groups: how many groups claim tasks of the stream, so that this rank gets one of so many; 0: the
    stream has the tasks of this group alone, all of which are fetched.
    """

    def __init__(
        self,
        load: LoadEpisode,
        task_stream: Callable[[Task], Iterable[Task]],
        num_workers: str = "0",
        prefetch_factor: int = 4,
        pin: bool = False,
        budget: int | None = None,
        claiming_groups: int = 0,
    ) -> None:
        self.claiming_groups = claiming_groups
        self.sent = deque[Task]()  # in the order of the stream, those whose episodes have not been received
        self.load, self.task_stream, self.prefetch_factor, self.pin = load, task_stream, prefetch_factor, pin
        self.auto = num_workers == "auto"
        self.num_workers = 0 if self.auto else int(num_workers)
        self.budget = (os.cpu_count() or 1) - 1 if budget is None else budget
        self.stream: Iterator[EpisodeFile | LoadResult] | None = None
        self.folder: EpisodeFolder | None = None  # of episodes on their way
        self.warnings: list[str] = []  # about loader processes, since they were last asked for
        self.full = False  # whether `warnings` has told that episodes cannot be written
        self.deaths: Counter[Seed] = Counter()  # of loader processes, by the task that they were preparing
        self.preparing: dict[tuple[int, Seed], float] = {}  # process and task of each, and since when
        self.late: set[Seed] = set()  # tasks whose loader process was killed because they took too long
        self.failures, self.cause = 0, ""  # of loader processes in a row that no task caused; the last of any
        self.wait_s = self.load_s = 0.0
        self.rounds, self.warm = 0, (0.0, 0.0)  # outer steps, and what the first of them took: it warms up

    def fetch(self, tasks: Sequence[Task]) -> list[LoadResult]:
        """The next episodes. `wait_s` and `load_s` add up what this process waited, and what loading cost."""
        began = time.perf_counter()
        loaded = [self._fetch_one(task) for task in tasks]
        self.wait_s += time.perf_counter() - began
        self.load_s += sum(one.seconds for one in loaded)
        return loaded

    def choose_num_workers(self, step_seconds: float, steps_left: float) -> int | None:
        """`auto`: after a few outer steps, which took `step_seconds` in all, say how many processes it takes
        for the steps that are left, and use them.
        """
        self.rounds += 1
        if self.rounds == 1:
            self.warm = self.load_s, step_seconds
        if not self.auto or self.rounds < MEASURED:
            return None
        self.auto = False
        load, step = self.load_s - self.warm[0], step_seconds - self.warm[1]
        if load > WAIT_SHARE * step and load * steps_left > START_S * (MEASURED - 1):
            prepared = 2 * load * max(1, self.claiming_groups)
            self.num_workers = min(self.budget, math.ceil(prepared / max(step - load, 1e-9)))
        return self.num_workers

    def close(self) -> None:
        """End the loader processes."""
        stream, self.stream, folder, self.folder = self.stream, None, self.folder, None
        if hasattr(stream, "_shutdown_workers"):
            stream._shutdown_workers()  # type: ignore[union-attr]
        if folder:
            folder.close()

    def _fetch_one(self, task: Task) -> LoadResult:
        try:
            return self._next(task)
        except Exception as error:  # it must reach the ranks that wait, not end this one
            return LoadResult(task, None, f"{type(error).__name__}: {one_line(error)}", crash=True)

    def _next(self, task: Task) -> LoadResult:
        while self.num_workers and self.deaths[task.seed] < DEATHS:
            try:
                if self.stream is None:
                    self.stream = self._start(task)
                self._drop_before(task)
                if self.claiming_groups and task not in self.sent:
                    if not self.deaths[task.seed]:
                        break
                    self.close()  # it has ended a loader process: this process must not load it
                    continue
                found = next(self.stream)
                self.sent.popleft()
            except (RuntimeError, OSError, EOFError) as error:
                if "timed out" in str(error) and self.load.timeout_s:
                    self._end_late_processes(self.load.timeout_s + GRACE_S)
                else:
                    self._recover(error)
                continue
            try:
                loaded = found.take() if isinstance(found, EpisodeFile) else found
            except OSError as error:
                self._not_passed(error)
                break
            assert loaded.task == task, f"asked for {task}, but the loader is at {loaded.task}"
            self.failures = 0
            return loaded
        if not self.deaths[task.seed]:
            loaded = self.load(task)
            return loaded.pin_memory() if self.pin else loaded
        if task.seed in self.late:
            return LoadResult(task, None, self.load.late)
        return LoadResult(
            task,
            None,
            f"task {task.name}: loader processes died {self.deaths[task.seed]} times while they prepared it,"
            f" last: {self.cause}",
        )

    def _drop_before(self, task: Task) -> None:
        """Drop the episodes of the stream before `task`, which other groups have claimed."""
        while self.claiming_groups and self.sent and claim_order(self.sent[0]) < claim_order(task):
            assert self.stream is not None
            found = next(self.stream)
            self.sent.popleft()
            if isinstance(found, EpisodeFile) and found.path:
                with suppress(OSError):
                    os.unlink(found.path)

    def _stream_from(self, task: Task) -> Iterator[Task]:
        """The stream from `task` on, without tasks that have ended too many loader processes."""
        self.sent.clear()
        for one in self.task_stream(task):
            if self.deaths[one.seed] < DEATHS:
                self.sent.append(one)
                yield one

    def _recover(self, error: Exception) -> None:
        """End the loader processes after a failure, to start others; after DEATHS failures in a row start no
        more.
        """
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise error
        ended = exit_codes(self.stream)
        blamed = [seed for pid, seed in self.folder.preparing() if pid in ended] if self.folder else []
        self.deaths.update(blamed)
        self.failures += not blamed
        ends = [
            f"process {pid} exited with code {code}"
            if code >= 0
            else f"process {pid} was killed by {signal.Signals(-code).name}"
            for pid, code in ended.items()
        ]
        self.cause = ", ".join(ends) or one_line(error)
        if isinstance(error, RuntimeError):
            self.warnings.append(f"a loader process died and was replaced: {self.cause}")
        if self.failures >= DEATHS:
            self.warnings.append(
                f"num_workers={self.num_workers}: loader processes failed {self.failures} times in a row,"
                f" last: {self.cause}; the training process loads all episodes; {remedy()}"
            )
            self.num_workers = 0
        self.close()
        tries = max([self.failures, *(self.deaths[seed] for seed in blamed)])
        self.load.sleep(BACK_OFF_S[min(tries, len(BACK_OFF_S)) - 1])

    def _end_late_processes(self, limit_s: float) -> None:
        """Kill loader processes that have prepared a task for longer than `limit_s`, and start others; these
        tasks are given up.
        """
        now = time.monotonic()
        found = self.folder.preparing() if self.folder else []
        self.preparing = {pair: self.preparing.get(pair, now) for pair in found}
        late = [pair for pair, began in self.preparing.items() if now - began > limit_s]
        for pid, seed in late:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.late.add(seed)
            self.deaths[seed] = DEATHS
        if late:
            self.warnings.append("a loader process did not react to load_timeout; it was killed and replaced")
            self.close()

    def _not_passed(self, error: OSError) -> None:
        """Load in this process an episode that a loader process could not write or whose file was removed."""
        if self.folder and not self.folder.path.exists():
            self.warnings.append(
                f"{self.folder.path} was removed while it was in use; the loader processes start again"
            )
            self.close()
        elif not self.full:
            self.full = True
            self.warnings.append(
                f"num_workers={self.num_workers}: loader processes cannot write to {root()}"
                f" ({error.strerror}); the training process loads missing episodes; {remedy()}"
            )

    def _start(self, task: Task) -> Iterator[EpisodeFile | LoadResult]:
        self.folder = EpisodeFolder()
        remove_stale()
        # a fork of this process would copy its threads' locks
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fmmeta.tasks.fork_server"])
        # SLURM sends SIGUSR1 to all processes of a step, a terminal that is lost SIGHUP; the trainer stops
        # the run, and the processes that are started here inherit that these signals are blocked
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGHUP})
        try:
            resource_tracker.ensure_running()
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        loader = torch.utils.data.DataLoader(
            PreparedTasks(self.load, self.folder),
            batch_size=None,
            sampler=self._stream_from(task),  # type: ignore[arg-type]
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=True,
            pin_memory=self.pin,
            timeout=POLL_S if self.load.timeout_s else 0,
            multiprocessing_context=context,
            worker_init_fn=serve,
            generator=torch.Generator(),  # DataLoader draws a seed; not from the trainer's generator
        )
        with hidden_main_module():
            return LoaderIterator(loader)


ADDRESS = re.compile(r" at 0x\w+")  # in the text of an object


class Sent(pickle.Pickler):
    """Refuses objects of the main module, which loader processes do not import."""

    def reducer_override(self, found: Any) -> Any:
        if getattr(found, "__module__", None) in MAIN:
            name = getattr(found, "__qualname__", type(found).__qualname__)
            raise UsageError(
                f"{name} of the main module, which they do not import; move it to another module"
            )
        return NotImplemented


def check_sent(parts: Sequence[Any], num_workers: str) -> None:
    """Raise `UsageError` if loader processes could not receive the parts of a `LoadEpisode` with code or
    objects of the user.
    """
    try:
        Sent(io.BytesIO()).dump(parts)
    except Exception as error:  # pickling runs code of the object
        own = isinstance(error, UsageError)
        text = str(error) if own else f"an object ({ADDRESS.sub('', one_line(error))}); define it in a module"
        raise UsageError(
            f"num_workers={num_workers}: loader processes cannot receive {text}, or use num_workers=0"
        ) from None


def serve(worker: int) -> None:
    """Set up a loader process: ignore Ctrl-C and lost output, use one thread, end when the trainer ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_output("stdout", "stderr")
    torch.set_num_threads(1)
    threading.Thread(target=end_with_trainer, daemon=True).start()


def end_with_trainer() -> None:
    """Also below a fork server that was started by others (fork_server.py): DataLoader watches the fork
    server alone.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()  # on a pipe that only the trainer holds open: the fork server never had that end
        os._exit(1)


def exit_codes(stream: Any) -> dict[int, int]:
    """Of the loader processes of a stream that have ended, by number; it waits a moment for the first."""
    deadline = time.monotonic() + 1.0
    while True:
        workers = getattr(stream, "_workers", ())
        ended = {worker.pid: worker.exitcode for worker in workers if worker.exitcode is not None}
        if ended or not workers or time.monotonic() > deadline:
            return ended
        time.sleep(0.02)


def remedy() -> str:
    """What to do where loader processes cannot work; about shared memory only if it is short."""
    free = shutil.disk_usage(root()).free // 2**20
    if free >= SHORT_MIB:
        return "use --num_workers 0"
    return (
        f"{root()} has {free} MiB free: free room there, start the container with --shm-size=8g, or use"
        " --num_workers 0"
    )
