"""What a run tells while it lasts: lines of metrics.jsonl and of trackers, progress on the terminal, marks
and warnings.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from fmmeta.common.progress import Progress
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.outer_step import OuterStep
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.training import run_record
from fmmeta.training.state import TrainingState
from fmmeta.training.step_metrics import StepMetrics
from fmmeta.training.trackers import Trackers


class RunLogger:
    """One for a run, from the outer step that `state` is at. Files are the first rank's, from `open` on."""

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        folder: Path,
        ranks: ProcessGroups,
        trackers: Trackers,
        progress: Progress,
    ) -> None:
        self.config, self.state, self.ranks, self.progress = config, state, ranks, progress
        self.folder, self.trackers = folder, trackers
        self.metrics = run_record.Metrics(folder, state.outer_step, False)
        self.first, self.warned = state.outer_step, False
        self.line: dict[str, Any] | None = None  # the last of metrics.jsonl

    def open(self) -> None:
        """Go on with the file; lines after the state's outer step are dropped."""
        self.metrics = run_record.Metrics(
            self.folder, self.state.outer_step, self.ranks.first, self.trackers.log
        )

    def step(
        self, moved: OuterStep | None, tally: StepMetrics, epoch: int, exploded: int, facts: dict[str, Any]
    ) -> None:
        """An outer step is done: `tally` agreed, `exploded` tasks dropped for their size. moved: None if no
        update was due; facts: of those who took part. Collective: none.
        """
        config, step = self.config, self.state.outer_step
        values = {
            "step": step,
            "epoch": epoch,
            "seconds": time.monotonic() - tally.began,  # the reduction and the outer step are part of it
            **tally.values,
            "grad_norm": moved.grad_norm if moved else math.nan,
            "lr": moved.lr if moved else math.nan,
            "comm_bytes": self.ranks.cross.bytes_sent,
            **facts,
        }
        self.ranks.cross.bytes_sent = 0
        if exploded:
            values["exploded_tasks"] = exploded
        if spike := self.state.spikes.mark(values["query_loss"]):
            values["loss_spike"] = spike
        noted = step in (1, config.outer_steps) or step % config.logging_steps == 0
        if noted or values["skipped_tasks"] or spike or facts.get("retries"):
            self.line = values
            self.metrics.write(self.line)
        text = f"loss {values['query_loss']:.4f}  accuracy {100 * values['accuracy']:.1f} %"
        skipped = f"  skipped {values['skipped_tasks']}" if values["skipped_tasks"] else ""
        self.progress.line("outer step", step, config.outer_steps, text + skipped, self.first)
        if not self.warned and (warning := find(config.algorithm).warning(config, values)):
            self.warned = True
            self.progress.notice(warning)

    def write_pending_line(self) -> None:
        """Write a line that its writer has not lived to write."""
        if self.line is not None and self.metrics.last < self.line["step"] <= self.state.outer_step:
            self.metrics.write(self.line)

    def validated(self, accuracy: float, loss: float) -> None:
        """Means over the validation tasks, at the state's outer step."""
        self.metrics.write({"step": self.state.outer_step, "valid_accuracy": accuracy, "valid_loss": loss})
