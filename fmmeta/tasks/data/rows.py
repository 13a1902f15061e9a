"""Rows of a data set by role, each once, which a token store holds; and rows that are given in Python."""

import hashlib
import json
import os
import re
import sys
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.text import counted, shortened
from fmmeta.config.json_files import NAMES
from fmmeta.config.settings import Config, RowConfig
from fmmeta.tasks.data.columns import (
    OPTIONS,
    PAIRED,
    USUAL,
    Bad,
    Row,
    as_json,
    cell,
    input_setting,
    is_text,
    pick,
    refuse,
    stratifier,
)
from fmmeta.tasks.data.hub import split_rows
from fmmeta.tasks.data.images import EncodedImage, ImageReader, pixels_digest

Examples = Sequence[tuple[Any, Any] | Mapping[str, Any]]
"""Pairs of text and class, or of input and output; or rows as a file has them."""
IN_MEMORY = "in-memory"
"""Value of the setting `dataset` for rows that were given in Python."""
Notice = Callable[[str], None]
DEPTH, FIRST = 4, 10  # of lists and dictionaries in which texts are looked for, and how many items
MOST_IMAGES = 5000  # of a data set that are decoded to compare them


@dataclass
class Table:
    """Rows by role. `unit` is what splits assign: the named task, or the class if tasks have no names.

    input, target: of a `Learner.pair`; of other rows a digest, and the class, if there is one.
    """

    unit: list[str] = field(default_factory=list)
    stratum: list[str] = field(default_factory=list)
    task: list[str] = field(default_factory=list)  # "" if tasks have no names
    input: list[str] = field(default_factory=list)
    target: list[str] = field(default_factory=list)
    image: list[EncodedImage] = field(default_factory=list)  # of image models; `input` has their names
    values: list[str] = field(default_factory=list)  # what else is stored of a row, as JSON
    content: list[int] = field(default_factory=list)  # what identifies a row in any data: `content_key`

    @property
    def contents(self) -> dict[str, np.ndarray]:
        """The content of the rows of each unit, uint64."""
        found = defaultdict[str, list[int]](list)
        for unit, key in zip(self.unit, self.content, strict=True):
            found[unit].append(key)
        return {unit: np.array(keys, np.uint64) for unit, keys in found.items()}

    def rows(self, kind: Any) -> list[Any]:
        """What the learner of class `kind` has stored of the rows."""
        images = self.image or [None] * len(self.input)
        columns = zip(self.input, self.target, self.values, images, strict=True)
        return [stored_row(kind, *row) for row in columns]


def stored_row(kind: Any, source: str, target: str, values: str, image: EncodedImage | None = None) -> Any:
    """What a learner has stored of a row, from its columns. kind: the class of the learner."""
    found = json.loads(values) if values != "{}" else dict[str, Any]()
    if kind.pair:
        found[kind.pair[0]], found[kind.pair[1]] = source, target
    if image is not None:
        found["image"] = image
    return found


def content_key(*parts: str | EncodedImage) -> int:
    """64 bits that identify a text, a pair or an image in all data sets, whatever the form and the names.

    Texts are equal apart from white space and Unicode form (NFKC), images if their pixels are. Other near
    duplicates, such as another case, wording or size, are other rows.
    """
    seen = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            text = " ".join((part if part.isascii() else unicodedata.normalize("NFKC", part)).split())
        else:
            text = pixels_digest(part)
        seen.update(text.encode() + b"\0")
    return int.from_bytes(seen.digest(), "little")


def tabulate(
    name: str, rows: Sequence[Row], config: Config, notice: Notice, bad: Bad = refuse, **how: Any
) -> Table:
    """The rows of data set `name` by role. how: see `Tabulator`."""
    tabulator = Tabulator(name, columns_of(rows), config, bad, **how)
    table = tabulator.add(rows)
    tabulator.finish(notice)
    return table


def columns_of(rows: Iterable[Row]) -> set[str]:
    return {column for row in rows for column in row.values}


