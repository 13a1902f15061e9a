"""A folder of folders of files: each file is a task, its folder the stratum; files are read when drawn.

    tasks/<stratum>/<task>.jsonl      (.csv, .parquet, .gz too)

Nothing but the name, the size and the first line of each file is looked at before, so that a run over a
million files starts soon; after that a node reads the files of its tasks only, and a bad file is one bad
task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import inside
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import Bad, Row, ending, read_file
from fmmeta.tasks.data.token_store import digest, files_digest, prepare
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import ClassSource, Draw, PairSource, Shape, TaskSource
from fmmeta.tasks.sources.rows_by_class import group_rows, problems

OPEN = 64  # files whose tokens stay at hand
PEEK = 4096  # bytes looked at to estimate the length of a row
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class TaskFile:
    name: str
    stratum: str
    path: Path
    size: int  # bytes
    row_tokens: float  # of one of its rows, by estimate


def task_files(dataset: str, max_length: int) -> list[TaskFile] | None:
    """The task files of a folder of folders; None for any other data set.

    Raises `UsageError` for two files of one name.
    """
    root = Path(dataset)
    if not root.is_dir() or any(ending(path) for path in root.iterdir() if path.is_file()):
        return None
    folders = [inside(root, folder) for folder in sorted(root.iterdir()) if folder.is_dir()]
    files = [inside(folder, path) for folder in folders for path in sorted(folder.iterdir()) if ending(path)]
    named: dict[str, TaskFile] = {}
    for path in files:
        name, stratum = f"{path.parent.name}/{path.name.split('.')[0]}", path.parent.name
        if name in named:
            raise UsageError(f"dataset={dataset} has two files for the task {name}; rename one")
        named[name] = TaskFile(name, stratum, path, *glance(path, max_length))
    return list(named.values()) or None


class FolderSource(TaskSource):
    """Tasks that are files."""

    def __init__(self, files: Sequence[TaskFile], shape: Shape, config: Config, tokenizer: Any) -> None:
        self.files, self.shape, self.config, self.tokenizer = files, shape, config, tokenizer
        rows = (shape.k_shot + shape.k_shot_max) / 2 + shape.num_query
        drawn = rows * (shape.n_way + shape.n_way_max) / 2
        self.items = Items.of(Item(file.name, file.stratum, round(drawn * file.row_tokens)) for file in files)
        self.opened: dict[int, TaskSource] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    @property
    def fingerprint(self) -> str:
        """Of names and sizes: the contents are not read."""
        return digest([(file.name, file.size) for file in self.files])

    def part(self, numbers: Sequence[int]) -> FolderSource:
        """The source of some of the files."""
        return FolderSource(
            [self.files[number] for number in numbers], self.shape, self.config, self.tokenizer
        )

    def draw(self, task: Task) -> Draw:
        source = self.opened.get(task.item)
        if source is None:
            while len(self.opened) >= OPEN:
                del self.opened[next(iter(self.opened))]
            source = self.opened[task.item] = self._open(self.files[task.item])
        return replace(source.draw(replace(task, item=0)), task=task)

    def _read(self, path: Path, bad: Bad) -> list[Row]:
        return read_file(path, bad, self.config.max_file_gib)

    def _open(self, file: TaskFile) -> TaskSource:
        with file.path.open("rb"):
            pass  # an I/O error as it is, so that it can be tried again
        store = prepare(
            str(file.path),
            files_digest([file.path]),
            partial(self._read, file.path),
            self.config,
            self.tokenizer,
            lambda text: None,
            one_task=True,
        )
        classes = self.config.task_type == "classification"
        pool = group_rows(store, set(store.member.names), classes)[""]
        problem = next((text for _, text in problems(file.name, pool, self.shape, "")), None)
        if problem:
            raise UsageError(f"{file.path}: {problem.split(';')[0]}; fix or remove the file")
        make = ClassSource if classes else PairSource
        return make(store, {file.name: pool if classes else pool[""]}, {file.name: file.stratum}, self.shape)  # type: ignore


def glance(path: Path, max_length: int) -> tuple[int, float]:
    """Size in bytes, and tokens of a row by the length of the first line; the longest there may be where that
    says nothing.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            line = file.read(PEEK).split(b"\n")[0]
    except OSError:
        return -1, max_length  # met again, and treated, when the task is drawn
    plain = path.suffix == ".jsonl" or path.suffix == ".csv"
    return size, min(max_length, max(4, len(line) / BYTES_PER_TOKEN)) if plain else max_length
