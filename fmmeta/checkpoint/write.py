"""Writes checkpoints: theta and the outer optimizer as named slices of parameters, readable on any layout.

    checkpoint-N/
      shard-RRRRR.safetensors    one per rank of the first group, with the slices that the rank owns:
                                 `vector/parameter@offset` -> fp32 [length];
                                 `...@offset#dim:first:length` if offset counts in a slice of the parameter
      tables.safetensors         replicated state: learned rates by layer and step, with their moments
      state.json                 outer step, optimizer steps, settings
      manifest.json              bytes and sha256 of every other file; written last

Each rank writes into tmp-checkpoint-N; one rank renames the folder when all ranks have finished. verify.py
checks checkpoints before they are read. A save removes no checkpoint before the new one is complete. No
pickles.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
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

DTYPES = {torch.float32: "F32", torch.float64: "F64"}  # of vectors and tables
CHUNK_BYTES = 2**24  # written and hashed at a time


def pieces(vectors: Mapping[str, Tensor], params: ParamMap, ranks: ProcessGroups) -> dict[str, Tensor]:
    """The slices that this rank writes, not copied, by key in its shard file."""
    if ranks.layout.group_index or (ranks.layout.group_rank and params.replicated):
        return {}
    return {
        f"{name}/{key_of(fragment)}": vector[fragment.here]
        for name, vector in vectors.items()
        for fragment in params.fragments
        if fragment.owned
    }


def key_of(fragment: Fragment) -> str:
    """`parameter@offset`, with `#` and the slice that the offset counts in under tensor parallelism."""
    part = f"#{':'.join(map(str, fragment.cut))}" if fragment.cut else ""
    return f"{fragment.name}@{fragment.offset}{part}"


def shapes(params: ParamMap) -> dict[str, list[int]]:
    """The shape of each parameter that this rank holds."""
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
    """Write `folder` completely, or leave everything as it was; keep the newest `keep` checkpoints.

    shard: slices of this rank; shapes: of its parameters; state, tables: equal on all ranks. Raises
    `UsageError` for a disk error. Collective: comm.
    """
    temporary, entries = folder.with_name(f"tmp-{folder.name}"), {}
    try:
        with comm.raise_on_all("preparing a checkpoint"), disk_errors(folder):
            if comm.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with comm.raise_on_all("writing a checkpoint"), disk_errors(folder):
            if shard:
                name = f"shard-{comm.rank:05d}.safetensors"
                entries[name] = write_tensors(temporary / name, shard, {"shapes": json.dumps(shapes)})
        gathered = comm.gather_bytes(json.dumps(entries).encode())
        with comm.raise_on_all("finishing a checkpoint"), disk_errors(folder):
            if comm.rank == 0:
                entries = {name: entry for part in gathered for name, entry in json.loads(part).items()}
                if tables:
                    entries[TABLES] = write_tensors(temporary / TABLES, tables, {})
                entries[STATE] = write_file(temporary / STATE, [to_json(state, indent=1).encode()])
                write_file(temporary / MANIFEST, [json.dumps({"files": entries}, indent=1).encode()])
                sync(temporary)
                put_in_place(temporary, folder, keep)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # frees space for complete checkpoints
        raise


def put_in_place(temporary: Path, folder: Path, keep: int) -> None:
    """Rename a finished checkpoint; then remove the oldest checkpoints beyond the newest `keep`."""
    replaced = folder.with_name(f"replaced-{folder.name}")
    if folder.exists():
        os.rename(folder, replaced)  # if the process ends here, `undo_partial_save` undoes it
    os.rename(temporary, folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in list_complete(folder.parent)[:-keep]:
        if old != folder:
            remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no group lists a part of it."""
    unnamed = folder.with_name(f"tmp-{folder.name}")  # removed by `undo_partial_save` too
    shutil.rmtree(unnamed, ignore_errors=True)
    with suppress(OSError):
        os.rename(folder, unnamed)
    shutil.rmtree(unnamed, ignore_errors=True)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise `UsageError` for a disk error of the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{folder} could not be written: {error.strerror or error}; free space or fix it"
        ) from None


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Entry:
    """Write tensors in the format of safetensors; returns size and checksum.

    save_file would copy all tensors first, and hold the interpreter's lock, which training needs meanwhile.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    flat = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values())
    data = (memoryview(values.numpy()) for values in flat)  # type: ignore
    return write_file(file, chain([len(head).to_bytes(8, "little"), head], data))


def write_file(file: Path, parts: Iterable[bytes | memoryview]) -> Entry:
    """Write bytes to a file and flush them to the disk; returns size and checksum."""
    checksum, size = hashlib.sha256(), 0
    with file.open("wb") as opened:
        for part in parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                checksum.update(chunk)
                opened.write(chunk)
            size += len(part)
        opened.flush()
        os.fsync(opened.fileno())
    return {"bytes": size, "sha256": checksum.hexdigest()}
