"""The folder of a run: run.json, the lock, the settings it may continue with, the newest complete checkpoint;
lines of metrics.jsonl, and terminal output.

    find the folder -> lock it -> undo a partial save -> compare settings
    -> verify checkpoints, newest first -> rename those that are newer

No file of a folder is overwritten or removed here; checkpoints that must not be resumed from are renamed and
named in the log.
"""

import fcntl
import glob
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fmmeta import checkpoint
from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.install import version
from fmmeta.common.processes import output_of
from fmmeta.common.progress import LOGGER, STDERR, Warn
from fmmeta.common.security import make_folders, publish_text, redact, remove_empty
from fmmeta.common.text import to_json
from fmmeta.config import recipes
from fmmeta.config.algorithms import find
from fmmeta.config.resume import HIDDEN_ON_RESUME, changed_settings
from fmmeta.config.settings import Config
from fmmeta.meta.outer_step import Outcome
from fmmeta.parallel.process_groups import Communicator
from fmmeta.report.command import LOCK
from fmmeta.report.page import parse_line, read_run
from fmmeta.training.callbacks import Callback, RunView

PACKAGES = ("fmmeta", "torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors", "peft")

WRITTEN_BY = "# Written by fmmeta"  # first line of config.yaml
PER_LAUNCH = HIDDEN_ON_RESUME | {"lighthouse", "group_name"}  # settings that config.yaml leaves out
KEPT_LINES = 1000  # of metrics.jsonl, for a writer that comes later, and until a full disk takes them
MOST_LISTED = 100  # times that the checkpoints of a run are listed while others write them


def write_run(
    folder: Path, settings: dict[str, Any], layout: str, device_type: str = "cpu", **facts: Any
) -> None:
    """Write run.json: `settings_of` the run, versions, git commit, and `facts`.

    Secrets are redacted.
    """
    run = {
        "settings": settings,
        "layout": layout,
        "promise": promise_of(settings, device_type),
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        **facts,
    }
    publish_text(folder / "run.json", redact(to_json(run, indent=1)) + "\n")


def promise_of(settings: Mapping[str, Any], device_type: str = "cpu") -> str:
    """How theta of a repeated or resumed run compares with that of the first.

    On GPUs some kernels of torch (index_add_, the backward pass of SDPA) add in an order that varies.
    """
    if settings["max_staleness"]:
        return f"max_staleness={settings['max_staleness']}: theta depends on how long tasks take"
    if ":" in settings["task_schedule"]:
        return f"task_schedule={settings['task_schedule']}: theta depends on it"
    for name, value in (("task_schedule", "dynamic"), ("elastic", True)):
        if settings[name] == value:
            return f"{name}={value}: theta is the same to rounding, 1e-5 of its distance from the start"
    if device_type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return "cuda without torch.use_deterministic_algorithms: theta is the same to rounding"
    return "theta is the same bit for bit on the same layout"


def write_config(folder: Path, config: Config) -> None:
    """Write config.yaml: `fmmeta train FOLDER/config.yaml --output_dir NEW` starts the run again.

    A file of that name that fmmeta has not written is left alone. Secrets are redacted.
    """
    path = folder / "config.yaml"
    if path.is_dir() or (
        path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN_BY)
    ):
        return
    head = (
        f"{WRITTEN_BY} {version('fmmeta')}: settings that differ from the defaults.\n"
        "# fmmeta train THIS_FILE --output_dir NEW starts the run again, from the folder where it started;\n"
        "# with the --output_dir of this run it resumes.\n"
    )
    publish_text(path, redact(head + recipes.text_of(config, PER_LAUNCH)))


def git_commit() -> str | None:
    """Commit of the current folder, if it is in a git checkout."""
    return output_of(["git", "rev-parse", "HEAD"]) or None


@dataclass(frozen=True)
class RunStart:
    """Where a run begins. finished: nothing is left to do.

    warnings: for the user; explicit: the user named the checkpoint; begun_from: path and outer step of the
    checkpoint that the user named at this start or an earlier one; lock: held by rank 0 while the run lasts;
    started: when the run began, in seconds since 1970, by an earlier process if there was one.
    """

    folder: Path
    checkpoint: Path | None
    finished: bool
    warnings: Sequence[str] = ()
    explicit: bool = False
    begun_from: dict[str, Any] = field(default_factory=dict)
    lock: "FolderLock | None" = None
    started: float = field(default_factory=time.time)


