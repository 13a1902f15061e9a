"""On which tasks are gradient steps the right tool? Two families of tasks on which class means fail.

    python -m benchmarks.gradient_steps --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--rows ...]

records     A record lists one thing of each of ten kinds (an animal, a tool, ...) in any order. A task sorts
            records into five classes by one of the kinds, and nothing says by which; the nine other things
            are drawn from five each. An embedding must hold all ten things, so that most of a distance is
            noise. No thing of a test task is in a training task.
regrouped   Classes that unite five unrelated intents of BANKING77 each, as where one team answers questions
            of five kinds; training, validation and test tasks are made of those classes of split 01.

Accuracy in percent on the same episode of each test task; gains are over frozen prototypes, paired by task,
with 95 % intervals (Student's t). nearest: the class of the nearest support example, on other draws from the
same tasks. The rows of a family see about the same number of texts in training. The inner loops were
chosen on validation tasks (docs/log.md); the higher rate of heads in `records` was set after a test score of
FOMAML had been seen. Finished rows are stored in results/gradient_steps.json and are not
computed again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.common import keep, read, table
from benchmarks.full_way import Encoder, rows_of
from benchmarks.intents import COSINE
from fmmeta import Config, MetaTrainer, evaluate
from fmmeta.metrics.scores import format_interval, mean_ci95
from fmmeta.tasks.word_suite import BY_CATEGORY

RESULTS = Path(__file__).parent / "results" / "gradient_steps.json"
WAYS, QUERIES = 5, 10  # classes of a task, queries of a class
INTENTS, PER_INTENT = 5, 12  # intents of a class, texts of an intent in a task

Rows = list[dict[str, str]]


def regrouped(data: str, rng: random.Random) -> Callable[[str], Rows]:
    texts: dict[str, list[str]] = {}
    for row in rows_of(data, "banking77", "train"):
        texts.setdefault(row["label"], []).append(row["text"])
    classes = json.loads(Path(data, "banking77", "class_splits.json").read_text())["01"]

    def task(split: str) -> Rows:
        intents = rng.sample(classes[split], WAYS * INTENTS)
        return [
            {"label": name_of(place % WAYS), "text": text}
            for place, intent in enumerate(intents)
            for text in rng.sample(texts[intent], PER_INTENT)
        ]

    return task


def records(data: str, rng: random.Random) -> Callable[[str], Rows]:
    of_test = {kind: rng.sample(things, len(things) // 2) for kind, things in BY_CATEGORY.items()}

    def task(split: str) -> Rows:
        decides, things = rng.choice(sorted(BY_CATEGORY)), dict[str, list[str]]()
        for kind, every in BY_CATEGORY.items():
            allowed = [one for one in every if (one in of_test[kind]) == (split == "test")]
            things[kind] = rng.sample(allowed, WAYS)
        rows = Rows()
        for place in [*range(WAYS)] * (max(FAMILIES["records"].shots) + QUERIES):
            record = [some[place] if kind == decides else rng.choice(some) for kind, some in things.items()]
            rows.append({"label": name_of(place), "text": ", ".join(rng.sample(record, len(record)))})
        return rows

    return task


@dataclass(frozen=True)
class Family:
    """Tasks of a kind, and how rules train on them."""

    tasks: Callable[[str, random.Random], Callable[[str], Rows]]  # data and generator -> rows of a task
    shots: list[int]  # of the test; training has the last
    count: dict[str, int]  # tasks for training, validation and test
    episodes: int  # of the test
    inner: dict[str, Any]
    zero_head: dict[str, Any]  # settings of an inner loop whose head begins with zeros
    outer_steps: tuple[int, int]  # of ProtoNet, and of rules with an inner loop


FAMILIES = {
    "records": Family(
        records,
        shots=[2, 5],
        count={"train": 200, "valid": 10, "test": 40},
        episodes=40,
        inner={"inner_optimizer": "adamw", "inner_lr": 3e-4, "inner_steps": 6},
        zero_head={"inner_lr_groups": ["head=30"]},
        outer_steps=(66, 25),
    ),
    "regrouped": Family(
        regrouped,
        shots=[20],
        count={"train": 80, "valid": 10, "test": 30},
        episodes=20,
        inner={"inner_optimizer": "adamw", "inner_lr": 3e-4, "inner_steps": 8},
        zero_head={},
        outer_steps=(55, 10),
    ),
}
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
OF_FEATURES = ["prototype", "knn", "soft_kmeans", "sinkhorn", "linear"]
NEAREST = "nearest"
ROWS: dict[str, tuple[dict[str, Any] | None, list[str]]] = {  # meta-training, methods of the test
    "none": (None, OF_FEATURES),
    "none, inner loop": (None, ["finetune"]),
    "protonet": ({"algorithm": "protonet"}, OF_FEATURES),
    "fomaml": ({"algorithm": "fomaml"}, ["finetune"]),
    "reptile": ({"algorithm": "reptile"}, ["finetune"]),
    # first-order ProtoMAML: the head begins at the class means, which have no gradient
    "proto_maml": ({"algorithm": "fomaml", "head_init": "prototype"}, ["finetune"]),
}
METRIC_BASED = [*OF_FEATURES[:4], NEAREST]


def name_of(number: int) -> str:
    return f"team {number + 1}"


def write_tasks(data: str, name: str, folder: Path) -> str:
    """Tasks as a file with a column `task`, and which of them are for training, validation and test."""
    family, rows, splits = FAMILIES[name], Rows(), dict[str, list[str]]()
    draw = family.tasks(data, random.Random(0))
    for split, count in family.count.items():
        splits[split] = [f"{split} {number}" for number in range(count)]
        rows += [{"task": task, **row} for task in splits[split] for row in draw(split)]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "task_splits.json").write_text(json.dumps(splits))
    return str(folder)


def run(family: Family, row: str, model: str, data: str) -> dict[str, Any]:
    """Percent right in each episode by number of examples and method, and processor minutes."""
    settings, methods = ROWS[row]
    learns = methods == ["finetune"]
    inner = family.inner if learns else {}
    if learns and settings and "head_init" not in settings:
        inner = {**inner, **family.zero_head}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if settings is not None:
            config = Config(
                model_name_or_path=model,
                dataset=[data],
                output_dir=folder,
                n_way=WAYS,
                k_shot=family.shots[-1],
                outer_steps=family.outer_steps[learns],
                **{**SHAPE, **TRAINING, **inner, **settings},
            )
            MetaTrainer(config).train()
            model = f"{folder}/model"
        of_frozen = {**inner, "head_init": "prototype"} if learns and settings is None else {}
        found = evaluate(
            model,
            data,
            method=methods,
            n_way=str(WAYS),
            k_shot=family.shots,
            episodes=family.episodes,
            **SHAPE,
            **of_frozen,
        )
        right: dict[str, dict[str, list[float]]] = {str(shots): {} for shots in family.shots}
        for cell in found["cells"]:
            scores = [round(100 * score["accuracy"], 2) for score in cell["scores"]]
            right[str(cell["k_shot"])][cell["method"]] = scores
        if methods == OF_FEATURES:
            for shots in family.shots:
                right[str(shots)][NEAREST] = nearest(model, data, shots, family.episodes)
    return {"right": right, "cpu_minutes": round((time.process_time() - began) / 60, 1)}


def nearest(model: str, data: str, shots: int, episodes: int) -> list[float]:
    """Percent of queries whose nearest support example is of their class, an episode of each test task."""
    rows = [json.loads(line) for line in Path(data, "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    encode, rng, right = Encoder(model), random.Random(1), list[float]()
    for task in json.loads(Path(data, "task_splits.json").read_text())["test"][:episodes]:
        support, query = Rows(), Rows()
        for number in range(WAYS):
            of_class = [row for row in rows if row["task"] == task and row["label"] == name_of(number)]
            drawn = rng.sample(of_class, shots + QUERIES)
            support += drawn[:shots]
            query += drawn[shots:]
        of_support, of_query = (encode([row["text"] for row in part]) for part in (support, query))
        places = (of_query @ of_support.T).argmax(1).tolist()
        hits = [support[place]["label"] == row["label"] for place, row in zip(places, query, strict=True)]
        right.append(100 * sum(hits) / len(hits))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.families:
            data = write_tasks(asked.data, name, Path(folder, name))
            for row in asked.rows:
                if f"{name}: {row}" not in read(asked.json):
                    keep(asked.json, {f"{name}: {row}": run(FAMILIES[name], row, asked.model, data)})
                    print(show(read(asked.json)), flush=True)
    print(show(read(asked.json)))


def show(cells: dict[str, Any]) -> str:
    """A table for each family, and how far each inner loop is above the best metric-based row."""
    return "\n\n".join(
        f"{name}\n\n{show_family(name, cells)}" for name in FAMILIES if f"{name}: none" in cells
    )


def show_family(name: str, cells: dict[str, Any]) -> str:
    header, columns = ["meta-training", "method"], list[list[str]]()
    found = {row: cells[f"{name}: {row}"]["right"] for row in ROWS if f"{name}: {row}" in cells}
    keys = [(row, method) for row, right in found.items() for method in next(iter(right.values()))]
    for shots in map(str, FAMILIES[name].shots):
        right = {(row, method): found[row][shots][method] for row, method in keys}
        frozen = right["none", "prototype"]
        best = max((key for key in keys if key[1] in METRIC_BASED), key=lambda key: mean(right[key]))
        header += [f"{shots} examples", "gain", f"above {best[0]}+{best[1]}"]
        columns.append([format_interval(mean_ci95(right[key]), ".1f") for key in keys])
        columns.append(
            [
                ""
                if key in (("none", "prototype"), (key[0], NEAREST))
                else format_interval(
                    mean_ci95([one - other for one, other in zip(right[key], frozen, strict=True)]), "+.1f"
                )
                for key in keys
            ]
        )
        columns.append(
            [f"{mean(right[key]) - mean(right[best]):+.1f}" if key[1] == "finetune" else "" for key in keys]
        )
    return table(header, [[*key, *row] for key, row in zip(keys, zip(*columns, strict=True), strict=True)])


if __name__ == "__main__":
    main()
