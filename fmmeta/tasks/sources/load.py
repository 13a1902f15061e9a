"""Loads data sets by name into task sources, one per split.

    name -> rows -> columns -> tokens (token_store.py) -> classes or named tasks -> train | valid | test
         -> TaskSource
    tasks/<stratum>/<task>.jsonl      (.csv, .parquet, .gz too) -> FolderSource
    images/<class>/<image>.png        (or <stratum>/<class>/<image>.png): one row per image

On each node one rank runs this before the others (training/build.py), which then find the finished store.

In a folder of folders each file is a task, its folder the stratum. A run over a million files starts soon:
only the name, the size and the first line of each file are read before training. After that a node reads the
files of its tasks only, when they are drawn, and a bad file is one bad task.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import Warn
from fmmeta.common.security import inside
from fmmeta.common.text import counted, nearest, shortened
from fmmeta.config.fields import refuse_first, shown
from fmmeta.config.json_files import read_object
from fmmeta.config.settings import Config
from fmmeta.tasks.data.columns import Bad, Row, as_json
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.files import data_files, files_of, image_rows, read_file, stem, stream_file
from fmmeta.tasks.data.hub import cards_of, hub_rows, open_hub, split_rows
from fmmeta.tasks.data.images import ImageReader, content_of
from fmmeta.tasks.data.rows import IN_MEMORY, MOST_IMAGES, tabulate
from fmmeta.tasks.data.splits import (
    SPLIT_SETTINGS,
    SPLITS,
    Splits,
    UsedSplits,
    check_splits,
    doubts,
    keys_of,
    label,
    leaks,
    own_splits,
    read_splits,
)
from fmmeta.tasks.data.token_store import BYTES_PER_TOKEN, Contents, TokenStore, digest, files_digest, prepare
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.answers import ClassAnswers
from fmmeta.tasks.sources.base import (
    ClassKey,
    ClassSource,
    Draw,
    EpisodeShape,
    EpisodeTransform,
    Mixture,
    PairSource,
    RowsByClass,
    TaskSource,
    name_rows,
    short_names,
    those_named,
)
from fmmeta.tasks.sources.own import OwnSource, Tasks, refuse_unread, tasks_named
from fmmeta.tasks.sources.stream import (
    StreamSource,
    documents,
    long_enough,
    read_texts,
    text_files,
    texts_beside_rows,
    texts_digest,
)
from fmmeta.tasks.suites import ciphers, digits, letters, tables
from fmmeta.tasks.word_suite import words

Notice = Callable[[str], None]


def strata_of(store: TokenStore) -> dict[str, str]:
    """The stratum of each unit of splits: that of its last row."""
    found = store.of_data.group_by("unit", use_threads=False).aggregate([("stratum", "last")])
    return dict(zip(found["unit"].to_pylist(), found["stratum_last"].to_pylist(), strict=True))


def make_source(
    config: Config,
    store: TokenStore,
    tasks: dict[str, RowsByClass],
    strata: Mapping[str, str],
    shape: EpisodeShape,
    split: str,
    notice: Notice,
    tokenizer: Any,
    path: Path | None = None,
) -> TaskSource:
    """The source of some tasks, or of the one set of classes of a split. path: of the file of the only task.

    Classes and tasks with too few rows for an episode are dropped with a notice, or (on_bad_task=raise)
    refused by a `UsageError`, as the last task and that of a file are.
    """
    if config.learner.ordered:
        return StreamSource(config, store, {name: rows[""] for name, rows in tasks.items()}, strata)
    for task, rows in list(tasks.items()):
        for name, problem in problems(task, rows, shape, split):
            if path:
                problem = f"{path}: {problem.split(';')[0]}; fix or remove the file"
            if config.on_bad_task == "raise" or (path and name is None):
                raise UsageError(problem)
            notice(Warn(f"left out: {problem}"))
            if name is None:
                del tasks[task]
            else:
                del rows[name]
    if not tasks:
        raise UsageError(
            f"k_shot={config.k_shot}: no {'task' if store.named_tasks else 'class'} of the {split} split has"
            f" enough rows; lower k_shot, num_query={config.num_query} or n_way={config.n_way}"
        )
    make = ClassSource if config.draws_classes else PairSource
    return make(store, tasks, strata, shape, ClassAnswers.of(config, tokenizer))


def group_rows(store: TokenStore, config: Config) -> dict[str, RowsByClass]:
    """Row numbers by task and class (of pairs one class, named ""), both in order of first appearance."""
    keys = ["task", "target"] if config.draws_classes else ["task"]
    rows = store.of_data.select(keys).append_column("row", [np.arange(len(store))])
    found = rows.group_by(keys, use_threads=False).aggregate([("row", "list")])
    groups = zip(found.select(keys).to_pylist(), found["row_list"], strict=True)
    grouped = defaultdict[str, RowsByClass](dict)
    for group, numbers in sorted(groups, key=lambda pair: pair[1][0].as_py()):
        grouped[group["task"]][group.get("target", "")] = numbers.values.to_numpy()
    return grouped


def problems(
    task: str, classes: RowsByClass, shape: EpisodeShape, split: str
) -> Iterator[tuple[str | None, str]]:
    """Classes with too few rows, as (class, error), and (None, error) if too few classes remain: first if
    there are too few classes in all.
    """
    where = f"task {task!r}" if task else f"the {split} split"
    if len(classes) < shape.n_way:
        noun = counted(len(classes), "class", "classes")
        yield None, f"n_way={shape.n_way} is above the {noun} of {where}; lower n_way"
        return
    needed, of_task = shape.k_shot + shape.num_query, f" of task {task!r}" if task else ""
    small = {name: len(rows) for name, rows in classes.items() if len(rows) < needed}
    remaining = len(classes) - len(small)
    for name, count in small.items():
        what = f"class {name!r}{of_task}" if name else f"task {task!r}"
        yield (
            name or None,  # the rows of a task without classes
            f"k_shot={shape.k_shot} and num_query={shape.num_query} need {needed} rows, but {what} has"
            f" {count}; lower them or leave it out of the {split} split",
        )
    if remaining < shape.n_way and "" not in classes:
        noun = counted(remaining, "class", "classes")
        yield (
            None,
            f"n_way={shape.n_way} is above the {noun} of {where} with {needed} rows or more; lower k_shot,"
            " num_query or n_way",
        )


OPEN = 64  # files whose token stores stay open
PEEK = 4096  # bytes read to estimate the length of a row


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
    if not root.is_dir() or any(path.is_file() for path in files_of(root)):
        return None
    folders = [
        inside(root, folder)
        for folder in sorted(root.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
    ]
    files = [inside(folder, path) for folder in folders for path in files_of(folder)]
    named: dict[str, TaskFile] = {}
    for path in files:
        name = f"{path.parent.name}/{stem(path)}"
        if name in named:
            raise UsageError(f"dataset={dataset} has two files for the task {name}; rename one")
        named[name] = TaskFile(name, path.parent.name, path, *glance(path, max_length))
    return list(named.values()) or None


MOST_BYTES = 2**25  # of task files whose rows are compared at the start


def contents_of(files: Sequence[TaskFile], config: Config, tokenizer: Any) -> Contents:
    """Of task files that can be read; empty for more than MOST_BYTES or MOST_IMAGES."""
    found, images = dict[str, np.ndarray](), isinstance(tokenizer, ImageReader)
    for file in files if sum(file.size for file in files) <= MOST_BYTES else []:
        with suppress(UsageError, OSError):
            rows = read_file(file.path, lambda error: None, config.max_file_gib)
            if images and len(rows) + sum(map(len, found.values())) > MOST_IMAGES:
                return {}
            name, ignore = str(file.path), lambda _: None
            table = tabulate(name, rows, config, ignore, ignore, one_task=True, tokenizer=tokenizer)
            found[file.name] = np.array(table.content, np.uint64)
    return found


class FolderSource(TaskSource):
    """Tasks that are files."""

    def __init__(
        self, files: Sequence[TaskFile], shape: EpisodeShape, config: Config, tokenizer: Any
    ) -> None:
        self.files, self.shape, self.config, self.tokenizer = files, shape, config, tokenizer
        rows = shape.mean_rows(shape.n_way_max)
        self.items = Items.of(Item(file.name, file.stratum, round(rows * file.row_tokens)) for file in files)
        self.opened: dict[int, TaskSource] = {}

    def part(self, chosen: np.ndarray) -> "FolderSource":
        files = [file for file, is_in in zip(self.files, chosen, strict=True) if is_in]
        return FolderSource(files, self.shape, self.config, self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    def draw(self, task: Task) -> Draw:
        source, notices = self.opened.get(task.item), list[str]()
        if source is None:
            while len(self.opened) >= OPEN:
                del self.opened[next(iter(self.opened))]
            source = self.opened[task.item] = self.open_task(self.files[task.item], notices.append)
        return replace(source.draw(replace(task, item=0)), task=task, notices=tuple(notices))

    def open_task(self, file: TaskFile, notice: Notice) -> TaskSource:
        """The source of one file; it leaves out rows and classes as `make_source` does. Raises `OSError` or
        `UsageError` if it cannot be used.
        """
        with file.path.open("rb"):
            pass  # raises an I/O error as `OSError`, so that it is retried
        content, read = files_reader(str(file.path), [file.path], self.config)
        store = prepare(
            str(file.path),
            content,
            read,
            self.config,
            self.tokenizer,
            notice,
            one_task=True,
        )
        tasks = {file.name: group_rows(store, self.config)[""]}
        strata = {file.name: file.stratum}
        return make_source(
            self.config, store, tasks, strata, self.shape, "", notice, self.tokenizer, file.path
        )


def glance(path: Path, max_length: int) -> tuple[int, float]:
    """Size in bytes and tokens of a row (of the first one; `max_length` if it is compressed or binary)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(PEEK)
    except OSError:
        return -1, max_length  # it is raised again, and handled, when the task is drawn
    if path.suffix not in (".jsonl", ".csv", ".tsv", ".json"):
        return size, max_length
    lines = begin.split(b"\n")
    first_row = lines[path.suffix in (".csv", ".tsv") and len(lines) > 1]  # a header precedes it
    if path.suffix == ".json":  # of a list, in one line or in several for each row
        first_row = begin.partition(b"{")[2].partition(b"}")[0]
    return size, min(max_length, max(4, len(first_row) / BYTES_PER_TOKEN))


