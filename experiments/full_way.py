"""full_way.yaml: all classes of a data set from a few examples each, on its test file."""

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.data import Encoder, texts_of, write_csv
from fmmeta.evaluation import methods
from fmmeta.metrics.scores import calibration_error, episode_score, prediction_stats


@lru_cache(2)
def encoded(model: str, data: str, name: str) -> tuple[Any, ...]:
    """Encoder, features and classes of the texts of the test file, CPU seconds of a text."""
    encode, texts, truth = Encoder(model), list[str](), list[int]()
    for place, (_, of_class) in enumerate(sorted(texts_of(data, name, "test").items())):
        texts += of_class
        truth += [place] * len(of_class)
    return encode, encode(texts), torch.tensor(truth), encode.seconds


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Accuracy, calibration error, CPU seconds to learn and answer, test texts encoded per CPU second."""
    name, shots, draw = (cell.axes[axis] for axis in ("set", "shots", "draw"))
    folder, examples = Path(study.folder, f"{name} {shots} {draw}"), dict[str, list[str]]()
    for place, (label, texts) in enumerate(sorted(texts_of(study.data, name, "train").items())):
        chosen = np.random.default_rng([draw, place]).choice(len(texts), 10, False)
        examples[label] = [texts[row] for row in chosen[:shots]]
    write_csv(folder / "my.csv", examples)
    (folder / "splits.json").write_text(json.dumps({"train": [*examples], "valid": [], "test": []}))
    model, trained = study.trained(cell)
    encode, queries, truth, per_query = encoded(model, study.data, name)
    named = examples if cell.settings["named"] else ()
    texts = [label.replace("_", " ").replace("-", " ") for label in named]
    texts += [text for of_class in examples.values() for text in of_class]
    began, labels = time.process_time(), torch.arange(len(examples))
    labels = torch.cat([labels[: len(named)], labels.repeat_interleave(shots)])
    support = encode(texts)
    scores = getattr(methods, cell.settings["method"])(support, labels, queries, len(examples))
    score = episode_score(0, name, "", prediction_stats(scores, truth))
    seconds = time.process_time() - began + (trained if cell.settings["on_shots"] else 0)
    found = {"accuracy": score.accuracy, "ece": calibration_error([score])}
    return {**found, "seconds": round(seconds, 2), "queries_per_second": round(1 / per_query)}
