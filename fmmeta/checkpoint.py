"""Checkpoints: theta and the outer optimizer as named slices of parameters, readable on any layout.

    checkpoint-N/
      shard-RRRRR.safetensors    per rank of the first group: `vector/parameter@offset` -> fp32 [length], what the rank owns;
                                 `...@offset#dim:first:length` where offset counts in a cut of the parameter
      tables.safetensors         what every rank holds alike: learned rates by layer and step, with their moments
      state.json                 outer step, optimizer steps, settings; written last

Written beside the run as tmp-checkpoint-N and renamed by rank 0 when every rank is done. No pickles.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmmeta.config import UsageError
from fmmeta.parallel.communicator import Ranks
from fmmeta.parallel.shards import Fragment, ParamMap

STATE, TABLES = "state.json", "tables.safetensors"


def save(folder: Path, vectors: dict[str, Tensor], params: ParamMap, state: dict[str, Any], ranks: Ranks, keep: int,
         tables: Mapping[str, Tensor] | None = None) -> None:  # fmt: skip
    """Write `vectors` ([S] each), `tables` (equal on all ranks) and `state` to `folder`, a checkpoint-N; keep the newest `keep`.

    Collective: world.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f"tmp-{folder.name}")
    with ranks.world.together("preparing a checkpoint"):
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with ranks.world.together("writing a checkpoint"):
        if ranks.layout.group_index == 0 and (ranks.layout.group_rank == 0 or not params.replicated):
            file = temporary / f"shard-{ranks.layout.group_rank:05d}.safetensors"
            save_file({f"{name}/{place_in_parameter(fragment)}": vector[fragment.here].cpu().clone()
                       for name, vector in vectors.items() for fragment in params.fragments if fragment.owned}, file)  # fmt: skip
            sync(file)
    with ranks.world.together("finishing a checkpoint"):
        if ranks.first:
            if tables:
                save_file({name: table.cpu().clone() for name, table in tables.items()}, temporary / TABLES)
                sync(temporary / TABLES)
            (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            sync(temporary / STATE)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
            sync(folder.parent)
            for old in complete(folder.parent)[:-keep]:
                shutil.rmtree(old)


def load(folder: Path, names: list[str], params: ParamMap, like: Tensor) -> dict[str, Tensor]:
    """Read this rank's slices of the vectors in `names`, whatever layout wrote them; [S] each, like `like`."""
    from safetensors import SafetensorError, safe_open

    try:
        files = [safe_open(file, "pt") for file in sorted(folder.glob("shard-*.safetensors"))]
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be read ({error}); give an older checkpoint") from None
    where: dict[str, list[Stored]] = defaultdict(list)
    for file in files:
        for key in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
            path, _, place = key.rpartition("@")
            offset, _, cut = place.partition("#")
            length = file.get_slice(key).get_shape()[0]
            where[path].append(
                Stored(int(offset), int(offset) + length, file, key, tuple(map(int, cut.split(":"))) if cut else None)
            )
    vectors = {name: torch.zeros_like(like) for name in names}
    for name, vector in vectors.items():
        for fragment in params.fragments:
            stored = where[f"{name}/{fragment.name}"]
            straight = fragment.cut is None and all(part.cut is None for part in stored)
            missing = (read_range if straight else read_across)(fragment, stored, vector[fragment.here])
            if missing:
                raise UsageError(f"{folder} lacks {missing} elements of {name}/{fragment.name}; give another checkpoint")
    return vectors


def load_tables(folder: Path) -> dict[str, Tensor]:
    """The tables of a checkpoint, none if it has none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / TABLES).is_file():
        return {}
    try:
        return load_file(folder / TABLES)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / TABLES} cannot be read ({error}); give an older checkpoint") from None


class Stored(NamedTuple):
    """A tensor of a shard file: elements `begin` to `end` of the flattened parameter, or of a cut of it."""

    begin: int
    end: int
    file: Any
    key: str
    cut: tuple[int, ...] | None


def place_in_parameter(fragment: Fragment) -> str:
    return f"{fragment.name}@{fragment.offset}" + (f"#{':'.join(map(str, fragment.cut))}" if fragment.cut else "")


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
        piece = Fragment(fragment.name, fragment.shape, 0, part.begin, part.end - part.begin, cut=part.cut)  # type: ignore[arg-type]
        piece.fill(whole, part.file.get_tensor(part.key).float())
        piece.fill(known, torch.ones(piece.length))
    into.copy_(fragment.take(whole))
    return fragment.length - int(fragment.take(known).sum())


def read_state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"resume_from_checkpoint={folder} is no checkpoint ({error}); give a checkpoint-N folder") from None


def complete(output_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [folder for folder in output_dir.glob("checkpoint-*") if (folder / STATE).is_file()]
    numbered = [(folder.name.removeprefix("checkpoint-"), folder) for folder in found]
    return [folder for _, folder in sorted((int(number), folder) for number, folder in numbered if number.isdigit())]


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
