"""Shared by unit tests: the text of a UsageError, the process groups of one process, and data files."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fmmeta.common.errors import UsageError
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.tasks.data import rows

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the UsageError that a call raises; it must be one line."""
    with pytest.raises(UsageError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fast_or_slow(
    values: Sequence[Any], is_fast: Callable[[Any], bool], name: Callable[[Any], str | None] = lambda _: None
) -> list[Any]:
    """pytest parameters for `values`, named by `name`; those that are not fast are marked slow."""
    return [
        pytest.param(value, id=name(value), marks=[] if is_fast(value) else [pytest.mark.slow])
        for value in values
    ]


def one_rank() -> ProcessGroups:
    """The communicators of a launch of one process, without any process group."""
    return World(Launch(), torch.device("cpu")).split(1, default_group=False)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format that the name asks for, compressed if it ends in .gz."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".jsonl":
        plain.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif plain.suffix == ".csv":
        with plain.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
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


def read_rows(dataset: str, config_name: str | None = None) -> list[rows.Row]:
    """Every row of a file, a folder or a hub data set."""
    files = rows.data_files(dataset)
    if files is None:
        return rows.hub_rows(dataset, "train", rows.open_hub(dataset, config_name))
    return [row for file in files for row in rows.read_file(file)]
