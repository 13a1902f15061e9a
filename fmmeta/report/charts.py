"""Curves over the outer steps: coordinates for the inline SVG of report.html.j2, and their values as a table.

    +--------------------------- 360 ---------------------------+
    | values of the step under the pointer                      |
    | 1.6 |----------- grid                                     |
    |     |   lines, spikes (triangles)                         |
    | 1.2 |__________________________________________________   |
    |      skipped and bad tasks (ticks)                        |
    |      0            50            100            150        |
    +-----------------------------------------------------------+

No script: a style sheet shows the values of the step under the pointer. Coordinates are those of the view
box; the style sheet sets the width and the sizes of text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fmmeta.report.data import Facts, Line, noise_advice, number, points, spikes, tasks_per_step

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360.0, 214.0, 45.0, 10.0, 22.0, 34.0
AREA = {  # edges of the picture and of the plot
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": WIDTH - RIGHT,
    "top": TOP,
    "bottom": HEIGHT - BOTTOM,
}
MOST_POINTS, MOST_STRIPS = 300, 100

Points = Sequence[tuple[int, "float | None"]]


@dataclass(frozen=True)
class Series:
    """A line: its name, its look (classes of the style sheet), and (step, value); None leaves a gap.

    The values of a line without a name are not shown under the pointer.
    """

    name: str
    look: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """A chart of some series over `steps` outer steps.

    `spikes`: points to mark; `ticks`: steps to mark below, by their look.
    """

    name: str
    title: str
    series: Sequence[Series]
    steps: int
    form: Callable[[float], str]
    log: bool = False
    spikes: Sequence[tuple[int, float]] = ()
    ticks: Sequence[tuple[str, Sequence[int]]] = ()

    @property
    def named(self) -> list[Series]:
        return [one for one in self.series if one.name]

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest height in the plot."""
        beyond = {step for step, _ in self.spikes}  # drawn at the edge, so that they do not flatten the rest
        points = [point for one in self.named for point in one.points if point[0] not in beyond]
        return span([self._height(value) for _, value in points if self._drawn(value)], self.log)

    def summary(self) -> str:
        """The curves in words, for readers who cannot see them."""
        parts = []
        for one in self.named:
            known = [(step, value) for step, value in one.points if value is not None]
            if known:
                low, high = min(value for _, value in known), max(value for _, value in known)
                parts.append(
                    f"{one.name}: {known[0][1]:.4g} at step {known[0][0]}, {known[-1][1]:.4g} at step"
                    f" {known[-1][0]}, between {low:.4g} and {high:.4g}"
                )
        parts += [f"{len(self.spikes)} spikes"] if self.spikes else []
        return f"{self.title} over the outer steps. " + ("; ".join(parts) or "No values") + "."

    def drawing(self) -> dict[str, Any]:
        """Coordinates and texts of what report.html.j2 draws."""
        marks = log_marks(*self.limits) if self.log else marks_between(*self.limits, 5)
        return {
            "area": AREA,
            "grid": [(self.y(mark), self.form(mark)) for mark in marks],
            "labels": [
                (self.x(mark), f"{mark:,.0f}") for mark in marks_between(0, max(1, self.steps), 5, whole=True)
            ],
            "lines": [(one.look, self._path(one), self._dots(one)) for one in self.series],
            "spikes": [
                f"M{self.x(step)} {round(self.y(value) - 1, 1)}l4.5 -8h-9z"
                for step, value in self.spikes
                if self._drawn(value)
            ],
            "ticks": [
                (look, " ".join(f"M{self.x(step)} {HEIGHT - BOTTOM + 3}v7" for step in steps))
                for look, steps in self.ticks
                if steps
            ],
            "strips": self._strips(),
        }

    def _drawn(self, value: float | None) -> bool:
        return value is not None and (value > 0 or not self.log)

    def _height(self, value: float | None) -> float:
        assert value is not None
        return math.log10(value) if self.log else value

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, self.steps), 1)

    def y(self, value: float | None) -> float:
        low, high = self.limits
        share = min(1.0, max(0.0, (self._height(value) - low) / (high - low)))
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)

    def _path(self, one: Series) -> str:
        moves, up = [], "M"
        for step, value in extremes(one.points, MOST_POINTS):
            if self._drawn(value):
                moves.append(f"{up}{self.x(step)} {self.y(value)}")
            up = "L" if self._drawn(value) else "M"
        return " ".join(moves) or "M0 0"

    def _dots(self, one: Series) -> list[tuple[float, float]]:
        """Points of a short line."""
        points = one.points if one.name and len(one.points) <= 40 else ()
        return [(self.x(step), self.y(value)) for step, value in points if self._drawn(value)]

    def _strips(self) -> list[dict[str, Any]]:
        """The values shown while the pointer is over a step, and the rectangle of that step."""
        known = [(one, dict(one.points)) for one in self.named]
        steps = sorted({step for _, values in known for step in values})
        width = max(3.0, (WIDTH - LEFT - RIGHT) / min(MOST_STRIPS, max(1, len(steps))))
        return [
            {
                "step": step,
                "x": self.x(step),
                "left": round(min(max(0.0, self.x(step) - width / 2), WIDTH - width), 1),
                "width": round(width, 1),
                "shown": [
                    (one.look, one.name, values[step], self.y(values[step]))
                    for one, values in known
                    if self._drawn(values.get(step))
                ],
            }
            for step in thin(steps, MOST_STRIPS)
        ]


SMOOTHED = 60  # values of a line that also gets a running mean, over a twentieth of them
MOST_ROWS = 200
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
SUPPORT, QUERY, VALIDATION = "b", "a", "c"  # looks


