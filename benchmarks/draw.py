"""Draw the tables of docs/explanation/memory-and-time.md from benchmarks/results/*.json: nothing is measured.

python -m benchmarks.draw
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import plot

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


DRAWN: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "floor": floor,
    "peers": peers,
    "adapters": adapters,
    "start": start,
    "weak": weak,
    "growth": growth,
    "second_order": second_order,
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
            image = given.docs / f"{name}.svg"
            plot(str(image), lambda axes, draw=draw, found=found: draw(axes, found))
            print(image)


if __name__ == "__main__":
    main()
