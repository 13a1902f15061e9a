"""Texts and images that studies make data sets of, and sentence vectors."""

from __future__ import annotations

import csv
import gzip
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from fmmeta.tasks.word_suite import BY_CATEGORY

Texts = dict[str, list[str]]  # by class
Rows = list[tuple[int, str]]  # class and text of a task


def read_rows(data: str, name: str, part: str) -> list[dict[str, str]]:
    """The rows of a part of a data set."""
    file = Path(data, name, f"{part}.jsonl")
    packed = file.with_suffix(".jsonl.gz")
    text = gzip.decompress(packed.read_bytes()) if packed.is_file() else file.read_bytes()
    return [json.loads(line) for line in text.decode().splitlines()]


def texts_of(data: str, name: str, part: str) -> Texts:
    """The texts of each class of a part of a data set, in the order of its file."""
    found = defaultdict[str, list[str]](list)
    for row in read_rows(data, name, part):
        found[row["label"]].append(row["text"])
    return found


def lists_of_things(kinds: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    """Texts that list two things of each kind among two others."""
    others, texts = [one for kind, words in BY_CATEGORY.items() if kind not in kinds for one in words], []
    for _ in range(count):
        things = [one for kind in kinds for one in rng.sample(BY_CATEGORY[kind], 2)] + rng.sample(others, 2)
        texts.append(", ".join(rng.sample(things, len(things))))
    return texts


def regrouped(data: str, rng: random.Random) -> Callable[[str], Rows]:
    """Classes that unite five intents, twelve texts of each."""
    texts = texts_of(data, "banking77", "train")
    classes = json.loads(Path(data, "banking77", "class_splits.json").read_text())["01"]

    def task(split: str) -> Rows:
        intents = enumerate(rng.sample(classes[split], 25))
        return [(place % 5, text) for place, one in intents for text in rng.sample(texts[one], 12)]

    return task


def records(data: str, rng: random.Random) -> Callable[[str], Rows]:
    """Lists of ten things, of which one decides the class; no thing of a test task is in a training task."""
    of_test = {kind: rng.sample(things, len(things) // 2) for kind, things in BY_CATEGORY.items()}

    def task(split: str) -> Rows:
        decides, things, rows = rng.choice(sorted(BY_CATEGORY)), dict[str, list[str]](), Rows()
        for kind, every in BY_CATEGORY.items():
            allowed = [one for one in every if (one in of_test[kind]) == (split == "test")]
            things[kind] = rng.sample(allowed, 5)
        for place in [*range(5)] * 15:
            record = [some[place] if kind == decides else rng.choice(some) for kind, some in things.items()]
            rows.append((place, ", ".join(rng.sample(record, len(record)))))
        return rows

    return task


def write_csv(file: Path, texts: Texts) -> None:
    """A data set that a user may have: columns `text` and `label`, class after class."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as opened:
        rows = [(text, label) for label, of_class in texts.items() for text in of_class]
        csv.writer(opened).writerows([("text", "label"), *rows])


def bent(rng: np.random.Generator, images: np.ndarray, alike: bool) -> np.ndarray:
    """Images uint8 [N, H, W] after small affine maps and smooth bends, all alike or each its own."""
    count, (affine, elastic) = (1, (0.2, 0.3)) if alike else (len(images), (0.1, 0.1))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(count, *shape))).float()

    shape, maps = images.shape[1:], [torch.eye(2) + affine * normal(2, 2), 0.5 * affine * normal(2, 1)]
    bends = F.interpolate(elastic * normal(2, 3, 3), size=shape, mode="bilinear", align_corners=True)
    grid = F.affine_grid(torch.cat(maps, 2), [count, 1, *shape], align_corners=False) + bends.permute(
        0, 2, 3, 1
    )
    pixels = torch.from_numpy(images.copy()).float()[:, None]
    found = F.grid_sample(pixels, grid.expand(len(images), -1, -1, -1), align_corners=False)[:, 0]
    return found.round().clamp(0, 255).to(torch.uint8).numpy()


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
        for rows in torch.tensor(order).split(64):
            of_batch = [texts[row] for row in rows]
            batch = self.tokenizer(
                of_batch, padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None]
            hidden = self.model(**batch).last_hidden_state
            found[rows] = F.normalize((hidden * mask).sum(1) / mask.sum(1))
        self.seconds = (time.process_time() - began) / len(texts)
        return found
