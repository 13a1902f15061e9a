"""Reads checkpoints: the names in a folder, its manifest, the checksum of every file, and slices of
parameters, written by any layout. write.py describes the files.

Names in a manifest are compared and never followed. No code or pickle is loaded.
"""

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import Fragment, ParamMap

STATE, TABLES, MANIFEST = "state.json", "tables.safetensors", "manifest.json"
FILES = re.compile(r"shard-[0-9]{5}\.safetensors|tables\.safetensors|state\.json")
NEEDED = {
    "outer_step": int,
    "bad_steps": int,
    "tasks": dict,
    "numbers": dict,
    "vectors": list,
    "settings": dict,
}


class Entry(TypedDict):
    """Size and checksum of a file in a manifest."""

    bytes: int
    sha256: str


def list_complete(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [
        folder
        for folder in output_dir.glob("checkpoint-*")
        if folder.name.removeprefix("checkpoint-").isdecimal() and (folder / MANIFEST).is_file()
    ]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))


def find_corruption(folder: Path, comm: Communicator) -> str:
    """The first corruption of a checkpoint, as a message; "" if it is complete and intact.

    Every file is read once, divided over the ranks. Collective: comm.
    """
    message = ""
    try:
        files = read_manifest(folder)
        for name in sorted(files)[comm.rank :: comm.size]:
            message = message or find_file_corruption(folder / name, files[name])
    except OSError as error:
        message = f"{error.filename or folder} cannot be read: {error.strerror}"
    except ValueError as error:
        message = str(error)
    return next(filter(None, comm.gather(message)), "")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The files of a checkpoint, by name. Raises `OSError`, and `ValueError` for a damaged manifest."""
    text = (folder / MANIFEST).read_bytes()
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        files = json.loads(text)["files"]
        if STATE in files and all(
            FILES.fullmatch(name) and {"bytes", "sha256"} <= set(files[name]) for name in files
        ):
            return files
    raise ValueError(f"{MANIFEST} is damaged")


def find_file_corruption(file: Path, entry: Entry) -> str:
    """How a file differs from its entry in the manifest, as a message; "" if it does not.

    Raises `OSError`.
    """
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"{file.name} has {size} bytes instead of {entry['bytes']}"
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256")
    if checksum.hexdigest() != entry["sha256"]:
        return f"{file.name} has another sha256 than {MANIFEST}"
    return ""


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json. Raises `UsageError` if no run can resume from it."""
    with usage_errors(f"resume_from_checkpoint={folder} is no checkpoint", "give a checkpoint-N folder"):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, kind in NEEDED.items():
            if not isinstance(state, dict) or not isinstance(state.get(name), kind):
                raise ValueError(f"{STATE} has no {name}")
    return state


def undo_partial_save(output_dir: Path) -> None:
    """Remove or restore the folders of a save that was interrupted."""
    for replaced in output_dir.glob("replaced-checkpoint-*"):
        name = replaced.with_name(replaced.name.removeprefix("replaced-"))
        if name.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, name)
    for incomplete in output_dir.glob("tmp-checkpoint-*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def rename_aside(folder: Path) -> Path:
    """Rename a checkpoint that no run must resume from. It is no longer listed, and never removed."""
    aside, number = folder.with_name(f"aside-{folder.name}"), 0
    while aside.exists():
        number += 1
        aside = folder.with_name(f"aside-{folder.name}.{number}")
    return folder.rename(aside)


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
            read = read_range if contiguous else read_through_whole
            if missing := read(fragment, stored, vector[fragment.here]):
                raise UsageError(
                    f"{folder} lacks {missing} elements of {name}/{fragment.name}; give another checkpoint"
                )
    return vectors


def load_tables(folder: Path) -> dict[str, Tensor]:
    """The tables of a checkpoint, which may have none.

    Raises `UsageError`, also if the checkpoint is removed while it is read.
    """
    with usage_errors(f"{folder}: {TABLES} cannot be read", "give an older checkpoint"):
        return load_file(folder / TABLES) if TABLES in read_manifest(folder) else {}


class Stored(NamedTuple):
    """A tensor of a shard file: elements `begin` to `end` of the flattened parameter or its slice `cut`."""

    begin: int
    end: int
    file: Any
    key: str
    cut: tuple[int, ...] | None


def index(folder: Path) -> tuple[dict[str, list[Stored]], dict[str, list[int]]]:
    """The tensors of all shards by `vector/parameter`, and the shapes of parameters. Raises `UsageError`."""
    where: dict[str, list[Stored]] = defaultdict(list)
    shapes: dict[str, list[int]] = {}
    with usage_errors(f"{folder} cannot be read", "give an older checkpoint"):
        for name in sorted(name for name in read_manifest(folder) if name.startswith("shard-")):
            file = safe_open(folder / name, "pt")
            shapes |= json.loads((file.metadata() or {}).get("shapes", "{}"))
            for key in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                path, _, place = key.rpartition("@")
                offset, _, cut = place.partition("#")
                (length,) = file.get_slice(key).get_shape()
                part = tuple(map(int, cut.split(":"))) if cut else None
                where[path].append(Stored(int(offset), int(offset) + length, file, key, part))
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
