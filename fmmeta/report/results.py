"""What came out of a run: the table before and after, strata, and the confusion of one episode.

Numbers are those of run.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmmeta.report.data import AFTER, BEFORE, FROM_START, Facts, number
from fmmeta.report.markup import (
    NONE,
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

Interval = Sequence[Any]
"""Mean and half the 95 % interval; null where there is no interval."""


def exact(value: Any, shown: str) -> Markup:
    """A number as people read it, with the one of the file beside it for programs."""
    return tag("data", shown, value=value)


def percent(interval: Interval, signed: bool = False) -> Markup:
    mean, half = (number(one) for one in interval)
    if mean is None:
        return join(NONE)
    shown = f"{100 * mean:+.1f}" if signed else f"{100 * mean:.1f}"
    return join(
        exact(interval[0], shown), *([] if half is None else [" ± ", exact(interval[1], f"{100 * half:.1f}")])
    )


def plain(interval: Interval, signed: bool = False) -> Markup:
    mean, half = (number(one) for one in interval)
    if mean is None:
        return join(NONE)
    shown = f"{mean:+.4f}" if signed else f"{mean:.4f}"
    return join(
        exact(interval[0], shown), *([] if half is None else [" ± ", exact(interval[1], f"{half:.4f}")])
    )


def held_out(facts: Facts) -> Markup | None:
    """The table before and after adaptation, or None before the end of a run."""
    found = facts.held_out
    if AFTER not in found:
        return None
    rows = []
    for name, look in ((BEFORE, "d"), (FROM_START, "b"), (AFTER, "a")):
        accuracy, loss = found[name]["accuracy"], found[name]["loss"]
        rows.append(
            row(
                row_head(name),
                cell(interval_bar(accuracy, look), "bar"),
                cell(percent(accuracy), "n"),
                cell(plain(loss), "n"),
            )
        )
    gain = found.get("gain")
    if isinstance(gain, dict):  # the same episodes, with the same adaptation, from other weights
        cells = cell(percent(gain["accuracy"], signed=True), "n"), cell(plain(gain["loss"], signed=True), "n")
        rows.append(row(row_head("gain of meta-training (paired)"), cell(cls="bar"), *cells, cls="gain"))
    head = [
        column_head(),
        column_head("0 to 100 %", "bar"),
        column_head("accuracy %", "n"),
        column_head("loss", "n"),
    ]
    caption = (
        f"{found['episodes']} held-out {shape_of(facts)} episodes; ± is half the 95 % interval over"
        " episodes. "
    )
    caption += "A gain in loss is a fall."
    return section("held-out", "Before and after", table(head, rows, "stack wide", caption))


def shape_of(facts: Facts) -> str:
    """5-way 1-shot, or the shots alone for language models; ranges where episodes vary."""
    settings = facts.settings
    ways, shots = (between(settings.get(name), settings.get(f"{name}_max")) for name in ("n_way", "k_shot"))
    return f"{ways}-way {shots}-shot" if settings.get("task_type") == "classification" else f"{shots}-shot"


def between(low: Any, high: Any) -> str:
    return str(low) if high in (None, low) else f"{low} to {high}"


def interval_bar(interval: Interval, look: str) -> Markup:
    """A point and its interval on the way from 0 to 100 %."""
    mean, half = number(interval[0]), number(interval[1]) or 0.0
    if mean is None:
        return join()
    low, high = max(0.0, mean - half), min(1.0, mean + half)
    return tag(
        "svg",
        rail(),
        tag("line", x1=part(low), x2=part(high), y1="50%", y2="50%", cls=f"rod {look}"),
        tag("circle", cx=part(mean), cy="50%", r=5, cls=f"fill {look}"),
        aria_hidden="true",
    )


def rail() -> Markup:
    return tag("line", x1="0", x2="100%", y1="50%", y2="50%", cls="grid", stroke_width=2)


def part(share: float) -> str:
    return f"{100 * share:.2f}%"


def strata(facts: Facts) -> Markup | None:
    """Accuracy after adaptation by stratum, from the start and meta-trained; the largest gain first."""
    trained = facts.held_out.get("per_stratum") or {}
    started = facts.held_out.get("per_stratum_at_start") or {}
    if len(trained) < 2:
        return None
    rows = []
    for name in sorted(trained, key=lambda name: started.get(name, 0.0) - trained[name]):
        before, after = started.get(name), trained[name]
        bar = [rail()]
        if before is not None:
            bar += [
                tag("line", x1=part(before), x2=part(after), y1="50%", y2="50%", cls="rod a"),
                tag("circle", cx=part(before), cy="50%", r=4.5, cls="hollow b"),
            ]
        bar.append(tag("circle", cx=part(after), cy="50%", r=5, cls="fill a"))
        cells = [
            cell(NONE if value is None else exact(value, f"{100 * value:.1f}"), "n")
            for value in (before, after)
        ]
        rows.append(
            row(row_head(name or "(none)"), *cells, cell(tag("svg", *bar, aria_hidden="true"), "bar"))
        )
    head = [
        column_head("stratum"),
        column_head("start", "n"),
        column_head("meta-trained", "n"),
        column_head("0 to 100 %", "bar"),
    ]
    caption = (
        "Accuracy % after adaptation: hollow from the weights at the start, full meta-trained; the largest"
        " gain first."
    )
    return section("strata", "By stratum", table(head, rows, "stack", caption))


def confusion(facts: Facts) -> Markup | None:
    """Right classes against answers on the query set of one held-out episode."""
    found = facts.held_out.get("confusion")
    if not found:
        return None
    if "counts" not in found:
        return section(
            "confusion", "One held-out episode", quiet(f"No confusion matrix: {found.get('left_out')}.")
        )
    counts, classes = found["counts"], found["classes"]
    right, asked = sum(told[i] for i, told in enumerate(counts)), sum(map(sum, counts))
    rows = []
    for i, (name, told) in enumerate(zip(classes, counts, strict=True)):
        most = max(1, sum(told))
        looks = [f"m{round(5 * count / most)}{' right' if i == j else ''}" for j, count in enumerate(told)]
        cells = [cell(str(count) if count else "·", look) for count, look in zip(told, looks, strict=True)]
        rows.append(row(row_head(f"{i + 1}  {name}"), *cells))
    head = [
        column_head("right class"),
        *(column_head(str(i + 1), title=name) for i, name in enumerate(classes)),
    ]
    where = f"{found.get('task')}" + (f" ({found['stratum']})" if found.get("stratum") else "")
    say = (
        f"Task {where}, adapted from the meta-trained weights: {right} of {asked} query examples right;"
        " columns are answers."
    )
    matrix = scrolling(table(head, rows, "confusion"), "Confusion matrix")
    return section("confusion", "One held-out episode", quiet(say), matrix)
