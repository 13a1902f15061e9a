"""The log of a run: lines of metrics.jsonl, and terminal output."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.progress import LOGGER, STDERR, Warn
from fmmeta.common.security import publish_text, redact
from fmmeta.common.text import to_json
from fmmeta.config.algorithms import find
from fmmeta.meta.outer_step import Outcome
from fmmeta.report.data import parse_line
from fmmeta.training.callbacks import Callback, RunView


class RunLogger(Callback):
    """Logs every outer step and validation; only the first rank writes, from `open` on."""

    def __init__(self, on_log: Callable[[dict[str, Any]], None]) -> None:
        """on_log: called with every line."""
        self.on_log_line = on_log
        self.metrics: Metrics | None = None
        self.first, self.warned = 0, False
        self.line: dict[str, Any] | None = None  # the last of metrics.jsonl

    def open(self, run: RunView) -> None:
        """Continue metrics.jsonl; lines after the state's outer step are dropped. Local."""
        self.metrics = Metrics(run.folder, run.state.outer_step, run.ranks.first)

    def on_train_begin(self, run: RunView) -> None:
        self.first = run.state.outer_step

    def on_step_end(self, run: RunView, outcome: Outcome) -> None:
        """Show the outer step; write a line every logging_steps, and after spikes, skips and retries."""
        config, values = run.config, run.metrics
        values["seconds"] = time.monotonic() - run.began  # with what callbacks before this one took
        step, skipped = values["step"], values["skipped_tasks"]
        due = step in (1, config.outer_steps) or step % config.logging_steps == 0
        if due or skipped or "loss_spike" in values or values.get("retries"):
            self.line = values
            self._log(values)
        text = f"loss {values['query_loss']:.4f}"
        text += f"  accuracy {100 * values['accuracy']:.1f} %" if "accuracy" in values else ""
        text += f"  skipped {skipped}" if skipped else ""
        run.progress.line("outer step", step, config.outer_steps, text, self.first)
        if not self.warned and (warning := find(config.algorithm).warning(config, values)):
            self.warned = True
            run.progress.notice(Warn(warning))

    def on_train_end(self, run: RunView) -> None:
        config = run.config
        if config.gradient_noise_scale:
            run.progress.notice(run.state.updates.noise_scale.advice(config.tasks_per_step))

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        self._log({"step": run.state.outer_step, **metrics})

    def write_pending_line(self, run: RunView) -> None:
        """Append the last line if the previous writer group died before writing it. Collective: world."""
        last = int(run.ranks.world.broadcast_(torch.tensor(self.metrics.last if self.metrics else 0), 0))
        if self.line is not None and last < self.line["step"] <= run.state.outer_step:
            self._log(self.line)

    def _log(self, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
        self.on_log_line(values)


class Metrics:
    """metrics.jsonl: one object per logged outer step; only the rank that `writes` opens the file.

    A resumed run drops the lines after outer_step, that of its checkpoint. last: the last step in the file.
    """

    def __init__(self, folder: Path, outer_step: int, writes: bool) -> None:
        self.file = folder / "metrics.jsonl"
        self.writes, self.failed, self.last = writes, False, 0
        if writes and self.file.is_file():
            kept = [
                (text, line)
                for text in self.file.read_text(encoding="utf-8", errors="replace").splitlines()
                if (line := parse_line(text)) and line["step"] <= outer_step
            ]
            publish_text(self.file, "".join(f"{text}\n" for text, _ in kept))
            self.last = max((line["step"] for _, line in kept), default=0)

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; while the disk is full lines are lost, and the run continues."""
        self.last = max(self.last, values["step"])
        if not self.writes:
            return
        try:
            with self.file.open("a", encoding="utf-8") as file:
                # a lost line may be written in part
                file.write("\n" * self.failed + redact(to_json(values)) + "\n")
            self.failed = False
        except OSError as error:
            if not self.failed:
                LOGGER.warning(
                    "%s cannot be written (%s); its lines are lost until it can",
                    self.file,
                    error.strerror,
                    extra=STDERR,
                )
            self.failed = True
