"""Draw the tables of docs/performance.md and docs/few-shot-classification.md from benchmarks/results/*.json:
nothing is measured.

python -m benchmarks.draw
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import plot
from benchmarks.intents import ROWS, SETS, by_split, estimate, gains

ROOT = Path(__file__).parent.parent


def bars(axes: Any, heights: Mapping[str, float], line: float | None, ylabel: str, title: str) -> None:
    """Named bars with their values, and a line for what they are to be compared with."""
    drawn = axes.bar(list(heights), list(heights.values()), width=0.6)
    axes.bar_label(drawn, fmt="%.3g", label_type="center", color="white")
    if line is not None:
        axes.axhline(line, color="black", linewidth=1, linestyle="--")
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.12)
    axes.set(ylabel=ylabel, title=title)


def floor(axes: Any, found: dict[str, Any]) -> None:
    ratios = {
        f"ZeRO {name.removeprefix('zero')}": r["cpu"]["ratio"]["median"]
        for name, r in found["stages"].items()
    }
    bars(
        axes,
        ratios,
        1,
        "CPU seconds by the floor's",
        "An outer step in a group of one and a hand-written loop",
    )


def peers(axes: Any, found: dict[str, Any]) -> None:
    named = {"same": "same\ntensors", "users": "as users\nrun them", "anil": "ANIL,\n10 steps"}
    times = {
        f"{peer}\n{named[question]}": 1 / ratio["median"]
        for question, r in found["questions"].items()
        for peer, ratio in r["cpu_ratio"].items()
    }
    bars(
        axes, times, 1, "episodes per CPU second by the peer's", "fmmeta beside its peers, MiniLM, one thread"
    )


def adapters(axes: Any, found: dict[str, Any]) -> None:
    times = {name.replace(" ", "\n"): r["cpu"]["speedup"]["median"] for name, r in found["adapters"].items()}
    bars(axes, times, 1, "episodes per CPU second by one task at a time's", "8 tasks in one pass")


def start(axes: Any, found: dict[str, Any]) -> None:
    seconds = {name.replace(" ", "\n", 1): r["wall"]["median"] for name, r in found["start"].items()}
    bars(axes, seconds, None, "seconds", "Imports, and Enter to first outer step")


def weak(axes: Any, found: dict[str, Any]) -> None:
    rates = {name: sum(each) / len(each) for name, each in found["tokens_per_second"].items()}
    bars(
        axes,
        rates,
        None,
        "tokens per second",
        f"Two processes on two cores: efficiency {found['efficiency']['median']:.2f}",
    )


def growth(axes: Any, found: dict[str, Any]) -> None:
    for axis, r in found["axes"].items():
        x = [size / r["sizes"][0] for size in r["sizes"]]
        axes.plot(x, [r["cpu"][str(size)]["median"] for size in r["sizes"]], marker="o", label=axis)
    axes.set(
        xlabel="times the smallest size",
        ylabel="CPU seconds of an outer step",
        title="Growth of an outer step",
    )
    axes.set_ylim(bottom=0)
    axes.legend()


def intents(axes: Any, found: dict[str, Any]) -> None:
    rows = list(reversed([row for row in ROWS if row != "none+prototype"]))
    for above, name in zip((0.15, -0.15), SETS, strict=True):
        there = [
            (row, *estimate(gains(ours, frozen, "1")))
            for set_, row, ours, frozen in by_split(found["cells"])
            if set_ == name and row in rows
        ]
        axes.errorbar(
            [mean for _, mean, _ in there],
            [rows.index(row) + above for row, *_ in there],
            xerr=[half or 0 for *_, half in there],
            fmt="o",
            capsize=3,
            label=name,
        )
    axes.axvline(0, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(
        xlabel="points over frozen prototypes, same episodes",
        title="New intents from one example each, 5-way, 95 %",
    )
    axes.legend()


def second_order(axes: Any, found: dict[str, Any]) -> None:
    """Memory over K of every library, model and choice of adapters."""
    lines: dict[str, dict[int, float]] = {}
    for key, cell in found["cells"].items():
        if ", memory, " not in key:
            continue
        model, _, *texts, optimizer, k = key.split(", ")
        if optimizer == "sgd":
            lines.setdefault(", ".join([texts[0], model, *texts[1:]]), {})[int(k[2:])] = cell["bytes"] / 1e6
    for name, line in lines.items():
        style = "-" if name.startswith("fmmeta") else "--"
        axes.plot(sorted(line), [line[k] for k in sorted(line)], style, marker="o", label=name)
    axes.set(
        xlabel="inner steps",
        ylabel="MB above the loaded model",
        title="Memory of a task's exact meta-gradient",
        yscale="log",
    )
    axes.legend(fontsize=7)


def asynchrony(axes: Any, found: dict[str, Any]) -> None:
    for name, style in (("letters", "-"), ("intents", "--")):
        for mode, run in found.get(name, {}).get("runs", {}).items():
            seconds = [point[1] for point in run["points"]]
            losses = [sum(point[2]) / len(point[2]) for point in run["points"]]
            axes.plot(seconds, losses, style, marker="o", markersize=3, label=f"{name}, {mode}")
    axes.set(
        xlabel="seconds of training",
        ylabel="held-out loss",
        title="Three groups, one of them four times slower",
    )
    axes.legend(fontsize=7)


DRAWN: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "floor": floor,
    "peers": peers,
    "adapters": adapters,
    "start": start,
    "weak": weak,
    "growth": growth,
    "intents": intents,
    "second_order": second_order,
    "asynchrony": asynchrony,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    for name, draw in DRAWN.items():
        file = given.results / f"{name}.json"
        if file.is_file():
            found = json.loads(file.read_text())
            plot(str(given.docs / f"{name}.svg"), lambda axes, draw=draw, found=found: draw(axes, found))
            print(f"docs/{name}.svg")


if __name__ == "__main__":
    main()
