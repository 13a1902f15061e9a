"""All classes of an intent data set at once, from five or ten examples of each: how far do the other set's
classes help?

    python -m benchmarks.full_way --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 \
        [--rows ...] [--shots 5] [--draws 5]

The official test file, all 77 (150) classes. Examples are drawn from the training file, ten of each class and
draw, of which K = 5 takes the first five; their row numbers lie in results/full_way_draws.json. An encoder
"on the other set" comes from the recipe `intents` on the training classes of split 01 of that set: 50 of
CLINC150, 25 of BANKING77. One "on the shots" comes from the same recipe on the examples of the draw alone: no
other row of text is trained on. Classifiers look at frozen features of length 1; those with names have the
name of each class among its examples.

Labels of the data set itself were read earlier: the recipe was chosen on the validation classes of split 01
of both sets, and C of logistic regression on 50 classes of BANKING77 (docs/log.md).

Accuracy and calibration error in percent, mean and 95 % interval over the draws; CPU seconds to train on the
shots, encode the examples, fit a classifier and score all encoded test texts; test texts encoded per CPU
second.

Finished draws lie in results/full_way.json and are not computed again; an encoder's rows are computed
together.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from benchmarks.common import keep, read, table
from fmmeta import MetaTrainer
from fmmeta.cli import parse
from fmmeta.evaluation.methods import linear, prototype
from fmmeta.metrics.scores import (
    calibration_error,
    episode_score,
    format_interval,
    mean_ci95,
    prediction_stats,
)

RESULTS = Path(__file__).parent / "results" / "full_way.json"
DRAWS = Path(__file__).parent / "results" / "full_way_draws.json"
OTHER = {"banking77": "clinc150", "clinc150": "banking77"}
SHOTS = (5, 10)
NUMBER = 10  # of draws
ROWS = {  # encoder, classifier, names of classes
    "frozen, prototypes": ("frozen", prototype, False),
    "frozen, logistic regression": ("frozen", linear, False),
    "recipe on the other set, prototypes": ("other", prototype, False),
    "recipe on the other set, logistic regression": ("other", linear, False),
    "frozen, logistic regression, names": ("frozen", linear, True),
    "recipe on the other set, logistic regression, names": ("other", linear, True),
    "recipe on the shots, prototypes": ("shots", prototype, False),
    "recipe on the shots, logistic regression": ("shots", linear, False),
    "recipe on the shots, logistic regression, names": ("shots", linear, True),
}


def rows_of(data: str, name: str, part: str) -> list[dict[str, str]]:
    folder = Path(data, name)
    packed = folder / f"{part}.jsonl.gz"
    text = (
        gzip.decompress(packed.read_bytes()) if packed.is_file() else (folder / f"{part}.jsonl").read_bytes()
    )
    return [json.loads(line) for line in text.decode().splitlines()]


def draws_of(name: str, labels: np.ndarray, classes: list[str]) -> list[list[list[int]]]:
    """Row numbers of the training file [draw][class][10]; drawn at the first call."""
    known = json.loads(DRAWS.read_text()) if DRAWS.is_file() else {}
    if name not in known:
        known[name] = [
            [
                np.random.default_rng([draw, place]).choice(np.flatnonzero(labels == one), 10, False).tolist()
                for place, one in enumerate(classes)
            ]
            for draw in range(NUMBER)
        ]
        DRAWS.write_text(json.dumps(known))
    return known[name]


class Encoder:
    """Sentence vectors of length 1: the mean of the token vectors. seconds: processor time of each text."""

    def __init__(self, folder: str) -> None:
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
        self.model.eval()
        self.seconds = 0.0

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """Features [N, D] of N texts."""
        began, order = time.process_time(), sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found = torch.zeros(len(texts), self.model.config.hidden_size)
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = self.tokenizer(
                [texts[row] for row in rows],
                padding=True,
                truncation=True,
                max_length=64,
                return_tensors="pt",
            )
            mask = batch["attention_mask"][..., None]
            hidden = self.model(**batch).last_hidden_state
            found[rows] = F.normalize((hidden * mask).sum(1) / mask.sum(1))
        self.seconds = (time.process_time() - began) / len(texts)
        return found


def train_recipe(model: str, data: str, folder: str, recipe: str = "intents") -> str:
    """A recipe on a data set; the folder of its model."""
    flags = {"model_name_or_path": model, "dataset": data, "output_dir": folder, "eval_episodes": "0"}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    MetaTrainer(parse([recipe, *words])).train()
    return f"{folder}/model"


@dataclass
class Target:
    """A data set to classify. draws: row numbers of the training file [draw][class][10]."""

    name: str
    train: list[dict[str, str]]
    test: list[dict[str, str]]
    classes: list[str]
    draws: list[list[list[int]]]

    @staticmethod
    def read(data: str, name: str) -> Target:
        train, test = rows_of(data, name, "train"), rows_of(data, name, "test")
        classes = sorted({row["label"] for row in train})
        draws = draws_of(name, np.array([row["label"] for row in train]), classes)
        return Target(name, train, test, classes, draws)

    def examples(self, draw: int, shots: int) -> list[dict[str, str]]:
        """The first `shots` rows of every class, class after class."""
        return [self.train[row] for of_class in self.draws[draw] for row in of_class[:shots]]


class Scorer:
    """Classifies a target's test rows with the features of an encoder, which are computed once."""

    def __init__(self, target: Target, encode: Encoder) -> None:
        self.target, self.encode = target, encode
        place = {one: number for number, one in enumerate(target.classes)}
        self.truth = torch.tensor([place[row["label"]] for row in target.test])
        self.queries = encode([row["text"] for row in target.test])
        self.per_query = encode.seconds
        self.names = encode([one.replace("_", " ").replace("-", " ") for one in target.classes])
        self.support: dict[tuple[int, int], Tensor] = {}

    def __call__(self, row: str, draw: int, shots: int, trained: float) -> dict[str, float]:
        """Numbers of a row for one draw; `trained`: CPU seconds that the encoder took for it."""
        _, classify, named = ROWS[row]
        count = len(self.target.classes)
        if (draw, shots) not in self.support:
            examples = self.target.examples(draw, shots)
            self.support[draw, shots] = self.encode([one["text"] for one in examples])
        support, labels = self.support[draw, shots], torch.arange(count).repeat_interleave(shots)
        if named:
            support, labels = torch.cat([support, self.names]), torch.cat([labels, torch.arange(count)])
        began = time.process_time()
        scores = classify(support, labels, self.queries, count)
        seconds = trained + len(support) * self.encode.seconds + time.process_time() - began
        score = episode_score(0, row, "", prediction_stats(scores, self.truth))
        return {
            "accuracy": round(score.accuracy, 5),
            "ece": round(cast(float, calibration_error([score])), 5),
            "seconds": round(seconds, 2),
            "queries_per_second": round(1 / self.per_query),
        }


