"""Saves checkpoints while training continues: copies shards to host memory, writes them in a thread.

    save:    wait for the write before -> copy this rank's pieces (training waits) -> start the thread
    thread:  write.py over a separate communicator, without mixing with messages of training
    judge:   once the thread of every rank is done, all ranks learn how it went, at the same outer step

The copies stay allocated: their first touch costs ten times as much as a copy. Where host memory has no room
for them the rank writes at once, and training waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.checkpoint import write
from fmmeta.common.errors import UsageError
from fmmeta.common.host_memory import host_bytes
from fmmeta.config.settings import Config
from fmmeta.parallel.param_map import ParamMap
from fmmeta.parallel.process_groups import ProcessGroups

LAST_S = 60.0  # that a failing run waits for a write
SHARE = 0.5  # of the host memory that is left, which copies may take


class Saver:
    """Writes the checkpoints of a run. Ranks outside the first group only agree."""

    def __init__(
        self, params: ParamMap, config: Config, ranks: ProcessGroups, notice: Callable[[str], None]
    ) -> None:
        self.params, self.config, self.ranks, self.notice = params, config, ranks, notice
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.warming: threading.Thread | None = None
        self.warmed = False
        self.folder: Path | None = None  # being written, or written and not judged yet
        self.last: Path | None = None  # the newest whole one that this process knows of
        self.failure, self.failed = "", 0  # of the write at hand; writes in a row that failed
        self.wait_s = self.write_s = 0.0  # that training waited, and that writing took, for the last one

    def save(
        self,
        folder: Path,
        vectors: Mapping[str, Tensor],
        state: dict[str, Any],
        tables: Mapping[str, Tensor],
        last: bool = False,
    ) -> None:
        """Begin to write a checkpoint-N; with `last` wait for it, and raise `UsageError` if it fails.

        Collective: world.
        """
        began = time.perf_counter()
        self.wait()
        if self.warming is not None:
            self.warming.join()
            self.warming = None
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
                target=self._write, args=(pieces, state, tables), name="saver", daemon=True
            )
            self.thread.start()
            if not copies:
                self.thread.join()
        self.wait_s = time.perf_counter() - began
        if last:
            self.wait(last=True)

    def warm(self, vectors: Mapping[str, Tensor]) -> None:
        """Allocate the copies ahead of the first save, beside training."""
        if self.config.save_async and not self.warmed:
            self.warmed = True
            pieces = write.pieces(vectors, self.params, self.ranks)
            self.warming = threading.Thread(target=self.allocate, args=(pieces,), name="saver", daemon=True)
            self.warming.start()

    def allocate(self, pieces: Mapping[str, Tensor]) -> bool:
        """Whether there are copies to write to, for these pieces."""
        if {name: piece.numel() for name, piece in pieces.items()} != {
            name: copy.numel() for name, copy in self.copies.items()
        }:
            self.copies = {}
            if 4 * sum(piece.numel() for piece in pieces.values()) > SHARE * host_bytes(
                self.ranks.layout.launch.local_world_size
            ):
                return False
            on_gpu = self.ranks.device.type == "cuda"
            self.copies = {
                name: torch.empty(piece.numel(), pin_memory=on_gpu).zero_() for name, piece in pieces.items()
            }
        return True

    def close(self) -> None:
        """Let the write of this rank end, whatever the others do."""
        if self.thread is not None:
            self.thread.join(LAST_S)

    @property
    def done(self) -> bool:
        """Whether this rank has nothing under way."""
        return self.thread is None or not self.thread.is_alive()

    def wait(self, last: bool = False) -> None:
        """Wait for the write under way, on all ranks, and judge it. Collective: world."""
        if self.folder is not None:
            if self.thread is not None:
                self.thread.join()
            self.judge(self.ranks.world.sum_(torch.tensor([float(bool(self.failure))])).item() > 0, last)

    def judge(self, failed: bool, last: bool = False) -> None:
        """What all ranks do about a write that is done on all of them; `failed` is what they agreed on.

        Raises `UsageError` alike on all.
        """
        folder, self.folder, self.thread = self.folder, None, None
        if not failed:
            self.last, self.failed = folder, 0
            return
        self.failed += 1
        whole = f"the last whole one is {self.last}" if self.last else "there is no whole one"
        said = self.failure or f"{folder} could not be written"
        if last or self.failed >= self.config.max_failed_saves:
            raise UsageError(f"{said}; {self.failed} in a row, {whole}")
        self.notice(f"{said}; training continues, {whole}")

    def _write(
        self, pieces: Mapping[str, Tensor], state: dict[str, Any], tables: Mapping[str, Tensor]
    ) -> None:
        began = time.perf_counter()
        assert self.folder is not None
        assert self.ranks.background is not None
        try:
            write.write(
                self.folder,
                pieces,
                write.shapes(self.params),
                state,
                tables,
                self.config.save_total_limit,
                self.ranks.background,
            )
        except Exception as error:  # it must reach the ranks that train
            self.failure = (
                str(error)
                if isinstance(error, UsageError)
                else f"{self.folder}: {type(error).__name__}: {error}"
            )
        self.write_s = time.perf_counter() - began
