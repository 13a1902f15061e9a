"""Inputs of `predict`: plain lines, JSON lines or table rows."""

from __future__ import annotations

import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from fmmeta.common.errors import UsageError
from fmmeta.evaluation.settings import PredictConfig, refuse_first
from fmmeta.tasks.data.columns import broken_text
from fmmeta.tasks.data.rows import MOST_GIB, ending, read_file, unpacked

KEYS = ("text", "sentence", "utterance", "input", "prompt", "question")


def texts_of(settings: PredictConfig) -> Iterator[str]:
    """The texts of `--input`: rows of a .csv or .parquet file, lines of any other and of standard input.

    Raises `UsageError`.
    """
    path = Path(settings.input)
    if settings.input == "-":
        yield from read_texts(sys.stdin, settings)
    elif ending(path) in (".csv", ".parquet"):
        for row in read_file(path):
            yield text_in(row.values, row.origin, settings)
    else:
        with open_lines(path) as file:
            yield from read_texts(file, settings)


def open_lines(path: Path) -> TextIO:
    """A text file for reading, unpacked if its name ends with .gz. Raises `UsageError`."""
    try:
        binary = unpacked(path, MOST_GIB) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UsageError(f"input={path} cannot be opened: {error.strerror}; give another file") from None
    return io.TextIOWrapper(binary, encoding="utf-8")


def read_texts(lines: Iterable[str], settings: PredictConfig) -> Iterator[str]:
    """The texts of plain lines, or of JSON objects. Raises `UsageError` naming the line."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            origin = f"input line {number}" if settings.input == "-" else f"{settings.input}:{number}"
            text = line.rstrip("\n").removeprefix("\ufeff" if number == 1 else "")  # byte order mark
            if text.lstrip().startswith("{"):
                try:
                    values = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{origin} is no JSON object ({error}); fix it") from None
                yield text_in(values, origin, settings)
            elif wrong := broken_text(text):
                raise UsageError(f"{origin} has {wrong}; fix it")
            elif text.strip():
                yield text
    except UnicodeDecodeError as error:
        raise UsageError(
            f"input is not UTF-8 at line {number + 1} or soon after it ({error.reason}); convert it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"input={settings.input} cannot be read: {error}; fix it, or give another file"
        ) from None


def text_in(values: dict[str, Any], origin: str, settings: PredictConfig) -> str:
    """The text of a row. Raises `UsageError`."""
    keys = [settings.text_column] if settings.text_column else KEYS
    key = next((key for key in keys if isinstance(values.get(key), str)), "")
    problems = [
        (not key, f"{origin} has no text under {', '.join(keys)}; name the key with --text_column"),
        (not values.get(key), f"{origin} has no text in {key}, which is empty; fix it"),
    ]
    refuse_first(problems)
    if wrong := broken_text(values[key]):
        raise UsageError(f"{origin} has {wrong} in {key}; fix it")
    return values[key]
