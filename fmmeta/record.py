"""A run's folder: run.json (what it is), metrics.jsonl (how it went), and whether it may be continued."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta import checkpoint
from fmmeta.config import Config, UsageError, changed_settings
from fmmeta.parallel.communicator import Communicator

PACKAGES = ("fmmeta", "torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors", "peft")


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder, the checkpoint to continue from (if any), whether nothing is left to do."""

    folder: Path
    checkpoint: Path | None
    finished: bool


def open_run(config: Config, fingerprint: str, comm: Communicator) -> Start:
    """Make or find the run's folder; refuse one that holds a run with other settings. Collective: comm (world)."""
    answer = b""
    with comm.together("opening output_dir"):
        if comm.rank == 0:
            start = find_start(config, fingerprint)
            answer = json.dumps([str(start.folder), start.checkpoint and str(start.checkpoint), start.finished]).encode()
    folder, found, finished = json.loads(comm.gather_bytes(answer)[0])
    return Start(Path(folder), Path(found) if found else None, finished)


def find_start(config: Config, fingerprint: str) -> Start:
    if config.output_dir is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.algorithm}-{Path(config.dataset[0]).name}"
        folder = Path("runs") / name
    else:
        folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"output_dir={folder} cannot be written to; choose another")
    asked = config.resume_from_checkpoint
    explicit = None if asked in ("latest", "never") else Path(asked)
    before = read_run(folder)
    if explicit is not None:
        settings = checkpoint.read_state(explicit).get("settings", {})
        refuse_changes(settings, config, fingerprint, f"resume_from_checkpoint={explicit}")
    if before is None:
        return Start(folder, explicit, False)
    if asked == "never":
        raise UsageError(f"output_dir={folder} holds a run, and resume_from_checkpoint=never; choose another output_dir")
    refuse_changes(before["settings"], config, fingerprint, f"output_dir={folder}")
    saved = checkpoint.complete(folder)
    return Start(folder, explicit or (saved[-1] if saved else None), before.get("finished", False) and explicit is None)


def refuse_changes(before: dict[str, Any], config: Config, fingerprint: str, where: str) -> None:
    changed = changed_settings(before, settings_of(config, fingerprint))
    if changed:
        raise UsageError(f"{where} holds a run with other settings ({'; '.join(changed)}); use these or another output_dir")


def settings_of(config: Config, fingerprint: str) -> dict[str, Any]:
    return json.loads(json.dumps({**config.as_dict(), "dataset_fingerprint": fingerprint}))


def read_run(folder: Path) -> dict[str, Any] | None:
    file = folder / "run.json"
    if not file.is_file():
        return None
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        return run if isinstance(run["settings"], dict) else None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} cannot be read; mend or remove it, or choose another output_dir") from None


def write_run(folder: Path, config: Config, fingerprint: str, layout: str, **facts: Any) -> None:
    """Write run.json: every resolved setting, versions, git commit, data fingerprint, and `facts`."""
    versions = {name: version(name) for name in PACKAGES}
    run = {
        "settings": settings_of(config, fingerprint),
        "layout": layout,
        "versions": versions,
        "git_commit": git_commit(),
        **facts,
    }
    temporary = folder / "run.json.tmp"
    temporary.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / "run.json")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the working folder, where it is a git checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


class Metrics:
    """metrics.jsonl: one object per logged outer step. On a resumed run, lines after the checkpoint are dropped first."""

    def __init__(self, folder: Path, outer_step: int, writes: bool, tell: Callable[[dict[str, Any]], None] | None = None) -> None:
        """`tell`: who gets the lines as well."""
        self.file = folder / "metrics.jsonl"
        self.writes, self.tell = writes, tell
        if writes and self.file.is_file():
            kept = [line for line in self.file.read_text(encoding="utf-8").splitlines() if keep_line(line, outer_step)]
            self.file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        if self.writes:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
            if self.tell is not None:
                self.tell(values)


def keep_line(line: str, outer_step: int) -> bool:
    try:
        return json.loads(line)["step"] <= outer_step
    except (ValueError, KeyError, TypeError):
        return False  # cut off by the end of an earlier process
