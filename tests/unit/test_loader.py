"""Prefetched episodes: the same for any number of processes, after I/O errors and after dead processes."""

import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import TimedOut, time_limit
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.augment import reading
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.loader import (
    DEATHS,
    MEASURED,
    EpisodeFile,
    EpisodeLoader,
    LoadEpisode,
    LoadResult,
    TaskSampler,
)
from fmmeta.tasks.schedule.meta_batches import Schedule, Task, claim_order
from fmmeta.tasks.sources.base import Draw, TaskSource, transformed
from fmmeta.tasks.sources.load import load_sources
from harness.fork_server import ROOT, environment
from tests.support.episodes import same_episodes
from tests.support.loading import hang
from tests.support.messages import check_message
from tests.support.models import write_classes

TOKENIZER = byte_tokenizer()


class WrappedSource(TaskSource):
    """A source that draws from another one."""

    def part(self, chosen):
        return self.source.part(chosen)


class FailingSource(WrappedSource):
    """A source that fails for some items.

    failures: item -> the kind of failure and how often it happens (a file counts); ("wait", other) draws the
    item after `other` has killed a process.
    """

    def __init__(self, source: TaskSource, failures: dict[int, tuple[str, int]], folder: Path) -> None:
        self.source, self.items, self.failures, self.folder = source, source.items, failures, folder

    def draw(self, task: Task) -> Draw:
        what, times = self.failures.get(task.item, ("", 0))
        count = self.folder / f"{task.item}"
        done = len(count.read_text()) if count.exists() else 0
        if done < times or what == "wait":
            count.write_text("x" * (done + 1))
            if what == "wait":  # for the next death by item `times`
                other, deaths = self.folder / str(times), min(done + 1, DEATHS)
                while not other.exists() or len(other.read_text()) < deaths:
                    time.sleep(0.01)
                time.sleep(0.5 * (done < DEATHS))  # the trainer sees it
                return self.source.draw(task)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "exit":
                os._exit(0)
            if what == "hang":
                time.sleep(1000)
            raise {
                "io": OSError(5, "Input/output error", "a.jsonl"),
                "row": UsageError("a.jsonl:3 is bad; fix it"),
                "bug": ZeroDivisionError("division by zero"),
            }[what]
        return self.source.draw(task)


class KillingSource(WrappedSource):
    """A source that kills the loader process that receives it."""

    def __init__(self, source: TaskSource) -> None:
        self.source, self.items = source, source.items

    def draw(self, task: Task) -> Draw:
        return self.source.draw(task)

    def __reduce__(self):
        return kill_own_process, ()


def kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, a schedule over it, and its first twelve tasks."""
    path = write_classes(tmp_path_factory.mktemp("data") / "c.jsonl")
    config = Config(
        dataset=[str(path)],
        n_way=2,
        k_shot=1,
        num_query=1,
        example_transforms=["fmmeta.tasks.augment:swap_words"],
    )
    source = load_sources(config, TOKENIZER, lambda text: None).train
    schedule = Schedule(source.items, 3, 1)
    return (
        source,
        schedule,
        [task for step in range(4) for task in schedule.meta_batch(step)],
        reading(config, TOKENIZER),
    )


@pytest.fixture
def fast_polling(monkeypatch):
    """Check loader processes every 0.1 s instead of every 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


def upcoming(schedule: Schedule):
    def of(task: Task):
        stream = iter(TaskSampler(schedule, first=task.seed[2]))
        return (one for one in stream if one.seed >= task.seed)

    return of


@pytest.fixture
def loader_of(made):
    """loader_of(num_workers, source, sleeps, ...): makes a loader, which the test need not close."""
    loaders = []

    def make(num_workers="0", source=None, sleeps=None, stream=None, **how) -> EpisodeLoader:
        waited = [] if sleeps is None else sleeps
        load = LoadEpisode(source or made[0], Batcher(0), made[3], sleep=waited.append)
        loaders.append(EpisodeLoader(load, stream or upcoming(made[1]), num_workers, **how))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_number_of_processes_and_start_position_do_not_change_episodes(made, num_workers, loader_of):
    tasks = made[2]
    expected = loader_of().fetch(tasks)
    loader, later = loader_of(num_workers), loader_of(num_workers)
    assert same_episodes(loader.fetch(tasks[:5]) + loader.fetch(tasks[5:9]), expected[:9])
    assert same_episodes(later.fetch(tasks[7:]), expected[7:])
    assert loader.load_s > 0