LEAST_WEIGHT = 1e-6  # of a class; the largest is 1 / LEAST_WEIGHT, so that sums in fp32 are finite
HUB_SETTINGS = ("dataset_config_name", "dataset_split", "dataset_revision")
SUITES = {"letters": letters, "words": words, "digits": digits, "ciphers": ciphers, "tables": tables}


@dataclass
class Sources:
    """One source for each requested split that has classes or tasks; small data sets hold none out."""

    of_split: dict[str, TaskSource]
    fingerprint: str  # of the data and all splits
    summary: str
    used: list[UsedSplits]  # of each data set that is not a suite
    class_weights: dict[str, float] = field(default_factory=dict)  # in the loss, by class; others have 1
    contents: Mapping[str, Contents] = field(default_factory=dict)  # of the rows of one data set, by split
    # labels of joint training: classes of other data sets or tasks are others, even if their names are equal
    numbers: dict[ClassKey, int] = field(default_factory=dict)
    drawn: list[EpisodeTransform] = field(default_factory=list)  # of what sources draw

    @classmethod
    def of(
        cls,
        name: str,
        splits: Splits,
        source_of: Callable[[str], TaskSource],
        fingerprint: str,
        what: str,
        used: list[UsedSplits],
        wanted: Sequence[str],
        contents: Contents,
    ) -> "Sources":
        """The sources of data set `name`. what: its size, for the summary. contents: of its rows; none for a
        suite. Raises `UsageError`.
        """
        if "train" in wanted and not splits.get("train"):
            raise UsageError(
                f"dataset={name} has nothing to train on: its train split is empty; fix the split file"
            )
        of_split = {split: source_of(split) for split in wanted if splits.get(split)}
        sizes = ", ".join(f"{len(splits.get(split, []))} {split}" for split in SPLITS)
        by_split = {
            split: {unit: contents[unit] for unit in splits.get(split, ()) if unit in contents}
            for split in SPLITS
        }
        return cls(of_split, fingerprint, f"{name}: {what}: {sizes}", used, contents=by_split)

    @property
    def train(self) -> TaskSource:
        return self.of_split["train"]

    @property
    def valid(self) -> TaskSource | None:
        return self.of_split.get("valid")

    @property
    def test(self) -> TaskSource | None:
        return self.of_split.get("test")

    @property
    def first(self) -> TaskSource:
        """The source of the first requested split that has one."""
        return next(iter(self.of_split.values()))


