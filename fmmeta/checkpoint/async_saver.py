"""Saves checkpoints while training continues: copies shards to host memory and writes them in a thread.

    save:    wait for the previous write -> copy this rank's slices (training waits) -> start the thread
    thread:  write.py over a separate communicator, which training does not use
    judge:   once the thread of every rank has ended, all ranks agree at the same outer step whether it failed

The copies stay allocated: their first use costs ten times as much as a copy. If host memory has no room for
them, the rank writes at once, and training waits.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint import write
from fmmeta.common.errors import UsageError
from fmmeta.common.processes import host_bytes
from fmmeta.config.settings import Config
from fmmeta.parallel.param_map import ParamMap
from fmmeta.parallel.process_groups import Communicator, ProcessGroups

EXIT_WAIT_S = 60.0  # for a pending write, when a run fails
MEMORY_SHARE = 0.5  # of the free host memory, which the copies may take


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
        pieces = write.pieces(vectors, self.params, self.ranks)
        copies = self.config.save_async and not last and self.allocate(pieces)
        if copies:
            for name, piece in pieces.items():
                self.copies[name].copy_(piece)
            pieces = self.copies
            tables = {name: table.to("cpu", copy=True) for name, table in tables.items()}
        self.folder, self.failure = folder, ""
        if self.ranks.background is not None:
            self.thread = threading.Thread(
                target=self._write,
                args=(folder, self.ranks.background, pieces, state, tables),
                name="saver",
                daemon=True,
            )
            self.thread.start()
            if not copies:
                self.thread.join()
        if last:
            self.wait(last=True)

    def warm(self, vectors: Mapping[str, Tensor]) -> None:
        """Allocate the copies before the first save, in a thread."""
        if self.config.save_async and self.warming is None:
            pieces = write.pieces(vectors, self.params, self.ranks)
            self.warming = threading.Thread(target=self.allocate, args=(pieces,), name="saver", daemon=True)
            self.warming.start()

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
            on_gpu = self.ranks.device.type == "cuda"
            self.copies = {
                name: torch.empty(piece.numel(), pin_memory=on_gpu).zero_() for name, piece in pieces.items()
            }
        return True

    def close(self) -> None:
        """Wait for the pending write of this rank alone, at most EXIT_WAIT_S. Local."""
        if self.thread is not None:
            self.thread.join(EXIT_WAIT_S)

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
        if last or self.failed >= self.config.max_failed_saves:
            raise UsageError(f"{failure}; {self.failed} in a row, {newest}")
        self.notice(f"{failure}; training continues, {newest}")

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
            keep = self.config.save_total_limit
            write.write(folder, pieces, write.shapes(self.params), state, tables, keep, comm)
        except UsageError as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = f"{folder}: {type(error).__name__}: {error}"
