"""The report of a run: report.html, one file that loads nothing and runs no script."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import Warn
from fmmeta.common.security import publish_text, redact
from fmmeta.common.text import render, units_of
from fmmeta.config.settings import setting
from fmmeta.report.data import AFTER, BEFORE, FROM_START, Facts, Line, number, points, read

NAME = "report.html"
MOST_ROWS = 200  # of the table of numbers, whose columns are these keys of metrics.jsonl
COLUMNS = {
    "support_loss": "support loss",
    "query_loss": "query loss",
    "accuracy": "accuracy %",
    "valid_loss": "valid. loss",
    "valid_accuracy": "valid. %",
    "grad_norm": "norm",
    "lr": "rate",
    "noise_scale": "noise scale",
    "skipped_tasks": "left out",
}
LEFT, RIGHT, TOP, BOTTOM = 42.0, 338.0, 8.0, 172.0  # edges of a plot, in a view box of 360 x 200
MOST_POINTS = 60  # of a line; the points of a longer one are means over equally many steps

Points = Sequence[tuple[float, float]]


@dataclass
class ReportConfig:
    """The settings of `fmmeta report`."""

    output_dir: str = setting(None, "Folder of the run")

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UsageError("output_dir is not given; name the folder of a run")


def run(config: ReportConfig) -> None:
    """`fmmeta report`: write the report of a run. Raises `UsageError`."""
    with usage_errors(
        f"output_dir={config.output_dir}: {NAME} cannot be written from run.json and metrics.jsonl",
        "restore them, or copy the run to a folder that you can write to",
    ):
        print(f"fmmeta: report {write(Path(config.output_dir))}", flush=True)


def write(folder: Path) -> Path:
    """Write report.html of a run, from run.json and metrics.jsonl.

    Raises `UsageError` where the folder holds no run.
    """
    file = folder / NAME
    publish_text(file, page(read(folder), time.strftime("%Y-%m-%d %H:%M %Z")))
    return file


def write_or_log(folder: Path, notice: Callable[[str], None]) -> None:
    """Write the report; an error is logged and does not end the run."""
    try:
        write(folder)
    except Exception as error:
        why = f"({type(error).__name__}: {error}); the run is not affected"
        notice(Warn(f"{folder / NAME} could not be written {why}"))


def page(facts: Facts, written: str) -> str:
    """The report as text. written: the time to show."""
    steps, valid, last, settings = facts.steps, facts.valid, facts.outer_step, facts.settings
    calm = [line for line in steps if "loss_spike" not in line]  # a spike would flatten the rest
    warm = steps[1:] or steps  # the first step warms up
    rows = {line["step"]: line for line in steps}
    for line in valid:
        rows[line["step"]] = {**rows.get(line["step"], {}), **line}
    trained, started = (facts.held_out.get(key) or {} for key in ("per_stratum", "per_stratum_at_start"))
    data = settings.get("dataset") or ["?"]
    names = [Path(str(name)).name for name in (data if isinstance(data, list) else [data])]
    return render(
        Path(__file__).with_name("report.html.j2"),
        facts=facts,
        title=f"{settings.get('algorithm')} on {redact(' + '.join(names))}",
        model=Path(redact(str(settings.get("model_name_or_path")))).name,
        tasks=settings.get("meta_batch_size", 1) * settings.get("meta_accumulation_steps", 1),
        strata=sorted(trained, key=lambda name: started.get(name, 0.0) - trained[name]),
        charts=[
            chart(
                "Loss",
                [
                    ("support", "b", points(calm, "support_loss")),
                    ("query", "a", points(calm, "query_loss")),
                    ("validation", "c", points(valid, "valid_loss")),
                ],
                last,
            ),
            *(
                chart(
                    "Accuracy %",
                    [
                        ("query", "a", points(steps, "accuracy", 100)),
                        ("validation", "c", points(valid, "valid_accuracy", 100)),
                    ],
                    last,
                )
                for _ in [1]
                if not steps or "accuracy" in steps[-1]
            ),
            chart(
                "Seconds per outer step",
                [
                    ("whole", "a", points(warm, "seconds")),
                    ("data wait", "b", points(warm, "data_seconds")),
                    ("group wait", "d", points(warm, "wait_seconds")),
                ],
                last,
            ),
        ],
        rows=[rows[step] for step in sorted(rows)[:: math.ceil(len(rows) / MOST_ROWS) or 1]],
        total=len(rows),
        columns={key: COLUMNS[key] for key in COLUMNS if any(key in line for line in rows.values())},
        groups=seconds_by_group(steps),
        over=units_of(facts.held_out.get("units", 0), facts.held_out.get("kind", "task")),
        about={
            "Settings": settings,
            "Versions": {
                **(facts.run.get("versions") or {}),
                "git commit": facts.run.get("git_commit"),
                "layout": facts.run.get("layout"),
            },
        },
        command=redact(f"fmmeta report --output_dir {facts.folder}"),
        written=written,
        number=number,
        redact=redact,
        BEFORE=BEFORE,
        FROM_START=FROM_START,
        AFTER=AFTER,
    )


def seconds_by_group(steps: Sequence[Line]) -> list[tuple[float, float, float]]:
    """Mean seconds of an outer step by group: computing, waiting for data, waiting for other groups.

    Of the logged steps with as many groups as the last one, without the first, which warms up.
    """
    usable = [line for line in steps if number(line.get("seconds")) is not None]
    usable = [line for line in usable if len(waits(line)) == len(waits(usable[-1]))]
    kept = usable[1:] or usable
    whole, data = (
        fmean(line.get(key) or 0.0 for line in kept or [{}]) for key in ("seconds", "data_seconds")
    )
    waiting = [fmean(column) for column in zip(*map(waits, kept), strict=True)]
    return [(max(0.0, whole - data - seconds), data, seconds) for seconds in waiting]


def waits(line: Line) -> list[float]:
    """Seconds that each group has waited for others in a logged step."""
    return line.get("wait_seconds_by_group") or [line.get("wait_seconds") or 0.0]


def chart(title: str, lines: Sequence[tuple[str, str, Points]], steps: int) -> dict[str, Any]:
    """Coordinates and texts of a chart, for the inline SVG of report.html.j2.

    lines: name, look (a class of the style sheet) and (step, value)s.
    """
    drawn = [(name, look, means(points)) for name, look, points in lines if points]
    values = [value for *_, points in drawn for _, value in points] or [0.0, 1.0]
    margin = 0.06 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    low, high, steps = min(values) - margin, max(values) + margin, max(1, steps)

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / steps, 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    return {
        "title": title,
        # `h0` draws a dot if the line is a single point
        "lines": [
            (name, look, "M" + "L".join(f"{x(step)} {y(value)}" for step, value in points) + "h0")
            for name, look, points in drawn
        ],
        "rows": [(y(mark), f"{mark:,.4g}") for mark in marks(low, high)],
        "columns": [(x(mark), f"{mark:,.0f}") for mark in marks(0, steps, whole=True)],
        "words": "; ".join(  # for readers who cannot see the lines
            f"{name} from {points[0][1]:.4g} at step {points[0][0]:g} to {points[-1][1]:.4g} at step"
            f" {points[-1][0]:g}"
            for name, _, points in drawn
        ),
    }


def means(points: Points) -> Points:
    """At most MOST_POINTS points: means of steps and of values over equally long parts of the line."""
    size = math.ceil(len(points) / MOST_POINTS)
    parts = [points[begin : begin + size] for begin in range(0, len(points), size or 1)]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]


def marks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers from low to high; whole: no fractions."""
    rough = max((high - low) / 5, float(whole))
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    size = next(size for size in sizes if size >= rough * 0.999 and not (whole and size % 1))
    return [count * size for count in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]
