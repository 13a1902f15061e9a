"""Rows of a data set, and their columns by role: text or image and class, or input and output, task and
stratum.

Data sets are local .jsonl, .csv and .parquet files (.gz too), folders of them, or hub ids. Local files are
read line by line, so that an error names the file and the line. Errors of a row are passed to `bad`, which
raises or counts them. An error after which the rest of a file cannot be read is raised: an unknown number of
rows would be missing.
"""

import csv
import datetime
import gzip
import hashlib
import io
import json
import math
import numbers
import os
import re
import sys
import time
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.security import Bounded, import_function, inside, most_bytes, one_line, too_large
from fmmeta.common.text import PromptTemplate, broken_text, counted, shortened, to_json
from fmmeta.config.json_files import NAMES
from fmmeta.config.settings import Config, RowConfig
from fmmeta.tasks.data.images import EncodedImage, encoded_image, image_folder, pixels_digest

ENDINGS = (".jsonl", ".csv", ".parquet")
PARQUET_ROWS = 1024  # that are in memory as columns at a time

Examples = Sequence[tuple[Any, Any] | Mapping[str, Any]]
"""Pairs of text and class, or of input and output; or rows as a file has them."""
IN_MEMORY = "in-memory"
"""Value of the setting `dataset` for rows that were given in Python."""

Bad = Callable[[UsageError], None]
"""Handles an error of a row or a file: raises it, or stores it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values by column, their origin (`file:line`), and the folder where relative paths of images begin."""

    values: dict[str, Any]
    origin: str
    folder: Path | None = None


def refuse(error: UsageError) -> NoReturn:
    raise error


def data_files(dataset: str) -> list[Path] | None:
    """The files of a local data set, sorted by name; None for a hub id. Raises `UsageError`."""
    path, kinds = Path(dataset), f"{', '.join(ENDINGS)} file (.gz too)"
    if path.is_dir():
        files = [inside(path, file) for file in files_of(path)]
        if not files:
            raise UsageError(f"dataset={dataset} holds no {kinds}; name a folder that does")
        return files
    if path.is_file():
        if not ending(path):
            raise UsageError(f"dataset={dataset} is no {kinds}; convert it to one of them")
        return [path]
    if path.is_absolute() or dataset.startswith(".") or ending(path) or dataset.count("/") > 1:
        raise UsageError(f"dataset={dataset} is not a file or folder; check the path")
    return None


def ending(path: Path) -> str | None:
    """The ending of a data file without `.gz`; None for other files."""
    name = path.name.removesuffix(".gz")
    return next((end for end in ENDINGS if name.endswith(end)), None)


def files_of(folder: Path) -> list[Path]:
    """The data files of a folder that are not hidden, sorted by name."""
    return sorted(path for path in folder.iterdir() if ending(path) and not path.name.startswith("."))


def stem(path: Path) -> str:
    """The name of a data file without its ending."""
    return path.name.removesuffix(".gz").removesuffix(str(ending(path)))


def read_file(path: Path, bad: Bad = refuse, most_gib: float | None = None) -> list[Row]:
    """See `stream_file`."""
    return list(stream_file(path, bad, most_gib))


def stream_file(path: Path, bad: Bad = refuse, most_gib: float | None = None) -> Iterator[Row]:
    """Rows of a file, as they are read. Raises `UsageError`, whatever `bad` does, if the file cannot be read
    to its end or unpacks to more than `most_gib` (see `most_bytes`).
    """
    readers = {".jsonl": jsonl, ".csv": csv_rows, ".parquet": partial(parquet, most_gib=most_gib)}
    empty, names = True, card_names(path.parent)
    try:
        with unpacked(path, most_gib) if path.suffix == ".gz" else path.open("rb") as file:
            for found in readers[ending(path) or ""](path, file):  # type: ignore[arg-type]
                empty = False
                if isinstance(found, Row):
                    yield named(found, names, ending(path) == ".csv")
                else:
                    bad(found)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}; fix or remove the file") from None
    if empty:
        bad(UsageError(f"{path} is empty; remove it or fill it"))


