"""small_sets.yaml: a CSV of few classes, and gains of the recipe on classes outside it."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch

from experiments.data import Encoder, Texts, lists_of_things, texts_of, write_csv
from fmmeta.evaluation.tune import SHOTS, class_accuracies
from fmmeta.tasks.word_suite import BY_CATEGORY


def drawn(data: str, name: str, size: int, rows: int, draw: int, source: dict[str, Any]) -> list[Texts]:
    """The texts of the CSV, and of up to 40 classes outside it."""
    rng = random.Random(f"{name} {size} x {rows} draw {draw}")
    if name == "generated":
        kinds = rng.sample([*itertools.combinations(sorted(BY_CATEGORY), 3)], size + 40)
        parts = (kinds[:size], rows), (kinds[size:], 30)
        return [{", ".join(one): lists_of_things(one, count, rng) for one in part} for part, count in parts]
    texts, tested = (texts_of(data, source["folder"], part) for part in source["parts"])
    enough = sorted(label for label, of_class in texts.items() if len(of_class) >= rows)
    inside = {label: rng.sample(texts[label], rows) for label in rng.sample(enough, size)}
    rest = sorted(tested.keys() - inside.keys())
    return [inside, {label: rng.sample(tested[label], 30) for label in rng.sample(rest, min(40, len(rest)))}]


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Gains by class and number of examples, CPU seconds, and what the recipe chose."""
    inside, outside = drawn(study.data, **cell.settings["drawn"])
    write_csv(Path(study.folder, cell.name, "my.csv"), inside)
    trained, seconds = study.trained(cell)
    run = json.loads(Path(trained).with_name("run.json").read_text())
    encoders = [Encoder(study.model), Encoder(trained)]
    features = [[encode(texts) for texts in outside.values()] for encode in encoders]
    # CPU seconds do not measure a training on a GPU
    cpu_seconds = None if torch.cuda.is_available() else round(seconds)
    found: dict[str, Any] = {"cpu_seconds": cpu_seconds, "frozen": {}, "gains": {}}
    for shots in SHOTS:
        frozen, ours = (class_accuracies(each, 5, shots, 2000) for each in features)
        found["frozen"][str(shots)] = round(float(frozen.mean()), 4)
        found["gains"][str(shots)] = dict(zip(outside, (ours - frozen).round(4).tolist(), strict=True))
    return {**found, "outer_steps": run["outer_steps"], "init_interpolation": run["init_interpolation"]}
