"""Writes the record of a run: run.json (settings, versions, results) and metrics.jsonl (a line per logged
step). Secrets are redacted in both.
"""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fmmeta.common.security import redact
from fmmeta.common.text import as_stored, to_json
from fmmeta.config.settings import Config
from fmmeta.report.data import parse_line

PACKAGES = ("fmmeta", "torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors", "peft")

NOTHING: Mapping[str, Any] = {}


def settings_of(config: Config, fingerprint: str, resolved: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """What identifies a run: flags, fingerprint of the data, and `resolved` of build.RunInputs."""
    return as_stored({**config.as_dict(), "dataset_fingerprint": fingerprint, **resolved})


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
    """Commit of the current folder, if it is in a git checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


class Metrics:
    """metrics.jsonl: one object per logged outer step; only the rank that `writes` opens the file.

    A resumed run drops the lines after outer_step, that of its checkpoint. last: the last step in the file.
    """

    def __init__(self, folder: Path, outer_step: int, writes: bool) -> None:
        self.file = folder / "metrics.jsonl"
        self.writes, self.failed, self.last = writes, False, 0
        if writes and self.file.is_file():
            texts = self.file.read_text(encoding="utf-8").splitlines()
            lines = [(text, line) for text in texts if (line := parse_line(text))]
            kept = [(text, line) for text, line in lines if line["step"] <= outer_step]
            temporary = self.file.with_name("metrics.jsonl.tmp")
            temporary.write_text("".join(f"{text}\n" for text, _ in kept), encoding="utf-8")
            temporary.replace(self.file)
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
                text = f"{self.file} cannot be written ({error.strerror}); its lines are lost until it can"
                print(f"fmmeta: {text}", file=sys.stderr, flush=True)
            self.failed = True
