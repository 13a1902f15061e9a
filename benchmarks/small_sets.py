"""Does the recipe `intents`, unchanged, gain on data sets of 8 to 16 training classes? And with --tune?

    python -m benchmarks.small_sets --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--sets ...]

Of each data set some classes are written to a file, on which the recipe is trained; episodes of other
classes, 5-way with 5 queries per class, are classified by class means of the frozen encoder and of the
trained one. Seeds draw the classes, and the episodes. All classes of the file are trained on. Row `tuned`:
the recipe with a section that chooses rate and interpolation by cross-validation over these classes.

banking77, clinc150   16 and 11 training classes, tested on the test classes of split 01
fewrel                11 of 16 relations, tested on the other five (names of entities are marked in the texts)
generated             8 classes, each two kinds of things: lists of two things of each kind among four others;
                      the held-out classes are other pairs of the same ten kinds

Accuracy in percent over EPISODES episodes of every seed; gains are paired by episode, mean over seeds and
95 % interval (Student's t over seeds where there are three, else over episodes). Finished cells lie in
results/small_sets.json and are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import keep, read, table
from benchmarks.full_way import Encoder, rows_of, train_recipe
from fmmeta.evaluation.methods import prototype
from fmmeta.metrics.scores import format_interval, mean_ci95
from fmmeta.tasks.word_suite import BY_CATEGORY

RESULTS = Path(__file__).parent / "results" / "small_sets.json"
WAYS, QUERIES, EPISODES, SHOTS = 5, 5, 600, (1, 5)
TUNED = {"tune": '{"outer_lrs": [1e-4, 3e-4], "minutes": 10}'}
ROWS: dict[str, dict[str, str]] = {"recipe": {}, "tuned": TUNED}  # further flags

Rows = list[dict[str, str]]


def of_intents(name: str, classes: int) -> Callable[[str, random.Random], tuple[Rows, Rows]]:
    """Training rows of some training classes of split 01, and test rows of its test classes."""

    def rows(data: str, rng: random.Random) -> tuple[Rows, Rows]:
        split = json.loads(Path(data, name, "class_splits.json").read_text())["01"]
        chosen, held_out = set(rng.sample(split["train"], classes)), set(split["test"])
        every = rows_of(data, name, "train")
        return [row for row in every if row["label"] in chosen], [
            row for row in every if row["label"] in held_out
        ]

    return rows


def fewrel(data: str, rng: random.Random) -> tuple[Rows, Rows]:
    every = rows_of(data, "fewrel_val_wiki", "all")
    chosen = set(rng.sample(sorted({row["label"] for row in every}), 11))
    return [row for row in every if row["label"] in chosen], [
        row for row in every if row["label"] not in chosen
    ]


def generated(data: str, rng: random.Random) -> tuple[Rows, Rows]:
    kinds = rng.sample(sorted(itertools.combinations(sorted(BY_CATEGORY), 2)), 8 + 10)

    def row(first: str, second: str) -> dict[str, str]:
        things = rng.sample(BY_CATEGORY[first], 2) + rng.sample(BY_CATEGORY[second], 2)
        others = [one for kind, words in BY_CATEGORY.items() if kind not in (first, second) for one in words]
        things += rng.sample(others, 4)
        rng.shuffle(things)
        return {"text": ", ".join(things), "label": f"{first} and {second}"}

    return [row(*pair) for pair in kinds[:8] for _ in range(60)], [
        row(*pair) for pair in kinds[8:] for _ in range(60)
    ]


SETS: dict[str, Callable[[str, random.Random], tuple[Rows, Rows]]] = {
    "banking77": of_intents("banking77", 16),
    "clinc150": of_intents("clinc150", 11),
    "fewrel": fewrel,
    "generated": generated,
}


def accuracies(features: Tensor, labels: np.ndarray, shots: int, seed: int) -> list[float]:
    """Of each episode: class means of `shots` examples classify the queries."""
    rng, found = np.random.default_rng([seed, shots]), []
    places = {one: np.flatnonzero(labels == one) for one in np.unique(labels)}
    for _ in range(EPISODES):
        chosen = rng.choice(sorted(places), WAYS, replace=False)
        drawn = np.array([rng.choice(places[one], shots + QUERIES, replace=False) for one in chosen])
        support, query = (torch.from_numpy(part.ravel()) for part in (drawn[:, :shots], drawn[:, shots:]))
        of_class = torch.arange(WAYS)
        scores = prototype(features[support], of_class.repeat_interleave(shots), features[query], WAYS)
        found.append(float((scores.argmax(1) == of_class.repeat_interleave(QUERIES)).double().mean()))
    return found


def cell_of(asked: argparse.Namespace, name: str, seed: int, row: str) -> dict[str, Any]:
    train, test = SETS[name](asked.data, random.Random(seed))
    texts, labels = [row["text"] for row in test], np.array([row["label"] for row in test])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, name)
        data.mkdir()
        rows = "".join(json.dumps(row) + "\n" for row in train)
        (data / "train.jsonl").write_text(rows, encoding="utf-8")
        splits = {"train": sorted({row["label"] for row in train}), "valid": [], "test": []}
        (data / "class_splits.json").write_text(json.dumps(splits))
        trained = train_recipe(asked.model, str(data), f"{folder}/run", **ROWS[row])
        minutes = (time.process_time() - began) / 60
        settings = json.loads(Path(folder, "run", "run.json").read_text())["settings"]
        of_encoder = {"frozen": Encoder(asked.model)(texts), "recipe": Encoder(trained)(texts)}
    return {
        "cpu_minutes": round(minutes, 1),
        "settings": {one: settings[one] for one in ("outer_lr", "outer_steps", "init_interpolation")},
        "shots": {
            str(shots): {
                encoder: [round(one, 2) for one in accuracies(features, labels, shots, seed)]
                for encoder, features in of_encoder.items()
            }
            for shots in SHOTS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed, name, row in itertools.product(asked.seeds, asked.sets, asked.rows):
        if key_of(name, seed, row) not in read(asked.json):
            keep(asked.json, {key_of(name, seed, row): cell_of(asked, name, seed, row)})
            print(show(read(asked.json)), flush=True)


def key_of(name: str, seed: int | str, row: str) -> str:
    return f"{name} {seed}" if row == "recipe" else f"{name} {seed} {row}"


def show(cells: dict[str, Any]) -> str:
    lines = []
    for name, row in itertools.product(SETS, ROWS):
        found = [cell for key, cell in cells.items() if key == key_of(name, key.split()[1], row)]
        if not found:
            continue
        line = [name, row, str(len(found))]
        for shots in map(str, SHOTS):
            of_seed = [cell["shots"][shots] for cell in found]
            gains = [np.subtract(one["recipe"], one["frozen"]) for one in of_seed]
            over = [float(one.mean()) for one in gains] if len(gains) > 2 else [*np.concatenate(gains)]
            line += [
                f"{100 * np.mean([one['frozen'] for one in of_seed]):.2f}",
                f"{100 * np.mean([one['recipe'] for one in of_seed]):.2f}",
                format_interval(mean_ci95([float(one) for one in over]), "+.2f", 100),
            ]
        lines.append([*line, f"{np.mean([cell['cpu_minutes'] for cell in found]):.1f}"])
    columns = [f"{column}, {shots} shots" for shots in SHOTS for column in ("frozen", "trained", "gain")]
    return table(["data set", "row", "seeds", *columns, "CPU min"], lines)


if __name__ == "__main__":
    main()