@pytest.fixture
def claiming_loader(made, loader_of):
    """Makes a loader with a process whose stream is the queue of two groups, without the task `skipped`."""
    queue = sorted(made[2], key=claim_order)

    def make(source=None, skipped=-1) -> EpisodeLoader:
        def stream(task: Task):
            return (one for n, one in enumerate(queue) if n >= queue.index(task) and n != skipped)

        return loader_of("1", source, stream=stream, claiming_groups=2)

    return make


def test_episodes_of_other_groups_are_dropped_and_unprepared_ones_are_loaded_here(
    made, claiming_loader, loader_of
):
    queue = sorted(made[2], key=claim_order)
    claimed = [queue[n] for n in (0, 3, 4, 6, 11)]
    loader = claiming_loader(skipped=6)
    loaded = [one for task in claimed for one in loader.fetch([task])]
    assert same_episodes(loaded, loader_of().fetch(claimed))
    assert loader.folder is not None
    assert list(loader.folder.path.iterdir()) == []


def test_a_task_of_another_group_that_ends_loader_processes_does_not_end_the_trainer(
    made, tmp_path, fast_polling, claiming_loader, loader_of
):
    queue = sorted(made[2], key=claim_order)
    bad = queue[1].item
    claimed = [task for task in (queue[0], *queue[4:]) if task.item != bad]
    loader = claiming_loader(FailingSource(made[0], {bad: ("kill", 99)}, tmp_path))
    loaded = [one for task in claimed for one in loader.fetch([task])]
    assert same_episodes(loaded, loader_of().fetch(claimed))
    (lost,) = loader.fetch([queue[1]])
    assert lost.batches is None
    assert "loader processes died" in lost.error


def test_augmentation_differs_between_outer_steps(made):
    source, _, tasks, transforms = made
    task = tasks[0]
    again = Task(task.item, task.name, task.stratum, task.tokens, (*task.seed[:2], 9, 0))
    draw = source.draw(task)
    one, other = (transformed(each, transforms) for each in (draw, replace(draw, task=again)))
    assert transformed(draw, transforms) == one
    assert one.support + one.query != other.support + other.query


def test_io_errors_are_retried_with_growing_waits(made, tmp_path, loader_of):
    sleeps: list[float] = []
    tasks = made[2][:3]
    loader = loader_of(source=FailingSource(made[0], {tasks[1].item: ("io", 2)}, tmp_path), sleeps=sleeps)
    assert same_episodes(loader.fetch(tasks), loader_of().fetch(tasks))
    assert sleeps == [0.1, 0.5]


@pytest.mark.parametrize(
    ("failure", "error", "crash", "waits"),
    [
        ("io", "OSError: [Errno 5] Input/output error: 'a.jsonl'", False, 3),
        ("row", "a.jsonl:3 is bad; fix it", False, 0),
        ("bug", "ZeroDivisionError: division by zero", True, 0),
    ],
)
def test_failed_tasks_leave_the_other_episodes_unchanged(
    made, tmp_path, failure, error, crash, waits, loader_of
):
    sleeps: list[float] = []
    tasks, bad = made[2][:6], made[2][1].item
    loaded = loader_of(source=FailingSource(made[0], {bad: (failure, 99)}, tmp_path), sleeps=sleeps).fetch(
        tasks
    )
    wrong = [one for one in loaded if one.task.item == bad]
    assert [(one.batches, one.error, one.crash) for one in wrong] == [(None, error, crash)] * len(wrong)
    assert len(sleeps) == waits * len(wrong)
    rest = [task for task in tasks if task.item != bad]
    assert same_episodes([one for one in loaded if one.task.item != bad], loader_of().fetch(rest))


def test_loader_processes_leave_the_random_numbers_of_the_trainer(made, loader_of):
    """A rule of one's own may draw from torch's generator; the number of processes must not change it."""
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    loader_of("1").fetch(made[2][:1])
    assert torch.equal(torch.rand(1), wanted)


def test_a_killed_process_is_replaced(made, tmp_path, fast_polling, loader_of):
    tasks = made[2][:9]
    loader = loader_of("1", FailingSource(made[0], {tasks[4].item: ("kill", 1)}, tmp_path))
    assert same_episodes(loader.fetch(tasks), loader_of().fetch(tasks))
    assert len(loader.warnings) == 1
    assert re.search(r"replaced: process \d+ was killed by SIGKILL$", loader.warnings[0])
    assert loader.folder is not None
    assert len(os.listdir(loader.folder.path)) < 9  # received episodes are removed


