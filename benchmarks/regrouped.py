"""On which tasks are gradient steps the right tool? Classes that unite unrelated intents.

    python -m benchmarks.regrouped --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--rows ...]

A task has five classes of five intents each, drawn at random, as where one team answers questions of five
kinds: 20 support and 10 query texts of each class, not told apart by intent. Training, validation and test
tasks come from the training, validation and test classes of split 01 of the data set. The mean of a class is
near none of its intents, in whatever space intents are told apart, so that prototypes must fail; fine-tuning
need not. Meta-trained rows see ROWS rows of text through forward and backward passes each.

Accuracy in percent over EPISODES test tasks, the same for all rows; gains are over frozen prototypes, paired by
task, 95 % intervals (Student's t). Inner loops were chosen on validation tasks (docs/log.md). Finished cells
lie in results/regrouped.json and are not computed again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import keep, read, table
from benchmarks.full_way import rows_of
from fmmeta import Config, MetaTrainer, evaluate
from fmmeta.metrics.scores import format_interval, mean_ci95

RESULTS = Path(__file__).parent / "results" / "regrouped.json"
WAYS, INTENTS, SHOTS, QUERIES = 5, 5, 20, 10  # classes of a task, intents of a class, texts of a class
TASKS = {"train": 80, "valid": 10, "test": 30}
EPISODES = TASKS["test"]
PER_INTENT = 12  # texts of a task


def write_tasks(data: str, name: str, folder: Path) -> str:
    """Tasks as a file with a column `task`, and which of them are for training, validation and test."""
    texts: dict[str, list[str]] = {}
    for row in rows_of(data, name, "train"):
        texts.setdefault(row["label"], []).append(row["text"])
    classes = json.loads(Path(data, name, "class_splits.json").read_text())["01"]
    rng, rows, splits = random.Random(0), list[dict[str, str]](), dict[str, list[str]]()
    for split, count in TASKS.items():
        splits[split] = [f"{split} {number}" for number in range(count)]
        for task in splits[split]:
            intents = rng.sample(classes[split], WAYS * INTENTS)
            for place, intent in enumerate(intents):
                for text in rng.sample(texts[intent], PER_INTENT):
                    rows.append({"task": task, "label": f"team {place % WAYS + 1}", "text": text})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "task_splits.json").write_text(json.dumps(splits))
    return str(folder)
