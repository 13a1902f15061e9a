"""The recipe `intents` at its defaults on small files: does it lose to the frozen encoder anywhere?

    python -m benchmarks.small_sets --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--cells ...]

The grid: a CSV of 8, 12, 16, 20 or 40 classes with 10, 15 or 50 rows each, as `fmmeta train intents --dataset
my.csv` reads it (of 15 classes or more some are held out), three draws of classes for each cell.

banking77, clinc150   rows of the training file; measured on rows of the test file
fewrel                16 relations in all: 8 classes leave 8, and 12 too few for an episode
generated             lists of two things of each of three kinds among two others; a class is the three kinds

Measured on up to 40 classes of the data set outside the CSV, 30 rows each: 5-way episodes with one and with
five examples and five queries of each class, class means of the frozen and of the trained encoder. The gain
of a class is the difference of its accuracies in the same EPISODES episodes.

The test, fixed before any cell was run: in each cell and for each number of examples a one-sided t test that
the mean gain over classes is below zero. A class counts once, with its mean over the draws in which it lies
outside; intervals are 95 %, over these classes. P values are corrected by Holm's method over all cells and
both numbers of examples; "below" marks what is significant at 0.05. The mean over the cells of a data set has
an interval over classes too, of their means over cells. What this cannot see: luck of a training that a
fourth draw of classes would show (the table has the lowest mean of three), and that classes of one domain are
not independent.

Row `before` of 40 classes x 50 rows: the recipe as it was before it chose steps and interpolation (320 steps,
interpolation 0.6), on the same draws. CPU s: of the slowest training of the cell, with imports left out.
Finished draws lie in results/small_sets.json and are not computed again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.stats import t as student

from benchmarks.common import keep, read, table
from benchmarks.full_way import Encoder, rows_of, train_recipe
from fmmeta.config.recipes import find
from fmmeta.evaluation.tune_outer_loop import SHOTS, class_accuracies
from fmmeta.metrics.scores import format_interval, mean_ci95
from fmmeta.tasks.word_suite import BY_CATEGORY

RESULTS = Path(__file__).parent / "results" / "small_sets.json"
CLASSES, ROWS, DRAWS = (8, 12, 16, 20, 40), (10, 15, 50), 3
EPISODES, OUTSIDE, OUTSIDE_ROWS = 2000, 40, 30
BEFORE = {"outer_steps": 320, "init_interpolation": 0.6, "outer_epochs": None, "tune": None}
FILES = {"banking77": "banking77", "clinc150": "clinc150", "fewrel": "fewrel_val_wiki"}
OF_SET = {"fewrel": (8,)}  # numbers of classes that the data can fill

Texts = dict[str, list[str]]  # by class


def cells() -> Iterator[str]:
    """The grid, one draw of every cell first."""
    for draw, row_count, name in itertools.product(range(DRAWS), ROWS, (*FILES, "generated")):
        for count in OF_SET.get(name, CLASSES):
            yield f"{name} {count} x {row_count} draw {draw}"
            if (count, row_count) == (CLASSES[-1], ROWS[-1]):
                yield f"{name} {count} x {row_count} before draw {draw}"


def generated(kinds: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    def text() -> str:
        others = [one for kind, words in BY_CATEGORY.items() if kind not in kinds for one in words]
        things = [one for kind in kinds for one in rng.sample(BY_CATEGORY[kind], 2)] + rng.sample(others, 2)
        return ", ".join(rng.sample(things, len(things)))

    return [text() for _ in range(count)]


def texts_of(data: str, name: str, classes: int, count: int, draw: int) -> tuple[Texts, Texts]:
    """The texts of the CSV, and of classes outside it."""
    rng = random.Random(f"{name} {classes} x {count} draw {draw}")
    if name == "generated":
        every = list(itertools.combinations(sorted(BY_CATEGORY), 3))
        chosen = rng.sample(every, classes + OUTSIDE)
        inside, outside = (
            {", ".join(kinds): generated(kinds, number, rng) for kinds in part}
            for part, number in ((chosen[:classes], count), (chosen[classes:], OUTSIDE_ROWS))
        )
        return inside, outside
    by_class: list[Texts] = []
    for part in ("all", "all") if name == "fewrel" else ("train", "test"):
        found = defaultdict[str, list[str]](list)
        for row in rows_of(data, FILES[name], part):
            found[row["label"]].append(row["text"])
        by_class.append(found)
    enough = sorted(label for label, texts in by_class[0].items() if len(texts) >= count)
    inside = {label: rng.sample(by_class[0][label], count) for label in rng.sample(enough, classes)}
    rest = sorted(by_class[1].keys() - inside.keys())
    outside = rng.sample(rest, min(OUTSIDE, len(rest)))
    return inside, {label: rng.sample(by_class[1][label], OUTSIDE_ROWS) for label in outside}


def measure(asked: argparse.Namespace, cell: str) -> dict[str, Any]:
    """Gains by class and number of examples, CPU seconds, and what the recipe chose."""
    name, classes, _, count, *before, _, draw = cell.split()
    inside, outside = texts_of(asked.data, name, int(classes), int(count), int(draw))
    with tempfile.TemporaryDirectory() as folder:
        with Path(folder, "my.csv").open("w", encoding="utf-8", newline="") as file:
            rows = [(text, label) for label, texts in inside.items() for text in texts]
            csv.writer(file).writerows([("text", "label"), *rows])
        recipe = "intents"
        if before:
            values = yaml.safe_load(find("recipe", recipe).read_text(encoding="utf-8"))
            recipe = f"{folder}/before.yaml"
            kept = {key: value for key, value in {**values, **BEFORE}.items() if value is not None}
            Path(recipe).write_text(yaml.safe_dump(kept), encoding="utf-8")
        began = sum(os.times()[:4])  # with loader processes
        trained = train_recipe(asked.model, f"{folder}/my.csv", f"{folder}/run", recipe)
        seconds = sum(os.times()[:4]) - began
        run = json.loads(Path(folder, "run", "run.json").read_text())
        encoders = {"frozen": Encoder(asked.model), "trained": Encoder(trained)}
        features = {key: [encode(texts) for texts in outside.values()] for key, encode in encoders.items()}
    accuracies = {
        (key, shots): class_accuracies(each, 5, shots, EPISODES)
        for (key, each), shots in itertools.product(features.items(), SHOTS)
    }
    return {
        "cpu_seconds": round(seconds),
        "outer_steps": run["outer_steps"],
        "init_interpolation": run["init_interpolation"],
        "frozen": {str(shots): round(float(accuracies["frozen", shots].mean()), 4) for shots in SHOTS},
        "gains": {
            str(shots): dict(
                zip(
                    outside,
                    (accuracies["trained", shots] - accuracies["frozen", shots]).round(4).tolist(),
                    strict=True,
                )
            )
            for shots in SHOTS
        },
    }


def of_classes(draws: list[dict[str, Any]], shots: int) -> list[float]:
    """The gain of each class, mean over the draws (and cells) in which it lies outside."""
    found = defaultdict[str, list[float]](list)
    for draw in draws:
        for label, gain in draw["gains"][str(shots)].items():
            found[label].append(gain)
    return [float(np.mean(each)) for each in found.values()]


def p_below(gains: list[float]) -> float:
    """P value of the one-sided t test that the mean is below zero."""
    error = np.std(gains, ddof=1) / len(gains) ** 0.5
    return float(student.cdf(np.mean(gains) / error, len(gains) - 1)) if error else 1.0


def holm(p_values: dict[Any, float]) -> set[Any]:
    """What is significant at 0.05 (Holm 1979, "A simple sequentially rejective multiple test procedure")."""
    found = set()
    for number, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        if p_values[key] > 0.05 / (len(p_values) - number):
            break
        found.add(key)
    return found


def show(results: dict[str, Any]) -> str:
    """The table of all finished draws, the mean of each data set last."""
    by_cell = defaultdict[str, list[dict[str, Any]]](list)
    for cell in filter(results.__contains__, cells()):
        by_cell[cell.rpartition(" draw ")[0]].append(results[cell])
    gains = {(cell, shots): of_classes(draws, shots) for cell, draws in by_cell.items() for shots in SHOTS}
    below = holm({key: p_below(each) for key, each in gains.items() if "before" not in key[0]})
    order = {
        f"{cell.rpartition(' draw ')[0]}": place for place, cell in enumerate(sorted(cells(), key=place_of))
    }
    lines = []
    for cell in sorted(by_cell, key=lambda one: order[one]):
        draws, line = by_cell[cell], [cell, str(len(by_cell[cell]))]
        for shots in SHOTS:
            lowest = min(np.mean([*draw["gains"][str(shots)].values()]) for draw in draws)
            line += [
                f"{100 * np.mean([draw['frozen'][str(shots)] for draw in draws]):.1f}",
                format_interval(mean_ci95(gains[cell, shots]), "+.2f", 100)
                + (" below" if (cell, shots) in below else ""),
                f"{100 * lowest:+.2f}",
            ]
        chosen = [
            " / ".join(f"{draw[key]:g}" for draw in draws) for key in ("outer_steps", "init_interpolation")
        ]
        lines.append([*line, *chosen, str(max(draw["cpu_seconds"] for draw in draws))])
    for name in (*FILES, "generated"):
        of_set = [
            draw
            for cell, draws in by_cell.items()
            for draw in draws
            if cell.split()[0] == name and "before" not in cell
        ]
        if of_set:
            line = [f"{name}, all cells", str(len(of_set))]
            for shots in SHOTS:
                line += ["", format_interval(mean_ci95(of_classes(of_set, shots)), "+.2f", 100), ""]
            lines.append([*line, "", "", str(max(draw["cpu_seconds"] for draw in of_set))])
    columns = [f"{what}, {shots} shot" for shots in SHOTS for what in ("frozen", "gain", "lowest draw")]
    return table(["data set, classes x rows", "draws", *columns, "steps", "interpolation", "CPU s"], lines)


def place_of(cell: str) -> tuple[Any, ...]:
    name, classes, _, rows, *before, _, _ = cell.split()
    return [*FILES, "generated"].index(name), int(classes), int(rows), before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cells", nargs="+", default=list(cells()), choices=list(cells()), metavar="CELL")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for cell in asked.cells:
        if cell not in read(asked.json):
            keep(asked.json, {cell: measure(asked, cell)})
            print(cell, flush=True)
    print(show(read(asked.json)))


if __name__ == "__main__":
    main()