def open_run(config: Config, settings: dict[str, Any], comm: Communicator) -> RunStart:
    """Make or find the run's folder; its checkpoint is verified. settings: `build.settings_of` the run.

    Raises `UsageError` where the folder holds a run with other settings, or is in use; then it leaves neither
    a lock nor folders that it made. Collective: comm (world).
    """
    with ExitStack() as on_refusal:
        start = RunStart(Path(), None, False)
        with comm.raise_on_all("opening output_dir"):
            if comm.rank == 0:
                folder, made = known_folder(config, settings), list[Path]()
                if folder is None:
                    made = make_new(config)
                    folder = made[0]
                    on_refusal.callback(remove_empty, made)
                # with --elastic the writing group takes the lock (elastic/controller.py)
                lock = FolderLock(folder, None, make(folder)) if config.elastic else lock_folder(folder)
                lock.made += made
                on_refusal.callback(lock.close)
                if not config.elastic:
                    checkpoint.undo_partial_save(folder)
                start = replace(find_start(config, settings, folder), lock=lock)
        start = replace(_of_rank0(start, comm), lock=start.lock)
        if start.checkpoint is not None and not start.finished:
            start = _verify(start, start.checkpoint, config, comm)
        on_refusal.pop_all()
        return start


def _of_rank0(start: RunStart, comm: Communicator) -> RunStart:
    """Rank 0's start without its lock, on every rank. Collective: comm."""
    values = [
        str(start.folder),
        str(start.checkpoint or ""),
        start.finished,
        start.warnings,
        start.explicit,
        start.begun_from,
        start.started,
    ]
    folder, newest, *others, started = comm.broadcast(values)
    return RunStart(Path(folder), Path(newest) if newest else None, *others, started=started)


def _verify(start: RunStart, chosen: Path, config: Config, comm: Communicator) -> RunStart:
    """The start from a checkpoint that is complete; newer ones are renamed.

    Raises `UsageError`. Collective: comm.
    """
    warnings = list[str]()
    if not start.explicit:
        # before a named checkpoint there may be those of another run
        since = start.begun_from.get("outer_step", 0) if named_checkpoint(config) else 0
        chosen, warnings = newest_complete(start.folder, comm, since)
    elif wrong := checkpoint.find_corruption(chosen, comm):
        raise UsageError(
            f"resume_from_checkpoint={chosen} is not complete: {wrong}; give another one, or latest"
        )
    warnings += start.warnings
    with comm.raise_on_all("setting checkpoints aside"):
        if comm.rank == 0 and not config.elastic:
            for path in newer(chosen, start.folder):
                aside = checkpoint.rename_aside(path).name
                warnings.append(f"{path} was renamed to {aside}: the run resumes from an older one")
    return replace(start, checkpoint=chosen, warnings=warnings)


def newest_complete(folder: Path, comm: Communicator, since: int = 0) -> tuple[Path, list[str]]:
    """The newest complete checkpoint of a run at outer step `since` or later, and what is wrong with those
    that are newer.

    In an elastic run another group writes and removes checkpoints meanwhile, so the folder is listed again
    after each one that is refused. Raises `UsageError`.

    Collective: comm.
    """
    refused: dict[str, str] = {}
    for _ in range(MOST_LISTED):
        listed: dict[str, str] = comm.on_first("listing checkpoints", lambda: manifests(folder, since))
        refused = {key: text for key, text in refused.items() if key in listed}
        left = [key for key in listed if key not in refused]
        if left:
            chosen = Path(listed[left[-1]])
            wrong = checkpoint.find_corruption(chosen, comm)
            if not wrong:
                return chosen, list(refused.values())
            refused[left[-1]] = f"{chosen} is refused: {wrong}"
        elif listed:
            break
    why = "; ".join(refused.values()) or f"listed {MOST_LISTED} times"
    raise UsageError(
        f"output_dir={folder} holds no complete checkpoint to resume from ({why}); to start"
        " over choose another output_dir"
    )


def checkpoints_since(folder: Path, outer_step: int) -> list[Path]:
    """The complete checkpoints of a run at an outer step or later, oldest first."""
    return [
        path
        for path in checkpoint.list_complete(folder)
        if int(path.name.removeprefix("checkpoint-")) >= outer_step
    ]


