"""The report of a run: report.html, one file that loads nothing and runs no script."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import redact
from fmmeta.common.text import render
from fmmeta.config.settings import setting
from fmmeta.report import charts, results, timing
from fmmeta.report.data import AFTER, BEFORE, FROM_START, Facts, number, read

NAME = "report.html"
NONE = "\u2013"  # where there is no value


@dataclass
class ReportConfig:
    """The settings of `fmmeta report`."""

    output_dir: str = setting(None, "Folder of the run")

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UsageError("output_dir is not given; name the folder of a run")


def run(config: ReportConfig) -> None:
    """`fmmeta report`: write the report of a run."""
    print(f"fmmeta: report {write(Path(config.output_dir))}", flush=True)


def write(folder: Path) -> Path:
    """Write report.html of a run, from run.json and metrics.jsonl.

    Raises `UsageError` where there is no run.
    """
    text = page(read(folder), time.strftime("%Y-%m-%d %H:%M %Z"))
    file, temporary = folder / NAME, folder / f"{NAME}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
    return file


def keep(folder: Path, writes: bool, notice: Callable[[str], None]) -> None:
    """Write the report where `writes`; that never ends a run."""
    if writes:
        try:
            write(folder)
        except Exception as error:
            notice(f"{folder / NAME} could not be written ({type(error).__name__}: {error}); the run goes on")


def page(facts: Facts, written: str) -> str:
    """The report as text. `written`: when."""
    versions = {
        **(facts.run.get("versions") or {}),
        "git commit": facts.run.get("git_commit"),
        "layout": facts.run.get("layout"),
    }
    return render(
        Path(__file__).with_name("report.html.j2"),
        facts=facts,
        title=title(facts),
        state=state(facts),
        what=summary(facts),
        shape=results.shape_of(facts),
        strata=results.strata(facts),
        training=charts.training(facts),
        time=timing.timing(facts),
        confusion=results.confusion(facts),
        about=[("Settings", texts(facts.settings)), ("Versions", texts(versions))],
        command=redact(f"fmmeta report --output_dir {facts.folder}"),
        written=written,
        number=number,
        BEFORE=BEFORE,
        FROM_START=FROM_START,
        AFTER=AFTER,
    )


def title(facts: Facts) -> str:
    settings = facts.settings
    data = settings.get("dataset") or ["?"]
    names = " + ".join(Path(str(name)).name for name in (data if isinstance(data, list) else [data]))
    return f"{settings.get('algorithm')} on {redact(names)}"


def state(facts: Facts) -> str:
    last, wanted = facts.outer_step, facts.settings.get("outer_steps")
    return "Finished" if facts.finished else f"Not finished: logged to outer step {last:,} of {wanted:,}"


def summary(facts: Facts) -> str:
    """Model, tasks, inner and outer loop, and layout in one line."""
    settings = facts.settings
    model = Path(redact(str(settings.get("model_name_or_path")))).name
    tasks = settings.get("meta_batch_size", 1) * settings.get("meta_accumulation_steps", 1)
    return (
        f"{model}, {results.shape_of(facts)} tasks, {settings.get('inner_steps')} inner steps at"
        f" {settings.get('inner_lr')}, {settings.get('outer_steps'):,} outer steps of {tasks} tasks;"
        f" {facts.run.get('layout')}"
    )


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Settings as text, secrets removed."""
    return {
        key: redact(
            " ".join(map(str, value)) if isinstance(value, list) else NONE if value is None else str(value)
        )
        for key, value in values.items()
    }
