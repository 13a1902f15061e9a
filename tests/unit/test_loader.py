"""Prefetched episodes: the same for any number of processes, after I/O errors and after dead processes; their
folders in memory; tasks that cannot be loaded.
"""

import errno
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from threading import current_thread, main_thread
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import TimedOut, time_limit
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks import loader
from fmmeta.tasks.augment import reading
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.loader import (
    DEATHS,
    MEASURED,
    PREFIX,
    EpisodeFile,
    EpisodeFolder,
    EpisodeLoader,
    LoadEpisode,
    LoadResult,
    PreparedTasks,
    TaskSampler,
    remove_stale,
    stale,
)
from fmmeta.tasks.schedule.meta_batches import Schedule, Task, claim_order
from fmmeta.tasks.sources.base import Draw, TaskSource, transformed
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.episodes import EpisodeReader
from harness.fork_server import ROOT, environment
from tests.support.episodes import same_episodes
from tests.support.helpers import fast_or_slow, one_rank, refusal
from tests.support.loading import hang
from tests.support.messages import check_message
from tests.support.models import write_classes, write_tasks
from tests.support.short_runs import until

TOKENIZER = byte_tokenizer()


FAILURES = {
    "io": OSError(5, "Input/output error", "a.jsonl"),
    "row": UsageError("a.jsonl:3 is bad; fix it"),
    "bug": ZeroDivisionError("division by zero"),
}


class FailingSource(TaskSource):
    """A source that draws from another one and fails for some items.

    failures: item -> the kind of failure and how often it happens (a file counts); ("wait", other) draws the
    item after `other` has killed a process.
    """

    def __init__(self, source: TaskSource, failures: dict[int, tuple[str, int]], folder: Path) -> None:
        self.source, self.items, self.failures, self.folder = source, source.items, failures, folder

    def part(self, chosen):
        return self.source.part(chosen)

    def draw(self, task: Task) -> Draw:
        what, times = self.failures.get(task.item, ("", 0))
        count = self.folder / f"{task.item}"
        done = len(count.read_text()) if count.exists() else 0
        if done >= times and what != "wait":
            return self.source.draw(task)
        count.write_text("x" * (done + 1))
        if what == "wait":  # for the next death by item `times`
            other, deaths = self.folder / str(times), min(done + 1, DEATHS)
            until(lambda: other.exists() and len(other.read_text()) >= deaths)
            time.sleep(0.5 * (done < DEATHS))  # the trainer sees it
            return self.source.draw(task)
        if what == "kill":
            kill_own_process()
        if what == "exit":
            os._exit(0)
        if what == "hang":
            time.sleep(1000)
        raise FAILURES[what]


class KillingSource(FailingSource):
    """A source that kills the loader process that receives it."""

    def __reduce__(self):
        return kill_own_process, ()


def kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Loader processes are forked from one that has imported this file, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fmmeta.tasks.fork_server", __name__])
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, a schedule over it, its first twelve tasks, and the transforms."""
    path = write_classes(tmp_path_factory.mktemp("data") / "c.jsonl")
    changes = ["fmmeta.tasks.augment:swap_words"]
    config = Config(dataset=[str(path)], n_way=2, k_shot=1, num_query=1, example_transforms=changes)
    source = load_sources(config, TOKENIZER, lambda text: None).train
    schedule = Schedule(source.items, 3, 1)
    tasks = [task for step in range(4) for task in schedule.meta_batch(step)]
    return SimpleNamespace(source=source, schedule=schedule, tasks=tasks, reading=reading(config, TOKENIZER))


def upcoming(schedule: Schedule):
    def of(task: Task):
        stream = iter(TaskSampler(schedule, first=task.seed[2]))
        return (one for one in stream if one.seed >= task.seed)

    return of


@pytest.fixture
def loader_of(made, tmp_path):
    """loader_of(num_workers, failures, sleeps, ...): makes a loader, which the test need not close."""
    loaders = []

    def make(
        num_workers="0", failures=None, kind=FailingSource, sleeps=None, stream=None, **how
    ) -> EpisodeLoader:
        waited = [] if sleeps is None else sleeps
        source = kind(made.source, failures or {}, tmp_path)
        load = LoadEpisode(source, Batcher(0), made.reading, sleep=waited.append)
        loaders.append(EpisodeLoader(load, stream or upcoming(made.schedule), num_workers, **how))
        return loaders[-1]

    yield make
    for one in loaders:
        one.close()


@pytest.fixture
def right(loader_of):
    """Whether results are those of a loader without processes and failures."""
    return lambda loaded: same_episodes(loaded, loader_of().fetch([one.task for one in loaded]))


@pytest.fixture
def fast_polling(monkeypatch):
    """Check loader processes every 0.1 s instead of every 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.mark.parametrize("num_workers", fast_or_slow(["1", "2"], "2".__eq__))
