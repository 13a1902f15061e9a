"""Where the time of an outer step went: computing, waiting for data, waiting for other groups."""

from __future__ import annotations

from collections.abc import Sequence

from fmmeta.report.data import Facts, Times, times
from fmmeta.report.markup import Markup, cell, column_head, join, quiet, row, row_head, section, table, tag

MOST_GROUPS = 24


def timing(facts: Facts) -> Markup | None:
    """Seconds of an outer step by group: waiting for data, for the other groups, and the rest."""
    found = times(facts.steps)
    if found is None or found.whole <= 0:
        return None
    groups = chosen(found)
    parts = [bar(found, group) for group in groups]
    say = f"{found.whole:.3g} s an outer step, the mean of {found.steps} logged ones"
    say += " (without the first, which warms up)" if found.first_left_out else ""
    say += ". Waiting for data is a mean over all ranks. "
    if len(groups) < len(found.waiting):
        say += (
            f"Shown are {len(groups)} of {len(found.waiting)} groups: those that the others wait for, and"
            " those that wait most. "
        )
    keys = [
        tag("span", swatch(look), name, cls="key")
        for name, look in (("computing", "a"), ("waiting for data", "b"), ("waiting for other groups", "d"))
    ]
    rows = [
        row(
            row_head(f"group {group}"),
            *(
                cell(tag("data", f"{value:.3g}", value=value), "n")
                for value in (found.computing(group), found.data, found.waiting[group])
            ),
        )
        for group in groups
    ]
    head = [column_head(), *(column_head(name, "n") for name in ("computing s", "data s", "other groups s"))]
    exact = tag("details", tag("summary", "Seconds by group"), table(head, rows))
    return section(
        "time",
        "Where the time goes",
        quiet(say),
        tag("div", *keys, cls="keys"),
        tag("div", *parts, cls="times"),
        exact,
    )


def swatch(look: str) -> Markup:
    return tag("svg", tag("rect", width=22, height=8, rx=2, cls=f"fill {look}"), aria_hidden="true")


def chosen(found: Times) -> Sequence[int]:
    """All groups, or of many those that wait least and most."""
    order = sorted(range(len(found.waiting)), key=lambda group: found.waiting[group])
    return order if len(order) <= MOST_GROUPS else order[: MOST_GROUPS // 2] + order[-MOST_GROUPS // 2 :]


def bar(found: Times, group: int) -> Markup:
    shares = [found.computing(group), found.data, found.waiting[group]]
    total, at, drawn = sum(shares) or 1.0, 0.0, []
    for seconds, look in zip(shares, "abd", strict=True):
        share = 100 * seconds / total
        drawn.append(
            tag("rect", x=f"{at:.2f}%", y="15%", width=f"{share:.2f}%", height="70%", cls=f"fill {look}")
        )
        at += share
    said = (
        f"group {group}: computing {shares[0]:.3g} s, data {shares[1]:.3g} s, other groups {shares[2]:.3g} s"
    )
    return join(
        tag("span", f"group {group}"), tag("svg", tag("title", said), *drawn, role="img", aria_label=said)
    )
