"""Reads slices of parameters from a checkpoint of any layout. No code or pickle is loaded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmmeta.checkpoint.verify import TABLES, read_manifest
from fmmeta.common.errors import UsageError
from fmmeta.parallel.param_map import Fragment, ParamMap


def load(folder: Path, names: list[str], params: ParamMap, like: Tensor) -> dict[str, Tensor]:
    """Read this rank's slices [S] of the vectors in `names`, written by any layout; device of `like`."""
    where, written = index(folder)
    for fragment in params.fragments:
        there = written.get(fragment.name, list(fragment.shape))
        if there != list(fragment.shape):
            raise UsageError(
                f"{folder} is of another model: {fragment.name} is {there} there and {list(fragment.shape)}"
                " here; give a checkpoint of this one"
            )
    vectors = {name: torch.zeros_like(like) for name in names}
    for name, vector in vectors.items():
        for fragment in params.fragments:
            stored = where[f"{name}/{fragment.name}"]
            straight = fragment.cut is None and all(part.cut is None for part in stored)
            missing = (read_range if straight else read_across)(fragment, stored, vector[fragment.here])
            if missing:
                raise UsageError(
                    f"{folder} lacks {missing} elements of {name}/{fragment.name}; give another checkpoint"
                )
    return vectors


def load_tables(folder: Path) -> dict[str, Tensor]:
    """The tables of a checkpoint, none if it has none.

    Raises `UsageError`, also where the checkpoint is removed meanwhile.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if TABLES not in read_manifest(folder):
        return {}
    try:
        return load_file(folder / TABLES)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{folder / TABLES} cannot be read ({error}); give an older checkpoint") from None


class Stored(NamedTuple):
    """A tensor of a shard file: elements `begin` to `end` of the flattened parameter, or of a cut of it."""

    begin: int
    end: int
    file: Any
    key: str
    cut: tuple[int, ...] | None


def index(folder: Path) -> tuple[dict[str, list[Stored]], dict[str, list[int]]]:
    """What the shards hold, by `vector/parameter`, and the shapes of the parameters. Raises `UsageError`."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, list[Stored]] = defaultdict(list)
    shapes: dict[str, list[int]] = {}
    try:
        for name in sorted(read_manifest(folder)):
            if not name.startswith("shard-"):
                continue
            file = safe_open(folder / name, "pt")
            shapes |= json.loads((file.metadata() or {}).get("shapes", "{}"))
            for key in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                path, _, place = key.rpartition("@")
                offset, _, cut = place.partition("#")
                (length,) = file.get_slice(key).get_shape()
                where[path].append(
                    Stored(
                        int(offset),
                        int(offset) + length,
                        file,
                        key,
                        tuple(map(int, cut.split(":"))) if cut else None,
                    )
                )
    except (OSError, RuntimeError, SafetensorError, ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{folder} cannot be read ({error}); give an older checkpoint") from None
    return where, shapes


def same_size(folder: Path, params: ParamMap) -> None:
    """Refuse a checkpoint with parameters that this rank knows nothing of, where it knows all.

    Raises `UsageError`.
    """
    _, written = index(folder)
    strange = sorted(set(written) - {fragment.name for fragment in params.fragments})
    if params.replicated and strange:
        raise UsageError(
            f"{folder} is of another model: it has {strange[0]}, which is not here; give a checkpoint of"
            " this one"
        )


def read_range(fragment: Fragment, stored: list[Stored], into: Tensor) -> int:
    """Read the overlap of a fragment with what is stored; return how many elements are missing."""
    missing = fragment.length
    for part in stored:
        low, high = max(part.begin, fragment.offset), min(part.end, fragment.offset + fragment.length)
        if low < high:
            values = part.file.get_slice(part.key)[low - part.begin : high - part.begin]
            into[low - fragment.offset : high - fragment.offset] = values.to(into)
            missing -= high - low
    return missing


def read_across(fragment: Fragment, stored: list[Stored], into: Tensor) -> int:
    """The same where one side is cut across rows (tensor parallelism): by way of the whole parameter."""
    whole, known = torch.zeros(fragment.shape), torch.zeros(fragment.shape)
    for part in stored:
        piece = Fragment(fragment.name, fragment.shape, 0, part.begin, part.end - part.begin, cut=part.cut)  # type: ignore
        piece.fill(whole, part.file.get_tensor(part.key).float())
        piece.fill(known, torch.ones(piece.length))
    into.copy_(fragment.take(whole))
    return fragment.length - int(fragment.take(known).sum())