def test_number_of_processes_and_start_position_do_not_change_episodes(made, num_workers, loader_of, right):
    loader, later = loader_of(num_workers), loader_of(num_workers)
    loaded = loader.fetch(made.tasks[:5]) + loader.fetch(made.tasks[5:9])
    assert [one.task for one in loaded] == made.tasks[:9]
    assert right(loaded)
    assert right(later.fetch(made.tasks[7:]))
    assert loader.load_s > 0


@pytest.fixture
def queue(made):
    """The tasks in the order in which two groups claim them."""
    return sorted(made.tasks, key=claim_order)


@pytest.fixture
def claiming_loader(queue, loader_of):
    """Makes a loader with a process whose stream is the queue, without the task `skipped`."""

    def make(failures=None, skipped=-1) -> EpisodeLoader:
        def stream(task: Task):
            return (one for n, one in enumerate(queue) if n >= queue.index(task) and n != skipped)

        return loader_of("1", failures, stream=stream, claiming_groups=2)

    return make


def test_episodes_of_other_groups_are_dropped_and_unprepared_ones_are_loaded_here(
    queue, claiming_loader, right
):
    loader = claiming_loader(skipped=6)
    assert right([one for n in (0, 3, 4, 6, 11) for one in loader.fetch([queue[n]])])
    assert loader.folder is not None
    assert list(loader.folder.path.iterdir()) == []


@pytest.mark.slow
def test_a_task_of_another_group_that_ends_loader_processes_does_not_end_the_trainer(
    queue, fast_polling, claiming_loader, right
):
    bad = queue[1].item
    claimed = [task for task in (queue[0], *queue[4:]) if task.item != bad]
    loader = claiming_loader({bad: ("kill", 99)})
    assert right([one for task in claimed for one in loader.fetch([task])])
    (lost,) = loader.fetch([queue[1]])
    assert lost.batches is None
    assert "loader processes died" in lost.error


def test_augmentation_differs_between_outer_steps(made):
    task = made.tasks[0]
    draw = made.source.draw(task)
    later = replace(draw, task=replace(task, seed=(*task.seed[:2], 9, 0)))
    one, same, other = (transformed(each, made.reading) for each in (draw, draw, later))
    assert one == same
    assert one.support + one.query != other.support + other.query


@pytest.mark.parametrize(
    ("failure", "error", "crash", "waits"),
    [
        (("io", 2), None, False, [0.1, 0.5]),
        (("io", 99), "OSError: [Errno 5] Input/output error: 'a.jsonl'", False, 3),
        (("row", 99), "a.jsonl:3 is bad; fix it", False, 0),
        (("bug", 99), "ZeroDivisionError: division by zero", True, 0),
    ],
)
def test_failed_tasks_leave_the_other_episodes_unchanged(
    made, failure, error, crash, waits, loader_of, right
):
    """I/O errors are tried again with growing waits; the second try of a task that fails twice is right."""
    sleeps: list[float] = []
    bad = made.tasks[1].item
    loaded = loader_of(failures={bad: failure}, sleeps=sleeps).fetch(made.tasks[:6])
    wrong = [one for one in loaded if one.task.item == bad] if error else []
    assert [(one.batches, one.error, one.crash) for one in wrong] == [(None, error, crash)] * len(wrong)
    assert sleeps == waits if not error else len(sleeps) == waits * len(wrong)
    assert right([one for one in loaded if one not in wrong])


def test_loader_processes_leave_the_random_numbers_of_the_trainer(made, loader_of):
    """A rule of one's own may draw from torch's generator; the number of processes must not change it."""
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    loader_of("1").fetch(made.tasks[:1])
    assert torch.equal(torch.rand(1), wanted)


def test_a_killed_process_is_replaced(made, fast_polling, loader_of, right):
    loader = loader_of("1", {made.tasks[4].item: ("kill", 1)})
    assert right(loader.fetch(made.tasks[:9]))
    (warning,) = loader.warnings
    assert re.search(r"replaced: process \d+ was killed by SIGKILL$", warning)
    assert loader.folder is not None
    assert len(os.listdir(loader.folder.path)) < 9  # received episodes are removed


