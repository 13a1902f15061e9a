"""Logs the numbers of a run to TensorBoard, W&B, MLflow and trackio, by accelerate's tracker classes, on the
first rank.

Accelerate's `PartialState` is not used: it would create a second process group, or wait for ranks that never
call it. Accelerate's trackers need it to find the main process and to log; `make` replaces both. A tracker
that fails is dropped with a notice; the run continues.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import redact
from fmmeta.config.settings import Config
from fmmeta.training.callbacks import Callback

if TYPE_CHECKING:
    from fmmeta.training.loop import Run

FILE = (  # in the run's folder: what the services call this run, so that a continuation is the same run there
    "trackers.json"
)
SECRET_NAME = re.compile(r"(^|_)(token|secret|password|api_?key|credentials?)$")


def check_installed(config: Config) -> None:
    """Refuse trackers whose package is not installed. Raises `UsageError`."""
    for name in config.report_to:
        if name != "none" and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"report_to={name} needs the package {name}, which is not installed; pip install"
                f" 'fmmeta[{name}]'"
            )


class Trackers(Callback):
    """The trackers of `config.report_to`, started on the first rank only; elsewhere the hooks do nothing."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.notice = notice
        self.running: dict[str, Any] = {}

    def start(self, config: Config, folder: Path, outer_step: int) -> None:
        """Start them, for a run that begins or goes on at `outer_step`.

        A tracker that cannot start raises `UsageError` at the beginning of a run. In a resumed run it is a
        notice, since the user may not be there to correct it.
        """
        names = [name for name in config.report_to if name != "none"]
        known = read_ids(folder) if outer_step else {}
        for name in names:
            try:
                tracker = make(name, folder, outer_step, known.get(name))
                tracker.start()
                if name not in known:
                    tracker.store_init_configuration(settings(config))
                    known[name] = id_of(name, tracker)
            except Exception as error:
                if not outer_step:
                    self.finish()
                    raise UsageError(
                        f"report_to={name} cannot start ({describe_error(error)}); correct that, or leave it"
                        " out"
                    ) from error
                self.notice(f"{name} cannot start ({describe_error(error)}); the run goes on without it")
            else:
                self.running[name] = tracker
        if names:
            (folder / FILE).write_text(json.dumps(known) + "\n", encoding="utf-8")

    def on_log(self, run: Run, metrics: dict[str, Any]) -> None:
        self.log(metrics)

    def close(self, run: Run) -> None:
        self.finish()

    def log(self, values: dict[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl."""
        numbers = flat(values)
        step = numbers.pop("step", None)
        for name in list(self.running):
            with self._drop_if_it_fails(name):
                self.running[name].log(numbers, step=None if step is None else int(step))

    def finish(self) -> None:
        for name in list(self.running):
            with self._drop_if_it_fails(name):
                self.running[name].finish()
        self.running.clear()

    @contextmanager
    def _drop_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.running.pop(name, None)
            self.notice(
                f"{name} failed ({describe_error(error)}); the run goes on without it, metrics.jsonl has"
                " all numbers"
            )


def make(name: str, folder: Path, outer_step: int, known: str | None) -> Any:
    """Accelerate's tracker, not started yet. `known`: what the service calls the run that goes on."""
    from accelerate import tracking

    tracking.logger = Quiet(logging.getLogger("accelerate.tracking"), {})  # type: ignore[assignment]
    run = folder.resolve().name
    if name == "tensorboard":  # what a stopped run logged after its checkpoint is hidden
        tracker = tracking.TensorBoardTracker("tensorboard", str(folder), purge_step=outer_step + 1)
    elif name == "wandb":
        project = os.environ.get("WANDB_PROJECT", "fmmeta")
        tracker = tracking.WandBTracker(project, name=run, dir=str(folder), id=known, resume="allow")
    elif name == "mlflow":
        tracker = tracking.MLflowTracker(experiment_name="fmmeta", run_name=run, run_id=known)
    else:
        tracker = tracking.TrackioTracker(
            os.environ.get("TRACKIO_PROJECT", "fmmeta"), name=run, resume="allow"
        )
    tracker.main_process_only = False  # only the first rank has it
    return tracker


def id_of(name: str, tracker: Any) -> str | None:
    if name == "wandb":
        return str(tracker.tracker.id)
    return str(tracker.tracker.info.run_id) if name == "mlflow" else None


def read_ids(folder: Path) -> dict[str, str | None]:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def settings(config: Config) -> dict[str, Any]:
    """Every setting as a number or redacted text; open ones and secrets are left out."""
    kept = {
        name: value
        for name, value in config.as_dict().items()
        if value is not None and not SECRET_NAME.search(name)
    }
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in kept.items()
    }
    return {name: redact(value) if isinstance(value, str) else value for name, value in texts.items()}


def flat(values: dict[str, Any]) -> dict[str, float]:
    """Finite numbers alone: those of a list by their places, a list of tasks as their number, those of a
    table by their names.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            numbers[name] = value
        elif isinstance(value, dict):
            numbers |= {f"{name}/{key}": one for key, one in flat(value).items()}
        elif isinstance(value, list):
            each = {
                f"{name}/{place}": float(one)
                for place, one in enumerate(value)
                if isinstance(one, (int, float)) and math.isfinite(one)
            }
            numbers |= each or {name: len(value)}
    return numbers


def describe_error(error: Exception) -> str:
    """The first line of an error, without secrets."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {redact(lines[0])[:200]}" if lines else type(error).__name__


class Quiet(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger with the one method that accelerate's has besides; theirs refuses to work without
    `PartialState`.
    """

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.debug(*args, **kwargs)
