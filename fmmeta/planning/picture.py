"""`--picture`: the memory of layouts as an SVG file, a bar for each, and the line of what a GPU has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from fmmeta.common.text import render
from fmmeta.planning.layouts import PlannedLayout
from fmmeta.planning.memory import GIB
from fmmeta.planning.show import KINDS, bar_of

# Okabe and Ito 2008, in the order of KINDS
COLOURS = ["#0072b2", "#56b4e9", "#009e73", "#7fcab5", "#e69f00", "#b88a1e", "#d55e00", "#cc79a7", "#8c8c8c"]
LEFT, WIDTH, ROW, TOP = 330, 500, 26, 62


def svg(layouts: Sequence[PlannedLayout], gpu_memory_gib: float, title: str) -> str:
    most = max([gpu_memory_gib, *(one.memory.total / GIB for one in layouts)])

    def x(gib: float) -> float:
        return round(LEFT + WIDTH * gib / most, 1)

    rows = []
    for number, one in enumerate(layouts):
        ends = [x(size / GIB) for size in accumulate(bar_of(one.memory).values(), initial=0)]
        bars = zip(ends, ends[1:], COLOURS, strict=False)
        rows.append(
            {
                "y": TOP + ROW * number,
                "label": f"{one.groups} x {one.strategy.group_size}: {one.strategy}",
                "bars": [
                    (begin, round(end - begin, 1), colour) for begin, end, colour in bars if end > begin
                ],
                "end": ends[-1],
                "total": f"{one.memory.total / GIB:.1f}",
            }
        )
    return render(
        Path(__file__).with_name("memory.svg.j2"),
        colours=dict(zip(KINDS, COLOURS, strict=True)),
        gpu_memory_gib=gpu_memory_gib,
        height=TOP + ROW * len(layouts) + 34,
        limit=x(gpu_memory_gib),
        rows=rows,
        title=title,
    )
