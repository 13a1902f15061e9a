"""Episodes ahead of time: the same with any number of processes, from any position, past errors and dead processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fmmeta.config import Config, UsageError
from fmmeta.models.tiny import byte_tokenizer
from fmmeta.tasks.batch import Dealer
from fmmeta.tasks.load import load_sources
from fmmeta.tasks.loader import DEATHS, MEASURED, EpisodeLoader, Load, Loaded
from fmmeta.tasks.samplers import TaskSampler
from fmmeta.tasks.schedule import Schedule, Task
from fmmeta.tasks.source import Draw, TaskSource
from fmmeta.tasks.transforms import Transforms
from tests.models import write_classes

TOKENIZER = byte_tokenizer()


class Trouble(TaskSource):
    """A source, with an error for some items. `troubles`: item -> what happens, and how often (a file counts)."""

    def __init__(self, source: TaskSource, troubles: dict[int, tuple[str, int]], folder: Path) -> None:
        self.source, self.items, self.troubles, self.folder = source, source.items, troubles, folder

    def draw(self, task: Task) -> Draw:
        what, times = self.troubles.get(task.item, ("", 0))
        count = self.folder / f"{task.item}"
        done = len(count.read_text()) if count.exists() else 0
        if done < times:
            count.write_text("x" * (done + 1))
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"io": OSError(5, "Input/output error", "a.jsonl"), "row": UsageError("a.jsonl:3 is bad; mend it"),
                   "bug": ZeroDivisionError("division by zero")}[what]  # fmt: skip
        return self.source.draw(task)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, a schedule over it, and its first twelve tasks."""
    path = write_classes(tmp_path_factory.mktemp("data") / "c.jsonl")
    config = Config(dataset=[str(path)], n_way=2, k_shot=1, num_query=1,
                    example_transforms=["fmmeta.tasks.transforms:swap_words"])  # fmt: skip
    source = load_sources(config, TOKENIZER, lambda text: None).train
    schedule = Schedule(source.items, 3, 1)
    return source, schedule, [task for step in range(4) for task in schedule.meta_batch(step)], Transforms.of(config, TOKENIZER)


