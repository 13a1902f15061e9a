"""Writes checkpoints: theta and the outer optimizer as named slices of parameters, readable on any layout.

    checkpoint-N/
      shard-RRRRR.safetensors    one per rank of the first group, with the slices that the rank owns:
                                 `vector/parameter@offset` -> fp32 [length];
                                 `...@offset#dim:first:length` if offset counts in a slice of the parameter
      tables.safetensors         replicated state: learned rates by layer and step, with their moments
      state.json                 outer step, optimizer steps, settings
      manifest.json              bytes and sha256 of every other file; written last

Each rank writes into tmp-checkpoint-N; one rank renames the folder when all ranks have finished. read.py
checks checkpoints before they are read. A save removes no checkpoint before the new one is complete. No
pickles. `Saver` writes while training continues:

    save:    wait for the previous write -> copy this rank's slices (training waits) -> start the thread
    thread:  `write` over a separate communicator, which training does not use
    judge:   once the thread of every rank has ended, all ranks agree at the same outer step whether it failed

The copies stay allocated: their first use costs ten times as much as a copy. If host memory has no room for
them, the rank writes at once, and training waits.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint.read import MANIFEST, STATE, TABLES, Entry, list_complete
from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.processes import host_bytes, native_thread
from fmmeta.common.progress import Warn
from fmmeta.common.security import sync
from fmmeta.common.text import to_json
from fmmeta.config.settings import Config
from fmmeta.parallel.param_map import Fragment, ParamMap
from fmmeta.parallel.process_groups import Communicator, ProcessGroups

EXIT_WAIT_S = 60.0  # for a pending write, when a run fails
MOST_FAILED = 3  # checkpoints in a row that could not be written
MEMORY_SHARE = 0.5  # of the free host memory, which the copies may take


DTYPES = {torch.float32: "F32", torch.float64: "F64"}  # of vectors and tables
CHUNK_BYTES = 2**24  # written and hashed at a time


def rank_slices(vectors: Mapping[str, Tensor], params: ParamMap, ranks: ProcessGroups) -> dict[str, Tensor]:
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


def param_shapes(params: ParamMap) -> dict[str, list[int]]:
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
    disk_errors = partial(usage_errors, f"{folder} could not be written", "free space or fix it")
    try:
        with comm.raise_on_all("preparing a checkpoint"), disk_errors():
            if comm.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with comm.raise_on_all("writing a checkpoint"), disk_errors():
            if shard:
                name = f"shard-{comm.rank:05d}.safetensors"
                entries[name] = write_tensors(temporary / name, shard, {"shapes": json.dumps(shapes)})
        gathered = comm.gather(entries)
        with comm.raise_on_all("finishing a checkpoint"), disk_errors():
            if comm.rank == 0:
                entries = {name: entry for part in gathered for name, entry in part.items()}
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
    data = (
        memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore
        for tensor in tensors.values()
    )
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


class Saver:
    """Writes the checkpoints of a run. Ranks outside the first group only agree on the outcome."""

    def __init__(
        self, params: ParamMap, config: Config, ranks: ProcessGroups, notice: Callable[[str], None]
    ) -> None:
        self.params, self.config, self.ranks, self.notice = params, config, ranks, notice
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.warming: threading.Thread | None = None
        self.folder: Path | None = None  # being written, or written and not judged yet
        self.last: Path | None = None  # the newest complete checkpoint that this process wrote or loaded
        self.failure, self.failed = "", 0  # error of the current write; failed writes in a row

    def save(
        self,
        folder: Path,
        vectors: Mapping[str, Tensor],
        state: dict[str, Any],
        tables: Mapping[str, Tensor],
        last: bool = False,
    ) -> None:
        """Start to write checkpoint-N; with `last`, wait for it and raise `UsageError` if it fails.

        Collective: world.
        """
        self.wait()
        if self.warming is not None:
            self.warming.join()
        pieces = rank_slices(vectors, self.params, self.ranks)
        copies = not last and self.allocate(pieces)
        if copies:
            for name, piece in pieces.items():
                self.copies[name].copy_(piece)
            pieces = self.copies
            tables = {name: table.to("cpu", copy=True) for name, table in tables.items()}
        self.folder, self.failure = folder, ""
        if self.ranks.background is not None:
            self.thread = native_thread(
                "saver", partial(self._write, folder, self.ranks.background, pieces, state, tables)
            )
            if not copies:
                self.thread.join()
        if last:
            self.wait(last=True)

    def warm(self, vectors: Mapping[str, Tensor]) -> None:
        """Allocate the copies before the first save, in a thread."""
        if self.warming is None:
            pieces = rank_slices(vectors, self.params, self.ranks)
            self.warming = native_thread("saver", partial(self.allocate, pieces))

    def allocate(self, pieces: Mapping[str, Tensor]) -> bool:
        """Allocate copies of the sizes of `pieces`; False if host memory has no room for them."""
        if {name: piece.numel() for name, piece in pieces.items()} != {
            name: copy.numel() for name, copy in self.copies.items()
        }:
            self.copies = {}
            if 4 * sum(piece.numel() for piece in pieces.values()) > MEMORY_SHARE * host_bytes(
                self.ranks.layout.launch.local_world_size
            ):
                return False
            try:
                for name, piece in pieces.items():
                    self.copies[name] = torch.empty(
                        piece.numel(), pin_memory=self.ranks.device.type == "cuda"
                    ).zero_()
            except (RuntimeError, MemoryError):  # torch's error of a failed allocation, pinned or not
                self.copies = {}
                return False
        return True

    def close(self) -> None:
        """Wait for the threads of this rank alone, at most EXIT_WAIT_S each. Local."""
        for thread in filter(None, (self.thread, self.warming)):
            thread.join(EXIT_WAIT_S)

    @property
    def done(self) -> bool:
        """Whether this rank has no pending write."""
        return self.thread is None or not self.thread.is_alive()

    def wait(self, last: bool = False) -> None:
        """Wait for the pending write on all ranks, and judge it. Collective: world."""
        if self.folder is not None:
            if self.thread is not None:
                self.thread.join()
            self.judge(self.ranks.world.sum_(torch.tensor([float(bool(self.failure))])).item() > 0, last)

    def judge(self, failed: bool, last: bool = False) -> None:
        """Record a write that has ended on all ranks; `failed`: whether it failed on one of them.

        Raises `UsageError` on all ranks for the last write, or for too many failures in a row.
        """
        folder, self.folder, self.thread = self.folder, None, None
        if not failed:
            self.last, self.failed = folder, 0
            return
        self.failed += 1
        newest = f"the last complete one is {self.last}" if self.last else "there is no complete one"
        failure = self.failure or f"{folder} could not be written"
        if last or self.failed >= MOST_FAILED:
            raise UsageError(f"{failure}; {self.failed} in a row, {newest}")
        self.notice(Warn(f"{failure}; training continues, {newest}"))

    def _write(
        self,
        folder: Path,
        comm: Communicator,
        pieces: Mapping[str, Tensor],
        state: dict[str, Any],
        tables: Mapping[str, Tensor],
    ) -> None:
        """Write in the thread; an error is stored for the ranks that train."""
        try:
            write(
                folder,
                pieces,
                param_shapes(self.params),
                state,
                tables,
                self.config.save_total_limit,
                comm,
            )
        except UsageError as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = f"{folder}: {type(error).__name__}: {error}"
