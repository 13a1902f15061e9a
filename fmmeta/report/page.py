"""The report of a run: report.html, one file that loads nothing and runs no script.

It shows run.json and metrics.jsonl of a run, which may still be running; their readers are here too.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import Warn, clock
from fmmeta.common.security import publish_text, redact
from fmmeta.common.text import render, three_digits, units_of

BEFORE, FROM_START, AFTER = (  # rows of the table on held-out tasks
    "before adaptation, meta-trained",
    "after adaptation, weights at the start",
    "after adaptation, meta-trained",
)

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
RATES = {"tasks_per_second": "tasks/s", "tokens_per_second": "tokens/s"}
LEFT, RIGHT, TOP, BOTTOM = 42.0, 338.0, 8.0, 172.0  # edges of a plot, in a view box of 360 x 200
MOST_POINTS = 60  # of a line; the points of a longer one are means over equally many steps

Points = Sequence[tuple[float, float]]
Line = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A run as its files describe it.

    settings, held_out: of `run`; the latter is the table on held-out tasks, empty before the end of the run.
    steps: logged outer steps; valid: scores on validation tasks.
    """

    folder: Path
    run: dict[str, Any]
    settings: dict[str, Any]
    held_out: dict[str, Any]
    steps: list[Line]
    valid: list[Line]

    @property
    def outer_step(self) -> int:
        """The last one that was logged."""
        return max((line["step"] for line in (*self.steps, *self.valid)), default=0)


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a folder; None where there is none.

    Raises `UsageError` where it cannot be read.
    """
    file = folder / "run.json"
    if not file.is_file():
        return None
    with usage_errors(f"{file} cannot be read", "correct or remove it, or choose another output_dir"):
        run = json.loads(file.read_text(encoding="utf-8"))
        return run if isinstance(run["settings"], dict) else None


def parse_line(text: str) -> Line | None:
    """A line of metrics.jsonl, or None if it is incomplete: a process died while it wrote it."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_lines(folder: Path) -> list[Line]:
    """The complete lines of metrics.jsonl; empty where there is none."""
    file = folder / "metrics.jsonl"
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ()
    return [line for text in texts if (line := parse_line(text))]


def read(folder: Path) -> Facts:
    """Read a run's folder; of two lines of one kind for a step the last counts.

    Raises `UsageError` where the folder holds no run.
    """
    run = read_run(folder)
    if run is None:
        raise UsageError(f"output_dir={folder} holds no run.json; give the folder of a run")
    found = {(line["step"], "valid_loss" in line): line for line in read_lines(folder)}
    lines = [found[key] for key in sorted(found)]
    steps, valid = ([line for line in lines if key in line] for key in ("query_loss", "valid_loss"))
    return Facts(folder, run, run["settings"], run.get("held_out") or {}, steps, valid)


def number(value: Any) -> float | None:
    """A finite number, or None for all else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def points(lines: Sequence[Line], key: str, factor: float = 1.0) -> list[tuple[int, float]]:
    """(step, factor * value) of the lines where the value is a finite number."""
    return [(line["step"], factor * line[key]) for line in lines if number(line.get(key)) is not None]


def write(folder: Path, refresh_s: float = 0.0) -> Path:
    """Write report.html of a run, from run.json and metrics.jsonl.

    refresh_s: a browser loads it again so often, 0 for never; nor where the run is finished. Raises
    `UsageError` where the folder holds no run.
    """
    file = folder / NAME
    publish_text(file, page(read(folder), time.strftime("%Y-%m-%d %H:%M %Z"), refresh_s))
    return file


def write_or_log(folder: Path, notice: Callable[[str], None], refresh_s: float = 0.0) -> None:
    """Write the report; an error is logged and does not end the run."""
    try:
        write(folder, refresh_s)
    except Exception as error:
        why = f"({type(error).__name__}: {error}); the run is not affected"
        notice(Warn(f"{folder / NAME} could not be written {why}"))


def page(facts: Facts, written: str, refresh_s: float = 0.0) -> str:
    """The report as text. written: the time to show; refresh_s: see `write`."""
    steps, valid, last, settings = facts.steps, facts.valid, facts.outer_step, facts.settings
    calm = [line for line in steps if "loss_spike" not in line]  # a spike would flatten the rest
    warm = steps[1:] or steps  # the first step warms up
    rows = {line["step"]: line for line in steps}
    for line in valid:
        rows[line["step"]] = {**rows.get(line["step"], {}), **line}
    trained, started = (facts.held_out.get(key) or {} for key in ("per_stratum", "per_stratum_at_start"))
    own = dict.fromkeys(key for line in valid for key in line if key.startswith("valid_"))
    own = {key: key.replace("valid_", "valid. ") for key in own if key not in COLUMNS}
    columns = {**COLUMNS, **own}  # with the metrics of the kind of task, and the user's
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
            *(
                chart(key.removeprefix("valid_"), [("validation", "c", points(valid, key))], last)
                for key in own
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
        columns={key: columns[key] for key in columns if any(key in line for line in rows.values())},
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
        refresh_s=0 if facts.run.get("finished") else math.ceil(refresh_s),
        pace=pace(facts),
        number=number,
        redact=redact,
        BEFORE=BEFORE,
        FROM_START=FROM_START,
        AFTER=AFTER,
    )


def pace(facts: Facts) -> str:
    """Goodput of a run, and where it is not finished its throughput and the time left, in words."""
    stored, last = facts.run.get("goodput") or {}, facts.steps[-1] if facts.steps else {}
    goodput, left = (
        number(stored.get("percent", last.get("goodput_percent"))),
        number(last.get("seconds_left")),
    )
    texts = [] if goodput is None else [f"Goodput {goodput:.1f} %: passes whose result is in theta"]
    if texts and not facts.run.get("finished"):
        texts += [
            f"{three_digits(last[key])} {unit}"
            for key, unit in RATES.items()
            if number(last.get(key)) is not None
        ]
        texts += [] if left is None else [f"{clock(left)} left"]
    return "; ".join(texts) + "." * bool(texts)


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