@pytest.mark.parametrize(
    ("failure", "ended"),
    [
        ("kill", "was killed by SIGKILL"),
        pytest.param("exit", "exited with code 0", marks=pytest.mark.slow),
    ],
)
def test_task_that_ends_every_process_is_given_up(made, fast_polling, failure, ended, loader_of, right):
    tasks = made.tasks[:6]
    loaded = loader_of("1", {tasks[2].item: (failure, 99)}).fetch(tasks)
    wrong = loaded[2]
    assert (wrong.task, wrong.batches, wrong.crash) == (tasks[2], None, False)
    wanted = rf"task {tasks[2].name}: .*loader processes died {DEATHS} times.*{ended}"
    assert re.fullmatch(wanted, wrong.error), wrong.error
    assert right(loaded[:2])
    assert loaded[3].batches is not None


@pytest.mark.slow
def test_death_counts_only_for_the_task_being_prepared(made, fast_polling, loader_of, right):
    """The second task kills its process while the trainer waits for the first task, which another process
    prepares.
    """
    first, second, third = made.tasks[:3]
    loader = loader_of("2", {first.item: ("wait", second.item), second.item: ("kill", 99)})
    loaded = loader.fetch([first, second, third])
    assert loaded[1].batches is None
    assert right([loaded[0], loaded[2]])
    assert loader.deaths == {second.seed: DEATHS}


def test_processes_that_die_at_start_are_given_up_and_no_task_is_lost(made, fast_polling, loader_of, right):
    loader = loader_of("1", kind=KillingSource)
    assert right(loader.fetch(made.tasks[:3]))
    assert loader.num_workers == 0
    (last,) = loader.warnings[DEATHS:]
    check_message(last, "num_workers=1: ", f"loader processes failed {DEATHS} times")


@pytest.mark.slow
def test_removed_folder_loses_no_task(made, loader_of, right):
    loader = loader_of("1")
    loaded = loader.fetch(made.tasks[:2])
    removed = loader.folder.path
    # renamed first: a loader process that writes a file while rmtree is at work would make rmtree fail
    shutil.rmtree(removed.rename(f"{removed}-removed"))
    assert right(loaded + loader.fetch(made.tasks[2:]))
    assert loader.num_workers == 1
    assert loader.folder.path != removed
    check_message(*loader.warnings, f"{removed} was removed", "start again")


@pytest.mark.parametrize(
    ("error", "free_mib", "lost", "blamed"),
    [
        (RuntimeError("Too many open files.\nPlease increase the limit"), 8192, True, False),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), 8192, False, False),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), 1, False, True),
    ],
)
def test_processes_that_cannot_start(made, monkeypatch, loader_of, error, free_mib, lost, blamed):
    """An error of this rank becomes a result that all ranks handle, or the training process loads. Shared
    memory is blamed only if it is short.
    """
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20))
    loader = loader_of("1")
    loader._start = Mock(side_effect=error)
    (found,) = loader.fetch(made.tasks[:1])
    assert (found.batches is None, found.crash) == (lost, lost)
    if lost:
        assert found.error == "RuntimeError: Too many open files. Please increase the limit"
        return
    (warning,) = loader.warnings
    parts = ("failed 3 times in a row", "Resource temporarily unavailable", "use --num_workers 0")
    check_message(warning, "num_workers=1", *parts)
    assert ("--shm-size" in warning) == blamed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "semaphores", "parts"),
    [
        ("from the start", 0, ["failed 3 times in a row", "the training process loads all"]),
        pytest.param(
            *("from the start", 4, ["failed 3 times in a row", "the training process loads all"]),
            marks=pytest.mark.slow,
        ),
        ("later", 0, ["cannot write to /dev/shm", "loads missing episodes"]),
    ],
)
def test_full_shared_memory_loses_no_task(made, tmp_path, full, semaphores, parts):
    """Without room for all semaphores or an episode the training process loads them and logs one line."""
    (tmp_path / "made.pickle").write_bytes(pickle.dumps((made.source, made.tasks, made.reading)))
    command = f'{sys.executable} -m tests.support.full_memory "{tmp_path}" "{full}" {semaphores}'
    mount = f"mount -t tmpfs -o size=1m none /dev/shm && exec {command}"
    how: dict[str, Any] = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", mount], **how, timeout=100, check=False)
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("no mount namespaces here")
    episodes, warning = ended.stdout.splitlines()
    assert episodes == "same episodes", ended.stderr
    remedies = ("0 MiB free", "start the container with --shm-size=8g", "--num_workers 0")
    check_message(warning, "num_workers=1", "No space left on device", *parts, *remedies)
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    ("load_s", "budget", "steps_left", "chosen"),
    [(0.05, 8, 999, 0), (2.0, 8, 6, 1), (6.0, 8, 6, 3), (9.0, 4, 6, 4), (9.0, 0, 6, 0), (2.0, 8, 5, 0)],
)
def test_auto_chooses_processes_by_loading_time(loader_of, load_s, budget, steps_left, chosen):
    """Loading takes `load_s` of 10 s in the two outer steps after the first one, which does not count. A
    process starts in five seconds, which loading in the steps that are left has to exceed.
    """
    loader = loader_of("auto", budget=budget)
    loader.load_s = 100.0
    assert loader.choose_num_workers(200.0, 99) is None
    loader.load_s += load_s
    answers = [loader.choose_num_workers(210.0, steps_left) for _ in range(MEASURED)]
    assert [answer for answer in answers if answer is not None] == [chosen]
    assert loader.num_workers == chosen