def load_sources(
    config: Config,
    tokenizer: Any,
    notice: Notice,
    trained: Sequence[UsedSplits] = (),
    rows: Sequence[Row] | Tasks | None = None,
    wanted: Sequence[str] = SPLITS,
) -> Sources:
    """Read, split, check and tokenise `config.dataset`. Raises `UsageError` for data that would fail later.

    trained: splits that the models in use were trained with. They are kept unless a setting names others.
    rows: of the data set IN_MEMORY, or its tasks. wanted: splits, the first of which must not be empty;
    others are not checked.
    """
    if all(name in SUITES or (Path(name).exists() and not is_saved(name)) for name in config.dataset):
        for setting in HUB_SETTINGS:
            if (value := getattr(config, setting)) not in (None, "train"):
                raise UsageError(
                    f"{setting}={value} is for data sets of the hub, and dataset={shown(config.dataset)} is"
                    " generated or local; leave it out"
                )
    loaded = [load_one(name, config, tokenizer, notice, trained, rows, wanted) for name in config.dataset]
    by_name = zip(config.dataset, (one.contents for one in loaded), strict=True)
    for text in leaks(dict(by_name), wanted):
        notice(Warn(text))
    sources = loaded[0]
    if len(loaded) > 1:
        of_split: dict[str, TaskSource] = {}
        for split in wanted:
            named = zip(short_names(config.dataset), (one.of_split.get(split) for one in loaded), strict=True)
            if present := {name: source for name, source in named if source is not None}:
                of_split[split] = Mixture(present)
        sources = Sources(
            of_split,
            fingerprint=digest([one.fingerprint for one in loaded]),
            summary="; ".join(one.summary for one in loaded),
            used=[used for one in loaded for used in one.used],
        )
    if wanted[0] not in sources.of_split:
        raise UsageError(
            f"eval_split={wanted[0]} of dataset={' '.join(config.dataset)} is empty: no class or task is held"
            " out for it; give another --eval_split, or a file of splits"
        )
    if {*SPLITS} <= {*wanted} and sources.test is None and config.test_episodes and sources.used:
        notice(Warn(no_table(config, sources.used)))
    sources.class_weights = read_class_weights(config, sources, {*SPLITS} <= {*wanted}, notice)
    if config.label_names is not None:
        sources.drawn = [name_rows]
    if config.joint_head:
        sources.numbers = {key: number for number, key in enumerate(sources.train.class_keys())}
    return sources