def manifests(folder: Path, since: int = 0) -> dict[str, str]:
    """Checkpoints at outer step `since` or later, oldest first, by the manifest's inode: a checkpoint may be
    replaced by another one of the same name.
    """
    found = dict[str, str]()
    for path in checkpoints_since(folder, since):
        with suppress(OSError):  # removed by the group that writes
            found[str((path / checkpoint.MANIFEST).stat().st_ino)] = str(path)
    return found


def newer(chosen: Path, folder: Path) -> list[Path]:
    """Other checkpoints of the run's folder at the outer step of `chosen` or later."""
    step = checkpoint.read_state(chosen)["outer_step"]
    return [path for path in checkpoints_since(folder, step) if path.resolve() != chosen.resolve()]


def known_folder(config: Config, settings: dict[str, Any]) -> Path | None:
    """--output_dir, or runs/<run_name>; without them the newest unfinished run with these settings in runs/,
    or None.
    """
    if config.output_dir is not None:
        return Path(config.output_dir)
    if config.run_name is not None:
        return Path("runs") / config.run_name
    if config.resume_from_checkpoint != "never":
        for folder in sorted(Path("runs").glob(f"*-{glob.escape(short_name(config))}"), reverse=True):
            if is_unfinished(folder, settings, named_checkpoint(config)):
                return folder
    return None


def recorded_precision(config: Config, settings: dict[str, Any], comm: Communicator) -> str:
    """The precision of the run that a start with these settings resumes; that of `settings` if there is none.

    Raises `UsageError`. Collective: comm (world).
    """

    def recorded() -> str:
        named, all_settings = named_checkpoint(config), [settings]  # the last ones count
        if named:
            all_settings.append(checkpoint.read_state(named)["settings"])
        both = [known_folder(config, {**settings, "precision": one}) for one in ("bf16", "fp32")]
        for folder in sorted(filter(None, both)):  # the newest last
            if run := read_run(folder):
                all_settings.append(run["settings"])
        return all_settings[-1].get("precision", settings["precision"])

    return comm.on_first("looking for a run to resume", recorded)


def new_folder(config: Config, number: int = 1) -> Path:
    """The name of a new folder. number: of the run among those that begin in the same second."""
    second = time.strftime("%Y%m%d-%H%M%S") + (f"-{number}" if number > 1 else "")
    return Path("runs") / f"{second}-{short_name(config)}"


def short_name(config: Config) -> str:
    return f"{config.algorithm.replace(':', '-')}-{Path(config.dataset[0]).name}"


def make_new(config: Config) -> list[Path]:
    """Make a new folder that no other process has made: jobs of an array begin in the same second.

    Returns the folder and others that were missing, innermost first. Raises `UsageError`.
    """
    number, above = 0, list[Path]()
    while True:
        number += 1
        above = make(Path("runs")) or above
        folder = new_folder(config, number)
        # another process has made it, or was refused and has removed runs/
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir()
            return [folder, *above]


def named_checkpoint(config: Config) -> Path | None:
    """The checkpoint that --resume_from_checkpoint names, if it does."""
    wanted = config.resume_from_checkpoint
    return None if wanted in ("latest", "never") else Path(wanted)


def has_begun_from(run: dict[str, Any], named: Path) -> bool:
    """Whether a run, by its run.json, was the last time begun from the checkpoint `named`."""
    return (run.get("begun_from") or {}).get("checkpoint") == str(named.resolve())


def is_unfinished(folder: Path, settings: dict[str, Any], named: Path | None = None) -> bool:
    """Whether a folder holds a stopped run with these settings and a checkpoint, begun from the checkpoint
    `named` if given, and is not in use.
    """
    with suppress(UsageError, OSError):  # not readable, in use, or another user's
        run = read_run(folder)
        if run is None or run.get("finished") or changed_settings(run["settings"], settings):
            return False
        if (named is None or has_begun_from(run, named)) and checkpoint.list_complete(folder):
            lock = lock_folder(folder, 0, quiet=True)
            lock.close()
            return not lock.warning  # without locks it may be in use
    return False


