"""The numbers of a run: sums of an outer step over all groups, lines of metrics.jsonl, terminal output."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import LOGGER, STDERR, Warn
from fmmeta.common.security import publish_text, redact
from fmmeta.common.text import to_json
from fmmeta.config.algorithms import find
from fmmeta.meta.noise_scale import TaskSquares
from fmmeta.meta.task import TaskResult
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.report.data import parse_line
from fmmeta.training.callbacks import Callback, Outcome

if TYPE_CHECKING:
    from fmmeta.training.loop import Run


class StepMetrics:
    """Numbers of this group's tasks in one outer step; `all_reduce` sets `values` from those of all groups.

    names: further numbers of the algorithm's task gradients. replicated: whether each rank of a group holds
    the whole model. counts: further sums over tasks, by name. waited: seconds that this group has waited for
    others so far. squares: of the tasks of all groups, after `all_reduce`.
    """

    def __init__(
        self, names: Sequence[str] = (), replicated: bool = True, counts: Sequence[str] = ()
    ) -> None:
        self.counts, self.waited = dict.fromkeys(counts, 0.0), 0.0
        self.replicated, self.squares = replicated, TaskSquares(0.0, 0.0, 0.0)
        self.began = time.monotonic()
        self.weight = self.weight_squared = self.data_seconds = 0.0
        self.square = 0.0  # this rank's part of the sum of w |g|^2 (meta/noise_scale.py)
        self.skipped = self.tokens = self.tasks = self.failures = 0
        # sums over the finite tasks, each times its weight
        self.sums = dict.fromkeys(("support_loss", "query_loss", "accuracy", *names), 0.0)
        self.values: dict[str, Any] = {}
        self.tasks_by_group: list[int] = []  # with or without an episode

    def add(self, task: TaskResult, tokens: int, square: float = 0.0) -> None:
        """Count a task. square: this rank's part of |w g|^2, w its weight and g its meta-gradient, if
        measured.
        """
        self.tokens += tokens
        self.tasks += 1
        if not task.finite:
            self.skipped += 1
            return
        self.weight += task.weight
        self.weight_squared += task.weight**2
        self.square += square / task.weight if task.weight else 0.0
        found = {
            "support_loss": task.support.loss,
            "query_loss": task.query.loss,
            "accuracy": task.query.accuracy,
            **task.numbers,
        }
        if missing := self.sums.keys() - found.keys():
            raise UsageError(
                f"TaskResult.numbers has no {min(missing)!r}, which AlgorithmSpec.numbers names; return it"
                " from the rule, or leave it out of the spec"
            )
        for name in self.sums:
            self.sums[name] += task.weight * found[name]

    def count_missing(self, tasks: int, failures: int, data_seconds: float) -> None:
        """Count the group's tasks without an episode, this rank's failures, and its wait for data."""
        self.skipped += tasks
        self.tasks += tasks
        self.failures, self.data_seconds = failures, data_seconds

    def all_reduce(self, ranks: ProcessGroups) -> float:
        """Sum over all groups; return the summed weight of the finite tasks.

        `tasks` then counts those of all groups, with or without an episode. Collective: all groups.
        """
        waiting = time.monotonic()
        counts_group = ranks.layout.group_rank == 0  # these are equal on the ranks of a group
        of_group = {
            "weight": self.weight,
            "skipped": self.skipped,
            "tasks": self.tasks,
            "weight_squared": self.weight_squared,
            **self.sums,
            **self.counts,
        }
        mine = {
            **{name: value if counts_group else 0.0 for name, value in of_group.items()},
            "tokens": self.tokens,
            "data_seconds": self.data_seconds,
            "failures": self.failures,
            "square": 0.0 if self.replicated and not counts_group else self.square,
        }
        sums = ranks.all_groups.sum_(torch.tensor(list(mine.values()), dtype=torch.float64))
        total = dict(zip(mine, sums.tolist(), strict=True))
        # [3, groups]: busy, waiting and tasks, each a mean over the ranks of a group
        of_groups = torch.zeros(3, ranks.cross.size, dtype=torch.float64)
        of_groups[:, ranks.cross.rank] = (
            torch.tensor(
                [
                    waiting - self.began - self.waited,
                    time.monotonic() - waiting + self.waited,
                    float(self.tasks),
                ]
            )
            / ranks.layout.group_size
        )
        busy, waits, tasks = ranks.all_groups.sum_(of_groups)
        self.tasks_by_group = [round(count) for count in tasks.tolist()]
        weight = total["weight"]
        self.squares = TaskSquares(weight, total["weight_squared"], total["square"])
        self.tasks, self.failures = int(total["tasks"]), int(total["failures"])
        self.counts = {name: total[name] for name in self.counts}
        self.values = {
            "tokens": int(total["tokens"]),
            **{name: total[name] / weight if weight else math.nan for name in self.sums},
            "skipped_tasks": int(total["skipped"]),
            "data_seconds": total["data_seconds"] / ranks.all_groups.size,
            "wait_seconds": float(waits.mean()),
            "wait_seconds_by_group": [round(float(wait), 6) for wait in waits],
            "imbalance": float(busy.max() / busy.mean()) - 1,
        }
        if weight and math.isnan(self.values["accuracy"]):  # no answer is right or wrong
            del self.values["accuracy"]
        return weight


class RunLogger(Callback):
    """Logs every outer step and validation; only the first rank writes, from `open` on."""

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self.first, self.warned = 0, False
        self.line: dict[str, Any] | None = None  # the last of metrics.jsonl

    def open(self, run: "Run") -> None:
        """Continue metrics.jsonl; lines after the state's outer step are dropped. Local."""
        self.metrics = Metrics(run.folder, run.state.outer_step, run.ranks.first)

    def on_train_begin(self, run: "Run") -> None:
        self.first = run.state.outer_step

    def on_step_end(self, run: "Run", outcome: Outcome) -> None:
        """Show the outer step; write a line every logging_steps, and after spikes, skips and retries."""
        config, step, step_metrics, update = run.config, run.state.outer_step, run.metrics, run.update
        values = {
            "step": step,
            "epoch": run.schedule.position(step)[0],
            "seconds": time.monotonic() - step_metrics.began,
            **step_metrics.values,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "comm_bytes": run.ranks.cross.bytes_sent,
            **run.controller.metrics(),
            **(run.state.updates.noise_scale.values if config.gradient_noise_scale else {}),
        }
        run.ranks.cross.bytes_sent = 0
        if spike := run.state.spikes.mark(values["query_loss"]):
            values["loss_spike"] = spike
        due = step in (1, config.outer_steps) or step % config.logging_steps == 0
        if due or values["skipped_tasks"] or spike or values.get("retries"):
            self.line = values
            self._log(run, values)
        text = f"loss {values['query_loss']:.4f}"
        text += f"  accuracy {100 * values['accuracy']:.1f} %" if "accuracy" in values else ""
        text += f"  skipped {values['skipped_tasks']}" if values["skipped_tasks"] else ""
        run.progress.line("outer step", step, config.outer_steps, text, self.first)
        if not self.warned and (warning := find(config.algorithm).warning(config, values)):
            self.warned = True
            run.progress.notice(Warn(warning))

    def on_train_end(self, run: "Run") -> None:
        config = run.config
        if config.gradient_noise_scale:
            run.progress.notice(run.state.updates.noise_scale.advice(config.tasks_per_step))

    def on_evaluate(self, run: "Run", metrics: dict[str, float]) -> None:
        self._log(run, {"step": run.state.outer_step, **metrics})

    def write_pending_line(self, run: "Run") -> None:
        """Append the last line if the previous writer group died before writing it. Collective: world."""
        last = int(run.ranks.world.broadcast_(torch.tensor(self.metrics.last if self.metrics else 0), 0))
        if self.line is not None and last < self.line["step"] <= run.state.outer_step:
            self._log(run, self.line)

    def _log(self, run: "Run", values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
        run.callbacks.on_log(run, values)


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
