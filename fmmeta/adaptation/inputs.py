"""Input and output of `predict`: reads plain lines, JSON lines or table rows, writes JSON lines.

A file of answers appears under its name when it is whole; until then, and if anything fails, what lay there
stays.
"""

from __future__ import annotations

import io
import json
import os
import sys
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fmmeta.common.errors import UsageError
from fmmeta.evaluation.settings import PredictConfig
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
        with opened(path, "r", "input") as file:
            yield from read_texts(file, settings)


def read_texts(lines: Iterable[str], settings: PredictConfig) -> Iterator[str]:
    """The texts of plain lines, or of JSON objects. Raises `UsageError` naming the line."""
    for number, line in enumerate(decoded(lines, settings.input), 1):
        where = f"input line {number}" if settings.input == "-" else f"{settings.input}:{number}"
        line = line.rstrip("\n")
        if number == 1:
            line = line.removeprefix("\ufeff")  # some editors begin a file with it
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where} is no JSON object ({error}); fix it") from None
            yield text_in(values, where, settings)
        elif wrong := broken_text(line):
            raise UsageError(f"{where} has {wrong}; fix it")
        else:
            yield line


def text_in(values: dict[str, Any], where: str, settings: PredictConfig) -> str:
    """The text of a row."""
    keys = [settings.text_column] if settings.text_column else KEYS
    found = next((key for key in keys if isinstance(values.get(key), str)), None)
    if found is None:
        raise UsageError(f"{where} has no text under {', '.join(keys)}; name the key with --text_column")
    if not values[found]:
        raise UsageError(f"{where} has no text in {found}, which is empty; fix it")
    if wrong := broken_text(values[found]):
        raise UsageError(f"{where} has {wrong} in {found}; fix it")
    return values[found]


def decoded(lines: Iterable[str], name: str) -> Iterator[str]:
    """The lines themselves. Raises `UsageError` for one that is no UTF-8, or cannot be unpacked."""
    numbered, number = iter(lines), 0
    while True:
        number += 1
        try:
            yield next(numbered)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            raise UsageError(
                f"input is not UTF-8 at line {number} or soon after it ({error.reason}); convert it"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"input={name} cannot be read: {error}; fix it, or give another file") from None


def batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    part: list[str] = []
    for text in texts:
        part.append(text)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


@contextmanager
def sink(output: str) -> Iterator[TextIO]:
    """Where answers go. Raises `UsageError` for what cannot be written."""
    target = Path(os.path.realpath(output))
    if output == "-":
        yield sys.stdout
        return
    if target.exists() and not (
        target.is_file() and os.access(target, os.W_OK)
    ):  # a pipe or a device, or a refusal
        with opened(target, "w", "output") as file:
            yield file
        return
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with opened(part, "w", "output", output) as file:
            yield file
        part.replace(target)
    except OSError as error:
        raise UsageError(f"output={output} cannot be written: {error.strerror}; give another file") from None
    finally:
        part.unlink(missing_ok=True)


def opened(path: Path, mode: str, setting: str, shown: str | None = None) -> Any:
    """A text file, unpacked if its name says .gz. `shown`: its name as the user gave it."""
    try:
        if mode == "r" and path.suffix == ".gz":
            return io.TextIOWrapper(unpacked(path, MOST_GIB), encoding="utf-8")
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{setting}={shown or path} cannot be opened: {error.strerror}; give another file"
        ) from None
