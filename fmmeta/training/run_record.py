"""The record of a run: run.json (settings, versions, results) and metrics.jsonl (a line per logged step).

Neither holds secrets.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import redact
from fmmeta.common.text import as_stored, to_json
from fmmeta.config.renamed import translated
from fmmeta.config.settings import Config

PACKAGES = ("fmmeta", "torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors", "peft")

NOTHING: Mapping[str, Any] = {}


def settings_of(config: Config, fingerprint: str, resolved: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """What identifies a run: flags, fingerprint of the data, and `resolved` of build.RunInputs."""
    return as_stored({**config.as_dict(), "dataset_fingerprint": fingerprint, **resolved})


def read_run(folder: Path) -> dict[str, Any] | None:
    file = folder / "run.json"
    if not file.is_file():
        return None
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(run["settings"], dict):
            return None
        return {**run, "settings": translated(run["settings"], Config.__dataclass_fields__)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{file} cannot be read; correct or remove it, or choose another output_dir"
        ) from None


def write_run(
    folder: Path,
    config: Config,
    fingerprint: str,
    layout: str,
    resolved: Mapping[str, Any] = NOTHING,
    **facts: Any,
) -> None:
    """Write run.json: every resolved setting, versions, git commit, data fingerprint, and `facts`."""
    versions = {name: version(name) for name in PACKAGES}
    run = {
        "settings": settings_of(config, fingerprint, resolved),
        "layout": layout,
        "versions": versions,
        "git_commit": git_commit(),
        **facts,
    }
    temporary = folder / "run.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(redact(to_json(run, indent=1)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / "run.json")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the working folder, where it is a git checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


class Metrics:
    """metrics.jsonl: one object per logged outer step. Only the rank that `writes` opens the file.

    On a resumed run, lines after the checkpoint are dropped first.
    """

    def __init__(self, folder: Path, outer_step: int, writes: bool) -> None:
        self.file = folder / "metrics.jsonl"
        self.writes, self.lost, self.last = writes, False, 0
        if writes and self.file.is_file():
            kept = [
                line
                for line in self.file.read_text(encoding="utf-8").splitlines()
                if keep_line(line, outer_step)
            ]
            temporary = self.file.with_name("metrics.jsonl.tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            temporary.replace(self.file)
            self.last = max((json.loads(line)["step"] for line in kept), default=0)

    def write(self, values: dict[str, Any]) -> None:
        """Add a line; a full disk costs lines, not the run."""
        self.last = max(self.last, values["step"])
        if self.writes:
            try:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(
                        "\n" * self.lost + redact(to_json(values)) + "\n"
                    )  # a lost line may be half there
                self.lost = False
            except OSError as error:
                if not self.lost:
                    text = (
                        f"{self.file} cannot be written ({error.strerror}); its lines are lost until it can"
                    )
                    print(f"fmmeta: {text}", file=sys.stderr, flush=True)
                self.lost = True


def keep_line(line: str, outer_step: int) -> bool:
    try:
        return json.loads(line)["step"] <= outer_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False  # cut off by the end of an earlier process