@pytest.mark.parametrize(
    ("failure", "ended"), [("kill", "was killed by SIGKILL"), ("exit", "exited with code 0")]
)
def test_task_that_ends_every_process_is_given_up(made, tmp_path, fast_polling, failure, ended, loader_of):
    tasks = made[2][:6]
    loader = loader_of("1", FailingSource(made[0], {tasks[2].item: (failure, 99)}, tmp_path))
    loaded = loader.fetch(tasks)
    wrong = next(one for one in loaded if one.task == tasks[2])
    assert wrong.batches is None
    assert wrong.error.startswith(f"task {tasks[2].name}: ")
    assert f"loader processes died {DEATHS} times" in wrong.error
    assert wrong.error.endswith(ended)
    assert not wrong.crash
    assert same_episodes(loaded[:2], loader_of().fetch(tasks[:2]))
    assert loaded[3].batches is not None


def test_death_counts_only_for_the_task_being_prepared(made, tmp_path, fast_polling, loader_of):
    """The second task kills its process while the trainer waits for the first task, which another process
    prepares.
    """
    tasks = made[2][:3]
    first, second = tasks[0].item, tasks[1].item
    loader = loader_of("2", FailingSource(made[0], {first: ("wait", second), second: ("kill", 99)}, tmp_path))
    loaded = loader.fetch(tasks)
    assert [one.batches is None for one in loaded] == [False, True, False]
    assert same_episodes([loaded[0], loaded[2]], loader_of().fetch([tasks[0], tasks[2]]))
    assert loader.deaths == {tasks[1].seed: DEATHS}


def test_processes_that_die_at_start_are_given_up_and_no_task_is_lost(made, fast_polling, loader_of):
    loader = loader_of("1", KillingSource(made[0]))
    assert same_episodes(loader.fetch(made[2][:3]), loader_of().fetch(made[2][:3]))
    assert loader.num_workers == 0
    (last,) = loader.warnings[DEATHS:]
    assert last.startswith("num_workers=1: ")
    assert f"loader processes failed {DEATHS} times" in last


def test_removed_folder_loses_no_task(made, loader_of):
    loader = loader_of("1")
    loaded = loader.fetch(made[2][:2])
    folder = loader.folder
    assert folder is not None
    # renamed first: a loader process that writes a file while rmtree is at work would make rmtree fail
    shutil.rmtree(folder.path.rename(f"{folder.path}-removed"))
    loaded += loader.fetch(made[2][2:])
    assert loader.num_workers == 1
    assert loader.folder is not None
    assert loader.folder.path != folder.path
    assert same_episodes(loaded, loader_of().fetch(made[2]))
    (warning,) = loader.warnings
    assert warning.startswith(f"{folder.path} was removed")
    assert warning.endswith("start again")


def test_loader_error_becomes_a_result(made, loader_of):
    """The error of this rank becomes a result that all ranks handle."""
    loader = loader_of("1")
    loader._start = Mock(side_effect=RuntimeError("Too many open files.\nPlease increase the limit"))
    (found,) = loader.fetch(made[2][:1])
    assert (found.batches, found.crash) == (None, True)
    assert found.error == "RuntimeError: Too many open files. Please increase the limit"


def test_shared_memory_is_blamed_only_if_it_is_short(made, monkeypatch, loader_of):
    for free_mib, blamed in ((8192, False), (1, True)):
        free = SimpleNamespace(free=free_mib * 2**20)
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: free)
        loader = loader_of("1")
        loader._start = Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable"))
        (found,) = loader.fetch(made[2][:1])
        assert found.batches is not None
        (warning,) = loader.warnings
        check_message(warning, "num_workers=1", "failed 3 times in a row", "Resource temporarily unavailable")
        assert warning.endswith("use --num_workers 0")
        assert ("--shm-size" in warning) == blamed


@pytest.mark.parametrize(("full", "semaphores"), [("from the start", 0), ("from the start", 4), ("later", 0)])
def test_full_shared_memory_loses_no_task(made, tmp_path, full, semaphores):
    """Without room for all semaphores or an episode the training process loads them and logs one line."""
    (tmp_path / "made.pickle").write_bytes(pickle.dumps((made[0], made[2], made[3])))
    mount = (
        f"mount -t tmpfs -o size=1m none /dev/shm && exec {sys.executable} -m tests.support.full_memory"
        f' "{tmp_path}" "{full}" {semaphores}'
    )
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("no mount namespaces here")
    episodes, warning = ended.stdout.splitlines()
    assert episodes == "same episodes", ended.stderr
    causes = {"from the start": "failed 3 times in a row", "later": "cannot write to /dev/shm"}
    check_message(
        warning,
        "num_workers=1",
        causes[full],
        "No space left on device",
        "the training process loads all" if full == "from the start" else "loads missing episodes",
        "0 MiB free",
        "start the container with --shm-size=8g",
        "--num_workers 0",
    )
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    ("load_s", "budget", "chosen"), [(0.05, 8, 0), (2.0, 8, 1), (6.0, 8, 3), (9.0, 4, 4), (9.0, 0, 0)]
)
def test_auto_chooses_processes_by_loading_time(made, load_s, budget, chosen):
    """Loading takes `load_s` of 10 s in the outer steps after the first one, which does not count."""
    loader = EpisodeLoader(LoadEpisode(made[0], Batcher(0)), upcoming(made[1]), "auto", budget=budget)
    loader.load_s = 100.0
    assert loader.choose_num_workers(200.0) is None
    loader.load_s += load_s
    answers = [loader.choose_num_workers(210.0) for _ in range(MEASURED)]
    assert [answer for answer in answers if answer is not None] == [chosen]
    assert loader.num_workers == chosen