def test_number_of_classes_is_passed_to_the_loss(tmp_path):
    path = write_classes(tmp_path / "c.jsonl")
    config = Config(dataset=[str(path)], n_way=2, n_way_max=5, k_shot=1, k_shot_max=3, num_query=1, seed=3)
    source = load_sources(config, TOKENIZER, lambda text: None).train
    load, schedule = LoadEpisode(source, Batcher(0)), Schedule(source.items, 2, 3, sizes=source.size)
    seen: dict[str, set[int]] = {"ways": set(), "shots": set()}
    for task in (task for step in range(30) for task in schedule.meta_batch(step)):
        draw, loaded = source.draw(task), load(task)
        ways = len(draw.classes)
        shots, queries = (Counter(label for _, label in rows) for rows in (draw.support, draw.query))
        assert {int(n) for batch in loaded.batches.support for n in batch.targets["classes"]} == {ways}
        assert queries == dict.fromkeys(range(ways), 1)
        # known before the rows are drawn
        assert task.tokens == round(source.row_tokens[task.item] * (shots.total() + ways))
        seen["ways"].add(ways)
        seen["shots"].update(shots.values())
    assert seen == {"ways": {2, 3, 4, 5}, "shots": {1, 2, 3}}


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
def test_a_task_that_hangs_is_a_bad_task_and_the_others_are_loaded(made, num_workers, loader_of, right):
    bad = made.tasks[2].item
    loader = loader_of(num_workers, {bad: ("hang", 99)})
    loader.load.timeout_s = 1
    loaded = loader.fetch(made.tasks[:6])
    wrong = [one for one in loaded if one.task.item == bad]
    late = "it was still loading after load_timeout=1 s"
    assert {(one.batches, one.error, one.crash) for one in wrong} == {(None, late, False)}
    assert right([one for one in loaded if one not in wrong])
    assert not loader.warnings


class Threaded:
    """DataLoader as it is with an accelerator: its thread hands over what `pin_memory` returns."""

    given: ClassVar[dict[str, Any]] = {}

    def __init__(self, dataset, sampler, **given):
        self.given.update(given)
        self.dataset, self.sampler = dataset, sampler

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            for task in self.sampler:
                yield pool.submit(self.dataset[task].pin_memory).result()


def test_episodes_of_loader_processes_are_pinned_in_the_thread_of_the_loader(
    made, tmp_path, monkeypatch, loader_of, right
):
    """DataLoader's thread calls `pin_memory` of what a process returns; the trainer gets the result."""
    threads = []
    loader = loader_of("1")
    loader.pin = True
    with monkeypatch.context() as patch:
        patch.setattr(LoadResult, "pin_memory", lambda self: threads.append(current_thread()) or self)
        patch.setattr("torch.utils.data.DataLoader", Threaded)
        patch.setattr("fmmeta.tasks.loader.LoaderIterator", iter)
        assert right(loader.fetch(made.tasks[:2]))
    assert Threaded.given["pin_memory"]
    assert len(threads) == 2
    assert main_thread() not in threads
    missing = EpisodeFile(str(tmp_path / "gone")).pin_memory()  # read in the thread, raised in the trainer
    assert isinstance(missing, EpisodeFile)
    with pytest.raises(FileNotFoundError):
        missing.take()


ROUNDS, RANKS = 30, 4


def start_repeatedly(root: str, barrier) -> None:
    """Start a rank again and again, next to others; stale folders are created between the rounds."""
    loader.SHM = root
    for _ in range(ROUNDS):
        barrier.wait(60)
        folder = EpisodeFolder()
        remove_stale()
        assert folder.path.exists(), "another rank has removed the folder of this one"
        barrier.wait(60)
        remove_stale()  # beside those that end
        folder.close()
        if barrier.wait(60) == 0:
            for number in range(2 * RANKS):
                leave_stale_folder(Path(root), f"{number}-stale")


