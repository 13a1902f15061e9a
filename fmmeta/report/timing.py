"""Where the time of an outer step went: computing, waiting for data, waiting for other groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmmeta.report.data import Facts, Times, times

MOST_GROUPS = 24


def timing(facts: Facts) -> dict[str, Any] | None:
    """Mean times of an outer step, and the parts of it by group."""
    found = times(facts.steps)
    if found is None or found.whole <= 0:
        return None
    return {"mean": found, "groups": [(group, parts(found, group)) for group in chosen(found)]}


def chosen(found: Times) -> Sequence[int]:
    """All groups, or of many those that wait least and most."""
    order = sorted(range(len(found.waiting)), key=lambda group: found.waiting[group])
    return order if len(order) <= MOST_GROUPS else order[: MOST_GROUPS // 2] + order[-MOST_GROUPS // 2 :]


def parts(found: Times, group: int) -> list[dict[str, Any]]:
    """Seconds of a group, where they begin on its bar and how wide they are."""
    shares = [found.computing(group), found.data, found.waiting[group]]
    total, at, drawn = sum(shares) or 1.0, 0.0, []
    for seconds, look in zip(shares, "abd", strict=True):
        share = 100 * seconds / total
        drawn.append({"seconds": seconds, "look": look, "begin": f"{at:.2f}%", "width": f"{share:.2f}%"})
        at += share
    return drawn