class FolderLock:
    """The lock `file` of a run's folder, if any, and the folders `made` for it, innermost first.

    warning: why it keeps no other run out; empty if it does.
    """

    def __init__(self, folder: Path, file: Any, made: list[Path], warning: str = "") -> None:
        self.folder, self.file, self.made, self.warning = folder, file, made, warning

    def close(self) -> None:
        """Release the lock; remove the folders that were made if they are empty."""
        if self.file is not None:
            (self.folder / LOCK).unlink(missing_ok=True)
        remove_empty(self.made)
        if self.file is not None:
            self.file.close()


def make(folder: Path) -> list[Path]:
    """Make a run's folder; return those that were missing. Raises `UsageError`."""
    with usage_errors(f"output_dir={folder} cannot be made", "choose another"):
        made = make_folders(folder)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"output_dir={folder} cannot be written to; choose another")
    return made


def lock_folder(folder: Path, timeout_s: float = 120.0, quiet: bool = False) -> FolderLock:
    """Make a run's folder and take its lock; the kernel releases it when this process ends.

    On a file system without locks it is logged that nothing keeps a second run out of the folder. quiet: log
    nothing. Raises `UsageError` after `timeout_s`.
    """
    made, began = make(folder), time.monotonic()
    while True:
        try:
            file = (folder / LOCK).open("a+")
        except FileNotFoundError:  # another start was refused, and has removed the folder
            made = make(folder) or made
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            in_use = f"output_dir={folder} is in use by {file.read().strip() or 'another process'}"
            file.close()
        except OSError as error:  # a file system without locks
            warning = (
                f"output_dir={folder} is on a file system without locks ({error.strerror}), and nothing keeps"
                " a second run out of it; start only one, or use another file system"
            )
            if not quiet:
                LOGGER.warning("%s", warning)
            return FolderLock(folder, file, made, warning)
        else:
            if is_file(file, folder / LOCK):
                break
            file.close()
            continue
        if time.monotonic() - began >= timeout_s:
            raise UsageError(f"{in_use}; wait for it, or choose another")
        if not quiet:
            quiet = True
            LOGGER.warning("%s; waiting for %g s at most", in_use, timeout_s)
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return FolderLock(folder, file, made)


