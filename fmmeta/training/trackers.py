"""Logs the numbers of a run to TensorBoard, W&B, MLflow and trackio, by accelerate's tracker classes, on the
first rank.

Accelerate's `PartialState` is not used: it would create a second process group, or wait for ranks that never
call it. Accelerate's trackers need it to find the main process and to log; `make` replaces both. A tracker
that fails is dropped with a notice; the run continues.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError, one_line
from fmmeta.common.progress import Warn
from fmmeta.common.security import redact
from fmmeta.config.settings import TRACKERS, Config
from fmmeta.training.callbacks import Callback, RunView

FILE = "trackers.json"  # in the run's folder: ids of the run in the services, so that it resumes there
SECRET_NAME = re.compile(r"(^|_)(token|secret|password|api_?key|credentials?)$")


def check_installed(config: Config) -> None:
    """Refuse trackers whose package is not installed. Raises `UsageError`."""
    for name in names_of(config):
        if find_spec(name) is None:
            raise UsageError(
                f"report_to={name} needs the package {name}, which is not installed; pip install"
                f" 'fmmeta[{name}]'"
            )


def names_of(config: Config) -> list[str]:
    """The trackers of --report_to; all: those that are installed."""
    if config.report_to == ["all"]:
        return [name for name in TRACKERS if find_spec(name)]
    return [name for name in config.report_to if name != "none"]


class Trackers(Callback):
    """The trackers of `config.report_to`, started on the first rank only; elsewhere the hooks do nothing."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.notice = notice
        self.running: dict[str, Any] = {}

    def start(self, config: Config, folder: Path, outer_step: int) -> None:
        """Start the trackers of a run that begins, or resumes, at `outer_step`.

        A tracker that cannot start raises `UsageError` at the beginning of a run. In a resumed run it is
        logged and left out, since the user may not be there to correct it.
        """
        names = names_of(config)
        known = read_ids(folder) if outer_step else {}
        for name in names:
            try:
                tracker = make(name, folder, outer_step, known.get(name), config.run_name)
                tracker.start()
                if name not in known:
                    tracker.store_init_configuration(settings(config))
                    known[name] = id_of(name, tracker)
                self.running[name] = tracker
            except Exception as error:
                text = f"cannot start ({describe_error(error)})"
                if not outer_step:
                    self.close()
                    raise UsageError(f"report_to={name} {text}; correct that, or leave it out") from error
                self.notice(Warn(f"{name} {text}; the run continues without it"))
        if names:
            (folder / FILE).write_text(json.dumps(known) + "\n", encoding="utf-8")

    def on_log(self, run: RunView, metrics: dict[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl."""
        numbers = flat(metrics)
        step = numbers.pop("step", None)
        self._call("log", numbers, step=None if step is None else int(step))

    def close(self, run: RunView | None = None) -> None:
        """End the trackers."""
        self._call("finish")
        self.running.clear()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of every tracker; one that fails is dropped, and the run continues."""
        for name, tracker in list(self.running.items()):
            try:
                getattr(tracker, method)(*arguments, **named)
            except Exception as error:
                del self.running[name]
                text = f"{name} failed ({describe_error(error)}); the run continues without it, metrics.jsonl"
                self.notice(Warn(f"{text} has all numbers"))


def make(name: str, folder: Path, outer_step: int, known: str | None, run_name: str | None = None) -> Any:
    """Accelerate's tracker, not started yet. known: the id of the run to continue, in the service; run_name:
    default: the folder's name.
    """
    from accelerate import tracking

    tracking.logger = Quiet(logging.getLogger("accelerate.tracking"), {})  # type: ignore[assignment]
    run, project = run_name or folder.resolve().name, os.environ.get(f"{name.upper()}_PROJECT", "fmmeta")
    if name == "tensorboard":  # lines that a stopped run logged after its checkpoint are hidden
        tracker = tracking.TensorBoardTracker("tensorboard", str(folder), purge_step=outer_step + 1)
    elif name == "wandb":
        tracker = tracking.WandBTracker(project, name=run, dir=str(folder), id=known, resume="allow")
    elif name == "mlflow":
        tracker = tracking.MLflowTracker(experiment_name="fmmeta", run_name=run, run_id=known)
    else:
        tracker = tracking.TrackioTracker(project, name=run, resume="allow")
    tracker.main_process_only = False  # only the first rank has it
    return tracker


def id_of(name: str, tracker: Any) -> str | None:
    """The id of a run in its service, if it is needed to continue the run."""
    if name == "wandb":
        return str(tracker.tracker.id)
    return str(tracker.tracker.info.run_id) if name == "mlflow" else None


def read_ids(folder: Path) -> dict[str, str | None]:
    """The ids of an earlier process of the run by tracker; empty if they cannot be read."""
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def settings(config: Config) -> dict[str, Any]:
    """Settings that are set, as numbers or redacted text; secrets are left out."""
    texts = {
        name: " ".join(map(str, one)) if isinstance(one, list) else one
        for name, one in config.as_dict().items()
        if one is not None and not SECRET_NAME.search(name)
    }
    return {name: redact(one) if isinstance(one, str) else one for name, one in texts.items()}


def flat(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line by name; a list without numbers counts its elements.

    >>> flat({"loss": 0.5, "text": "x", "waits": [0.1, 0.2], "bad_tasks": [{}], "held_out": {"after": 1.0}})
    {'loss': 0.5, 'waits/0': 0.1, 'waits/1': 0.2, 'bad_tasks': 1, 'held_out/after': 1.0}
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            numbers[name] = value
        elif isinstance(value, dict):
            numbers |= {f"{name}/{key}": one for key, one in flat(value).items()}
        elif isinstance(value, list):
            numbers |= flat({f"{name}/{place}": one for place, one in enumerate(value)}) or {name: len(value)}
    return numbers


def describe_error(error: Exception) -> str:
    """The text of an error on one line, without secrets."""
    return f"{type(error).__name__}: {redact(one_line(error))[:200]}"


class Quiet(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger with the further method of accelerate's, which works without `PartialState`."""

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.debug(*args, **kwargs)
