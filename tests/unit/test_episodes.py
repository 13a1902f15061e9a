"""Ranks skip tasks that failed to load, and raise an error when too many fail or none is left."""

import json

import pytest

from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.episodes import EpisodeReader
from tests.support.helpers import one_rank, write_rows
from tests.support.messages import check_message, refusal
from tests.support.models import WORDS


@pytest.fixture
def folder(tmp_path):
    """A folder of four task files with two classes each."""
    names = [f"s/t{number}" for number in range(4)]
    (tmp_path / "tasks" / "s").mkdir(parents=True)
    for name in names:
        rows = [{"text": f"{name} {WORDS[i]}", "label": "ab"[i % 2]} for i in range(8)]
        write_rows(tmp_path / "tasks" / f"{name}.jsonl", rows)
    (tmp_path / "tasks" / "task_splits.json").write_text(json.dumps({"train": names}))
    return tmp_path / "tasks"


SKIP = {"on_bad_task": "skip", "max_bad_fraction": 1.0}


def reader_of(folder, bad: slice, **settings):
    """A reader, three tasks of different files, of which some are damaged, and the list of its log lines."""
    config = Config(dataset=[str(folder)], n_way=2, k_shot=1, num_query=1, **settings)
    source, lines = load_sources(config, byte_tokenizer(), lambda text: None).train, []
    tasks = Schedule(source.items, 3, config.seed).meta_batch(0)
    assert len({task.name for task in tasks}) == 3
    for task in tasks[bad]:
        (folder / f"{task.name}.jsonl").write_text("{")
    load = LoadEpisode(source, Batcher(0), sleep=lambda seconds: None)
    return EpisodeReader.of(load, one_rank(), config, lines.append), tasks, lines


def test_bad_tasks_are_skipped_and_logged(folder):
    reader, tasks, lines = reader_of(folder, slice(None, None, 2), **SKIP)
    assert [task for task, _ in reader.read_share(tasks)] == [tasks[1]]
    assert [text.split(":")[1].strip() for text in lines] == [f"task {task.name}" for task in tasks[::2]]
    assert reader.counts == {"seen": 3, "bad": 2}


def test_meta_batch_without_a_loaded_task_is_an_error(folder):
    reader, tasks, lines = reader_of(folder, slice(None), **SKIP)
    message = refusal(reader.read_share, tasks)
    assert message.startswith("none of 3 tasks was loaded")
    assert f"task {tasks[-1].name}: " in message
    assert message.endswith(lines[-1].removeprefix(f"left out: task {tasks[-1].name}: "))
    assert f"{tasks[-1].name}.jsonl" in lines[-1]
    assert len(lines) == 3
    assert reader.read_same_task(tasks[0]) == []  # no error for a task that every group reads


@pytest.mark.parametrize(
    ("settings", "last", "part"),
    [
        ({**SKIP, "max_bad_fraction": 0.01}, 1, "max_bad_fraction=0.01: 2 of 3 tasks"),
        ({}, 0, "--on_bad_task skip"),
    ],
)
def test_too_many_bad_tasks_or_any_without_skip_are_an_error(folder, settings, last, part):
    reader, tasks, _ = reader_of(folder, slice(2), **settings)
    check_message(refusal(reader.read_share, tasks), part, f"task {tasks[last].name}: ")
