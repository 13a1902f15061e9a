"""How a run went: curves over the outer steps, with what went wrong on them."""

from __future__ import annotations

from fmmeta.report.data import Facts, Line, number, points, spikes
from fmmeta.report.markup import (
    Markup,
    cell,
    column_head,
    join,
    quiet,
    row,
    row_head,
    scrolling,
    section,
    table,
    tag,
)
from fmmeta.report.svg import Chart, Points, Series, smooth, thin

Marks = list[tuple[int, float]]
SMOOTHED = 60  # values from which on a line gets a mean over a twentieth of them
MOST_ROWS = 200
SUPPORT, QUERY, VALIDATION = "b", "a", "c"  # looks


def curves(facts: Facts) -> Markup:
    if not facts.steps and not facts.valid:
        return section("training", "Training", quiet("No outer step is logged."))
    skipped = [line["step"] for line in facts.steps if line.get("skipped_tasks")]
    bad = [line["step"] for line in facts.steps if line.get("bad_tasks")]
    jumps = spikes(facts.steps)
    charts = [figure(facts, chart) for chart in charts_of(facts, jumps, skipped, bad)]
    said = quiet(notes(facts, jumps, skipped, bad))
    return section("training", "Training", said, tag("div", *charts, cls="charts"), numbers(facts))


def charts_of(facts: Facts, jumps: Marks, skipped: list[int], bad: list[int]) -> list[Chart]:
    steps, valid, last = facts.steps, facts.valid, max(facts.outer_step, 1)
    ticks = (("d", skipped), ("a", bad))
    loss = [
        *series("support", SUPPORT, points(steps, "support_loss")),
        *series("query", QUERY, points(steps, "query_loss")),
        *series("validation", VALIDATION, points(valid, "valid_loss")),
    ]
    right = [
        *series("query", QUERY, hundred(points(steps, "accuracy"))),
        *series("validation", VALIDATION, hundred(points(valid, "valid_accuracy"))),
    ]
    norms = points(steps, "grad_norm")
    known = [value for _, value in norms if value]
    wide = bool(known) and max(known) > 30 * min(known)
    return [
        Chart("loss", "Loss", loss, last, short, spikes=jumps, ticks=ticks),
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
    """The line, and a smoother one over it where it is long; nothing where there are no values."""
    if not values:
        return []
    if len(values) < SMOOTHED:
        return [Series(name, look, values)]
    return [Series(name, f"{look} faint", values), Series("", look, smooth(values, len(values) // 20))]


def hundred(values: Points) -> Points:
    return [(step, None if value is None else 100 * value) for step, value in values]


def short(value: float) -> str:
    """0.002 -> 0.002, 0.00002 -> 2e-5, 1000 -> 1,000."""
    if value and not 1e-4 <= abs(value) < 1e5:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.4g}"


def figure(facts: Facts, chart: Chart) -> Markup:
    named = [one for one in chart.series if one.name]
    keys = (
        [tag("span", sample(one.look.split()[0]), one.name, cls="key") for one in named]
        if len(named) > 1
        else []
    )
    return tag("figure", tag("figcaption", tag("h3", chart.title), *keys), chart.svg(summary(chart)))


def sample(look: str) -> Markup:
    return tag("svg", tag("path", d="M1 4h20", cls=f"curve {look}"), aria_hidden="true")


def summary(chart: Chart) -> str:
    told = []
    for one in chart.series:
        known = [(step, value) for step, value in one.points if value is not None]
        if one.name and known:
            low, high = min(value for _, value in known), max(value for _, value in known)
            told.append(
                f"{one.name}: {known[0][1]:.4g} at step {known[0][0]}, {known[-1][1]:.4g} at step"
                f" {known[-1][0]}, between {low:.4g} and {high:.4g}"
            )
    told += [f"{len(chart.spikes)} spikes"] if chart.spikes else []
    return f"{chart.title} over the outer steps. " + ("; ".join(told) or "No values") + "."


def notes(facts: Facts, jumps: Marks, skipped: list[int], bad: list[int]) -> Markup:
    """What is drawn, and what went wrong."""
    parts: list[str] = [f"{len(facts.steps)} logged outer steps, from left to right"]
    if any(len(points(facts.steps, key)) >= SMOOTHED for key in ("query_loss", "grad_norm")):
        parts.append("; the strong line is a running mean over a twentieth of them")
    parts.append(". ")
    if jumps:
        told = (
            f" {len(jumps)} {'spike' if len(jumps) == 1 else 'spikes'} of the query loss, far above its"
            " running mean; "
        )
        parts += [tag("span", "▲", cls="word-spike"), told, "the drawing is cut off there. "]
    elif facts.steps:
        parts.append("No spikes. ")
    if skipped:
        tasks = sum(line["skipped_tasks"] for line in facts.steps if line.get("skipped_tasks"))
        parts.append(f"Ticks below: {tasks} tasks were left out in {len(skipped)} outer steps")
        lost = sum(len(line["bad_tasks"]) for line in facts.steps if line.get("bad_tasks"))
        parts.append(f", {lost} of them because they could not be had. " if bad else ", not being finite. ")
    elif facts.steps:
        parts.append("No task was left out.")
    return join(*parts)


def numbers(facts: Facts) -> Markup:
    """The curves as a table, for those who cannot see them or want the digits."""
    valid = {line["step"]: line for line in facts.valid}
    lines = {line["step"]: line for line in facts.steps}
    shown = thin(sorted(lines.keys() | valid.keys()), MOST_ROWS)
    names = {
        "support_loss": "support loss",
        "query_loss": "query loss",
        "accuracy": "accuracy %",
        "valid_loss": "valid. loss",
        "valid_accuracy": "valid. %",
        "grad_norm": "norm",
        "lr": "rate",
        "skipped_tasks": "left out",
    }
    used = [key for key in names if any(key in line for line in (*facts.steps, *facts.valid))]
    head = [column_head("step"), *(column_head(names[key], "n") for key in used)]
    rows = [
        row(
            row_head(f"{step:,}"),
            *(value_of(key, {**lines.get(step, {}), **valid.get(step, {})}) for key in used),
        )
        for step in shown
    ]
    total = len(lines.keys() | valid.keys())
    what = "Numbers of the curves" + (
        f" ({len(shown)} of {total} steps; all are in metrics.jsonl)" if len(shown) < total else ""
    )
    return tag("details", tag("summary", what), scrolling(table(head, rows), what))


def value_of(key: str, line: Line) -> Markup:
    value = number(line.get(key))
    if value is None:
        return cell("not finite" if key in line else "", "n")
    shown = f"{100 * value:.1f}" if "accuracy" in key else short(value) if key == "lr" else f"{value:.4g}"
    return cell(tag("data", shown, value=line[key]), "n")
