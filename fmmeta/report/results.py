"""What came out of a run: the table before and after, strata, and the confusion of one episode. Numbers are those of run.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmmeta.report.facts import AFTER, BEFORE, FROM_START, Facts, number
from fmmeta.report.markup import NONE, Markup, join, tag

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
    return join(exact(interval[0], shown), *([] if half is None else [" ± ", exact(interval[1], f"{100 * half:.1f}")]))


def plain(interval: Interval, signed: bool = False) -> Markup:
    mean, half = (number(one) for one in interval)
    if mean is None:
        return join(NONE)
    shown = f"{mean:+.4f}" if signed else f"{mean:.4f}"
    return join(exact(interval[0], shown), *([] if half is None else [" ± ", exact(interval[1], f"{half:.4f}")]))


def held_out(facts: Facts) -> Markup | None:
    """The table before and after adaptation, or None before the end of a run."""
    found = facts.held_out
    if AFTER not in found:
        return None
    rows = []
    for name, look in ((BEFORE, "d"), (FROM_START, "b"), (AFTER, "a")):
        accuracy, loss = found[name]["accuracy"], found[name]["loss"]
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", interval_bar(accuracy, look), cls="bar"),
                        tag("td", percent(accuracy), cls="n"), tag("td", plain(loss), cls="n")))  # fmt: skip
    gain = found.get("gain")
    if isinstance(gain, dict):  # the same episodes, with the same adaptation, from other weights
        rows.append(tag("tr", tag("th", "gain of meta-training (paired)", scope="row"), tag("td", cls="bar"),
                        tag("td", percent(gain["accuracy"], signed=True), cls="n"),
                        tag("td", plain(gain["loss"], signed=True), cls="n"), cls="gain"))  # fmt: skip
    head = tag("tr", tag("th", "", scope="col"), tag("th", "0 to 100 %", scope="col", cls="bar"),
               tag("th", "accuracy %", scope="col", cls="n"), tag("th", "loss", scope="col", cls="n"))  # fmt: skip
    table = tag("table", tag("caption", f"{found['episodes']} held-out {shape_of(facts)} episodes; ± is half the 95 % interval "
                             "over episodes (1.96 standard errors). A gain in loss is a fall."),
                tag("thead", head), tag("tbody", *rows), cls="stack wide")  # fmt: skip
    return tag("section", tag("h2", "Before and after", id="held-out"), table, aria_labelledby="held-out")


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
    return tag("svg", rail(), tag("line", x1=part(low), x2=part(high), y1="50%", y2="50%", cls=f"rod {look}"),
               tag("circle", cx=part(mean), cy="50%", r=5, cls=f"fill {look}"), aria_hidden="true")  # fmt: skip


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
            bar += [tag("line", x1=part(before), x2=part(after), y1="50%", y2="50%", cls="rod a"),
                    tag("circle", cx=part(before), cy="50%", r=4.5, cls="hollow b")]  # fmt: skip
        bar.append(tag("circle", cx=part(after), cy="50%", r=5, cls="fill a"))
        cells = [tag("td", NONE if value is None else exact(value, f"{100 * value:.1f}"), cls="n") for value in (before, after)]
        drawn = tag("td", tag("svg", *bar, aria_hidden="true"), cls="bar")
        rows.append(tag("tr", tag("th", name or "(none)", scope="row"), *cells, drawn))
    head = tag("tr", tag("th", "stratum", scope="col"), tag("th", "start", scope="col", cls="n"),
               tag("th", "meta-trained", scope="col", cls="n"), tag("th", "0 to 100 %", scope="col", cls="bar"))  # fmt: skip
    caption = "Accuracy % after adaptation: hollow from the weights at the start, full meta-trained; the largest gain first."
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *rows), cls="stack")
    return tag("section", tag("h2", "By stratum", id="strata"), table, aria_labelledby="strata")


def confusion(facts: Facts) -> Markup | None:
    """Right classes against answers on the query set of one held-out episode."""
    found = facts.held_out.get("confusion")
    if not found:
        return None
    title = tag("h2", "One held-out episode", id="confusion")
    if "counts" not in found:
        why = tag("p", f"No confusion matrix: {found.get('left_out')}.", cls="quiet")
        return tag("section", title, why, aria_labelledby="confusion")
    counts, classes = found["counts"], found["classes"]
    right, asked = sum(row[i] for i, row in enumerate(counts)), sum(map(sum, counts))
    rows = []
    for i, (name, row) in enumerate(zip(classes, counts, strict=True)):
        most = max(1, sum(row))
        cells = [tag("td", str(count) if count else "·", cls=f"m{round(5 * count / most)}{' right' if i == j else ''}")
                 for j, count in enumerate(row)]  # fmt: skip
        rows.append(tag("tr", tag("th", f"{i + 1}  {name}", scope="row"), *cells))
    head = tag("tr", tag("th", "right class", scope="col"),
               *(tag("th", str(i + 1), scope="col", title=name) for i, name in enumerate(classes)))  # fmt: skip
    where = f"{found.get('task')}" + (f" ({found['stratum']})" if found.get("stratum") else "")
    say = f"Task {where}, adapted from the meta-trained weights: {right} of {asked} query examples right; columns are answers."
    table = tag("table", tag("thead", head), tag("tbody", *rows), cls="confusion")
    scrolls = tag("div", table, cls="scroll", role="region", tabindex="0", aria_label="Confusion matrix")
    return tag("section", title, tag("p", say, cls="quiet"), scrolls, aria_labelledby="confusion")
