"""The log of a run: lines of metrics.jsonl, progress on the terminal, and warnings."""

import time
from typing import TYPE_CHECKING, Any

import torch

from fmmeta.config.algorithms import find
from fmmeta.training import run_record
from fmmeta.training.callbacks import Callback

if TYPE_CHECKING:
    from fmmeta.training.loop import Outcome, Run


class RunLogger(Callback):
    """Logs every outer step and validation; only the first rank writes, from `open` on."""

    def __init__(self) -> None:
        self.metrics: run_record.Metrics | None = None
        self.first, self.warned = 0, False
        self.line: dict[str, Any] | None = None  # the last of metrics.jsonl

    def open(self, run: "Run") -> None:
        """Continue metrics.jsonl; lines after the state's outer step are dropped. Local."""
        self.metrics = run_record.Metrics(run.folder, run.state.outer_step, run.ranks.first)

    def on_train_begin(self, run: "Run") -> None:
        self.first = run.state.outer_step

    def on_step_end(self, run: "Run", outcome: "Outcome") -> None:
        """Show the outer step; write a line every logging_steps, and after spikes, skips and retries."""
        config, step, step_metrics, update = run.config, run.state.outer_step, run.metrics, run.update
        membership = run.controller.metrics()
        values = {
            "step": step,
            "epoch": run.schedule.position(step)[0],
            "seconds": time.monotonic() - step_metrics.began,
            **step_metrics.values,
            "grad_norm": update.grad_norm if update else float("nan"),
            "lr": update.lr if update else float("nan"),
            "comm_bytes": run.ranks.cross.bytes_sent,
            **membership,
        }
        run.ranks.cross.bytes_sent = 0
        if spike := run.state.spikes.mark(values["query_loss"]):
            values["loss_spike"] = spike
        due = step in (1, config.outer_steps) or step % config.logging_steps == 0
        if due or values["skipped_tasks"] or spike or membership.get("retries"):
            self.line = values
            self._log(run, values)
        text = f"loss {values['query_loss']:.4f}  accuracy {100 * values['accuracy']:.1f} %"
        skipped = f"  skipped {values['skipped_tasks']}" if values["skipped_tasks"] else ""
        run.progress.line("outer step", step, config.outer_steps, text + skipped, self.first)
        if not self.warned and (warning := find(config.algorithm).warning(config, values)):
            self.warned = True
            run.progress.notice(warning)

    def on_evaluate(self, run: "Run", metrics: dict[str, float]) -> None:
        self._log(run, {"step": run.state.outer_step, **metrics})

    def write_pending_line(self, run: "Run") -> None:
        """Append the last line if the previous writer group died before writing it. Collective: world."""
        last = torch.tensor(self.metrics.last if self.metrics else 0)
        last = int(run.ranks.world.broadcast_(last, 0))
        if self.line is not None and last < self.line["step"] <= run.state.outer_step:
            self._log(run, self.line)

    def _log(self, run: "Run", values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
        run.callbacks.on_log(run, values)