def test_number_of_classes_is_passed_to_the_loss(tmp_path):
    path = write_classes(tmp_path / "c.jsonl")
    config = Config(dataset=[str(path)], n_way=2, n_way_max=5, k_shot=1, k_shot_max=3, num_query=1, seed=3)
    source = load_sources(config, TOKENIZER, lambda text: None).train
    load, seen = LoadEpisode(source, Batcher(0)), set()
    for step in range(30):
        for task in Schedule(source.items, 2, 3, sizes=source.size).meta_batch(step):
            draw, loaded = source.draw(task), load(task)
            ways = len(draw.classes)
            shots = [sum(label == c for _, label in draw.support) for c in range(ways)]
            assert loaded.batches is not None
            assert {int(n) for batch in loaded.batches.support for n in batch.targets["classes"]} == {ways}
            assert [sum(label == c for _, label in draw.query) for c in range(ways)] == [1] * ways
            assert task.tokens == round(
                source.row_tokens[task.item] * (sum(shots) + ways)
            )  # known before the rows are drawn
            seen |= {("ways", ways), *(("shots", n) for n in shots)}
    assert seen == {("ways", n) for n in (2, 3, 4, 5)} | {("shots", n) for n in (1, 2, 3)}


def test_a_time_limit_ends_code_that_catches_errors_and_leaves_the_caller_its_timer():
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with pytest.raises(TimedOut), time_limit(0.05):
            hang(None, None)
        with time_limit(30), time_limit(None):
            pass
        assert 30 < signal.getitimer(signal.ITIMER_REAL)[0] < 60
        assert not fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_a_task_that_hangs_is_a_bad_task_and_the_others_are_loaded(made, tmp_path, num_workers, loader_of):
    tasks = made[2][:6]
    loader = loader_of(num_workers, FailingSource(made[0], {tasks[2].item: ("hang", 99)}, tmp_path))
    loader.load.timeout_s = 2
    loaded = loader.fetch(tasks)
    wrong = [one for one in loaded if one.task.item == tasks[2].item]
    assert {(one.batches, one.error, one.crash) for one in wrong} == {
        (None, "it was still loading after load_timeout=2 s", False)
    }
    rest = [task for task in tasks if task.item != tasks[2].item]
    assert same_episodes([one for one in loaded if one.batches is not None], loader_of().fetch(rest))
    assert not loader.warnings


def test_episodes_of_loader_processes_are_pinned_in_the_thread_of_the_loader(
    made, tmp_path, monkeypatch, loader_of
):
    """DataLoader's thread calls `pin_memory` of what a process returns; the trainer gets the result."""
    threads = []
    monkeypatch.setattr(LoadResult, "pin_memory", lambda self: threads.append(current_thread()) or self)
    expected = loader_of().fetch(made[2][:2])
    loader = loader_of("1")
    loader.pin, options = True, {}

    class Threaded:
        """DataLoader as it is with an accelerator: its thread hands over what `pin_memory` returns."""

        def __init__(self, dataset, sampler, **given):
            options.update(given)
            self.dataset, self.sampler = dataset, sampler

        def __iter__(self):
            with ThreadPoolExecutor(1) as pool:
                for task in self.sampler:
                    yield pool.submit(self.dataset[task].pin_memory).result()

    monkeypatch.setattr("torch.utils.data.DataLoader", Threaded)
    monkeypatch.setattr("fmmeta.tasks.loader.LoaderIterator", iter)
    assert same_episodes(loader.fetch(made[2][:2]), expected)
    assert options["pin_memory"]
    assert len(threads) == 2
    assert main_thread() not in threads
    missing = EpisodeFile(str(tmp_path / "gone")).pin_memory()  # read in the thread, raised in the trainer
    assert isinstance(missing, EpisodeFile)
    with pytest.raises(FileNotFoundError):
        missing.take()
