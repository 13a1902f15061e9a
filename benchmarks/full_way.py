"""All classes of an intent data set at once, from five or ten examples of each: how far do the other set's
classes help?

    python -m benchmarks.full_way --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--rows ...]

The official test file, all 77 (150) classes. Examples are drawn from the training file, ten of each class and
draw, of which K = 5 takes the first five; their row numbers lie in results/full_way_draws.json. An encoder
"on the other set" comes from the recipe `intents` on the training classes of split 01 of that set: 50 of
CLINC150, 25 of BANKING77. Classifiers look at frozen features of length 1; those with names have the name of
each class among its examples.

Labels of the data set itself were read earlier: the recipe was chosen on the validation classes of split 01
of both sets, and C of logistic regression on 50 classes of BANKING77 (docs/log.md).

Accuracy and calibration error in percent, mean and 95 % interval over the draws; CPU seconds to
encode the examples, fit a classifier and score all encoded test texts; test texts encoded per CPU second.

Finished cells lie in results/full_way.json; an encoder's rows are computed together.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Iterator
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


def train_recipe(model: str, data: str, folder: str) -> str:
    """The recipe `intents` on a data set; the folder of its model."""
    flags = {"model_name_or_path": model, "dataset": data, "output_dir": folder, "eval_episodes": "0"}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    MetaTrainer(parse(["intents", *words])).train()
    return f"{folder}/model"


def cells_of(asked: argparse.Namespace, name: str, encoder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cells of an encoder's rows on a data set."""
    train, test = rows_of(asked.data, name, "train"), rows_of(asked.data, name, "test")
    classes = sorted({row["label"] for row in train})
    place = {one: number for number, one in enumerate(classes)}
    draws = draws_of(name, np.array([row["label"] for row in train]), classes)
    truth = torch.tensor([place[row["label"]] for row in test])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.model
        if encoder == "other":
            path = train_recipe(asked.model, f"{asked.data}/{OTHER[name]}", folder)
        trained, encode = time.process_time() - began, Encoder(path)
    queries = encode([row["text"] for row in test])
    per_query = encode.seconds
    names = encode([one.replace("_", " ").replace("-", " ") for one in classes])
    drawn = sorted({row for draw in draws for of_class in draw for row in of_class})
    features = dict(zip(drawn, encode([train[row]["text"] for row in drawn]), strict=True))
    for row in asked.rows:
        of_row, classify, named = ROWS[row]
        if of_row != encoder:
            continue
        cell: dict[str, Any] = {"training_minutes": round(trained / 60, 2), "shots": {}}
        for shots in SHOTS:
            accuracy, error, seconds = [], [], []
            for draw in draws:
                rows = [(features[one], label) for label, found in enumerate(draw) for one in found[:shots]]
                rows += [(one, label) for label, one in enumerate(names) if named]
                support, labels = (
                    torch.stack([one for one, _ in rows]),
                    torch.tensor([one for _, one in rows]),
                )
                start = time.process_time()
                scores = classify(support, labels, queries, len(classes))
                seconds.append(time.process_time() - start + len(rows) * encode.seconds)
                score = episode_score(0, row, "", prediction_stats(scores, truth))
                accuracy.append(round(score.accuracy, 5))
                error.append(round(cast(float, calibration_error([score])), 5))
            cell["shots"][str(shots)] = {
                "accuracy": accuracy,
                "ece": error,
                "adaptation_seconds": round(float(np.median(seconds)), 2),
                "queries_per_second": round(1 / per_query),
            }
        yield f"{name}: {row}", cell


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=list(OTHER), choices=list(OTHER))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.sets:
        for encoder in ("frozen", "other"):
            wanted = {f"{name}: {row}" for row in asked.rows if ROWS[row][0] == encoder}
            if not wanted <= read(asked.json).keys():
                keep(asked.json, dict(cells_of(asked, name, encoder)))
    print(show(read(asked.json)))


def show(cells: dict[str, Any]) -> str:
    lines = []
    for name in OTHER:
        for row in ROWS:
            cell = cells.get(f"{name}: {row}")
            if cell is None:
                continue
            of_shots = [cell["shots"][str(shots)] for shots in SHOTS]
            lines.append(
                [
                    name,
                    row,
                    *(format_interval(mean_ci95(one["accuracy"]), ".2f", 100) for one in of_shots),
                    *(f"{100 * np.mean(one['ece']):.1f}" for one in of_shots),
                    " / ".join(f"{one['adaptation_seconds']:.1f}" for one in of_shots),
                    str(of_shots[0]["queries_per_second"]),
                ]
            )
    header = ["data set", "row", "5 shots", "10 shots", "ECE, 5", "ECE, 10", "CPU s", "texts a second"]
    return table(header, lines)


if __name__ == "__main__":
    main()