def image_rows(dataset: str) -> list[Row]:
    """The images of a folder, as rows; none for any other data set, such as a file of rows beside a folder of
    its images. Raises `UsageError`.
    """
    root = Path(dataset)
    if root.is_dir() and any(map(ending, root.iterdir())):
        return []
    return [
        Row({"image": str(path.relative_to(root)), "label": label, "stratum": stratum}, str(path), root)
        for path, label, stratum in image_folder(dataset)
    ]


def unpacked(path: Path, most_gib: float | None = None) -> io.BufferedReader:
    return io.BufferedReader(Bounded(cast("io.BufferedIOBase", gzip.open(path, "rb")), path, most_gib))


def jsonl(path: Path, file: io.BufferedReader) -> Iterator[Row | UsageError]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
            yield UsageError(f"{path}:{number} is not a line of JSON ({error}); fix the line")
        else:
            if isinstance(values, dict):
                values = {sys.intern(name): one for name, one in values.items()}  # rows share the names
                yield Row(values, f"{path}:{number}", path.parent)
            else:
                yield UsageError(f'{path}:{number} is no JSON object; write {{"text": ..., "label": ...}}')


def csv_rows(path: Path, file: io.BufferedReader) -> Iterator[Row | UsageError]:
    csv.field_size_limit(sys.maxsize)  # of the process; 131,072 characters by default
    undecodable: list[UsageError] = []  # of the current row

    def lines() -> Iterator[str]:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                undecodable.append(
                    UsageError(f"{path}:{number} is not a line of CSV ({error}); fix the line")
                )
                yield line.decode("utf-8", "replace")

    reader = csv.reader(lines(), strict=True)
    header, done = None, 0  # done: lines before the current row
    try:
        for cells in reader:
            if undecodable and header is None:
                raise undecodable[0]
            if undecodable:
                yield undecodable.pop(0)
                undecodable.clear()
            elif not cells:
                pass  # a blank line
            elif header is None:
                header = cells
                refuse_twice(f"{path}:{reader.line_num}", header)
            elif len(cells) != len(header):
                yield UsageError(
                    f"{path}:{reader.line_num} has another number of fields than the header; fix the line"
                )
            else:
                yield Row(dict(zip(header, cells, strict=True)), f"{path}:{reader.line_num}", path.parent)
            done = reader.line_num
    except csv.Error as error:  # the start of the next row is not known
        raise UsageError(f"{path}:{done + 1} is not a line of CSV ({error}); fix the line") from None


def parquet(path: Path, file: io.BufferedReader, most_gib: float | None) -> Iterator[Row | UsageError]:
    import pyarrow.parquet

    try:
        packed = pyarrow.parquet.ParquetFile(io.BytesIO(file.read()))
        groups = range(packed.num_row_groups)
        size = sum(packed.metadata.row_group(number).total_byte_size for number in groups)
        if size > most_bytes(most_gib):
            raise too_large(path, most_gib, f"{size} bytes, ")
        refuse_twice(str(path), packed.schema_arrow.names)
        names, done = schema_names(path, packed.schema_arrow), 0  # those of a card are the same
        for batch in packed.iter_batches(PARQUET_ROWS):
            for found in batch_rows(batch, path, done):
                yield named(found, names) if isinstance(found, Row) else found
            done += len(batch)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is not a parquet file ({one_line(error)}); fix or remove it") from None


def batch_rows(batch: Any, path: Path, done: int) -> Iterator[Row | UsageError]:
    """Rows of a batch of Arrow, an error for each that Python has no values for. done: rows before it."""
    try:
        found: list[Any] = batch.to_pylist()
    except Exception:  # each type has others: texts that are no UTF-8, unknown time zones
        found = [None] * len(batch)
    for index, values in enumerate(found):
        origin = f"{path}:{done + index + 1}"
        yield Row(values, origin, path.parent) if values else read_cells(batch, index, origin, path)


def read_cells(batch: Any, index: int, origin: str, path: Path) -> Row | UsageError:
    """A row of a batch, read value by value; an error for the first that cannot be read."""
    values = dict[str, Any]()
    for column, cells in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[column] = cells[index].as_py()
        except Exception as error:
            return UsageError(
                f"{origin} has a value in the column {shortened(column)} that cannot be read"
                f" ({one_line(error)}); fix it, or remove the column"
            )
    return Row(values, origin, path.parent)


