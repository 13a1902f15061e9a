"""On which tasks are gradient steps the right tool? Classes that unite unrelated intents.

    python -m benchmarks.regrouped --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--rows ...]

A task of BANKING77 has five classes of five intents each, drawn at random, as where one team answers
questions of five kinds: 20 support and 10 query texts of each class, and nothing says which intent a text
has. Training, validation and test tasks are made of the training, validation and test classes of split 01.
The mean of a class is near none of its intents wherever intents are told apart, so that prototypes must
fail. Meta-trained rows send about 33,000 rows of text forward and backward each.

Accuracy in percent on the same episode of each test task; gains are over frozen prototypes, paired by task,
with 95 % intervals (Student's t). nearest: the class of the nearest support example, on other draws from the
same tasks. The inner loop was chosen on validation tasks (docs/log.md). Finished rows lie in
results/regrouped.json and are not computed again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.common import keep, read, table
from benchmarks.full_way import Encoder, rows_of
from benchmarks.intents import COSINE
from fmmeta import Config, MetaTrainer, evaluate
from fmmeta.metrics.scores import format_interval, mean_ci95

RESULTS = Path(__file__).parent / "results" / "regrouped.json"
DATA = "banking77"
WAYS, INTENTS, SHOTS, QUERIES = 5, 5, 20, 10  # classes of a task, intents of a class, texts of a class
TASKS = {"train": 80, "valid": 10, "test": 30}
EPISODES = 20  # of the test tasks
PER_INTENT = 12  # texts of a task


def name_of(number: int) -> str:
    return f"team {number + 1}"


def write_tasks(data: str, folder: Path) -> str:
    """Tasks as a file with a column `task`, and which of them are for training, validation and test."""
    texts: dict[str, list[str]] = {}
    for row in rows_of(data, DATA, "train"):
        texts.setdefault(row["label"], []).append(row["text"])
    classes = json.loads(Path(data, DATA, "class_splits.json").read_text())["01"]
    rng, rows, splits = random.Random(0), list[dict[str, str]](), dict[str, list[str]]()
    for split, count in TASKS.items():
        splits[split] = [f"{split} {number}" for number in range(count)]
        for task in splits[split]:
            intents = rng.sample(classes[split], WAYS * INTENTS)
            for place, intent in enumerate(intents):
                for text in rng.sample(texts[intent], PER_INTENT):
                    rows.append({"task": task, "label": name_of(place % WAYS), "text": text})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "task_splits.json").write_text(json.dumps(splits))
    return str(folder)


TRAINING: dict[str, Any] = {
    "meta_batch_size": 4,
    "outer_lr": 5e-5,
    "lr_scheduler_type": "linear",
    "eval_episodes": 0,
    "save_steps": 0,
}
SHAPE: dict[str, Any] = {
    "num_query": QUERIES,
    "max_length": 64,
    "feature_norm": COSINE,
    "micro_batch_size": 128,
}
INNER: dict[str, Any] = {"inner_optimizer": "adamw", "inner_lr": 3e-4, "inner_steps": 8}
OF_FEATURES = ["prototype", "knn", "soft_kmeans", "sinkhorn", "linear"]
NEAREST = "nearest"
ROWS: dict[str, tuple[dict[str, Any] | None, list[str]]] = {  # meta-training, methods of the test
    "none": (None, OF_FEATURES),
    "none, inner loop": (None, ["finetune"]),
    "protonet": ({"algorithm": "protonet", "outer_steps": 55}, OF_FEATURES),
    "fomaml": ({"algorithm": "fomaml", "outer_steps": 10, **INNER}, ["finetune"]),
    "reptile": ({"algorithm": "reptile", "outer_steps": 10, **INNER}, ["finetune"]),
    # first-order ProtoMAML: the head begins at the class means, which have no gradient
    "proto_maml": (
        {"algorithm": "fomaml", "head_init": "prototype", "outer_steps": 10, **INNER},
        ["finetune"],
    ),
}
METRIC_BASED = [*OF_FEATURES[:4], NEAREST]


def run(row: str, model: str, data: str) -> dict[str, Any]:
    """Percent right in each episode by method, and processor minutes."""
    settings, methods = ROWS[row]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if settings is not None:
            config = Config(
                model_name_or_path=model,
                dataset=[data],
                output_dir=folder,
                n_way=WAYS,
                k_shot=SHOTS,
                **{**SHAPE, **TRAINING, **settings},
            )
            MetaTrainer(config).train()
            model = f"{folder}/model"
        inner = {**INNER, "head_init": "prototype"} if row == "none, inner loop" else {}
        found = evaluate(
            model,
            data,
            method=methods,
            n_way=str(WAYS),
            k_shot=[SHOTS],
            episodes=EPISODES,
            **SHAPE,
            **inner,
        )
        right = {
            cell["method"]: [round(100 * score["accuracy"], 2) for score in cell["scores"]]
            for cell in found["cells"]
        }
        if methods == OF_FEATURES:
            right[NEAREST] = nearest(model, data)
    return {"right": right, "cpu_minutes": round((time.process_time() - began) / 60, 1)}


def nearest(model: str, data: str) -> list[float]:
    """Percent of queries whose nearest support example is of their class, an episode of each test task."""
    rows = [json.loads(line) for line in Path(data, "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    encode, rng, right = Encoder(model), random.Random(1), list[float]()
    for task in json.loads(Path(data, "task_splits.json").read_text())["test"][:EPISODES]:
        support, query = list[dict[str, str]](), list[dict[str, str]]()
        for number in range(WAYS):
            of_class = [row for row in rows if row["task"] == task and row["label"] == name_of(number)]
            drawn = rng.sample(of_class, SHOTS + QUERIES)
            support += drawn[:SHOTS]
            query += drawn[SHOTS:]
        of_support, of_query = (encode([row["text"] for row in part]) for part in (support, query))
        places = (of_query @ of_support.T).argmax(1).tolist()
        hits = [support[place]["label"] == row["label"] for place, row in zip(places, query, strict=True)]
        right.append(100 * sum(hits) / len(hits))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_tasks(asked.data, Path(folder))
        for row in asked.rows:
            if row not in read(asked.json):
                keep(asked.json, {row: run(row, asked.model, data)})
    print(show(read(asked.json)))


def show(cells: dict[str, Any]) -> str:
    """The table, and how far each inner loop is above the best metric-based row."""
    frozen = cells["none"]["right"]["prototype"]
    lines, means = list[list[str]](), dict[tuple[str, str], float]()
    for row in ROWS:
        for method, right in cells.get(row, {"right": {}})["right"].items():
            means[row, method] = mean(right)
            gain = [one - other for one, other in zip(right, frozen, strict=True)]
            shown = format_interval(mean_ci95(gain), "+.1f") if any(gain) and method != NEAREST else ""
            lines.append([row, method, format_interval(mean_ci95(right), ".1f"), shown])
    best = max((one for one in means if one[1] in METRIC_BASED), key=lambda one: means[one])
    for line, one in zip(lines, means, strict=True):
        line.append(f"{means[one] - means[best]:+.1f}" if one[1] == "finetune" else "")
    header = ["meta-training", "method", "accuracy", "gain", f"above {best[0]}+{best[1]}"]
    return table(header, lines)


if __name__ == "__main__":
    main()
