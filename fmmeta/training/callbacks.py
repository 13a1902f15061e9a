"""Callbacks around the outer loop: hooks, their order, and those built in.

    on_train_begin -> (on_step_begin -> on_step_end) per outer step -> on_train_end -> close
                                        on_log, then on_evaluate and on_log, then on_save

Every hook runs through the callbacks in one order: profiler (its clock stops first), run logger, trackers,
report page, limit of non-finite steps, validation, then `MetaTrainer(config, callbacks=[...])` as given. So a
line is logged before its step can end the run. The loop saves afterwards: a checkpoint holds the best
validated weights and whether a callback has ended the run. `close` runs in reverse order, since trackers may
wait for a server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Warn
from fmmeta.report import page

if TYPE_CHECKING:
    from torch import Tensor

    from fmmeta.common.progress import Progress
    from fmmeta.config.settings import Config
    from fmmeta.meta.outer_step import Outcome
    from fmmeta.parallel.process_groups import ProcessGroups
    from fmmeta.parallel.workers.base import Worker
    from fmmeta.training.state import TrainingState


REFRESH_S = 60.0  # a browser shows the page of the end, or what `fmmeta report --watch` has written


@dataclass(eq=False)
class RunView:
    """What a callback sees of a run.

    theta: this rank's part of the meta-parameters, fp32 [S]. state: `state.outer_step` counts the outer steps
    done. progress: `progress.notice(text)` logs a line on the first rank. writes: whether this group writes
    the files of the run (--elastic: it may change). metrics: numbers of the outer step that has ended, by
    their names in metrics.jsonl. began: when its tasks began, by `time.monotonic`.
    """

    config: "Config"
    folder: Path
    ranks: "ProcessGroups"
    worker: "Worker"
    state: "TrainingState"
    progress: "Progress"
    writes: bool = True
    metrics: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0

    @property
    def theta(self) -> "Tensor":
        """The live meta-parameters of the model, fp32 [S]: this rank's part."""
        return self.state.meta_params.theta

    @property
    def ends_early(self) -> bool:
        """Whether no outer step follows although `outer_steps` is not reached: set by callbacks, on all ranks
        alike, and kept in checkpoints.
        """
        return self.state.ends_early

    @ends_early.setter
    def ends_early(self, ends: bool) -> None:
        self.state.ends_early = ends


class Callback:
    """Base class of callbacks; every hook does nothing.

    Hooks run on all ranks of the launch at the same place (with --elastic: of each group). A hook may use
    collectives only if all ranks take part. It must not change theta or the settings. `run` is a `RunView`:
    `config`, `folder`, `ranks`, `worker`, `theta` (this rank's fp32 shard [S]), `state` (`state.outer_step`:
    outer steps done), `metrics`, `progress` and `writes`. `run.ends_early = True`, set on all ranks alike,
    makes this outer step the last one; the model is then exported as usual. A run that is stopped meanwhile
    and resumed does the same, unless it was set in `on_save`, when the checkpoint has been begun. If a hook
    of a user's callback raises on any rank, the run ends on all of them with one line, exit code 2.

    >>> from fmmeta import Callback
    >>> class PrintAccuracy(Callback):
    ...     def on_evaluate(self, run, metrics):
    ...         if run.ranks.first:
    ...             print(run.state.outer_step, metrics["valid_accuracy"])
    """

    def on_train_begin(self, run: "RunView") -> None:
        """Before the first outer step of this process (with --elastic: before the first quorum)."""

    def on_step_begin(self, run: "RunView") -> None:
        """Before the tasks of an outer step. With --elastic also before each retry."""

    def on_step_end(self, run: "RunView", outcome: "Outcome") -> None:
        """After an outer step, already counted in `run.state.outer_step`. outcome: what it did to theta."""

    def on_evaluate(self, run: "RunView", metrics: dict[str, float]) -> None:
        """After a validation that is complete. metrics: valid_accuracy in [0, 1], valid_loss, and
        valid_NAME for the numbers of `--metrics`.
        """

    def on_log(self, run: "RunView", metrics: dict[str, Any]) -> None:
        """For every line of metrics.jsonl, and for the held-out accuracies at the end.

        With --elastic a line may come twice, if its writer group died before writing it.
        """

    def on_save(self, run: "RunView", folder: Path) -> None:
        """When a checkpoint is begun. A background thread may still be writing to `folder`."""

    def on_train_end(self, run: "RunView") -> None:
        """After the model is exported and evaluated; not where the run was stopped or failed."""

    def close(self, run: "RunView") -> None:
        """Release resources, however the run ended. Local: must not communicate."""


class CallbackList:
    """Calls a hook of all callbacks: `callbacks.on_step_end(run, outcome)`.

    Errors of those that are built in are agreed where they occur, those of `users` here, after each hook of
    each callback. Collective (every hook but `close`): world, where there are users.
    """

    def __init__(self, built_in: Sequence[Callback], users: Sequence[Callback]) -> None:
        self.built_in, self.users = built_in, users

    def __getattr__(self, hook: str) -> Callable[..., None]:
        """A function that calls the hook of that name on every callback."""
        if hook not in vars(Callback):
            raise AttributeError(f"{hook} is not a hook of Callback")
        return partial(self._call, hook)

    def close(self, run: "RunView") -> None:
        """Close all in reverse order; one that raises does not hide how the run ended. Local."""
        for callback in reversed((*self.built_in, *self.users)):
            try:
                callback.close(run)
            except Exception as error:
                run.progress.notice(Warn(f"{failure_of(callback, 'close', error)}; the run is not affected"))

    def _call(self, hook: str, run: "RunView", *arguments: Any) -> None:
        for callback in self.built_in:
            getattr(callback, hook)(run, *arguments)
        for callback in self.users:
            with run.ranks.world.raise_on_all(f"calling {hook} of {type(callback).__name__}"):
                try:
                    getattr(callback, hook)(run, *arguments)
                except Exception as error:
                    raise UsageError(
                        f"{failure_of(callback, hook, error)} at outer step {run.state.outer_step};"
                        " correct the callback, or leave it out"
                    ) from error


def failure_of(callback: Callback, hook: str, error: Exception) -> str:
    """One line that names the callback, the hook and the first line of the error."""
    first_line = str(error).strip().partition("\n")[0]
    return f"callbacks={type(callback).__name__}: {hook} raised {type(error).__name__}: {first_line}"


class ReportPage(Callback):
    """Writes report.html when training begins and however the run ends."""

    def on_train_begin(self, run: "RunView") -> None:
        self._write(run, REFRESH_S)

    def close(self, run: "RunView") -> None:
        self._write(run)

    def _write(self, run: "RunView", refresh_s: float = 0.0) -> None:
        if run.ranks.first and run.writes:
            page.write_or_log(run.folder, run.progress.notice, refresh_s)


class NonfiniteLimit(Callback):
    """Ends a run after --max_bad_steps outer steps in a row without a finite task."""

    def on_step_end(self, run: "RunView", outcome: "Outcome") -> None:
        """Raises `UsageError`, on all ranks alike."""
        config, count = run.config, run.state.bad_steps
        if count < config.max_bad_steps:
            return
        given, lower = f"inner_lr={config.inner_lr}: no task was finite", "--inner_lr or --outer_lr"
        if not config.inner_steps:
            given, lower = f"outer_lr={config.outer_lr}: no task was finite", "--outer_lr"
        raise UsageError(
            f"{given} in {count} outer steps in a row (the last is {run.state.outer_step}); lower {lower},"
            " name what you change in --accept_changed_settings, and continue from the last checkpoint"
        )