@pytest.mark.slow
def test_concurrent_starts_after_a_killed_run_keep_each_others_folders(tmp_path):
    context = multiprocessing.get_context("forkserver")
    given = (str(tmp_path), context.Barrier(RANKS))
    ranks = [context.Process(target=start_repeatedly, args=given) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS


@pytest.fixture
def shm(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHM", str(tmp_path))
    return tmp_path


def leave_stale_folder(root: Path, name: str) -> Path:
    """Create the folder with episodes that a killed trainer leaves."""
    folder = root / f"{PREFIX}{name}"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}").write_bytes(b"x" * 4096)
    return folder


def test_locked_folder_is_kept_whatever_its_name(shm, tmp_path_factory):
    """The name holds the process id in the PID namespace of the trainer, which is another one here. So are
    files and links.
    """
    used, left = EpisodeFolder(), leave_stale_folder(shm, f"{os.getpid()}-left")
    other = used.path.rename(used.path.with_name(f"{PREFIX}999999999-used"))
    elsewhere, link, file = (
        tmp_path_factory.mktemp("elsewhere"),
        shm / f"{PREFIX}1-link",
        shm / f"{PREFIX}1-file",
    )
    link.symlink_to(elsewhere)
    file.touch()
    assert list(stale()) == [left]
    remove_stale()
    assert {*shm.iterdir()} == {other, link, file}
    os.close(used.lock)  # as the kernel does when the trainer ends
    remove_stale()
    assert {*shm.iterdir()} == {link, file}
    assert elsewhere.exists()


def test_episode_or_its_error_is_passed_to_the_trainer(shm):
    folder, task = EpisodeFolder(), Task(0, "name", "stratum", 1, (1, 0, 2, 3))
    prepared = []
    tasks = PreparedTasks(lambda _: prepared.extend(folder.preparing()) or "episode", folder)
    found = tasks[task]
    assert found.take() == "episode"
    assert prepared == [(os.getpid(), (1, 0, 2, 3))]
    assert folder.preparing() == []
    folder.close()
    with pytest.raises(FileNotFoundError):
        found.take()
    assert tasks[task] == EpisodeFile("", errno.ENOENT)
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        EpisodeFile("", errno.ENOENT).take()


SKIP = {"on_bad_task": "skip", "max_bad_fraction": 1.0}


def reader_of(root, bad: slice, **settings):
    """A reader, three tasks of different files, of which some are damaged, and the list of its log lines."""
    given = {"n_way": 2, "k_shot": 1, "num_query": 1, **settings}
    config = Config(dataset=[str(write_tasks(root))], **given)
    source, lines = load_sources(config, TOKENIZER, lambda text: None).train, []
    tasks = Schedule(source.items, 3, config.seed).meta_batch(0)
    assert len({task.name for task in tasks}) == 3
    for task in tasks[bad]:
        (root / f"{task.name}.jsonl").write_text("{")
    load = LoadEpisode(source, Batcher(0), sleep=lambda seconds: None)
    return EpisodeReader.of(load, one_rank(), config, lines.append), tasks, lines


def test_bad_tasks_are_skipped_and_logged(tmp_path):
    reader, tasks, lines = reader_of(tmp_path, slice(None, None, 2), **SKIP)
    assert [task for task, _ in reader.read_share(tasks)] == [tasks[1]]
    assert [text.split(":")[1].strip() for text in lines] == [f"task {task.name}" for task in tasks[::2]]
    assert reader.counts == {"seen": 3, "bad": 2}
    assert reader.read_same_task(tasks[0]) == []  # no error for a task that every group reads


@pytest.mark.parametrize(
    ("settings", "bad", "named", "parts"),
    [
        (SKIP, 3, 2, ["none of 3 tasks was loaded", ".jsonl:1 is not a line of JSON"]),
        ({**SKIP, "max_bad_fraction": 0.01}, 2, 1, ["max_bad_fraction=0.01: 2 of 3 tasks"]),
        ({}, 2, 0, ["--on_bad_task skip"]),
    ],
)
def test_too_many_bad_tasks_or_any_without_skip_are_an_error(tmp_path, settings, bad, named, parts):
    reader, tasks, _ = reader_of(tmp_path, slice(bad), **settings)
    check_message(refusal(reader.read_share, tasks), f"task {tasks[named].name}: ", *parts)
