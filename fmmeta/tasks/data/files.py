"""Rows of local .jsonl, .json, .csv, .tsv and .parquet files (.gz too), of folders of them, and of folders of
images.

Texts are read line by line, so that an error names the file and the line. Errors of a row are passed to
`bad`, which raises or counts them. An error after which the rest of a file cannot be read is raised: an
unknown number of rows would be missing.
"""

import codecs
import csv
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.common.security import Bounded, inside, most_bytes, too_large
from fmmeta.common.text import HALF_PAIR, shortened
from fmmeta.tasks.data.columns import Bad, Row, refuse
from fmmeta.tasks.data.hub import BATCH, card_names, named, schema_names
from fmmeta.tasks.data.images import IMAGE_ENDINGS

TEXTS = (".txt", ".md")  # of documents
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
NO_ROWS = ("class_splits.json", "task_splits.json", "dataset_infos.json")  # beside the files of rows
SEPARATORS = ";\t|"  # that a .csv may have in place of commas


def data_files(dataset: str) -> list[Path] | None:
    """The files of a local data set, sorted by name; None for a hub id. Raises `UsageError`."""
    path, files = Path(dataset), list[Path]()
    if path.is_dir():
        files = [inside(path, file) for file in files_of(path)]
    elif path.is_file() and ending(path):
        files = [path]
    if path.exists() and not files:
        raise UsageError(
            f"dataset={dataset} is no {', '.join(ENDINGS)} file (.gz too; {', '.join(TEXTS)} for documents),"
            " and holds none; convert it, or name another"
        )
    if not files and (path.is_absolute() or dataset[0] == "." or ending(path) or dataset.count("/") > 1):
        raise UsageError(f"dataset={dataset} is not a file or folder; check the path")
    return files or None


def ending(path: Path) -> str | None:
    """The ending of a data file without `.gz`; None for other files."""
    name = path.name.removesuffix(".gz")
    return next((end for end in ENDINGS if name.endswith(end)), None)


def is_document(path: Path) -> bool:
    """Whether a file is a text."""
    return path.suffix.lower() in TEXTS


def files_of(folder: Path) -> list[Path]:
    """The data files of a folder that are not hidden, sorted by name; .json files, which often have settings,
    only without others.
    """
    files = sorted(path for path in folder.iterdir() if ending(path) and not path.name.startswith("."))
    others = [path for path in files if ending(path) != ".json"]
    return others or [path for path in files if path.name not in NO_ROWS]


def stem(path: Path) -> str:
    """The name of a data file without its ending."""
    return path.name.removesuffix(".gz").removesuffix(ending(path) or path.suffix)


def read_file(path: Path, bad: Bad = refuse, most_gib: float | None = None) -> list[Row]:
    """See `stream_file`."""
    return list(stream_file(path, bad, most_gib))


def stream_file(path: Path, bad: Bad = refuse, most_gib: float | None = None) -> Iterator[Row]:
    """Rows of a file, as they are read. Raises `UsageError`, whatever `bad` does, if the file cannot be read
    to its end or unpacks to more than `most_gib` (see `most_bytes`).
    """
    readers: dict[str, Callable[[Path, Any], Iterator[Row | UsageError]]] = {
        ".jsonl": jsonl,
        ".json": json_rows,
        ".csv": csv_rows,
        ".tsv": partial(csv_rows, delimiter="\t", quoting=csv.QUOTE_NONE),
        ".parquet": partial(parquet, most_gib=most_gib),
    }
    kind, empty, names = ending(path) or "", True, card_names(path.parent)
    with (
        usage_errors(f"{path} cannot be read", "fix or remove the file"),
        unpacked(path, most_gib) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        for found in readers[kind](path, file):
            empty = False
            if isinstance(found, Row):
                yield named(found, names, kind in (".csv", ".tsv"))
            else:
                bad(found)
    if empty:
        bad(UsageError(f"{path} is empty; remove it or fill it"))


def image_rows(dataset: str) -> list[Row]:
    """The images <class>/<image> or <stratum>/<class>/<image> of a folder, sorted, as rows.

    Empty for any other data set, such as a file of rows beside a folder of its images.

    Raises `UsageError` for a link that leaves the folder.
    """
    root, found = Path(dataset), list[Row]()
    if not root.is_dir() or files_of(root):
        return found
    for path in sorted([*root.glob("*/*"), *root.glob("*/*/*")]):
        *folders, name = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in (*folders, name))
        if path.suffix.lower() in IMAGE_ENDINGS and path.is_file() and not hidden:
            values = {"image": str(inside(root, path).relative_to(root)), "label": "/".join(folders)}
            values["stratum"] = folders[0] if len(folders) > 1 else "all"
            found.append(Row(values, str(path), root))
    return found