def train_on_shots(asked: argparse.Namespace, target: Target, draw: int, shots: int) -> tuple[Encoder, float]:
    """The recipe `intents` on the examples of a draw; its encoder, and CPU seconds."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "examples")
        data.mkdir()
        rows = "".join(json.dumps(row) + "\n" for row in target.examples(draw, shots))
        (data / "train.jsonl").write_text(rows, encoding="utf-8")
        splits = {"train": target.classes, "valid": [], "test": []}
        (data / "class_splits.json").write_text(json.dumps(splits))
        encode = Encoder(train_recipe(asked.model, str(data), f"{folder}/run"))
    return encode, time.process_time() - began


def measure(asked: argparse.Namespace, name: str, encoder: str) -> None:
    """Add the draws that the rows of an encoder lack."""
    target = Target.read(asked.data, name)
    rows = [row for row in asked.rows if ROWS[row][0] == encoder]
    fixed: Scorer | None = None
    for shots, draw in itertools.product(asked.shots, range(asked.draws)):
        cells, key = read(asked.json), f"{shots} {draw}"
        todo = [row for row in rows if key not in cells.get(f"{name}: {row}", {})]
        if not todo:
            continue
        trained = 0.0
        if encoder == "shots":
            encode, trained = train_on_shots(asked, target, draw, shots)
            scorer = Scorer(target, encode)
        elif fixed is None:
            with tempfile.TemporaryDirectory() as folder:
                other = f"{asked.data}/{OTHER[name]}"
                path = train_recipe(asked.model, other, folder) if encoder == "other" else asked.model
                scorer = fixed = Scorer(target, Encoder(path))
        else:
            scorer = fixed
        cells = read(asked.json)
        found = {row: scorer(row, draw, shots, trained) for row in todo}
        keep(
            asked.json,
            {f"{name}: {row}": {**cells.get(f"{name}: {row}", {}), key: found[row]} for row in todo},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=list(OTHER), choices=list(OTHER))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--shots", nargs="+", type=int, default=list(SHOTS), choices=SHOTS)
    parser.add_argument("--draws", type=int, default=NUMBER)
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, encoder in itertools.product(asked.sets, dict.fromkeys(ROWS[row][0] for row in asked.rows)):
        measure(asked, name, encoder)
    print(show(read(asked.json)))


def show(cells: dict[str, Any]) -> str:
    """The table, in percent. Seconds are medians over the draws, texts a second those of five shots."""
    lines = []
    for name, row in itertools.product(OTHER, ROWS):
        cell = cells.get(f"{name}: {row}")
        if cell is None:
            continue
        of_shots = [[one for key, one in cell.items() if key.split()[0] == str(shots)] for shots in SHOTS]
        known = [found for found in of_shots if found]

        def column(form: Callable[[list[dict[str, float]]], str], of: list[Any] = of_shots) -> list[str]:
            return [form(found) if found else "" for found in of]

        lines.append(
            [
                name,
                row,
                " / ".join(str(len(found)) for found in of_shots),
                *column(
                    lambda found: format_interval(mean_ci95([one["accuracy"] for one in found]), ".2f", 100)
                ),
                *column(lambda found: f"{100 * np.mean([one['ece'] for one in found]):.1f}"),
                " / ".join(f"{np.median([one['seconds'] for one in found]):.1f}" for found in known),
                f"{np.median([one['queries_per_second'] for one in known[0]]):.0f}",
            ]
        )
    header = [
        "data set",
        "row",
        "draws",
        "5 shots",
        "10 shots",
        "ECE, 5",
        "ECE, 10",
        "CPU s",
        "texts a second",
    ]
    return table(header, lines)


if __name__ == "__main__":
    main()