ClassNames = Mapping[str, Sequence[str]]
"""Names of the classes whose numbers a column holds, by column."""


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Those of the columns that are a `datasets.ClassLabel`."""
    import datasets

    labels = {name: one for name, one in features.items() if isinstance(one, datasets.ClassLabel)}
    return {name: one.names for name, one in labels.items() if one.names}


def schema_names(path: Path, schema: Any) -> ClassNames:
    """Those in the metadata that `datasets` writes into a parquet file. Raises `UsageError`."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    import datasets

    try:
        return class_names(datasets.Features.from_arrow_schema(schema))
    except Exception as error:  # metadata of a newer version, or damaged
        raise UsageError(
            f"{path} has metadata of datasets that cannot be read ({one_line(error)}); write the file again"
        ) from None


def cards_of(folder: Path) -> list[Path]:
    """The files of a folder's data set card that name classes."""
    cards = [folder / name for name in ("README.md", "dataset_infos.json")]
    naming = re.compile(rb'(?s)dataset_info:.*class_label:|"ClassLabel"')
    return [card for card in cards if card.is_file() and naming.search(card.read_bytes())]


def card_names(folder: Path) -> ClassNames:
    """Those in the data set card of a folder, as `datasets` reads it for a hub id. Raises `UsageError`.

    Columns that its configurations name differently are refused: local files do not say which one they are.
    """
    if not cards_of(folder):
        return {}
    from datasets.info import DatasetInfosDict

    found: dict[str, Sequence[str]] = {}
    try:
        infos = DatasetInfosDict.from_directory(str(folder))
    except Exception as error:  # YAML, JSON or features that cannot be read
        raise UsageError(
            f"{folder} has a data set card that cannot be read ({one_line(error)}); fix it"
        ) from None
    for info in infos.values():
        for column, names in class_names(info.features or {}).items():
            if found.setdefault(column, names) != names:
                raise UsageError(
                    f"{folder} has a data set card whose configurations name the classes of {column}"
                    " differently; keep the one of these files"
                )
    return found


def named(row: Row, names: ClassNames, of_csv: bool = False) -> Row:
    """The row with names in place of the numbers of classes; None for what is no class, as -1 is in rows
    without a label. of_csv: digits are numbers, also where a class is called so.
    """
    for column in names.keys() & row.values.keys():
        classes, value = names[column], row.values[column]
        if isinstance(value, str) and value.strip().isdecimal() and (of_csv or value not in classes):
            value = int(value)
        if isinstance(value, (int, float)):
            is_class = 0 <= value < len(classes) and value % 1 == 0
            value = classes[int(value)] if is_class else None
        row.values[column] = next((one for one in (value, str(value).strip()) if one in classes), None)
    return row


def refuse_twice(where: str, columns: Sequence[str]) -> None:
    """Raise `UsageError` if two columns have the same name; columns without a name are not read."""
    for name, count in Counter(columns).items():
        if name and count > 1:
            raise UsageError(f"{where} has {count} columns named {shortened(name)}; rename all but one")


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached, tried once per process: the hub's client tries six times for every
    file, which takes minutes without a network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    for wait_s in (1.0, 2.0, 0.0):  # a connection may fail for a moment
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return True
        except Exception:  # each HTTP client has other exceptions for it
            time.sleep(wait_s)
    return False