def unpacked(path: Path, most_gib: float | None = None) -> io.BufferedReader:
    return io.BufferedReader(Bounded(cast("io.BufferedIOBase", gzip.open(path, "rb")), path, most_gib))


def jsonl(path: Path, file: io.BufferedReader) -> Iterator[Row | UsageError]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield row_of(json.loads(line.decode("utf-8-sig")), f"{path}:{number}", path)
        except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
            yield UsageError(f"{path}:{number} is not a line of JSON ({error}); fix the line")


def json_rows(path: Path, file: io.BufferedReader) -> Iterator[Row | UsageError]:
    """Lines, or the items of one list, which is read completely."""
    if not file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from jsonl(path, file)
        return
    content = file.read()
    with usage_errors(f"{path} is not JSON", "fix the file"):
        items = json.loads(content.decode("utf-8-sig"))
    for number, one in enumerate(items, 1):
        yield row_of(one, f"{path}[{number}]", path)


def row_of(values: Any, origin: str, path: Path) -> Row | UsageError:
    """A row of JSON."""
    if not isinstance(values, dict):
        return UsageError(f'{origin} is no JSON object; write {{"text": ..., "label": ...}}')
    # rows share the names
    return Row({sys.intern(name): one for name, one in values.items()}, origin, path.parent)


def csv_rows(path: Path, file: io.BufferedReader, **dialect: Any) -> Iterator[Row | UsageError]:
    csv.field_size_limit(sys.maxsize)  # of the process; 131,072 characters by default
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(lines, strict=True, **dialect)
    header, done = None, 0  # done: lines before the current row
    try:
        for cells in filter(None, reader):  # no blank lines
            where, wrong = f"{path}:{reader.line_num}", ""
            if not all(map(str.isascii, cells)) and HALF_PAIR.search("".join(cells)):
                wrong = "is no UTF-8"
            elif header and len(cells) != len(header):
                wrong = "has another number of fields than the header"
            if header and not wrong:
                yield Row(dict(zip(header, cells, strict=True)), where, path.parent)
            elif header:
                yield UsageError(f"{where} {wrong}; fix the line")
            else:
                header = cells
                refuse_twice(where, header)
                other = next((one for one in SEPARATORS if len(cells) == 1 and one in cells[0]), None)
                if wrong or (other and not dialect):
                    wrong = wrong or f"separates columns by {other!r} and not by commas"
                    raise UsageError(f"{where} {wrong}; fix the header")
            done = reader.line_num
    except csv.Error as error:  # the start of the next row is not known
        raise UsageError(f"{path}:{done + 1} is not a line of CSV ({error}); fix the line") from None


def refuse_twice(where: str, columns: Sequence[str]) -> None:
    """Raise `UsageError` if two columns have the same name; columns without a name are not read."""
    for name, count in Counter(columns).items():
        if name and count > 1:
            raise UsageError(f"{where} has {count} columns named {shortened(name)}; rename all but one")


def parquet(path: Path, file: io.BufferedReader, most_gib: float | None) -> Iterator[Row | UsageError]:
    import pyarrow.parquet

    with usage_errors(f"{path} is not a parquet file", "fix or remove it"):
        packed = pyarrow.parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
        groups = range(packed.num_row_groups)
        size = sum(packed.metadata.row_group(number).total_byte_size for number in groups)
        if size > most_bytes(most_gib):
            raise too_large(path, most_gib, f"{size} bytes, ")
        refuse_twice(str(path), packed.schema_arrow.names)
        names, done = schema_names(path, packed.schema_arrow), 0  # those of a card are the same
        for batch in packed.iter_batches(BATCH):
            for found in batch_rows(batch, path, done):
                yield named(found, names) if isinstance(found, Row) else found
            done += len(batch)


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
