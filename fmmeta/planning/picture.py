"""The memory of layouts as an SVG file: a bar for each, its kinds side by side, and the line of what a GPU
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fmmeta.common.errors import UsageError
from fmmeta.planning.layouts import PlannedLayout
from fmmeta.planning.memory import GIB
from fmmeta.planning.show import KINDS, bar_of
from fmmeta.report.markup import Markup, tag

# Okabe and Ito 2008, in the order of KINDS
COLOURS = dict(
    zip(
        KINDS,
        ("#0072b2", "#56b4e9", "#009e73", "#7fcab5", "#e69f00", "#b88a1e", "#d55e00", "#cc79a7", "#8c8c8c"),
        strict=True,
    )
)
WIDTH, LEFT, RIGHT, ROW, TOP = 900.0, 330.0, 70.0, 26.0, 62.0


def svg(layouts: Sequence[PlannedLayout], gpu_memory_gib: float, title: str) -> Markup:
    most = max([gpu_memory_gib, *(one.memory.total / GIB for one in layouts)])
    height = TOP + ROW * len(layouts) + 34
    rows = [row(one, number, most) for number, one in enumerate(layouts)]
    limit = x(gpu_memory_gib, most)
    ends = height - 30
    return tag(
        "svg",
        tag("title", title),
        tag("rect", width=WIDTH, height=height, fill="#ffffff"),
        *key(),
        *(part for parts in rows for part in parts),
        tag("line", x1=limit, x2=limit, y1=TOP - 6, y2=ends, stroke="#1c2127", stroke_dasharray="4 3"),
        tag("text", f"{gpu_memory_gib:g} GiB", x=limit, y=ends + 16, text_anchor="middle"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        font_family="system-ui, sans-serif",
        font_size="13",
        fill="#1c2127",
    )


def x(gib: float, most: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * gib / most, 1)


def row(one: PlannedLayout, number: int, most: float) -> list[Markup]:
    y, at = TOP + ROW * number, 0.0
    parts = [
        tag(
            "text", f"{one.groups} x {one.way.group_size}: {one.way}", x=LEFT - 8, y=y + 14, text_anchor="end"
        )
    ]
    for name, size in bar_of(one.memory).items():
        width = x(at + size / GIB, most) - x(at, most)
        if width > 0:
            parts.append(
                tag("rect", x=x(at, most), y=y, width=round(width, 1), height=ROW - 8, fill=COLOURS[name])
            )
        at += size / GIB
    return [*parts, tag("text", f"{at:.1f}", x=x(at, most) + 5, y=y + 14)]


def key() -> list[Markup]:
    parts = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        left, top = 12 + 175 * (number % 5), 10 + 20 * (number // 5)
        parts += [
            tag("rect", x=left, y=top, width=14, height=12, fill=colour),
            tag("text", name, x=left + 20, y=top + 11),
        ]
    return parts


def write(path: str, picture: Markup) -> None:
    """Raises `UsageError` where the file cannot be written."""
    try:
        Path(path).write_text(picture + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"picture={path} cannot be written ({error.strerror}); choose another file"
        ) from None