def no_table(config: Config, used: Sequence[UsedSplits]) -> str:
    """A message that nothing is held out for the table at the end of a run, and what to do."""
    names, most = shown(config.dataset), max((one.trained // 3 for one in used if one.held_out), default=0)
    classes = any(one.noun == "class" for one in used)
    nouns = "classes" if classes else "tasks"
    have = " and ".join(f"{one.trained} {one.nouns}" for one in used)
    lower = f"lower n_way={config.n_way} to {most} or less, " if classes and 1 < most < config.n_way else ""
    return (
        f"dataset={names}: no {nouns} are held out of {have}, so this run ends without a table of scores on"
        f" new {nouns}; {lower}{'or ' if lower else ''}give more {nouns}, or test {nouns} in a file of splits"
    )


def read_class_weights(config: Config, sources: Sources, complete: bool, notice: Notice) -> dict[str, float]:
    """Weights by class name, of --class_weights; empty without the setting. Raises `UsageError`.

    complete: all splits were read, so that every name must be known; else names may be of other splits.
    With one head for all classes (joint training) also by the labels' names.
    """
    if config.class_weights is None:
        return {}
    given, weights = read_object("class_weights", config.class_weights, '{"rare": 3.0}')
    for name, weight in weights.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:
            raise UsageError(
                f"{given} gives class {shortened(name)} the weight {shortened(weight)}; write a number from"
                f" {LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}, or leave the class out for weight 1"
            )
    keys = [key for source in sources.of_split.values() for key in source.class_keys(given)]
    known = {key[-1] for key in keys}
    unknown = [name for name in weights if name not in known]
    if unknown and not complete:
        if len(unknown) == len(weights):
            notice(Warn(f"{given} names none of the {len(known)} classes here; all have weight 1"))
    elif unknown:
        raise UsageError(
            f"{given} names class {shortened(unknown[0])}, which is none of the {len(known)} classes of"
            f" dataset={' '.join(config.dataset)}{nearest(unknown[0], known, '; leave it out')}"
        )
    labels = {"/".join(key): weights[key[-1]] for key in keys if config.joint_head and key[-1] in weights}
    return {**labels, **weights}


def sources_of(tasks: Tasks, config: Config, tokenizer: Any, wanted: Sequence[str]) -> Sources:
    """The sources of tasks that a function draws."""
    refuse_unread(tasks.name, config)
    if config.learner.ordered:
        raise UsageError(
            f"dataset={tasks.name}: a function draws rows, and task_type={config.task_type} reads documents;"
            " give --task_type causal_lm, or the documents"
        )
    encoder = RowEncoder(config, tokenizer)
    of_split = {one: OwnSource(tasks, numbers, encoder) for one in wanted if (numbers := tasks.numbers(one))}
    sizes = ", ".join(f"{len(tasks.numbers(split))} {split}" for split in SPLITS)
    summary, contents = f"{tasks.name}: drawn by a function: {sizes}", {split: {} for split in SPLITS}
    return Sources({**of_split}, tasks.fingerprint, summary, [], contents=contents)


def load_one(
    name: str,
    config: Config,
    tokenizer: Any,
    notice: Notice,
    trained: Sequence[UsedSplits],
    rows: Sequence[Row] | Tasks | None,
    wanted: Sequence[str],
) -> Sources:
    """The sources of one data set. Raises `UsageError` if the train split is wanted and empty."""
    if isinstance(rows, Tasks) or (":" in name and not Path(name).exists()):
        return sources_of(rows if isinstance(rows, Tasks) else tasks_named(name), config, tokenizer, wanted)
    suite = generated(name, config, tokenizer) if name in SUITES else None
    whole = suite or config.learner.ordered
    if (task_per_file := None if whole else task_files(name, config.max_length)) is not None:
        if config.stratify_by is not None:
            raise UsageError(
                f"stratify_by={config.stratify_by} is a function of rows, and dataset={name} is a folder of"
                " task files, whose folders are the strata; leave it out"
            )
        for setting in ("task_column", "stratum_column") if len(config.dataset) == 1 else ():
            if (value := getattr(config, setting)) is not None:
                raise UsageError(
                    f"{setting}={value} is a column, and dataset={name} is a folder of task files, whose"
                    " names and folders are the tasks and strata; leave it out"
                )
        files = {file.name: file for file in task_per_file}
        strata = {file.name: file.stratum for file in task_per_file}
        content = digest([(file.name, file.size) for file in task_per_file])  # the files are not read
        contents = contents_of(task_per_file, config, tokenizer)
        if not contents:
            notice(f"{label(name)}: {counted(len(files), 'task file')} are too many to compare their rows")
        splits, used = choose_splits(name, content, config, strata, True, notice, trained, contents)
        return Sources.of(
            name,
            splits,
            lambda split: FolderSource(
                [files[task] for task in splits[split]], EpisodeShape.of(config), config, tokenizer
            ),
            digest([content, splits]),
            f"{counted(len(files), 'task file')},"
            f" {counted(len(set(strata.values())), 'stratum', 'strata')}; tasks",
            [used],
            wanted,
            contents,
        )
    content, read = reader_of(name, config, suite[0] if suite else rows)
    notes = list[str]()  # of the documents that are left out, known when all are read
    if config.learner.ordered:
        are_files = bool(text_files(name))
        if are_files and config.task_column and len(config.dataset) == 1:
            raise UsageError(
                f"task_column={config.task_column} is a column, and dataset={name} holds texts, whose names"
                " are those of the files; leave it out"
            )
        if message := texts_beside_rows(name):
            notice(Warn(message))
        read = partial(documents, config, read, notes.append, are_files)
    store = prepare(name, content, read, config, tokenizer, notice, notes=notes)
    strata, contents, used = strata_of(store), dict[str, np.ndarray](), list[UsedSplits]()
    if config.learner.ordered:
        strata = long_enough(config, store, strata, notice)
    if suite:
        splits = suite[1]
    else:
        contents.update(store.contents())
        content = digest(keys_of(contents, contents).tolist())  # of the rows, in whatever form
        splits, chosen = choose_splits(
            name, content, config, strata, store.named_tasks, notice, trained, contents
        )
        used.append(chosen)
    return Sources.of(
        name,
        splits,
        lambda split: make_source(
            config,
            store,
            those_named(group_rows(store, config), set(splits[split])),
            strata,
            EpisodeShape.of(config),
            split,
            notice,
            tokenizer,
        ),
        hashlib.sha256((store.fingerprint + json.dumps(splits, sort_keys=True)).encode()).hexdigest(),
        f"{counted(len(store), 'row')}, {counted(len(set(strata.values())), 'stratum', 'strata')};"
        f" {'tasks' if store.named_tasks else 'classes'}",
        used,
        wanted,
        contents,
    )


def reader_of(
    name: str, config: Config, rows: Sequence[Row] | None
) -> tuple[str, Callable[[Bad], Iterable[Row]]]:
    """A digest of a data set's content, and a function that reads its rows. rows: of IN_MEMORY or
    of a suite, whose generator may change.

    Raises `UsageError`.
    """
    if name == IN_MEMORY and rows is None:
        raise UsageError(
            f"dataset={IN_MEMORY} stands for rows that were given in Python; use"
            " MetaTrainer(dataset=...), or name a file"
        )
    if rows is not None and name in (IN_MEMORY, *SUITES):
        parts = (
            as_json(row.origin, row.values, json.dumps, sort_keys=True, default=content_of) for row in rows
        )
        return digest(f"[{', '.join(parts)}]"), lambda bad: rows
    if is_saved(name):
        import datasets

        with usage_errors(f"dataset={name} cannot be read as a folder of datasets", "save it again"):
            saved, kept = datasets.load_from_disk(name), files_digest(sorted(Path(name).rglob("*.arrow")))
        return digest([kept, config.dataset_split]), lambda bad: split_rows(name, saved, config.dataset_split)
    if texts := text_files(name) if config.learner.ordered else []:
        return texts_digest(Path(name), texts), lambda bad: read_texts(Path(name), texts, bad)
    if images := image_rows(name):
        stats = [(row.values["image"], Path(name, row.values["image"]).stat().st_size) for row in images]
        return digest(stats), lambda bad: images  # the files are not read before an episode needs them
    if (data := data_files(name)) is not None:
        return files_reader(f"dataset={name}", data, config)
    split = config.dataset_split
    part = open_hub(name, config.dataset_config_name, split, config.dataset_revision)
    return digest([part._fingerprint]), lambda bad: hub_rows(f"{name}[{split}]", part)


def is_saved(name: str) -> bool:
    """Whether `save_to_disk` of `datasets` has written a folder."""
    return any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))


