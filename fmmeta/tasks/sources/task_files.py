"""A folder of folders of files: each file is a task, its folder the stratum; a file is read when it is drawn.

    tasks/<stratum>/<task>.jsonl      (.csv, .parquet, .gz too)

A run over a million files starts soon: only the name, the size and the first line of each file are read
before training. After that a node reads the files of its tasks only, and a bad file is one bad task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import inside
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import ending, read_file
from fmmeta.tasks.data.token_store import digest, files_digest, prepare
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import Draw, EpisodeShape, TaskSource
from fmmeta.tasks.sources.classification import ClassSource
from fmmeta.tasks.sources.pairs import PairSource
from fmmeta.tasks.sources.rows_by_class import group_rows, problems

OPEN = 64  # files whose token stores stay open
PEEK = 4096  # bytes read to estimate the length of a row
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class TaskFile:
    name: str
    stratum: str
    path: Path
    size: int  # bytes
    row_tokens: float  # estimated tokens of a row


def task_files(dataset: str, max_length: int) -> list[TaskFile] | None:
    """The task files of a folder of folders; None for any other data set.

    Raises `UsageError` if two files have the same name.
    """
    root = Path(dataset)
    if not root.is_dir() or any(ending(path) for path in root.iterdir() if path.is_file()):
        return None
    folders = [inside(root, folder) for folder in sorted(root.iterdir()) if folder.is_dir()]
    files = [inside(folder, path) for folder in folders for path in sorted(folder.iterdir()) if ending(path)]
    named: dict[str, TaskFile] = {}
    for path in files:
        stratum = path.parent.name
        name = f"{stratum}/{path.name.split('.')[0]}"
        if name in named:
            raise UsageError(f"dataset={dataset} has two files for the task {name}; rename one")
        named[name] = TaskFile(name, stratum, path, *glance(path, max_length))
    return list(named.values()) or None


class FolderSource(TaskSource):
    """Tasks that are files."""

    def __init__(
        self, files: Sequence[TaskFile], shape: EpisodeShape, config: Config, tokenizer: Any
    ) -> None:
        self.files, self.shape, self.config, self.tokenizer = files, shape, config, tokenizer
        rows = shape.mean_rows(shape.n_way_max)
        self.items = Items.of(Item(file.name, file.stratum, round(rows * file.row_tokens)) for file in files)
        self.opened: dict[int, TaskSource] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    @property
    def fingerprint(self) -> str:
        """A digest of names and sizes: the contents are not read."""
        return digest([(file.name, file.size) for file in self.files])

    def only(self, names: Sequence[str]) -> "FolderSource":
        """The source of some of the tasks."""
        files = {file.name: file for file in self.files}
        return FolderSource([files[name] for name in names], self.shape, self.config, self.tokenizer)

    def draw(self, task: Task) -> Draw:
        source = self.opened.get(task.item)
        if source is None:
            while len(self.opened) >= OPEN:
                del self.opened[next(iter(self.opened))]
            source = self.opened[task.item] = self._open(self.files[task.item])
        return replace(source.draw(replace(task, item=0)), task=task)

    def _open(self, file: TaskFile) -> TaskSource:
        with file.path.open("rb"):
            pass  # raises an I/O error as `OSError`, so that it is retried
        store = prepare(
            str(file.path),
            files_digest([file.path]),
            lambda bad: read_file(file.path, bad, self.config.max_file_gib),
            self.config,
            self.tokenizer,
            lambda text: None,
            one_task=True,
        )
        classes = self.config.task_type == "classification"
        rows = group_rows(store, classes)[""]
        for _, problem in problems(file.name, rows, self.shape, ""):
            raise UsageError(f"{file.path}: {problem.split(';')[0]}; fix or remove the file")
        make = ClassSource if classes else PairSource
        return make(store, {file.name: rows}, {file.name: file.stratum}, self.shape)


def glance(path: Path, max_length: int) -> tuple[int, float]:
    """Size in bytes and tokens of a row (of its first line; `max_length` if it is compressed or binary)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            line = file.read(PEEK).split(b"\n")[0]
    except OSError:
        return -1, max_length  # it is raised again, and handled, when the task is drawn
    if path.suffix not in (".jsonl", ".csv"):
        return size, max_length
    return size, min(max_length, max(4, len(line) / BYTES_PER_TOKEN))
