"""Reads slices of parameters from a checkpoint of any layout. No code or pickle is loaded."""

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
    """Read this rank's slices [S] of the vectors in `names`, written by any layout; on the device of `like`.

    Raises `UsageError` for a checkpoint of another model, or one that lacks elements.
    """
    where, written = index(folder)
    unknown = sorted(set(written) - {fragment.name for fragment in params.fragments})
    if params.replicated and unknown:  # otherwise other ranks may hold it
        raise UsageError(
            f"{folder} is of another model: it has {unknown[0]}, which is not here; give a checkpoint of"
            " this one"
        )
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
            contiguous = fragment.cut is None and all(part.cut is None for part in stored)
            missing = (read_range if contiguous else read_through_whole)(
                fragment, stored, vector[fragment.here]
            )
            if missing:
                raise UsageError(
                    f"{folder} lacks {missing} elements of {name}/{fragment.name}; give another checkpoint"
                )
    return vectors


def load_tables(folder: Path) -> dict[str, Tensor]:
    """The tables of a checkpoint, which may have none.

    Raises `UsageError`, also if the checkpoint is removed while it is read.
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
    """A tensor of a shard file: elements `begin` to `end` of the flattened parameter or its slice `cut`."""

    begin: int
    end: int
    file: Any
    key: str
    cut: tuple[int, ...] | None


def index(folder: Path) -> tuple[dict[str, list[Stored]], dict[str, list[int]]]:
    """The tensors of all shards by `vector/parameter`, and the shapes of parameters. Raises `UsageError`."""
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
                part = tuple(map(int, cut.split(":"))) if cut else None
                where[path].append(Stored(int(offset), int(offset) + length, file, key, part))
    except (OSError, RuntimeError, SafetensorError, ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{folder} cannot be read ({error}); give an older checkpoint") from None
    return where, shapes


def read_range(fragment: Fragment, stored: list[Stored], into: Tensor) -> int:
    """Read the stored elements of a fragment; return the number of missing ones."""
    missing = fragment.length
    for part in stored:
        low, high = max(part.begin, fragment.offset), min(part.end, fragment.offset + fragment.length)
        if low < high:
            values = part.file.get_slice(part.key)[low - part.begin : high - part.begin]
            into[low - fragment.offset : high - fragment.offset] = values.to(into)
            missing -= high - low
    return missing


def read_through_whole(fragment: Fragment, stored: list[Stored], into: Tensor) -> int:
    """As `read_range`, through the whole parameter: tensor parallelism splits it across rows."""
    whole, present = torch.zeros(fragment.shape), torch.zeros(fragment.shape)
    for part in stored:
        piece = Fragment(fragment.name, fragment.shape, 0, part.begin, part.end - part.begin, cut=part.cut)  # type: ignore
        piece.fill(whole, part.file.get_tensor(part.key).float())
        piece.fill(present, torch.ones(piece.length))
    into.copy_(fragment.take(whole))
    return fragment.length - int(fragment.take(present).sum())
