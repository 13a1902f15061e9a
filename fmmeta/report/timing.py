"""Where the time of an outer step went: computing, waiting for data, waiting for other groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fmmeta.report.data import Facts, Line, number

MOST_GROUPS = 24


@dataclass(frozen=True)
class Times:
    """Mean seconds of an outer step over `steps` logged ones.

    whole: of the step; data: waiting for data; waiting: for other groups, by group.
    """

    steps: int
    first_left_out: bool
    whole: float
    data: float
    waiting: list[float]

    def computing(self, group: int) -> float:
        """The remaining seconds: passes, reduction, the outer step."""
        return max(0.0, self.whole - self.data - self.waiting[group])


def times(steps: Sequence[Line]) -> Times | None:
    """Mean times of the logged steps with as many groups as the last one.

    Of more than three steps the first is left out, since it warms up.
    """
    usable = [line for line in steps if number(line.get("seconds")) is not None]
    if not usable:
        return None
    usable = [line for line in usable if len(waits(line)) == len(waits(usable[-1]))]
    kept = usable[1:] if len(usable) > 3 else usable
    waiting = [sum(column) / len(kept) for column in zip(*map(waits, kept), strict=True)]
    whole, data = (
        sum(number(line.get(key)) or 0.0 for line in kept) / len(kept) for key in ("seconds", "data_seconds")
    )
    return Times(len(kept), len(kept) < len(usable), whole, data, waiting)


def waits(line: Line) -> list[float]:
    """Seconds that each group has waited for others in a logged step."""
    return [float(one) for one in line.get("wait_seconds_by_group") or [line.get("wait_seconds") or 0.0]]


def timing(facts: Facts) -> dict[str, Any] | None:
    """Mean times of an outer step, and the parts of it by group: of many groups the extreme ones."""
    found = times(facts.steps)
    if found is None or found.whole <= 0:
        return None
    groups = sorted(range(len(found.waiting)), key=lambda group: found.waiting[group])
    if len(groups) > MOST_GROUPS:
        groups = groups[: MOST_GROUPS // 2] + groups[-MOST_GROUPS // 2 :]
    return {"mean": found, "groups": [(group, parts(found, group)) for group in groups]}


def parts(found: Times, group: int) -> list[dict[str, Any]]:
    """Seconds of a group, where they begin on its bar and how wide they are."""
    shares = [found.computing(group), found.data, found.waiting[group]]
    total, begin, drawn = sum(shares) or 1.0, 0.0, []
    for seconds, look in zip(shares, "abd", strict=True):
        share = 100 * seconds / total
        drawn.append({"seconds": seconds, "look": look, "begin": f"{begin:.2f}%", "width": f"{share:.2f}%"})
        begin += share
    return drawn