def files_reader(
    what: str, files: Sequence[Path], config: Config
) -> tuple[str, Callable[[Bad], Iterable[Row]]]:
    """A digest of files, and a function that reads their rows. what: the files, for messages.

    That function raises `UsageError` for files that no longer have this digest: the rows would be stored
    under it, and later be read for files with the earlier content.
    """
    cards = [card for folder in dict.fromkeys(file.parent for file in files) for card in cards_of(folder)]
    content = files_digest([*files, *cards])

    def read(bad: Bad) -> Iterator[Row]:
        for file in files:
            yield from stream_file(file, bad, config.max_file_gib)
        if files_digest([*files, *cards]) != content:
            raise UsageError(f"{what} changed while it was read; start again once no program writes to it")

    return content, read


def generated(name: str, config: Config, tokenizer: Any) -> tuple[list[Row], Splits]:
    """The rows and splits of a suite. Raises `UsageError` for a run that it does not fit."""
    causal, of_images = config.learner.generates, name == "digits"
    kinds = ("images", "texts") if of_images else ("texts", "images")
    refuse_first(
        [
            (
                causal and of_images,
                f"dataset=digits has classes of images and no answers, and task_type={config.task_type}; use"
                " classification, or dataset=words",
            ),
            (
                (name in ("ciphers", "tables")) != config.learner.ordered,
                f"dataset={name} with task_type={config.task_type}: ciphers and tables are documents for"
                " task_type=stream, and the other suites are rows; use them together",
            ),
            (
                not causal and name == "words",
                f"dataset=words has answers and no classes, and task_type={config.task_type}; use"
                " --task_type causal_lm, or dataset=letters",
            ),
            (
                of_images != isinstance(tokenizer, ImageReader),
                f"dataset={name} holds {kinds[0]}, and model_name_or_path={config.model_name_or_path} reads"
                f" {kinds[1]}; use a model for {kinds[0]}, or the built-in one by leaving it out",
            ),
            (
                any(getattr(config, setting) for setting in SPLIT_SETTINGS),
                f"dataset={name} has its own splits; leave --class_splits, --task_splits and --class_split"
                " out",
            ),
        ]
    )
    return SUITES[name]()