class Tabulator:
    """Chooses columns by role, checks that every row fills them, and drops duplicate rows.

    names: the columns of the rows. one_task: the rows are one task; columns of tasks and strata are ignored.
    unique: False keeps duplicates. tokenizer: an `ImageReader` for images. setting: that names the data, for
    messages. Raises `UsageError`.
    """

    def __init__(
        self,
        name: str,
        names: Collection[str],
        config: Config,
        bad: Bad = refuse,
        one_task: bool = False,
        unique: bool = True,
        tokenizer: Any = None,
        setting: str = "dataset",
    ) -> None:
        self.name, self.config, self.bad, self.unique, self.one_task = name, config, bad, unique, one_task
        self.names, self.kind = sorted(names), config.learner.kind
        self.images = isinstance(tokenizer, ImageReader)
        self.stratum_of, self.stratum, task = None if one_task else stratifier(config), None, None
        with prefixed(f"{setting if name == setting else f'{setting}={name}'}:"):
            self.reader = self.kind.rows(config, tokenizer, self.names)
            if not one_task:
                task = pick(config, self.names, "task_column", required=not config.draws_classes)
                if self.stratum_of is None:
                    self.stratum = pick(config, self.names, "stratum_column", required=False)
        roles = {"target": self.reader.label, "task": task}
        self.columns = {role: column for role, column in roles.items() if column}
        # the target of a pair is the learner's to read
        self.read_here = [one for one in self.columns.items() if one[0] == "task" or not self.kind.pair]
        read = {*self.reader.columns, *self.columns.values(), self.stratum}
        self.unread = [one for one in self.names if self.reader.columns and one not in read]
        self.texts, self.nested = set[str](), set[str]()  # unread columns of texts, and of lists of texts
        self.count, self.wrong = 0, 0  # rows; bad rows
        self.seen, self.inputs, self.targets = set[int](), array("q"), array("q")  # hashes
        self.firsts = {role: dict[str, Row]() for role in self.columns}  # of each name, its first row

    def add(self, rows: Sequence[Row]) -> Table:
        """The next rows. Errors are passed to `bad`."""
        kept, decoded = list[dict[str, Any]](), self.count + len(rows) <= MOST_IMAGES
        for row in rows:
            self.count += 1
            try:
                values = self.read(row)
            except UsageError as error:
                self.bad(UsageError(f"{row.origin} {str(error).strip()}"))
                self.wrong += 1
                continue
            if self.stratum_of is not None:
                values["stratum"] = self.stratum_of(row)
            for role, rows_of_names in self.firsts.items():
                rows_of_names.setdefault(values[role], row)
            image, task, target = values.get("image"), values["task"], values["target"]
            content = content_key(*((image,) if image and decoded else values["parts"]))
            key = hash((content if image else values["input"], task, target))
            if not self.unique or key not in self.seen:
                self.seen.add(key)
                self.inputs.append(hash((task, content)))
                self.targets.append(hash(target))
                values["unit"], values["content"] = task or target, content
                kept.append(values)
        for columns, depth in ((self.texts, 0), (self.nested, DEPTH)):
            new = [column for column in self.unread if column not in columns]
            columns.update(column for column in new if holds_text(rows, column, depth))
        usual = {PAIRED[1], OPTIONS, *chain(*USUAL.values())}
        late = columns_of(rows).difference(self.names)
        if found := sorted(column for column in late if column.lower() in usual):
            raise UsageError(
                f"{self.name} has a column {found[0]} that its first {self.count - len(rows)} rows do not"
                " have; write it into the first row too, with null"
            )
        given = [role.name for role in fields(Table) if kept and role.name in kept[0]]
        return Table(**{role: [values[role] for values in kept] for role in given})

    def read(self, row: Row) -> dict[str, Any]:
        """The values of a row by role, and `parts`, which identify it. Raises `UsageError` without the place
        of the row.
        """
        values: dict[str, Any] = {"stratum": "all", "task": "", "target": ""}
        for role, column in self.read_here:
            values[role] = cell(row, column)
        stored = self.reader.read(row)
        if self.stratum and (self.config.stratum_column or is_text(row.values.get(self.stratum))):
            values["stratum"] = cell(row, self.stratum)  # rows without a usual one are in that of `all`
        if pair := self.kind.pair:
            # with --answers rows are compared by their inputs alone, as rows with a class are
            values["parts"] = self.kind.content(stored)[: 1 if self.config.answers else None]
            values["input"], values["target"] = stored[pair[0]], stored[pair[1]]
            if self.images:
                values["image"], pair = stored["image"], (*pair, "image")
            stored = {name: one for name, one in stored.items() if name not in pair}
        values["values"] = as_json("", stored, default=as_plain) if stored else "{}"
        if not pair:
            values["input"] = hashlib.sha256(values["values"].encode()).hexdigest()[:32]
            values["parts"] = (values["input"],)
        return values

    def finish(self, notice: Notice) -> None:
        """Log what is doubtful in all rows."""
        name, config, causal = self.name, self.config, self.config.learner.generates
        if self.images and self.count > MOST_IMAGES:
            notice(
                f"{self.count} images of {name} are compared with others by their names: above {MOST_IMAGES}"
            )
        for role, firsts in self.firsts.items():
            note_alike(self.columns[role], firsts, notice)
        if self.nested:
            unread, texts = sorted(self.nested), sorted(self.texts)
            advice = f"--{input_setting(config, self.images)} names another input"
            if not texts:
                advice = "write each value as one text to use it"
            elif "input" in texts and causal:
                advice = "leave --input_column out to read it"
            elif causal:
                advice = (
                    f"--prompt_template 'Q: {{{texts[0]}}} {{input}}\\nA:', say, puts them into the prompt"
                )
            of_data = "" if self.one_task else f" of {name}"  # one line for all files that are tasks
            notice(f"texts in {', '.join(unread)}{of_data} are not read; {advice}")
        if duplicates := self.count - len(self.inputs) - self.wrong:
            notice(f"{duplicates} of {self.count} rows repeat another one and are left out")
        distinct = np.unique(np.array([self.inputs, self.targets]), axis=1)
        alike = len(self.inputs) - distinct.shape[1]
        if self.unique and alike and self.kind.pair:
            notice(
                f"{alike} of {self.count} rows equal another one but for spaces or Unicode form; remove them"
            )
        classes = self.firsts.get("target", {})
        nameless = sorted(one for one in classes if not any(map(str.isalpha, one)))
        if config.label_names == NAMES and nameless:
            notice(
                f"label_names=names: {len(nameless)} of {counted(len(classes), 'class', 'classes')} of {name}"
                f" have no word as a name ({', '.join(nameless[:5])}), and it becomes an example; give the"
                " texts of the classes in a JSON file, or leave --label_names out"
            )
        several = int((np.unique(distinct[0], return_counts=True)[1] > 1).sum())
        if classes and self.unique and several:
            notice(f"{counted(several, 'input')} of {name} in more than one class; correct the labels")


@contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Inside, a `UsageError` says where."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place} {str(error).strip()}") from None


def holds_text(rows: Sequence[Row], column: str, depth: int = 0) -> bool:
    """Whether a column has a text that is no number, also among the first items of lists and dictionaries,
    up to this depth.
    """
    return any(has_word(row.values.get(column), depth) for row in rows)


def has_word(value: Any, depth: int) -> bool:
    """`holds_text` for a value. An image or a recording, whose dictionary has a path, is none."""
    if isinstance(value, Mapping):
        value = [] if "path" in value else list(value.values())
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(has_word(one, depth - 1) for one in value[:FIRST])
    return isinstance(value, str) and any(map(str.isalpha, value))


def note_alike(column: str, firsts: Mapping[str, Row], notice: Callable[[str], None]) -> None:
    """Log names of classes or tasks that are read as different ones and look the same.

    They are not merged: they may be meant, and a file of splits has them as they are. firsts: of each name,
    its first row.
    """
    alike: dict[str, list[str]] = {}
    for name, row in firsts.items():
        value = row.values[column]
        whole = isinstance(value, (int, float)) and value % 1 == 0  # 1, 1.0 and true of JSON
        text = str(int(value)) if whole else unicodedata.normalize("NFC", name).strip()
        alike.setdefault(text, []).append(name)
    if several := [names for names in alike.values() if len(names) > 1]:
        one, other = (f"{column}={shortened(name)} at {firsts[name].origin}" for name in several[0][:2])
        more = f" ({len(several) - 1} more like them)" if len(several) > 1 else ""
        notice(
            f"{one} and {other} differ only in spaces at an end, Unicode form (NFC, NFD) or type of number,"
            f" and are different names{more}; write them alike if they are the same"
        )


