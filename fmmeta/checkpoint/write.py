"""Checkpoints: theta and the outer optimizer as named slices of parameters, readable on any layout.

    checkpoint-N/
      shard-RRRRR.safetensors    one per rank of the first group, with the slices that the rank owns:
                                 `vector/parameter@offset` -> fp32 [length];
                                 `...@offset#dim:first:length` if offset counts in a slice of the parameter
      tables.safetensors         replicated state: learned rates by layer and step, with their moments
      state.json                 outer step, optimizer steps, settings
      manifest.json              bytes and sha256 of every other file; written last

Each rank writes into tmp-checkpoint-N; one rank renames the folder when all ranks have finished. verify.py
checks checkpoints that are found later. A save never removes a checkpoint before the new one is complete. No
pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint.verify import MANIFEST, STATE, TABLES, Entry, list_complete
from fmmeta.common.errors import UsageError
from fmmeta.common.security import sync
from fmmeta.common.text import to_json
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import Fragment, ParamMap
from fmmeta.parallel.process_groups import ProcessGroups

KINDS = {torch.float32: "F32", torch.float64: "F64"}  # vectors and tables have one of them
PART = 2**24  # bytes that are written and hashed at a time


def save(
    folder: Path,
    vectors: Mapping[str, Tensor],
    params: ParamMap,
    state: dict[str, Any],
    ranks: ProcessGroups,
    keep: int,
    tables: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `vectors` ([S] each), `tables` (equal on all ranks) and `state` to `folder`, a checkpoint-N; keep
    the newest `keep`.

    Collective: world.
    """
    write(folder, pieces(vectors, params, ranks), shapes(params), state, tables or {}, keep, ranks.world)


def pieces(vectors: Mapping[str, Tensor], params: ParamMap, ranks: ProcessGroups) -> dict[str, Tensor]:
    """What this rank writes, by name in its shard file, uncopied; nothing if others write the same."""
    if ranks.layout.group_index or (ranks.layout.group_rank and params.replicated):
        return {}
    return {
        f"{name}/{place_in_parameter(fragment)}": vector[fragment.here]
        for name, vector in vectors.items()
        for fragment in params.fragments
        if fragment.owned
    }


def shapes(params: ParamMap) -> dict[str, list[int]]:
    """By parameter, for those who read."""
    return {fragment.name: list(fragment.shape) for fragment in params.fragments}


def write(
    folder: Path,
    shard: Mapping[str, Tensor],
    shapes: Mapping[str, list[int]],
    state: dict[str, Any],
    tables: Mapping[str, Tensor],
    keep: int,
    comm: Communicator,
) -> None:
    """Write `folder` whole, or leave everything as it was.

    Raises `UsageError` where the disk says no. Collective: comm.
    """
    temporary, entries = folder.with_name(f"tmp-{folder.name}"), {}
    try:
        with comm.raise_on_all("preparing a checkpoint"), told(folder):
            if comm.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with comm.raise_on_all("writing a checkpoint"), told(folder):
            if shard:
                name = f"shard-{comm.rank:05d}.safetensors"
                entries[name] = write_tensors(temporary / name, shard, {"shapes": json.dumps(shapes)})
        told_by = comm.gather_bytes(json.dumps(entries).encode())
        with comm.raise_on_all("finishing a checkpoint"), told(folder):
            if comm.rank == 0:
                entries = {name: entry for part in told_by for name, entry in json.loads(part).items()}
                if tables:
                    entries[TABLES] = write_tensors(temporary / TABLES, tables, {})
                entries[STATE] = write_text(temporary / STATE, to_json(state, indent=1))
                write_text(temporary / MANIFEST, json.dumps({"files": entries}, indent=1))
                sync(temporary)
                put_in_place(temporary, folder, keep)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # room for those that are whole
        raise


def put_in_place(temporary: Path, folder: Path, keep: int) -> None:
    """Give a finished checkpoint its name; then remove those beyond `keep`, oldest first."""
    replaced = folder.with_name(f"replaced-{folder.name}")
    if folder.exists():
        os.rename(folder, replaced)  # if the process ends here, `whole.put_back` undoes it
    os.rename(temporary, folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in list_complete(folder.parent)[:-keep]:
        if old != folder:
            remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that another group lists all of it or nothing."""
    unnamed = folder.with_name(f"tmp-{folder.name}")  # `whole.put_back` removes what a kill leaves
    shutil.rmtree(unnamed, ignore_errors=True)
    with suppress(OSError):
        os.rename(folder, unnamed)
    shutil.rmtree(unnamed, ignore_errors=True)


@contextmanager
def told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{folder} could not be written: {error.strerror or error}; free space or fix it"
        ) from None


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Entry:
    """Write tensors in the format of safetensors, hashed on the way; save_file would copy them all and hold
    the interpreter's lock, which training needs while a thread writes.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    seen = hashlib.sha256()
    with file.open("wb") as opened:
        for chunk in (len(head).to_bytes(8, "little"), head):
            seen.update(chunk)
            opened.write(chunk)
        for tensor in tensors.values():
            values = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore
            for begin in range(0, len(values), PART):
                seen.update(values[begin : begin + PART])
                opened.write(values[begin : begin + PART])
        opened.flush()
        os.fsync(opened.fileno())
    return {"bytes": 8 + len(head) + end, "sha256": seen.hexdigest()}


def write_text(file: Path, text: str) -> Entry:
    with file.open("wb") as opened:
        opened.write(text.encode())
        opened.flush()
        os.fsync(opened.fileno())
    return {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def place_in_parameter(fragment: Fragment) -> str:
    return f"{fragment.name}@{fragment.offset}" + (
        f"#{':'.join(map(str, fragment.cut))}" if fragment.cut else ""
    )
