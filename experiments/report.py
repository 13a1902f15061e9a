"""Tables and plots of a study, from its finished cells; experiments/README.md lists what a column may say."""

from __future__ import annotations

import itertools
import pkgutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.stats import t as student
from scipy.stats import wilcoxon

from benchmarks.common import plot, table
from fmmeta.metrics.scores import format_interval, mean_ci95

Units = dict[str, float]  # values by episode, class or task
DOCS = Path(__file__).parent.parent / "docs"


def matches(axes: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether each of the wanted axes has the value, or one of the listed ones."""
    return all(axes.get(name) in (one if isinstance(one, list) else [one]) for name, one in wanted.items())


def units(result: dict[str, Any], path: str) -> Units:
    """The numbers at a path of keys, by their names or places; `*` takes each key's mean."""
    found: Any = result
    for key in path.split("."):
        found = {name: mean(units(found, name)) for name in found} if key == "*" else found.get(key, {})
    if isinstance(found, str):
        found = [float(one) for one in found.split()]
    if isinstance(found, list):
        return {str(place): value for place, value in enumerate(found)}
    found = found if isinstance(found, dict) else {"": found}
    return {name: value for name, value in found.items() if value is not None}


def mean(values: Units) -> float:
    return sum(values.values()) / len(values)


def averaged(several: Iterable[Units]) -> Units:
    """The mean of each unit over the cells that have it."""
    found = defaultdict[str, list[float]](list)
    for values in several:
        for name, value in values.items():
            found[name].append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


def estimate(cells: list[Units]) -> tuple[float, float]:
    """Mean, and half its 95 % interval: over three cells or more, else over the units of all."""
    means = [mean(values) for values in cells]
    every = [one for values in cells for one in values.values()]
    return statistics.mean(means), mean_ci95(means if len(means) > 2 else every)[1]


def p_below(gains: list[float]) -> float:
    """P value of the one-sided t test that the mean is below zero."""
    error = np.std(gains, ddof=1) / len(gains) ** 0.5
    return float(student.cdf(np.mean(gains) / error, len(gains) - 1)) if error else 1.0


def holm(p_values: dict[Any, float]) -> set[Any]:
    """What is significant at 0.05 (Holm 1979, "A simple sequentially rejective multiple test procedure")."""
    found = set()
    for number, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        if p_values[key] > 0.05 / (len(p_values) - number):
            break
        found.add(key)
    return found


class Lines:
    """Finished cells of a study in groups that share the values of some axes.

    by: the axes; only: values of axes, or a `grid`, that a cell must have.
    """

    def __init__(self, study: Any, results: dict[str, Any], by: list[str], only: dict[str, Any]) -> None:
        self.results, self.by, self.groups = results, by, defaultdict[Any, list[Any]](list)
        order = {axis: dict.fromkeys(study.spec.get("options", {}).get(axis, {})) for axis in by}
        for cell in study.cells.values():
            if matches({"grid": cell.grid, **cell.axes}, only) and cell.axes.keys() >= {*by}:
                for axis in by:
                    order[axis][cell.axes[axis]] = None
                if cell.name in results:
                    self.groups[tuple(cell.axes[axis] for axis in by)].append(cell)
        self.order = [[*values] for values in order.values()]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The values of each group, in the order of the YAML file."""
        places = [values.index for values in self.order]
        return iter(
            sorted(self.groups, key=lambda group: [of(v) for of, v in zip(places, group, strict=True)])
        )

    def values(self, group: tuple[Any, ...], column: dict[str, Any]) -> list[Units]:
        """What a column reads in the cells of a group: `minus` that of another group, or taken `from` it."""
        found = self.read(group, column)
        if not (apart := column.get("minus") or column.get("from")):
            return list(found.values())
        others = self.read(self.other(group, apart), column)
        sign = 1 if "minus" in column else -1
        return [
            {unit: sign * (value - others[at][unit]) for unit, value in values.items() if unit in others[at]}
            for at, values in found.items()
            if at in others
        ]

    def other(self, group: tuple[Any, ...], apart: dict[str, Any]) -> tuple[Any, ...]:
        """The group with other values of some axes."""
        return tuple(apart.get(axis, value) for axis, value in zip(self.by, group, strict=True))

    def read(self, group: tuple[Any, ...], column: dict[str, Any]) -> dict[Any, Units]:
        """By the values of the axes that the cells of a group do not share; `units`: one mean over them."""
        found: dict[Any, Units] = {}
        for cell in self.groups.get(group, []):
            path = column["value"].format_map(cell.names)
            if ":" in path:
                values = pkgutil.resolve_name(path)(self.results, cell)
            else:
                values = units(self.results[cell.name], path)
            if values:
                found[tuple(value for axis, value in cell.axes.items() if axis not in self.by)] = values
        return {(): averaged(found.values())} if column["show"] == "units" and found else found


def text_of(values: list[Units], column: dict[str, Any]) -> str:
    """The text of a column for a line; empty without values."""
    kind, form, scale = column["show"], column.get("form", "g"), column.get("scale", 1)
    if not values:
        return ""
    if kind == "count":
        return str(len(values))
    if kind in ("interval", "units"):
        numbers = [*values[0].values()]
        text = format_interval(estimate(values) if kind == "interval" else mean_ci95(numbers), form, scale)
        tested = column.get("test") == "wilcoxon" and any(numbers)
        return f"{text}, p {cast(Any, wilcoxon(numbers)).pvalue:.3f}" if tested else text.removesuffix(" ± -")
    if kind == "least":
        return format(min(value for one in values for value in one.values()), form)
    means = [scale * mean(one) for one in values]
    if kind == "each":
        return " / ".join(format(one, form) for one in means)
    functions = {"mean": statistics.mean, "median": statistics.median, "max": max, "min": min}
    return format(functions[kind](means), form)


def show(study: Any, results: Any = None) -> str:
    """All tables of a study."""
    results = results or study.results()
    if isinstance(study.spec["tables"], str):
        return pkgutil.resolve_name(study.spec["tables"])(study, results)
    return "\n\n".join(shown(study, results, one) for one in study.spec["tables"])


def shown(study: Any, results: dict[str, Any], spec: dict[str, Any]) -> str:
    """A table; `totals` are more lines of it, of groups by other axes."""
    rows, tested = list[list[str]](), dict[tuple[int, int], float]()
    for part in (spec, *spec.get("totals", [])):
        lines = Lines(study, results, part["lines"], part.get("only", {}))
        pairs: Any = itertools.product(lines, part.get("against", [{}]))
        for group, against in pairs:
            cell = lines.groups[group][0]
            if not matches(cell.axes, part.get("shown", {})):
                continue
            other = {f"other_{axis}": value for axis, value in against.items()}
            row = [text.format_map({**cell.names, **other}) for text in part["labels"].values()]
            for column in spec["columns"]:
                column = {name: against if one == "against" else one for name, one in column.items()}
                of = Lines(study, results, part["lines"], column["cells"]) if "cells" in column else lines
                apart = column.get("minus") or column.get("from") or {}
                blank = column["head"] in part.get("blank", []) or (apart and of.other(group, apart) == group)
                asked = not blank and matches(cell.axes, column.get("only", {}))
                values = of.values(group, column) if asked else []
                if values and part is spec and matches(cell.axes, column.get("holm", {"none": 0})):
                    tested[len(rows), len(row)] = p_below([*values[0].values()])
                row.append(text_of(values, column))
            rows.append(row)
    for line, place in holm(tested):
        rows[line][place] += " below"
    text = table([*spec["labels"], *(column["head"] for column in spec["columns"])], rows)
    return f"{spec['title']}\n\n{text}" if "title" in spec else text


def draw(study: Any) -> None:
    """Draw the plots of a study into docs/."""
    for spec in study.spec.get("plots", []):
        lines = Lines(study, study.results(), spec["lines"], spec.get("only", {}))
        plot(str(DOCS / spec["file"]), partial(intervals if "column" in spec else curves, lines, spec))


def intervals(lines: Lines, spec: dict[str, Any], axes: Any) -> None:
    """A column of the table as points with intervals; a series for each value of the first axis of a line."""
    series = lines.order[0]
    names = [row for row in lines.order[1][::-1] if any((name, row) in lines.groups for name in series)]
    for number, name in enumerate(series):
        values = [(place, lines.values((name, row), spec["column"])) for place, row in enumerate(names)]
        found = [(place, *estimate(one)) for place, one in values if one and estimate(one)[1]]
        places, means, halves = zip(*found, strict=True)
        at = [place + 0.3 * (0.5 - number / max(1, len(series) - 1)) for place in places]
        axes.errorbar(means, at, xerr=halves, fmt="o", capsize=3, label=name)
    axes.axvline(0, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set(**spec["axes"])
    axes.legend()


def curves(lines: Lines, spec: dict[str, Any], axes: Any) -> None:
    """A line for each group: a number of each cell over an axis, or mean and range of a list of each cell.

    `window`: of a running mean of lists. A list as `x`: numbers for {x} in the name of the value `y`.
    """
    window = spec.get("window", 1)
    for group in lines:
        cells = lines.groups[group]
        label = spec["label"].format_map(cells[0].names)
        if isinstance(spec["x"], list):
            names = {x: spec["y"].replace("{x}", str(x)) for x in spec["x"]}
            read = {x: lines.values(group, {"value": name, "show": "mean"}) for x, name in names.items()}
            points = [(x, statistics.mean(map(mean, cells))) for x, cells in read.items() if cells]
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
            continue
        found = [units(lines.results[cell.name], spec["y"].format_map(cell.names)) for cell in cells]
        if spec["x"] in cells[0].axes:
            x = [cell.axes[spec["x"]] for cell in cells]
            axes.plot(x, [mean(one) for one in found], marker="o", label=label)
            continue
        x = [*units(lines.results[cells[0].name], spec["x"]).values()] or range(1, len(found[0]) + 1)
        several = [[*one.values()] for one in found]
        smooth = [[np.mean(one[max(0, i - window + 1) : i + 1]) for i in range(len(x))] for one in several]
        (line,) = axes.plot(x, np.mean(smooth, 0), label=label)
        axes.fill_between(x, np.min(smooth, 0), np.max(smooth, 0), color=line.get_color(), alpha=0.2)
    axes.set(**spec["axes"])
    axes.legend()
