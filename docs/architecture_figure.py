"""Draws docs/architecture.svg: two groups of two ranks and the tasks of a meta-batch.

python docs/architecture_figure.py
"""

from __future__ import annotations

from pathlib import Path

INK, RULE, GROUP, CROSS, WORLD = "#1f2430", "#b9c0cc", "#2f6fb3", "#b4541a", "#6b7280"
LEFT, WIDTH, TOP, HEIGHT, RANK_HEIGHT = (40, 500), 340, 150, 290, 88


def text(
    x: float, y: float, words: str, size: int = 14, color: str = INK, anchor: str = "start", weight: int = 400
):
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, dash: str = "") -> str:
    style = f'fill="{fill}" stroke="{stroke}" stroke-width="1.5" stroke-dasharray="{dash}"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {style}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, both: bool = False) -> str:
    name = color[1:]
    ends = f'marker-end="url(#{name})"' + (f' marker-start="url(#{name})"' if both else "")
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2" {ends}/>'


def heads() -> str:
    shape = '<path d="M0 0 L8 4 L0 8 z"'
    size = 'markerWidth="8" markerHeight="8" refX="7" refY="4" markerUnits="userSpaceOnUse"'
    marks = (
        f'<marker id="{color[1:]}" {size} orient="auto-start-reverse">{shape} fill="{color}"/></marker>'
        for color in (INK, GROUP, CROSS)
    )
    return f"<defs>{''.join(marks)}</defs>"


def rank(group: int, group_rank: int) -> list[str]:
    x, y = LEFT[group] + 16, TOP + 46 + group_rank * (RANK_HEIGHT + 44)
    return [
        box(x, y, WIDTH - 32, RANK_HEIGHT, "#ffffff", RULE),
        text(x + 14, y + 24, f"rank {2 * group + group_rank}", weight=600),
        text(x + WIDTH - 46, y + 24, f"group_rank {group_rank}", 13, WORLD, "end"),
        text(x + 14, y + 48, f"its part of the model; shard {group_rank} of theta,"),
        text(x + 14, y + 68, "meta-gradient and optimizer moments"),
    ]


def figure() -> str:
    parts = [heads(), box(0.75, 0.75, 878.5, 578.5, "#ffffff", "#ffffff")]
    parts += [
        box(40, 46, 800, 56, "#f4f5f7", RULE),
        text(56, 36, "meta-batch of one outer step: 6 tasks", weight=600),
    ]
    for task in range(6):
        x = LEFT[task // 3] + WIDTH / 2 - 113 + task % 3 * 80
        parts += [box(x, 56, 66, 36, "#ffffff", INK), text(x + 33, 79, f"task {task}", 13, anchor="middle")]
    for group in range(2):
        x, middle = LEFT[group], LEFT[group] + WIDTH / 2
        parts += [
            arrow(middle, 104, middle, TOP - 4, INK),
            text(middle + 10, 126, "runs its tasks in turn", 13),
            box(x, TOP, WIDTH, HEIGHT, "#eef4fb", GROUP),
            text(x + 16, TOP + 28, f"group {group}: one model", 15, GROUP, weight=600),
            arrow(middle, TOP + 48 + RANK_HEIGHT, middle, TOP + 88 + RANK_HEIGHT, GROUP, both=True),
            text(middle + 12, TOP + 73 + RANK_HEIGHT, "group", 14, GROUP, weight=600),
        ]
        for group_rank in range(2):
            parts += rank(group, group_rank)
    for group_rank in range(2):
        y = TOP + 46 + RANK_HEIGHT / 2 + group_rank * (RANK_HEIGHT + 44)
        parts += [
            arrow(LEFT[0] + WIDTH - 12, y, LEFT[1] + 12, y, CROSS, both=True),
            text(440, y - 10, "cross", 14, CROSS, "middle", 600),
        ]
    legend = (
        (
            GROUP,
            "group",
            "every pass: DeepSpeed's collectives (ZeRO, pipeline, tensor parallelism) inside one group",
        ),
        (CROSS, "cross", "once per outer step: all-reduce of meta-gradient shards between equal group_rank"),
        (
            WORLD,
            "world",
            "once per outer step: metrics, agreement, errors; small messages of all ranks over gloo",
        ),
    )
    for row, (color, name, words) in enumerate(legend):
        parts += [
            text(40, 486 + 30 * row, name, 14, color, weight=600),
            text(100, 486 + 30 * row, words, 14),
        ]
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    title = "<title>Groups, ranks and tasks of one outer step</title>"
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 580" {font} role="img">'
    return f"{head}\n{title}\n{body}\n</svg>\n"


if __name__ == "__main__":
    Path(__file__).with_name("architecture.svg").write_text(figure(), encoding="utf-8")
