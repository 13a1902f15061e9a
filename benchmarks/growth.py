"""How an outer step grows: seconds should be a straight line in tasks, inner steps and tokens, and memory
flat in the first two.

    python -m benchmarks.growth --json benchmarks/results/growth.json --plot docs/growth.svg

One rank, one thread, FOMAML and AdamW on random rows of equal length. Per axis four sizes, measured in turn,
several times; a line a + b x is fitted to the medians (by relative error), and printed is how far the worst
of them lies off it, with a and b. `rows` and `length` are both tokens; attention is quadratic in the length.
Memory is the resident peak of one outer step. The last line is the worst deviation of CPU seconds from a
line, and the growth of memory over an eightfold size.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.common import plot, spread, table, write_json
from benchmarks.memory import resident
from benchmarks.stepping import QUIET, Cost, Prepared, alone, find_model, prepare
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Episode, MicroBatch

USUAL = {"tasks": 2, "inner_steps": 2, "rows": 8, "length": 16}
AXES = {"tasks": (1, 2, 4, 8), "inner_steps": (1, 2, 4, 8), "rows": (4, 8, 16, 32), "length": (8, 16, 32, 64)}


def random_set(rows: int, length: int, vocabulary: int, draw: torch.Generator) -> list[MicroBatch]:
    ids = torch.randint(1, vocabulary, (rows, length), generator=draw)
    return [
        MicroBatch(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            {"labels": torch.arange(rows) % 5},
            torch.full((rows,), 1 / rows),
        )
    ]


def outer_step(prepared: Prepared, sizes: dict[str, int], number: int) -> None:
    """The loop's arithmetic on random episodes."""
    run, parts = prepared.run, prepared.run.parts
    draw = torch.Generator().manual_seed(number)
    vocabulary = prepared.inputs.description.hf_config.vocab_size
    setup = replace(parts.setup, inner=replace(parts.setup.inner, steps=sizes["inner_steps"]))
    rule, updates = run.rule, run.state.updates
    for _ in range(sizes["tasks"]):
        sets = [random_set(sizes["rows"], sizes["length"], vocabulary, draw) for _ in range(2)]
        rule(replace(run.task_run(Episode(*sets), updates.meta), setup=setup))
    moved = updates.step(updates.meta.weight, 0)
    if moved.applied:
        run.worker.write(run.theta)


def line(sizes: tuple[int, ...], seconds: list[float]) -> tuple[float, float, float]:
    """a, b and the worst relative distance of a + b x, fitted by least squares of relative errors."""
    x, y = numpy.array(sizes, float), numpy.array(seconds)
    (a, b), *_ = numpy.linalg.lstsq(numpy.stack([1 / y, x / y], 1), numpy.ones(len(y)), rcond=None)
    return float(a), float(b), float(numpy.abs((a + b * x) / y - 1).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--json")
    parser.add_argument("--plot")
    given = parser.parse_args()
    world = alone()
    config = Config(
        model_name_or_path=find_model(given.model_name_or_path),
        pooling="mean",
        inner_steps=max(AXES["inner_steps"]),
        group_size="1",
        inner_lr=0.01,
        outer_lr=1e-6,
        **QUIET,
    )
    prepared, _ = prepare(config, world)
    number, results = 0, {}
    outer_step(prepared, USUAL, 0)
    for axis in given.axes:
        costs: dict[int, list[Cost]] = {size: [] for size in AXES[axis]}
        peaks: dict[int, int] = {}
        for _ in range(given.repeats):
            for size in AXES[axis]:
                number += 1
                sizes = {**USUAL, axis: size}
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
                costs[size].append(Cost.of(partial(outer_step, prepared, sizes, number)))
                peaks[size] = max(peaks.get(size, 0), resident("VmHWM"))
        medians = [spread([c.cpu for c in costs[size]])["median"] for size in AXES[axis]]
        a, b, off = line(AXES[axis], medians)
        results[axis] = {
            "sizes": AXES[axis],
            "cpu": {s: spread([c.cpu for c in costs[s]]) for s in costs},
            "intercept": a,
            "slope": b,
            "worst": off,
            "wall": {s: spread([c.wall for c in costs[s]]) for s in costs},
            "peak_bytes": peaks,
        }
        print(
            f"{axis}: " + ", ".join(f"{s} -> {m:.3f} s" for s, m in zip(AXES[axis], medians, strict=True)),
            flush=True,
        )
    world.close()
    print(
        table(
            [
                "axis",
                "fixed s",
                "s per unit",
                "worst off the line",
                *[f"peak MB, size {i + 1}" for i in range(4)],
            ],
            [
                [
                    axis,
                    f"{r['intercept']:.3f}",
                    f"{r['slope']:.4f}",
                    f"{100 * r['worst']:.1f} %",
                    *[f"{p / 1e6:.0f}" for p in r["peak_bytes"].values()],
                ]
                for axis, r in results.items()
            ],
        )
    )
    write_json(given.json, {"usual": USUAL, "axes": results})

    def draw(axes: Any) -> None:
        for axis, r in results.items():
            x = [s / r["sizes"][0] for s in r["sizes"]]
            axes.plot(x, [r["cpu"][s]["median"] for s in r["sizes"]], marker="o", label=axis)
        axes.set(
            xlabel="times the smallest size",
            ylabel="CPU seconds of an outer step",
            title="Growth of an outer step",
        )
        axes.set_ylim(bottom=0)
        axes.legend()

    plot(given.plot, draw)
    flat = {
        axis: max(p) / min(p)
        for axis in ("tasks", "inner_steps")
        if axis in results
        for p in [list(results[axis]["peak_bytes"].values())]
    }
    print(
        "growth: "
        + " ".join(f"{axis} {100 * r['worst']:.1f}%" for axis, r in results.items())
        + "; memory "
        + " ".join(f"{axis} x{value:.2f}" for axis, value in flat.items())
    )


if __name__ == "__main__":
    main()
