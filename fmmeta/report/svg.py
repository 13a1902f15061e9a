"""Line charts as inline SVG: no script; the values of a step show when the pointer is over it.

    +--------------------------- 360 ---------------------------+
    | values of the step under the pointer                      |
    | 1.6 |----------- grid                                     |
    |     |   lines, spikes (triangles)                         |
    | 1.2 |__________________________________________________   |
    |      skipped and bad tasks (ticks)                        |
    |      0            50            100            150        |
    +-----------------------------------------------------------+

Coordinates are those of the picture; its width is the column's. Sizes of text are the style sheet's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmmeta.report.markup import Markup, join, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360.0, 214.0, 45.0, 10.0, 22.0, 34.0
MOST_POINTS, MOST_STRIPS = 300, 100

Points = Sequence[tuple[int, "float | None"]]


@dataclass(frozen=True)
class Series:
    """A line: its name, its look (classes of the style sheet), and (step, value); a value that is None leaves
    a gap.

    One without a name only helps the eye: no value of it is shown.
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

    def svg(self, summary: str) -> Markup:
        """The drawing; `summary` describes it to those who cannot see it."""
        beyond = {step for step, _ in self.spikes}  # they are drawn at the edge, lest they flatten the rest
        values = [
            self._height(value)
            for one in self.series
            if one.name
            for step, value in one.points
            if self._drawn(value) and step not in beyond
        ]
        low, high = span(values, self.log)
        known = [(one, dict(one.points)) for one in self.series if one.name]
        strips = [self._strip(at, known, low, high) for at in thin(self._steps(), MOST_STRIPS)]
        named = f"{self.name}-title {self.name}-desc"
        return tag(
            "svg",
            tag("title", self.title, id=f"{self.name}-title"),
            tag("desc", summary, id=f"{self.name}-desc"),
            self._axes(low, high),
            *(self._line(one, low, high) for one in self.series),
            self._marks(low, high),
            tag("g", *strips, cls="strips"),
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_labelledby=named,
        )

    def _drawn(self, value: float | None) -> bool:
        return value is not None and (value > 0 or not self.log)

    def _height(self, value: float | None) -> float:
        assert value is not None
        return math.log10(value) if self.log else value

    def _steps(self) -> list[int]:
        return sorted({step for one in self.series if one.name for step, _ in one.points})

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, self.steps), 1)

    def y(self, value: float, low: float, high: float) -> float:
        share = min(1.0, max(0.0, (self._height(value) - low) / (high - low)))
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)

    def _axes(self, low: float, high: float) -> Markup:
        parts = []
        for mark in log_marks(low, high) if self.log else marks_between(low, high, 5):
            at = self.y(mark, low, high)
            parts += [
                tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, cls="grid"),
                tag("text", self.form(mark), x=LEFT - 5, y=at, dy=".35em", cls="end"),
            ]
        for mark in marks_between(0, max(1, self.steps), 5):
            parts.append(tag("text", f"{mark:,.0f}", x=self.x(mark), y=HEIGHT - 8, cls="middle"))
        return tag("g", *parts, cls="axes")

    def _line(self, one: Series, low: float, high: float) -> Markup:
        moves, up = [], "M"
        for step, value in extremes(one.points, MOST_POINTS):
            if not self._drawn(value):
                up = "M"
                continue
            moves.append(f"{up}{self.x(step)} {self.y(value, low, high)}")  # type: ignore[arg-type]
            up = "L"
        ends = (
            [
                tag("circle", cx=self.x(step), cy=self.y(value, low, high), r=2.2, cls=f"dot {one.look}")  # type: ignore
                for step, value in one.points
                if self._drawn(value)
            ]
            if one.name and len(one.points) <= 40
            else []
        )
        return join(tag("path", d=" ".join(moves) or "M0 0", cls=f"curve {one.look}"), *ends)

    def _marks(self, low: float, high: float) -> Markup:
        parts = [
            tag("path", d=f"M{self.x(step)} {round(self.y(value, low, high) - 1, 1)}l4.5 -8h-9z", cls="spike")
            for step, value in self.spikes
            if self._drawn(value)
        ]
        for look, steps in self.ticks:
            moves = " ".join(f"M{self.x(step)} {HEIGHT - BOTTOM + 3}v7" for step in steps)
            if moves:
                parts.append(tag("path", d=moves, cls=f"tick {look}"))
        return tag("g", *parts)

    def _strip(
        self, step: int, known: Sequence[tuple[Series, dict[int, float | None]]], low: float, high: float
    ) -> Markup:
        """What shows while the pointer is over a step, and where the pointer has to be for it."""
        here = [(one, values.get(step)) for one, values in known]
        here = [(one, value) for one, value in here if self._drawn(value)]
        words = [tag("tspan", f"\u2002{one.name} {value:.4g}", cls=f"word {one.look}") for one, value in here]
        dots = [
            tag("circle", cx=self.x(step), cy=self.y(value, low, high), r=3.4, cls=f"dot {one.look}")  # type: ignore
            for one, value in here
        ]
        width = max(3.0, (WIDTH - LEFT - RIGHT) / min(MOST_STRIPS, max(1, len(self._steps()))))
        left = min(max(0.0, self.x(step) - width / 2), WIDTH - width)
        shown = tag(
            "g",
            tag("line", x1=self.x(step), x2=self.x(step), y1=TOP, y2=HEIGHT - BOTTOM, cls="hair"),
            *dots,
            tag("text", tag("tspan", f"step {step:,}"), *words, x=WIDTH - RIGHT, y=12, cls="end"),
            cls="tip",
        )
        area = tag("rect", x=round(left, 1), y=0, width=round(width, 1), height=HEIGHT, cls="area")
        return tag("g", area, shown, cls="strip")


def span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Lowest and highest, with some air, as heights (logarithms where `log`); no air below zero."""
    if not values:
        return (0.0, 1.0)
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or (0.3 if log else 0.05 * abs(high) or 1.0)
    return (max(0.0, low - air) if low >= 0 and not log else low - air), high + air


def marks_between(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high, `about` as many as wanted."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [count * size for count in range(first, math.floor(high / size + 1e-9) + 1)]


def log_marks(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms, with 2 and 5 between them where they are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low < 2 else (1,)
    every = max(1, len(powers) // 5)
    marks = [factor * 10.0**power for power in list(powers)[::every] for factor in factors]
    return [mark for mark in marks if low <= math.log10(mark) <= high]


def thin(items: list[int], most: int) -> list[int]:
    """At most `most` of them, evenly, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def extremes(points: Points, most: int) -> Points:
    """A long line by the least and the greatest value of each stretch, so that no peak is lost; gaps stay
    gaps.
    """
    if len(points) <= most:
        return points
    length, kept = math.ceil(2 * len(points) / most), []
    for begin in range(0, len(points), length):
        stretch = points[begin : begin + length]
        known = [point for point in stretch if point[1] is not None]
        gap = next((point for point in stretch if point[1] is None), None)
        kept += sorted(
            {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else (),  # type: ignore
            key=lambda p: p[0],
        )  # type: ignore
        if gap is not None:
            kept.append(gap)
    return kept


def smooth(points: Points, window: int) -> Points:
    """Mean of up to `window` known values, each and those before it."""
    sums, found = [0.0], []
    for step, value in points:
        if value is not None:
            sums.append(sums[-1] + value)
            first = max(0, len(sums) - 1 - window)
            found.append((step, (sums[-1] - sums[first]) / (len(sums) - 1 - first)))
    return found
