"""Shared by unit tests: the process groups of one process, and data files."""

import csv
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.tasks.data import files, hub
from fmmeta.tasks.data.columns import Row
from tests.support.messages import refusal as refusal

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
CASES = ROOT.parent / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason=f"{CASES} does not exist")


def fast_or_slow(
    values: Sequence[Any],
    is_fast: Callable[[Any], bool],
    name: Callable[[Any], str | None] = lambda _: None,
    is_long: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """pytest parameters for `values`, named by `name`; those that are not fast are marked slow, and some of
    them long.
    """

    def marks(value: Any) -> list[Any]:
        if is_fast(value):
            return []
        return [pytest.mark.slow, *([pytest.mark.long] if is_long(value) else [])]

    return [pytest.param(value, id=name(value), marks=marks(value)) for value in values]


def one_rank() -> ProcessGroups:
    """The communicators of a launch of one process, without any process group."""
    return World(Launch(), torch.device("cpu")).split(1, default_group=False)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format that the name asks for, compressed if it ends in .gz."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".jsonl":
        plain.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif plain.suffix == ".json":
        plain.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    elif plain.suffix in (".csv", ".tsv"):
        with plain.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if plain.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), plain)
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return path


def recorded(patch: pytest.MonkeyPatch, owner: Any, name: str, **failures: Any) -> list[Any]:
    """The positional arguments and the result of each call of `owner.name` from now on.

    failures: `at` and `error`, the number of a call, from 0, that raises this error instead.
    """
    original, calls = getattr(owner, name), []

    def call(*args: Any, **named: Any) -> Any:
        if failures and len(calls) == failures["at"]:
            raise failures["error"]
        calls.append(SimpleNamespace(args=args, result=None))
        calls[-1].result = original(*args, **named)
        return calls[-1].result

    patch.setattr(owner, name, call)
    return calls


def stored_by(kind: Any, config: Config, row: dict[str, Any], answered: bool = True) -> Any:
    """What a learner stores of a row. kind: its class."""
    return kind.rows(config, None, [*row], answered).read(Row(row, "row"))


def read_rows(dataset: str, config_name: str | None = None) -> list[Row]:
    """Every row of a file, a folder or a hub data set."""
    paths = files.data_files(dataset)
    if paths is None:
        return [*hub.hub_rows(f"{dataset}[train]", hub.open_hub(dataset, config_name))]
    return [row for path in paths for row in files.read_file(path)]


def tables_of(text: str) -> dict[tuple[str, ...], list[list[str]]]:
    """Rows of Markdown tables by their header, without bold marks."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for table in re.findall(r"(?:^\|.*\n?)+", text.replace("**", ""), re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        found.setdefault(tuple(header), []).extend(rows)
    return found