def choose_splits(
    name: str,
    content: str,
    config: Config,
    strata: Mapping[str, str],
    named_tasks: bool,
    notice: Notice,
    trained: Sequence[UsedSplits],
    contents: Contents,
) -> tuple[Splits, UsedSplits]:
    """The first available of: the splits that a setting names, those that the model was trained with, those
    stored beside the data, splits by a hash of the names.

    content: digest of the data. contents: of its rows. Prints the held-out classes and rows that the model
    was trained on.
    """
    noun, least = ("task", 1) if named_tasks else ("class", config.n_way)
    splits, held_out = None, None
    if not any(getattr(config, setting) for setting in SPLIT_SETTINGS):
        for one in reversed(trained):
            splits, held_out = one.restored(content, label(name), noun, strata), one.held_out
            if splits:
                notice(f"{label(name)}: the splits that the model was trained with")
                break
    if not splits:
        splits, held_out = read_splits(name, config, named_tasks, notice), None
    if splits is None:
        splits, held_out = own_splits(strata, least, notice), least
    check_splits(splits, strata, noun)
    if unused := len(strata) - sum(map(len, splits.values())):
        nouns = counted(unused, noun, "classes" if noun == "class" else "")
        notice(f"{label(name)}: {nouns} of {len(strata)} in no split, not used")
    used = UsedSplits.of(name, content, noun, splits, held_out, contents)
    for text in doubts(trained, config, used, splits, contents):
        notice(Warn(text))
    return splits, used