def training(facts: Facts) -> dict[str, Any]:
    """Charts, the numbers of the text above them, and the table of their values."""
    skipped = [line for line in facts.steps if line.get("skipped_tasks")]
    bad = [line for line in facts.steps if line.get("bad_tasks")]
    ticks = (("d", [line["step"] for line in skipped]), ("a", [line["step"] for line in bad]))
    steps, valid, last = facts.steps, facts.valid, max(facts.outer_step, 1)
    norms = points(steps, "grad_norm")
    known = [value for _, value in norms if value]
    wide = bool(known) and max(known) > 30 * min(known)
    charts = [
        Chart(
            "loss",
            "Loss",
            [
                *series("support", SUPPORT, points(steps, "support_loss")),
                *series("query", QUERY, points(steps, "query_loss")),
                *series("validation", VALIDATION, points(valid, "valid_loss")),
            ],
            last,
            short,
            spikes=spikes(steps),
            ticks=ticks,
        ),
        Chart(
            "accuracy",
            "Accuracy %",
            [
                *series("query", QUERY, percent(points(steps, "accuracy"))),
                *series("validation", VALIDATION, percent(points(valid, "valid_accuracy"))),
            ],
            last,
            short,
            ticks=ticks,
        ),
        Chart(
            "norm",
            "Norm of the meta-gradient" + (" (logarithmic)" if wide else ""),
            series("norm", QUERY, norms),
            last,
            short,
            wide,
            ticks=ticks,
        ),
        Chart("rate", "Outer learning rate", [Series("lr", "a", points(steps, "lr"))], last, short),
    ]
    noise = points(steps, "noise_scale")
    if noise:
        charts.append(
            Chart("noise", "Gradient noise scale (tasks)", [Series("tasks", QUERY, noise)], last, short)
        )
    return {
        "charts": charts,
        "noise": noise_advice(noise[-1][1], tasks_per_step(facts.settings)) if noise else "",
        "smoothed": any(len(points(facts.steps, key)) >= SMOOTHED for key in ("query_loss", "grad_norm")),
        "spikes": len(spikes(facts.steps)),
        "skipped": len(skipped),
        "skipped_tasks": sum(line["skipped_tasks"] for line in skipped),
        "failed_loads": sum(len(line["bad_tasks"]) for line in bad),
        **numbers(facts),
    }


def series(name: str, look: str, values: Points) -> list[Series]:
    """The line, and a running mean over it if it is long; empty without values."""
    if not values:
        return []
    if len(values) < SMOOTHED:
        return [Series(name, look, values)]
    return [Series(name, f"{look} faint", values), Series("", look, smooth(values, len(values) // 20))]


def percent(values: Points) -> Points:
    return [(step, None if value is None else 100 * value) for step, value in values]


def short(value: float) -> str:
    """0.002 -> 0.002, 0.00002 -> 2e-5, 1000 -> 1,000."""
    if value and not 1e-4 <= abs(value) < 1e5:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.4g}"


def numbers(facts: Facts) -> dict[str, Any]:
    """The curves as a table, for readers who cannot see them or want the numbers."""
    valid = {line["step"]: line for line in facts.valid}
    lines = {line["step"]: line for line in facts.steps}
    steps = sorted(lines.keys() | valid.keys())
    used = [key for key in COLUMNS if any(key in line for line in (*facts.steps, *facts.valid))]
    return {
        "total": len(steps),
        "columns": [COLUMNS[key] for key in used],
        "rows": [
            (step, [value_of(key, {**lines.get(step, {}), **valid.get(step, {})}) for key in used])
            for step in thin(steps, MOST_ROWS)
        ],
    }


def value_of(key: str, line: Line) -> tuple[float | None, str]:
    """The value of a line and its text; None where there is no number."""
    value = number(line.get(key))
    if value is None:
        return None, "not finite" if key in line else ""
    if "accuracy" in key:
        return line[key], f"{100 * value:.1f}"
    return line[key], short(value) if key == "lr" else f"{value:.4g}"


def span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Limits of the axis around the values (logarithms where `log`), with a margin; not below zero."""
    if not values:
        return (0.0, 1.0)
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or (0.3 if log else 0.05 * abs(high) or 1.0)
    return (max(0.0, low - margin) if low >= 0 and not log else low - margin), high + margin


def marks_between(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """About `about` round numbers from low to high; whole: no fractions, so fewer in a short range."""
    rough = max((high - low) / about, float(whole))
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    size = next(size for size in sizes if size >= rough * 0.999 and not (whole and size % 1))
    return [count * size for count in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def log_marks(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms, also times 2 and 5 where they are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low < 2 else (1,)
    marks = [
        factor * 10.0**power for power in list(powers)[:: max(1, len(powers) // 5)] for factor in factors
    ]
    return [mark for mark in marks if low <= math.log10(mark) <= high]


def thin(items: list[int], most: int) -> list[int]:
    """At most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def extremes(points: Points, most: int) -> Points:
    """At most about `most` points: the least and the greatest value of each stretch of the line, and its
    first gap.
    """
    if len(points) <= most:
        return points
    length, kept = math.ceil(2 * len(points) / most), []
    for begin in range(0, len(points), length):
        stretch = points[begin : begin + length]
        known = sorted((value, step) for step, value in stretch if value is not None)
        kept += sorted({(step, value) for value, step in (known[:1] + known[-1:])})
        kept += [point for point in stretch if point[1] is None][:1]
    return kept


def smooth(points: Points, window: int) -> Points:
    """Running mean of each known value and up to `window` - 1 before it."""
    sums, found = [0.0], []
    for step, value in points:
        if value is not None:
            sums.append(sums[-1] + value)
            first = max(0, len(sums) - 1 - window)
            found.append((step, (sums[-1] - sums[first]) / (len(sums) - 1 - first)))
    return found
