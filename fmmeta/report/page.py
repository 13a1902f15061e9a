"""The report of a run: report.html, one file that asks nobody for anything and runs no script."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import redact
from fmmeta.config.settings import setting
from fmmeta.report import charts, results, timing
from fmmeta.report.data import AFTER, FROM_START, Facts, number, read
from fmmeta.report.markup import NONE, Markup, cell, quiet, row, row_head, section, table, tag
from fmmeta.report.style import SHEET

NAME = "report.html"
POLICY = (  # the browser itself refuses scripts and requests
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
)


@dataclass
class ReportConfig:
    """The settings of `fmmeta report`."""

    output_dir: str = setting(None, "Folder of the run")

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UsageError("output_dir is not given; name the folder of a run")


def run(config: ReportConfig) -> None:
    """`fmmeta report`: write the report of a run anew."""
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
    sections = [
        results.held_out(facts),
        results.strata(facts),
        charts.curves(facts),
        timing.timing(facts),
        results.confusion(facts),
        about(facts),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="robots", content="noindex"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title(facts)} · fmmeta"),
        tag("style", Markup(SHEET)),
    )
    again = tag("code", redact(f"fmmeta report --output_dir {facts.folder}"))
    footer = tag(
        "footer", quiet(f"Written {written}. ", again, " writes it anew, also while the run goes on.")
    )
    body = tag("body", tag("main", header(facts), *sections, footer))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def title(facts: Facts) -> str:
    settings = facts.settings
    data = settings.get("dataset") or ["?"]
    names = " + ".join(Path(str(name)).name for name in (data if isinstance(data, list) else [data]))
    return f"{settings.get('algorithm')} on {redact(names)}"


def header(facts: Facts) -> Markup:
    settings = facts.settings
    last, wanted = facts.outer_step, settings.get("outer_steps")
    state = "Finished" if facts.finished else f"Not finished: logged to outer step {last:,} of {wanted:,}"
    model = Path(redact(str(settings.get("model_name_or_path")))).name
    what = (
        f"{model}, {results.shape_of(facts)} tasks, {settings.get('inner_steps')} inner steps at"
        f" {settings.get('inner_lr')}, {wanted:,} outer steps of {tasks_per_step(settings)} tasks;"
        f" {facts.run.get('layout')}"
    )
    return tag("header", tag("span", state, cls="pill"), tag("h1", title(facts)), quiet(what), heroes(facts))


def tasks_per_step(settings: dict[str, Any]) -> int:
    return settings.get("meta_batch_size", 1) * settings.get("meta_accumulation_steps", 1)


def heroes(facts: Facts) -> Markup | None:
    """The few numbers that one looks for first."""
    found = facts.held_out
    if AFTER in found:
        causal = (
            facts.settings.get("task_type") == "causal_lm"
        )  # of which few answers are right to the last token
        key, what, form = (
            ("loss", "loss", results.plain) if causal else ("accuracy", "accuracy %", results.percent)
        )
        parts = [
            hero("a", form(found[AFTER][key]), f"{what} on held-out tasks, meta-trained"),
            hero("b", form(found[FROM_START][key]), "the same from the weights at the start"),
        ]
        if isinstance(found.get("gain"), dict):
            parts.append(hero("c", form(found["gain"][key], signed=True), f"gain in {what} (paired)"))
        return tag("div", *parts, cls="heroes")
    if not facts.steps:
        return None
    line = facts.steps[-1]
    loss, right = number(line.get("query_loss")), number(line.get("accuracy"))
    said_loss, said_right = (
        NONE if loss is None else f"{loss:.4f}",
        NONE if right is None else f"{100 * right:.1f}",
    )
    return tag(
        "div",
        hero("a", f"{line['step']:,}", "last logged outer step"),
        hero("b", said_loss, "query loss there"),
        hero("c", said_right, "accuracy % there, on the query sets"),
        cls="heroes",
    )


def hero(look: str, value: str, text: str) -> Markup:
    return tag("div", tag("b", value), tag("span", text), cls=f"hero {look}")


def about(facts: Facts) -> Markup:
    """Settings and versions, folded."""
    versions = {
        **(facts.run.get("versions") or {}),
        "git commit": facts.run.get("git_commit"),
        "layout": facts.run.get("layout"),
    }
    return section("about", "What was run", folded("Settings", facts.settings), folded("Versions", versions))


def folded(name: str, values: dict[str, Any]) -> Markup:
    cells = {key: (tag("code", key), tag("code", redact(said(value)))) for key, value in values.items()}
    rows = [row(row_head(name), cell(value)) for name, value in cells.values()]
    return tag("details", tag("summary", f"{name} ({len(rows)})"), table([], rows, "settings"))


def said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else NONE if value is None else str(value)