def open_hub(dataset: str, config_name: str | None, split: str = "train", revision: str | None = None) -> Any:
    """A split of a hub data set (of its cached copy if the hub cannot be reached); rows are read later.

    Raises `UsageError`, which tells an unreachable hub from a wrong name.
    """
    import datasets
    import datasets.config
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    asked_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not hub_answers()
    try:  # the client would try six times for every file
        return datasets.load_dataset(dataset, config_name, split=split, revision=revision)
    except Exception as error:  # the hub raises many types
        why = one_line(error)
        if "Unknown split" in why:
            raise UsageError(
                f"dataset_split={split} is no split of dataset={dataset} ({why}); give one of these, several"
                " as a+b, or all"
            ) from None
        if HF_HUB_OFFLINE:
            text = (
                f"is no path, not in the cache, and HF_HUB_OFFLINE is set ({why}); unset it, or give a file"
            )
        elif not hub_answers():
            text = (
                f"is no path, and the hub at {ENDPOINT} cannot be reached; check the network, or give a file"
            )
        else:
            text = f"is neither a path nor a readable hub data set ({why}); check the name"
            text += f" and dataset_revision={revision}" if revision else ""
        raise UsageError(f"dataset={dataset} {text}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = asked_offline


def hub_rows(dataset: str, split: str, part: Any) -> list[Row]:
    """Rows of a split; class ids become names, and images (audio, video) stay encoded."""
    part = part.with_format(None)
    for column, feature in part.features.items():
        if getattr(feature, "decode", False):
            part = part.cast_column(column, replace(feature, decode=False))
    names, numbered = class_names(part.features), enumerate(cast("Iterable[dict[str, Any]]", part), 1)
    return [named(Row(values, f"{dataset}[{split}]:{number}"), names) for number, values in numbered]


def rows_of(setting: str, examples: Examples, config: Config) -> list[Row]:
    """Examples as if they came from a file. Raises `UsageError`."""
    columns = (config.text_column or "text", config.label_column or "label")
    if config.task_type == "causal_lm":
        columns = (config.input_column or "input", config.output_column or "output")
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


def listed(name: str, examples: Any) -> Examples:
    """Examples as a list, of a `datasets.Dataset` with names of classes. Raises `UsageError` for none."""
    datasets = sys.modules.get("datasets")
    if datasets and isinstance(examples, datasets.Dataset):
        examples = [row.values for row in hub_rows(name, "rows", examples)]
    if isinstance(examples, Mapping) or not isinstance(examples, Iterable):
        raise UsageError(
            f"{name}={shortened(examples)} is neither a file nor pairs; give [(text, class), ...]"
        )
    if not (rows := list(examples)):
        raise UsageError(f"{name}=[] holds no examples; give pairs of text and class")
    return rows


def rows_in_memory(data: Any, config: Config) -> list[Row]:
    """Rows of a `datasets.Dataset`, of the splits --dataset_split of a `DatasetDict`, or of pairs and
    dictionaries. Raises `UsageError`.
    """
    import datasets

    kind = type(data).__name__
    if isinstance(data, (datasets.IterableDataset, datasets.IterableDatasetDict)):
        raise UsageError(f"dataset={kind} is a stream, whose rows have no numbers; give a datasets.Dataset")
    if isinstance(data, datasets.DatasetDict):
        wanted = config.dataset_split
        names = list(data) if wanted == "all" else wanted.split("+")
        if missing := [name for name in names if name not in data]:
            raise UsageError(
                f"dataset_split={wanted}: the DatasetDict has no split {missing[0]!r}; use"
                f" {', '.join(map(str, data))}, several as a+b, or all"
            )
        return [row for name in names for row in hub_rows("dataset", str(name), data[name])]
    if isinstance(data, datasets.Dataset):
        if not len(data):
            raise UsageError("dataset=Dataset holds no rows; give one with rows")
        return hub_rows("dataset", str(data.split or "rows"), data)
    if hasattr(data, "columns"):  # iterating over a table of pandas or polars gives names of columns
        raise UsageError(
            f"dataset={kind} is a table of another library; give datasets.Dataset.from_pandas(table)"
        )
    if isinstance(data, (str, os.PathLike, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"dataset={shortened(data)} holds no rows; give a datasets.Dataset, pairs or dictionaries, and"
            " names of files in Config(dataset=...)"
        )
    if not (rows := list(data)):
        raise UsageError("dataset=[] holds no rows; give pairs or dictionaries")
    if config.task_type == "causal_lm" and not isinstance(rows[0], Mapping):
        raise UsageError(
            f"dataset[0]={shortened(rows[0])} names no task; give dictionaries with task, input and output"
        )
    return rows_of("dataset", rows, config)


INSTRUCTION = "instruction"  # is joined with an `input`
TEXT, LABEL = ("text", "sentence", "utterance"), ("label", "intent", "class")
USUAL = {  # names that are recognised
    "text_column": TEXT,
    "image_column": ("image", "img", "text"),  # the last one is that of pairs
    "label_column": LABEL,
    "stratum_column": ("stratum", "category", "domain"),
    "task_column": ("task",),
    "input_column": ("input", "prompt", "question", INSTRUCTION, *TEXT),
    "output_column": ("output", "answer", "target", *LABEL),
}
OPTIONS = "options"  # column of the answers to choose from, for causal_lm


@dataclass
class Table:
    """Rows by role. `unit` is what splits assign: the named task, or the class if tasks have no names."""

    unit: list[str]
    stratum: list[str]
    task: list[str]  # "" if tasks have no names
    input: list[str]  # text or input
    target: list[str]  # class or output
    options: list[list[str]] = field(default_factory=list)  # causal_lm: answers to choose from; [] without
    image: list[EncodedImage] = field(default_factory=list)  # of image models; `input` has their names
    values: list[str] = field(default_factory=list)  # with --collate_fn: all columns of a row, as JSON
    content: list[int] = field(default_factory=list)  # what identifies a row in any data: `content_key`

    @property
    def contents(self) -> dict[str, np.ndarray]:
        """The content of the rows of each unit, uint64."""
        found = defaultdict[str, list[int]](list)
        for unit, key in zip(self.unit, self.content, strict=True):
            found[unit].append(key)
        return {unit: np.array(keys, np.uint64) for unit, keys in found.items()}

    @property
    def encodable(self) -> Sequence[Any]:
        """What a model reads: texts, or images."""
        return self.image or self.input


MOST_IMAGES = 5000  # of a data set that are decoded to compare them


def content_key(*parts: str | EncodedImage) -> int:
    """64 bits that identify a text, a pair or an image in all data sets, whatever the form and the names.

    Texts are equal apart from white space and Unicode form (NFKC), images if their pixels are. Other near
    duplicates, such as another case, wording or size, are other rows.
    """
    seen = hashlib.blake2b(digest_size=8)
    for part in parts:
        is_text = isinstance(part, str)
        text = " ".join(unicodedata.normalize("NFKC", part).split()) if is_text else pixels_digest(part)
        seen.update(text.encode() + b"\0")
    return int.from_bytes(seen.digest(), "little")


def tabulate(
    name: str,
    rows: Sequence[Row],
    config: Config,
    notice: Callable[[str], None],
    bad: Bad = refuse,
    one_task: bool = False,
    unique: bool = True,
    images: bool = False,
    setting: str = "dataset",
) -> Table:
    """Choose the columns of data set `name`, check that every row fills them, and drop duplicate rows.

    one_task: the rows are one task; columns of tasks and strata are ignored. unique: False keeps duplicates.
    images: whether the inputs are images. setting: that names the data, for messages. With --collate_fn, rows
    need neither a text nor an image.
    """
    given = setting if name == setting else f"{setting}={name}"
    if images and config.label_names is not None:
        raise UsageError(
            f"label_names={shortened(config.label_names)} needs texts, and {name} has images; leave it out"
        )
    unread = "text_column" if images else "image_column"
    if (value := getattr(config, unread)) is not None and config.collate_fn is None:
        kind = "images" if images else "texts"
        raise UsageError(f"{unread}={value}: the model reads {kind}, not this column; leave it out")
    names = sorted({column for row in rows for column in row.values})
    causal, collated = config.task_type == "causal_lm", config.collate_fn is not None
    of_input = input_setting(config.task_type, images)
    placed = template_columns(config) if causal and config.input_column is None else []
    others = [column for column in names if column not in placed]
    columns = {
        "input": pick(given, config, others, of_input, required=not collated),
        "target": pick(given, config, names, "output_column" if causal else "label_column"),
    }
    stratum_of = usual_stratum = None
    if not one_task:
        columns["task"] = pick(given, config, names, "task_column", required=causal)
        stratum_of = stratifier(config)
        if stratum_of is None:
            columns["stratum"] = pick(given, config, names, "stratum_column", required=False)
            if config.stratum_column is None:  # rows without a stratum are in that of `all`
                usual_stratum = columns.pop("stratum")
    pair = None
    if causal and columns["input"]:
        pair = PairInput.of(config, columns["input"], names, given, config.input_column is None)
        if columns["target"] in pair.columns:
            raise UsageError(
                f"prompt_template={config.prompt_template} names {{{columns['target']}}}, the column of the"
                " answer; write {output}, after all other names"
            )
        del columns["input"]
    table, seen = Table([], [], [], [], []), set[Any]()
    roles = ("task",) if causal else ("task", "target")
    units = {role: column for role, column in columns.items() if column and role in roles}
    firsts: dict[str, dict[str, Row]] = {role: {} for role in units}  # of each name, its first row
    wrong, image = 0, columns["input"] if images else None
    decoded, of_content = len(rows) <= MOST_IMAGES, ""
    if images:
        del columns["input"]
    if image and not decoded:
        notice(f"{len(rows)} images of {name} are compared with others by their names: above {MOST_IMAGES}")
    for number, row in enumerate(rows):
        try:
            values = {role: cell(row, column) for role, column in columns.items() if column}
            if pair:
                values["input"], of_content = pair.read(row)
            if usual_stratum and has_text(row, usual_stratum):
                values["stratum"] = cell(row, usual_stratum)
            if image:
                values["input"], data = encoded_image(row.values.get(image), image, row.origin, row.folder)
            if collated:
                shown = {key: one for key, one in row.values.items() if key != image}
                values["values"] = as_json(row.origin, shown, default=as_plain)
                inputs = {key: one for key, one in shown.items() if key not in columns.values()}
                inputs = as_json(row.origin, inputs, default=as_plain, sort_keys=True)
                values.setdefault("input", hashlib.sha256(inputs.encode()).hexdigest()[:32])
            choices = options_of(row, values["target"]) if causal else []
        except UsageError as error:
            bad(error)
            wrong += 1
            continue
        if stratum_of is not None:
            values["stratum"] = stratum_of(row)
        for role, rows_of_names in firsts.items():
            rows_of_names.setdefault(values[role], row)
        alone = data if image and decoded else values["input"]
        content = content_key(*((of_content, values["target"]) if pair else (alone,)))
        input_ = content if image else values["input"]
        key: Any = (input_, *(values.get(role) for role in ("task", "target", "values")))
        key = key if unique else number
        if key in seen:
            continue
        seen.add(key)
        table.unit.append(values.get("task", values["target"]))
        table.stratum.append(values.get("stratum", "all"))
        table.task.append(values.get("task", ""))
        table.input.append(values["input"])
        table.target.append(values["target"])
        table.options.append(choices)
        table.content.append(content)
        if image:
            table.image.append(data)
        if collated:
            table.values.append(values["values"])
    for role, column in units.items():
        note_alike(column, firsts[role], notice)
    if not collated:
        known = {
            *columns.values(),
            *(pair.columns if pair else ()),
            image,
            usual_stratum,
            OPTIONS if causal else "",
        }
        unread = [column for column in names if column not in known and holds_text(rows, column)]
        if unread:
            advice = f"--{of_input} names another input"
            if "input" in unread and causal:
                advice = "leave --input_column out to read it"
            elif causal:
                advice = (
                    f"--prompt_template 'Q: {{{unread[0]}}} {{input}}\\nA:', say, puts them into the prompt"
                )
            of_data = "" if one_task else f" of {name}"  # one line for all files that are tasks
            notice(f"texts in {', '.join(unread)}{of_data} are not read; {advice}")
    if duplicates := len(rows) - len(seen) - wrong:
        notice(f"{duplicates} of {len(rows)} rows repeat another one and are left out")
    distinct = {*zip(table.task, table.target, table.content, strict=True)}
    alike = len(table.unit) - len(distinct)
    if unique and alike and not collated:
        notice(f"{alike} of {len(rows)} rows equal another one but for spaces or Unicode form; remove them")
    if config.label_names == NAMES and not causal:
        classes = set(table.target)
        if nameless := sorted(name for name in classes if not any(map(str.isalpha, name))):
            notice(
                f"label_names=names: {len(nameless)} of {counted(len(classes), 'class', 'classes')} of {name}"
                f" have no word as a name ({', '.join(nameless[:5])}), and it becomes an example; give the"
                " texts of the classes in a JSON file, or leave --label_names out"
            )
    if not causal and unique:
        inputs = Counter((task, content) for task, _, content in distinct)
        if several := sum(count > 1 for count in inputs.values()):
            notice(f"{counted(several, 'input')} of {name} in more than one class; correct the labels")
    return table


@dataclass(frozen=True)
class PairInput:
    """The columns of a pair's input: one, `instruction` and `input`, which a line break joins, or those that
    --prompt_template names. Of several, some may be empty.

    template: None unless it names other columns than that of {input} (`picked`); then the input of a pair is
    its whole prompt.
    """

    columns: tuple[str, ...]
    template: PromptTemplate | None = None
    picked: str = ""

    @classmethod
    def of(
        cls, config: RowConfig, picked: str, columns: Collection[str], where: str, joins: bool
    ) -> "PairInput":
        """picked: the column of {input}. columns: those of the data `where`. joins: whether `instruction` may
        precede it. Raises `UsageError`.
        """
        if named := template_columns(config):
            if missing := [name for name in named if name not in columns]:
                raise UsageError(
                    f"prompt_template={config.prompt_template} names {{{missing[0]}}}, which is no column of"
                    f" {where}; it has {', '.join(columns)}"
                )
            return cls((*named, picked), PromptTemplate.of(config.prompt_template), picked)
        joined = joins and picked == "input" and INSTRUCTION in columns
        return cls((INSTRUCTION, picked) if joined else (picked,))

    def read(self, row: Row) -> tuple[str, str]:
        """The input, and the texts of its columns alone. Raises `UsageError`."""
        texts = {
            column: "" if len(self.columns) > 1 and is_missing(row.values.get(column)) else cell(row, column)
            for column in self.columns
        }
        parts = list(filter(None, texts.values()))
        if not parts:
            raise UsageError(f"{row.origin} has no text in {', '.join(self.columns)}; fix the row")
        joined = "\n".join(parts)
        if self.template is None:
            return joined, joined
        return self.template.fill({**texts, "input": texts[self.picked]}), joined


def input_of_pair(config: RowConfig, row: Row, keys: Sequence[str]) -> str:
    """The input of a row by itself. keys: usual names of the column of {input}, the first of which counts, or
    the one that was given.

    Raises `UsageError`.
    """
    free = [key for key in keys if key in row.values and key not in template_columns(config)]
    return PairInput.of(config, [*free, *keys][0], row.values, row.origin, len(keys) > 1).read(row)[0]


def refuse_text_alone(config: Config, where: str) -> None:
    """Raise `UsageError` for an input `where` that is one text, if the prompt needs other columns too."""
    if config.task_type == "causal_lm" and template_columns(config):
        raise UsageError(
            f"{where} is one text, and prompt_template={config.prompt_template} names columns; give"
            " objects with them"
        )


def template_columns(config: RowConfig) -> list[str]:
    """The columns that --prompt_template names, {input} aside."""
    return [] if config.prompt_template == "chat" else PromptTemplate.of(config.prompt_template).columns


def holds_text(rows: Sequence[Row], column: str) -> bool:
    """Whether a column has a text that is no number."""
    values = (row.values.get(column) for row in rows)
    return any(isinstance(value, str) and any(map(str.isalpha, value)) for value in values)


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN as in a table, or an empty text or list."""
    empty = isinstance(value, (str, list, tuple)) and not value
    return value is None or empty or (isinstance(value, float) and math.isnan(value))


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


def with_label_rows(table: Table, labels: Mapping[str, str]) -> Table:
    """The rows, and after them one per class with the text that names it."""
    none = [""] * len(labels)
    return replace(
        table,
        unit=table.unit + none,
        stratum=table.stratum + none,
        task=table.task + none,
        input=[*table.input, *labels.values()],
        target=[*table.target, *labels],
        options=table.options + [[] for _ in labels],
        content=table.content + [0] * len(labels),
    )


def as_json(origin: str, values: dict[str, Any], write: Callable[..., str] = to_json, **how: Any) -> str:
    """The columns of a row as JSON. write, how: a function such as json.dumps, and its options.

    Raises `UsageError`.
    """
    try:
        return write(values, **how)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{origin} has a value that JSON cannot hold ({one_line(error)}); give texts, numbers of fewer"
            " digits, lists, and dictionaries whose keys are texts"
        ) from None


def as_plain(value: Any) -> Any:
    """An array as a list, and another object as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def input_setting(task_type: str, images: bool) -> str:
    """The setting that names the column of inputs. images: whether the model reads images."""
    if task_type == "causal_lm":
        return "input_column"
    return "image_column" if images else "text_column"


def pick(
    given: str, config: Config, columns: Sequence[str], setting: str, required: bool = True
) -> str | None:
    """The column that a setting names, else the first usual one, else None unless it is required.

    given: the setting and the name of the data, for messages.
    """
    asked = getattr(config, setting)
    if asked is not None and asked not in columns:
        raise UsageError(f"{setting}={asked} is no column of {given}; it has {', '.join(columns)}")
    found = asked or next((column for column in USUAL[setting] if column in columns), None)
    if found is None and required:
        pairs = config.task_type == "classification" and all(
            set(USUAL[one]) & set(columns) for one in ("input_column", "output_column")
        )
        raise UsageError(
            f"{given} has none of the columns {', '.join(USUAL[setting])}; it has "
            f"{', '.join(columns)}: name one with --{setting}"
            + (", or use --task_type causal_lm for pairs of input and output" if pairs else "")
        )
    return found


def stratifier(config: Config) -> Callable[[Row], str] | None:
    """The function of --stratify_by, from a row to its stratum; None without the setting.

    Raises `UsageError`, as the returned function does: an error of that function is not one of the row.
    """
    named = config.stratify_by
    if named is None:
        return None
    function = import_function("stratify_by", named)

    def stratum_of(row: Row) -> str:
        try:
            value = function(dict(row.values))
        except Exception as error:  # code of the user
            raise UsageError(
                f"stratify_by={named} failed at {row.origin} with {type(error).__name__}: {one_line(error)};"
                " fix the function"
            ) from None
        try:
            hash(value)
        except TypeError:
            raise UsageError(
                f"stratify_by={named} returned {shortened(value)} at {row.origin}, a {type(value).__name__},"
                " which cannot be hashed; return a text or a number"
            ) from None
        text = "" if value is None or value != value else str(value)
        if not text or broken_text(text):
            raise UsageError(
                f"stratify_by={named} returned {shortened(value)} at {row.origin}, which names no stratum;"
                " return a text or a number"
            )
        return text

    return stratum_of


def cell(row: Row, column: str) -> str:
    """The text of a row in a column. Raises `UsageError`."""
    value = row.values.get(column)
    if not has_text(row, column):
        why = " (missing, null, or the number of no class, such as -1)" if value is None else ""
        raise UsageError(f"{row.origin} has {column}={shortened(value)}, which is no text{why}; fix the row")
    text = str(value)
    if wrong := broken_text(text):
        raise UsageError(f"{row.origin} has {wrong} in {column}; fix the row")
    return text


def has_text(row: Row, column: str) -> bool:
    """Whether a row has a text that is not empty in a column."""
    value = row.values.get(column)
    return is_text(value) and str(value) != ""


def is_text(value: Any) -> bool:
    """Whether a value is read as a text: numbers and dates are; null, NaN, bytes, lists, objects are not."""
    kinds = (str, bool, numbers.Number, np.bool_, datetime.date, datetime.time, datetime.timedelta)
    try:
        return isinstance(value, kinds) and bool(value == value) and str(value) is not None
    except (ValueError, ArithmeticError):  # an integer of thousands of digits, a signalling NaN
        return False


def options_of(row: Row, answer: str) -> list[str]:
    """The answers to choose from in a row's column `options`; [] without one. Raises `UsageError`.

    The answer is one of them, and has more than spaces in it.
    """
    if not answer.strip():
        raise UsageError(f"{row.origin} has the answer {answer!r}, which is empty; fix the row")
    options = row.values.get(OPTIONS)
    if is_missing(options):
        return []
    if isinstance(options, tuple):
        options = list(options)
    if not isinstance(options, list) or not all(isinstance(one, str) and one.strip() for one in options):
        raise UsageError(
            f"{row.origin} has {OPTIONS}={shortened(options)}, which is no list of texts; write"
            f' "{OPTIONS}": ["yes", "no"], say, or leave it out'
        )
    if wrong := next(filter(None, map(broken_text, options)), None):
        raise UsageError(f"{row.origin} has {wrong} in {OPTIONS}; fix the row")
    if len(set(options)) < 2 or answer not in options:
        raise UsageError(
            f"{row.origin} has {OPTIONS}={shortened(options)}, which are not two or more texts with the"
            f" answer {shortened(answer)} among them; add it"
        )
    return list(dict.fromkeys(options))