def is_file(file: Any, path: Path) -> bool:
    """Whether an open file still has this name: the previous owner of the lock may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def find_start(config: Config, settings: dict[str, Any], folder: Path) -> RunStart:
    """The start by the settings and the names in the folder; the checkpoint is not verified. Local.

    A checkpoint that the user names is where the run begins, once: a repeated command, such as that of a
    requeued job, resumes from what the run has saved since.
    """
    wanted, warnings, before = config.resume_from_checkpoint, list[str](), read_run(folder)
    explicit, begun_from = named_checkpoint(config), (before or {}).get("begun_from") or {}
    begun = explicit is not None and before is not None and has_begun_from(before, explicit)
    if begun and checkpoints_since(folder, begun_from["outer_step"]):
        warnings.append(
            f"resume_from_checkpoint={explicit} is where this run began, and the newest checkpoint since then"
            " counts; to begin there once more choose another output_dir"
        )
        explicit = None
    if explicit is not None:
        state = checkpoint.read_state(explicit)
        begun_from = {"checkpoint": str(explicit.resolve()), "outer_step": state["outer_step"]}
        warnings += accept_changes(state["settings"], config, settings, f"resume_from_checkpoint={explicit}")
    if before is None:
        return RunStart(folder, explicit, False, warnings, explicit is not None, begun_from)
    if wanted == "never":
        raise UsageError(
            f"output_dir={folder} holds a run, and resume_from_checkpoint=never; choose another output_dir"
        )
    changes = accept_changes(before["settings"], config, settings, f"output_dir={folder}")
    warnings += [text for text in changes if text not in warnings]
    accepted = any(text.startswith("accepted") for text in warnings)
    finished = before.get("finished", False) and (explicit is None or begun) and not accepted
    found = explicit or next(reversed(checkpoint.list_complete(folder)), None)
    started = float(before.get("started") or time.time())
    return RunStart(folder, found, finished, warnings, explicit is not None, begun_from, started=started)


def accept_changes(before: dict[str, Any], config: Config, settings: dict[str, Any], where: str) -> list[str]:
    """Log lines about settings that differ from those of the run before.

    Raises `UsageError` for settings that change theta and are not in --accept_changed_settings.
    """
    changed, free = changed_settings(before, settings), changed_settings(before, settings, free=True)
    accepted = [text for name, text in changed.items() if name in config.accept_changed_settings]
    refused = [text for name, text in changed.items() if name not in config.accept_changed_settings]
    if refused:
        raise UsageError(
            f"{where} holds a run with other settings ({'; '.join(refused)}); use the values before ->,"
            " another output_dir, or --accept_changed_settings with their names"
        )
    kinds = {
        "accepted from here on": accepted,
        "settings that differ, and do not change theta": free.values(),
    }
    return [f"{kind}: {'; '.join(texts)}" for kind, texts in kinds.items() if texts]


class RunLogger(Callback):
    """Logs every outer step and validation; only the first rank writes, from `open` on."""

    def __init__(self, on_log: Callable[[dict[str, Any]], None]) -> None:
        """on_log: called with every line."""
        self.on_log_line = on_log
        self.metrics: Metrics | None = None
        self.first, self.warned = 0, False
        self.lines = deque[dict[str, Any]](maxlen=KEPT_LINES)  # the last of metrics.jsonl

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
        text = f"loss {values['query_loss']:.4f}"
        text += f"  accuracy {100 * values['accuracy']:.1f} %" if "accuracy" in values else ""
        text += f"  skipped {skipped}" if skipped else ""
        text += f"  {values['tasks_per_second']:.3g} tasks/s  goodput {values['goodput_percent']:.0f} %"
        run.progress.line("outer step", step, config.outer_steps, text, self.first)
        if run.progress.left_s is not None:
            values["seconds_left"] = round(run.progress.left_s, 3)
        due = step in (1, config.outer_steps) or step % config.logging_steps == 0
        if due or skipped or "loss_spike" in values or values.get("retries"):
            self._log(values)
        if not self.warned and (warning := find(config.algorithm).warning(config, values)):
            self.warned = True
            run.progress.notice(Warn(warning))

    def on_train_end(self, run: RunView) -> None:
        config = run.config
        if config.gradient_noise_scale:
            run.progress.notice(run.state.updates.noise_scale.advice(config.tasks_per_step))

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        self._log({"step": run.state.outer_step, **metrics})

    def write_pending_lines(self, run: RunView) -> None:
        """Append the lines that the previous writer group has not written: it has died, or was stopped.
        Collective: world.
        """
        last = run.ranks.world.broadcast_(torch.tensor(self.metrics.last if self.metrics else (0, 0)), 0)
        for line in [line for line in self.lines if line["step"] <= run.state.outer_step]:
            if place_of(line) > tuple(last.tolist()):
                self._write(line)

    def _log(self, values: dict[str, Any]) -> None:
        self.lines.append(values)
        self._write(values)

    def _write(self, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
        self.on_log_line(values)


def place_of(line: Mapping[str, Any]) -> tuple[int, int]:
    """The order of lines: the outer step, then its validation."""
    return line["step"], int("seconds" not in line)


class Metrics:
    """metrics.jsonl: one object per logged outer step; only the rank that `writes` opens the file.

    A resumed run drops the lines after outer_step, that of its checkpoint. last: the place of the last line.
    """

    def __init__(self, folder: Path, outer_step: int, writes: bool) -> None:
        self.file = folder / "metrics.jsonl"
        self.writes, self.last = writes, (0, 0)
        self.waiting = deque[str](maxlen=KEPT_LINES)  # lines that could not be written
        if writes and self.file.is_file():
            kept = [
                (text, line)
                for text in self.file.read_text(encoding="utf-8", errors="replace").splitlines()
                if (line := parse_line(text)) and line["step"] <= outer_step
            ]
            publish_text(self.file, "".join(f"{text}\n" for text, _ in kept))
            self.last = max((place_of(line) for _, line in kept), default=self.last)

    def write(self, values: dict[str, Any]) -> None:
        """Append a line. While the disk is full the run continues; the last KEPT_LINES are written later."""
        self.last = max(self.last, place_of(values))
        if not self.writes:
            return
        size, failed = self.file.stat().st_size if self.file.is_file() else 0, bool(self.waiting)
        self.waiting.append(redact(to_json(values)) + "\n")
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(self.waiting)
            self.waiting.clear()
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.file, size)  # what was written in part
            if not failed:
                LOGGER.warning(
                    "%s cannot be written (%s); its next %d lines are kept until it can",
                    self.file,
                    error.strerror,
                    KEPT_LINES,
                    extra=STDERR,
                )
