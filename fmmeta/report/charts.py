"""Curves over the outer steps, with spikes and skipped tasks marked on them."""

from collections.abc import Sequence
from typing import Any

from fmmeta.report.data import Facts, Line, number, points, spikes
from fmmeta.report.svg import Chart, Points, Series, smooth, thin

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
    "skipped_tasks": "left out",
}
SUPPORT, QUERY, VALIDATION = "b", "a", "c"  # looks


def training(facts: Facts) -> dict[str, Any]:
    """Charts, the numbers of the text above them, and the table of their values."""
    skipped = [line for line in facts.steps if line.get("skipped_tasks")]
    bad = [line for line in facts.steps if line.get("bad_tasks")]
    ticks = (("d", [line["step"] for line in skipped]), ("a", [line["step"] for line in bad]))
    keys = ("query_loss", "grad_norm")
    return {
        "charts": charts_of(facts, ticks),
        "smoothed": any(len(points(facts.steps, key)) >= SMOOTHED for key in keys),
        "spikes": len(spikes(facts.steps)),
        "skipped": len(skipped),
        "skipped_tasks": sum(line["skipped_tasks"] for line in skipped),
        "failed_loads": sum(len(line["bad_tasks"]) for line in bad),
        **numbers(facts),
    }


def charts_of(facts: Facts, ticks: Sequence[tuple[str, Sequence[int]]]) -> list[Chart]:
    """ticks: steps to mark below the lines, by their look."""
    steps, valid, last = facts.steps, facts.valid, max(facts.outer_step, 1)
    loss = [
        *series("support", SUPPORT, points(steps, "support_loss")),
        *series("query", QUERY, points(steps, "query_loss")),
        *series("validation", VALIDATION, points(valid, "valid_loss")),
    ]
    right = [
        *series("query", QUERY, percent(points(steps, "accuracy"))),
        *series("validation", VALIDATION, percent(points(valid, "valid_accuracy"))),
    ]
    norms = points(steps, "grad_norm")
    known = [value for _, value in norms if value]
    wide = bool(known) and max(known) > 30 * min(known)
    return [
        Chart("loss", "Loss", loss, last, short, spikes=spikes(steps), ticks=ticks),
        Chart("accuracy", "Accuracy %", right, last, short, ticks=ticks),
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
    shown = f"{100 * value:.1f}" if "accuracy" in key else short(value) if key == "lr" else f"{value:.4g}"
    return line[key], shown
