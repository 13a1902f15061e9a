"""Rows of a data set: local .jsonl, .csv and .parquet files (.gz too), folders of them, or a hub id.

Local files are read line by line here, so that an error can name the file and the line. Errors are
passed to `bad`, which raises or counts them; reading continues after a bad line if the next line can be
found.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from fmmeta.common.errors import UsageError
from fmmeta.common.security import GIB, Bounded, inside, one_line

MOST_GIB = 16.0  # that a compressed file may hold, unless told otherwise
ENDINGS = (".jsonl", ".csv", ".parquet")

Bad = Callable[[UsageError], None]
"""Handles an error of a row or a file: raises it, or stores it."""


@dataclass(frozen=True)
class Row:
    """Values by column, and where they come from (`file:line`)."""

    values: dict[str, Any]
    origin: str


def refuse(error: UsageError) -> NoReturn:
    raise error


def data_files(dataset: str) -> list[Path] | None:
    """The files of a local data set, in the order of their names; None for a hub id. Raises `UsageError`."""
    path = Path(dataset)
    if path.is_dir():
        files = sorted(inside(path, file) for file in path.iterdir() if ending(file))
        if not files:
            raise UsageError(
                f"dataset={dataset} holds no {', '.join(ENDINGS)} file (.gz too); name a folder that does"
            )
        return files
    if path.is_file():
        if not ending(path):
            raise UsageError(
                f"dataset={dataset} is no {', '.join(ENDINGS)} file (.gz too); convert it to one of them"
            )
        return [path]
    if path.is_absolute() or dataset.startswith(".") or ending(path) or dataset.count("/") > 1:
        raise UsageError(f"dataset={dataset} is not a file or folder; check the path")
    return None


def ending(path: Path) -> str | None:
    name = path.name.removesuffix(".gz")
    return next((end for end in ENDINGS if name.endswith(end)), None)


def read_file(path: Path, bad: Bad = refuse, most_gib: float = MOST_GIB) -> list[Row]:
    """Rows of a file. Raises `UsageError`, whatever `bad` does, if it unpacks to more than `most_gib`."""
    readers = {".jsonl": jsonl, ".csv": csv_rows, ".parquet": partial(parquet, most_gib=most_gib)}
    rows, wrong = list[Row](), list[UsageError]()

    def told(error: UsageError) -> None:
        wrong.append(error)
        bad(error)

    try:
        with unpacked(path, most_gib) if path.suffix == ".gz" else path.open("rb") as file:
            rows.extend(readers[ending(path) or ""](path, file, told))  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error) as error:
        bad(UsageError(f"{path} cannot be read: {error}; fix or remove the file"))
        return rows
    if not rows and not wrong:
        bad(UsageError(f"{path} is empty; remove it or fill it"))
    return rows


def unpacked(path: Path, most_gib: float) -> io.BufferedReader:
    return io.BufferedReader(Bounded(cast("io.BufferedIOBase", gzip.open(path, "rb")), path, most_gib))


def jsonl(path: Path, file: io.BufferedReader, bad: Bad) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
            bad(UsageError(f"{path}:{number} is not a line of JSON ({error}); fix the line"))
            continue
        if isinstance(values, dict):
            yield Row(values, f"{path}:{number}")
        else:
            bad(UsageError(f'{path}:{number} is no JSON object; write {{"text": ..., "label": ...}}'))


def csv_rows(path: Path, file: io.BufferedReader, bad: Bad) -> Iterator[Row]:
    reader = csv.reader(
        (line.decode("utf-8-sig") for line in file), strict=True
    )  # line by line: errors know their line
    header, done = None, 0  # done: lines before the row at hand
    try:
        for cells in reader:
            if header is None:
                header = cells
            elif cells and len(cells) != len(header):
                bad(
                    UsageError(
                        f"{path}:{reader.line_num} has another number of fields than the header; fix the line"
                    )
                )
            elif cells:
                yield Row(dict(zip(header, cells, strict=True)), f"{path}:{reader.line_num}")
            done = reader.line_num
    except (csv.Error, UnicodeDecodeError) as error:  # where the next row begins is not known any more
        line = done + 1 if isinstance(error, csv.Error) else reader.line_num + 1
        bad(UsageError(f"{path}:{line} is not a line of CSV ({error}); fix the line"))


def parquet(path: Path, file: io.BufferedReader, bad: Bad, most_gib: float) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        packed = io.BytesIO(file.read())
        about = pyarrow.parquet.read_metadata(packed)
        size = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        if size > most_gib * GIB:
            raise UsageError(
                f"{path} unpacks to {size} bytes, more than max_file_gib={most_gib:g}; raise it if you trust"
                " the file"
            )
        table = pyarrow.parquet.read_table(packed)
    except pyarrow.ArrowException as error:
        bad(UsageError(f"{path} is not a parquet file ({error}); fix or remove it"))
        return
    for number, values in enumerate(table.to_pylist(), 1):
        yield Row(values, f"{path}:{number}")


def open_hub(dataset: str, config_name: str | None) -> dict[str, Any]:
    """All splits of a hub data set (or of its cached copy when HF_HUB_OFFLINE is set), none of whose rows is
    read yet.
    """
    import datasets

    try:
        return {str(split): part for split, part in datasets.load_dataset(dataset, config_name).items()}
    except Exception as error:  # the hub has many ways to say no
        raise UsageError(
            f"dataset={dataset} is neither a path nor a readable hub data set ({one_line(error)}); check the"
            " name"
        ) from None


def hub_rows(dataset: str, splits: dict[str, Any]) -> list[Row]:
    """Rows of all splits; class ids become names."""
    import datasets

    rows = []
    for split, part in splits.items():
        names = {
            column: feature
            for column, feature in part.features.items()
            if isinstance(feature, datasets.ClassLabel)
        }
        for number, values in enumerate(cast("Iterable[dict[str, Any]]", part), 1):
            named = {column: feature.int2str(values[column]) for column, feature in names.items()}
            rows.append(Row({**values, **named}, f"{dataset}[{split}]:{number}"))
    return rows