@pytest.fixture
def impatient(monkeypatch):
    """Look every 0.1 s, not every 5 s, whether a loader process is still there."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


def upcoming(schedule: Schedule):
    def of(task: Task):
        stream = iter(TaskSampler(schedule, first=task.seed[2]))
        return (one for one in stream if one.seed >= task.seed)

    return of


def loader_of(made, num_workers: str = "0", source: TaskSource | None = None, sleeps: list[float] | None = None) -> EpisodeLoader:
    load = Load(source or made[0], Dealer(0), made[3], 2, sleep=Sleep(sleeps))
    return EpisodeLoader(load, upcoming(made[1]), num_workers)


class Sleep:
    """Keeps what it is asked to wait, and does not wait."""

    def __init__(self, asked: list[float] | None) -> None:
        self.asked = asked if asked is not None else []

    def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)


def same(a: list[Loaded], b: list[Loaded]) -> bool:
    def tensors(loaded: Loaded):
        assert loaded.batches is not None, loaded.error
        return [t for batch in (*loaded.batches.support, *loaded.batches.query)
                for t in (batch.input_ids, batch.attention_mask, batch.labels, batch.weights)]  # fmt: skip

    return all(x.task == y.task and all(map(torch.equal, tensors(x), tensors(y))) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_any_number_of_processes_gives_the_same_episodes_from_any_position(made, num_workers):
    tasks = made[2]
    straight = loader_of(made).fetch(tasks)
    loader, later = loader_of(made, num_workers), loader_of(made, num_workers)
    try:
        assert same(loader.fetch(tasks[:5]) + loader.fetch(tasks[5:9]), straight[:9])
        assert same(later.fetch(tasks[7:]), straight[7:])
        assert loader.load_s > 0
    finally:
        loader.close()
        later.close()


def test_augmentation_differs_between_outer_steps(made):
    source, _, tasks, transforms = made
    task = tasks[0]
    again = Task(task.item, task.name, task.stratum, task.tokens, (*task.seed[:2], 9, 0))
    draw = source.draw(task)
    same_rows = Draw(again, draw.store, draw.support, draw.query, draw.classes)
    assert transforms(draw) == transforms(draw)
    assert transforms(draw).support + transforms(draw).query != transforms(same_rows).support + transforms(same_rows).query


def test_input_errors_are_tried_again_with_longer_and_longer_waits(made, tmp_path):
    sleeps: list[float] = []
    tasks = made[2][:3]
    loader = loader_of(made, source=Trouble(made[0], {tasks[1].item: ("io", 2)}, tmp_path), sleeps=sleeps)
    assert same(loader.fetch(tasks), loader_of(made).fetch(tasks))
    assert sleeps == [0.1, 0.5]


@pytest.mark.parametrize(("what", "said", "crash", "waits"), [
    ("io", "OSError: [Errno 5] Input/output error: 'a.jsonl'", False, 3),
    ("row", "a.jsonl:3 is bad; mend it", False, 0),
    ("bug", "ZeroDivisionError: division by zero", True, 0),
])  # fmt: skip
def test_what_cannot_be_had_leaves_the_others_where_they_were(made, tmp_path, what, said, crash, waits):
    sleeps: list[float] = []
    tasks, bad = made[2][:6], made[2][1].item
    loaded = loader_of(made, source=Trouble(made[0], {bad: (what, 99)}, tmp_path), sleeps=sleeps).fetch(tasks)
    wrong = [one for one in loaded if one.task.item == bad]
    assert [(one.batches, one.error, one.crash) for one in wrong] == [(None, said, crash)] * len(wrong)
    assert len(sleeps) == waits * len(wrong)
    rest = [task for task in tasks if task.item != bad]
    assert same([one for one in loaded if one.task.item != bad], loader_of(made).fetch(rest))


def test_a_killed_process_is_replaced(made, tmp_path, impatient):
    tasks = made[2][:9]
    loader = loader_of(made, "1", Trouble(made[0], {tasks[4].item: ("kill", 1)}, tmp_path))
    try:
        assert same(loader.fetch(tasks), loader_of(made).fetch(tasks))
        assert len(loader.deaths) == 1
        assert re.fullmatch(r"process \d+ was killed by SIGKILL", loader.deaths[0])
        assert loader.folder is not None
        assert len(os.listdir(loader.folder)) < 9  # what was received is gone
    finally:
        loader.close()


def test_a_task_that_kills_every_process_is_given_up(made, tmp_path, impatient):
    tasks = made[2][:6]
    loader = loader_of(made, "1", Trouble(made[0], {tasks[2].item: ("kill", 99)}, tmp_path))
    try:
        loaded = loader.fetch(tasks)
    finally:
        loader.close()
    wrong = next(one for one in loaded if one.task == tasks[2])
    assert wrong.batches is None
    assert wrong.error.startswith(f"task {tasks[2].name}: loader processes died {DEATHS} times in a row, last: process ")
    assert wrong.error.endswith("was killed by SIGKILL")
    assert same(loaded[:2], loader_of(made).fetch(tasks[:2]))
    assert loaded[3].batches is not None


@pytest.mark.parametrize(("load_s", "budget", "chosen"), [(0.05, 8, 0), (2.0, 8, 1), (6.0, 8, 3), (9.0, 4, 4), (9.0, 0, 0)])
def test_auto_starts_as_many_processes_as_loading_asks_for(made, load_s, budget, chosen):
    """`load_s` of 10 s in two outer steps after the first, which warms up and does not count."""
    loader = EpisodeLoader(Load(made[0], Dealer(0)), upcoming(made[1]), "auto", budget=budget)
    loader.load_s = 100.0
    assert loader.decide(200.0) is None
    loader.load_s += load_s
    answers = [loader.decide(210.0) for _ in range(MEASURED)]
    assert [answer for answer in answers if answer is not None] == [chosen]
    assert loader.num_workers == chosen


def test_a_few_classes_of_many_are_told_to_the_loss(tmp_path):
    path = write_classes(tmp_path / "c.jsonl")
    config = Config(dataset=[str(path)], n_way=2, n_way_max=5, k_shot=1, k_shot_max=3, num_query=1, seed=3)
    source = load_sources(config, TOKENIZER, lambda text: None).train
    load, seen = Load(source, Dealer(0), None, config.most_classes), set()
    for step in range(30):
        for task in Schedule(source.items, 2, 3, sizes=source.size).meta_batch(step):
            draw, loaded = source.draw(task), load(task)
            ways = len(draw.classes)
            shots = [sum(label == c for _, label in draw.support) for c in range(ways)]
            assert loaded.batches is not None
            assert {batch.classes for batch in loaded.batches.support} == {0 if ways == 5 else ways}
            assert [sum(label == c for _, label in draw.query) for c in range(ways)] == [1] * ways
            assert task.tokens == round(source.row_tokens[task.item] * (sum(shots) + ways))  # known before the rows are
            seen |= {("ways", ways), *(("shots", n) for n in shots)}
    assert seen == {("ways", n) for n in (2, 3, 4, 5)} | {("shots", n) for n in (1, 2, 3)}