def label_texts(config: RowConfig, classes: Sequence[str]) -> dict[str, str]:
    """The text of each class; empty without --label_names. Raises `UsageError`."""
    if config.label_names is None:
        return {}
    if config.label_names == NAMES:
        return {name: " ".join(re.split(r"[\s_-]+", name)).strip() or name for name in classes}
    texts = json.loads(config.label_names)
    if missing := [name for name in classes if name not in texts]:
        raise UsageError(
            f"label_names={shortened(config.label_names)} has no text for class {shortened(missing[0])}"
            f" ({len(missing)} of {counted(len(classes), 'class', 'classes')}); add it"
        )
    return {name: texts[name] for name in classes}


def label_rows(labels: Mapping[str, str]) -> Table:
    """A row per class, with the text that names it."""
    none, zeros = [""] * len(labels), [0] * len(labels)
    return Table(none, none, none, [*labels.values()], [*labels], values=["{}"] * len(labels), content=zeros)


def as_plain(value: Any) -> Any:
    """An array as a list, and another object as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def rows_of(setting: str, examples: Iterable[Any], config: Config) -> list[Row]:
    """Examples as if they came from a file. Raises `UsageError`."""
    names = config.learner.kind.pair or ("text", "label")
    columns = [getattr(config, f"{name}_column", None) or name for name in names]
    rows = []
    for index, one in enumerate(examples):
        if isinstance(one, (list, tuple)) and len(one) == 2:
            one = dict(zip(columns, one, strict=True))
        if not isinstance(one, Mapping):
            raise UsageError(
                f"{setting}[{index}]={shortened(one)} is no pair; give ({columns[0]}, {columns[1]}) or"
                f" {{'{columns[0]}': ..., '{columns[1]}': ...}}"
            )
        rows.append(Row({str(name): value for name, value in one.items()}, f"{setting}[{index}]"))
    return rows


def rows_in_memory(data: Any, config: Config, setting: str = "dataset") -> list[Row]:
    """Rows of a `datasets.Dataset`, of the splits --dataset_split of a `DatasetDict`, or of pairs and
    dictionaries. setting: that has the data, for messages. Raises `UsageError`.
    """
    given, datasets = f"{setting}={type(data).__name__}", sys.modules.get("datasets")
    if datasets and isinstance(data, (datasets.IterableDataset, datasets.IterableDatasetDict)):
        raise UsageError(f"{given} is a stream, whose rows have no numbers; give a datasets.Dataset")
    if datasets and isinstance(data, (datasets.Dataset, datasets.DatasetDict)):
        rows = [*split_rows(setting, data, config.dataset_split)]
    elif hasattr(data, "columns"):  # iterating over a table of pandas or polars gives names of columns
        raise UsageError(f"{given} is a table of another library; give datasets.Dataset.from_pandas(table)")
    elif isinstance(data, (str, os.PathLike, Mapping)) or not isinstance(data, Iterable):
        rows = []
    else:
        rows = rows_of(setting, data, config)
    if not rows:
        raise UsageError(
            f"{setting}={shortened(data)} holds no rows; give pairs, dictionaries or a datasets.Dataset,"
            " and names of files where settings are"
        )
    return rows
