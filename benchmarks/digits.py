"""Does meta-training on four digits help with three others, beyond comparing pixels?

    python -m benchmarks.digits --json benchmarks/results/digits.json

The suite `digits`, 3-way 1-shot: ProtoNet and FOMAML from random weights beside prototypes of raw pixels (the
nearest support image by Euclidean distance), on the same episodes of the test and of the validation classes.
Prints accuracies, and paired differences with 95 % intervals. Runs that the JSON file holds are kept.

Four classes are too few to learn from. So the training data are classes that are made from them (task
augmentation, Ni et al. 2021, arXiv 2010.07092): a class is joined with half of another one or not, turned and
mirrored, and bent, all of its images alike; then each image is bent a little by itself. Held-out images stay
as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel

import fmmeta
from benchmarks.common import read, table, write_json
from fmmeta import Config, MetaTrainer
from fmmeta.evaluation.command import Episodes, episodes_of
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.metrics.scores import mean_ci95
from fmmeta.models.load import describe, load_tokenizer
from fmmeta.models.tiny import image_settings, tiny_vit_config
from fmmeta.tasks.data.images import ImageReader, decode
from fmmeta.tasks.suites import digits

SPLITS = {"test": "7, 8, 9", "valid": "4, 5, 6"}
CLASSES, IMAGES = 1000, 20  # made from the training classes, and images of each
SHARED: dict[str, Any] = {
    "k_shot": 1,
    "num_query": 5,
    "pooling": "mean",
    "micro_batch_size": 64,
    "outer_lr": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50.0,
    "adam_epsilon": 1e-8,
    "eval_episodes": 0,
    "num_workers": "0",
    "save_steps": 0,
    "logging_steps": 100,
}
RULES: dict[str, dict[str, Any]] = {
    "protonet": {"outer_steps": 1200, "n_way": 8, "meta_batch_size": 2},
    "fomaml": {
        "outer_steps": 500,
        "n_way": 3,
        "meta_batch_size": 4,
        "inner_steps": 3,
        "inner_lr": 0.01,
        "head_init": "prototype",
    },
}
JOINED = 0.9  # share of the classes that are joined with another one
OF_CLASS, OF_IMAGE = (0.2, 0.3), (0.1, 0.1)  # spread of affine maps and of bends, in half widths of an image


def places(rng: np.random.Generator, count: int, affine: float, elastic: float, size: int) -> torch.Tensor:
    """Places of pixels [count, size, size, 2]: affine maps near the identity, and smooth bends."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    maps, shifts = torch.eye(2) + affine * normal(count, 2, 2), 0.5 * affine * normal(count, 2, 1)
    grid = F.affine_grid(torch.cat([maps, shifts], 2), [count, 1, size, size], align_corners=False)
    bends = elastic * normal(count, 2, 3, 3)
    bends = F.interpolate(bends, size=(size, size), mode="bilinear", align_corners=True)
    return grid + bends.permute(0, 2, 3, 1)


def sampled(images: np.ndarray, grid: torch.Tensor) -> np.ndarray:
    """Images uint8 [N, H, W] at the places of a grid, bilinear."""
    pixels = torch.from_numpy(images.copy()).float()[:, None]
    found = F.grid_sample(pixels, grid, align_corners=False)
    return found[:, 0].round().clamp(0, 255).to(torch.uint8).numpy()


def made_classes(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Rows of `CLASSES` classes that are made from the training classes of the suite."""
    rows, splits = digits()
    by_class = [
        np.stack([row.values["image"] for row in rows if row.values["label"] == name])
        for name in splits["train"]
    ]
    found = []
    for number in range(CLASSES):
        own, other = (
            images[rng.permutation(len(images))[:IMAGES]]
            for images in (by_class[i] for i in rng.integers(len(by_class), size=2))
        )
        images = joined(rng, own, other) if rng.random() < JOINED else own
        turns = int(rng.integers(8))
        images = np.rot90(images, turns % 4, (1, 2))
        images = images[:, :, ::-1] if turns >= 4 else images
        size = images.shape[-1]
        images = sampled(images, places(rng, 1, *OF_CLASS, size).expand(len(images), -1, -1, -1))
        images = sampled(images, places(rng, len(images), *OF_IMAGE, size))
        found += [{"image": image, "label": f"made {number}"} for image in images]
    return found


def joined(rng: np.random.Generator, images: np.ndarray, others: np.ndarray) -> np.ndarray:
    """One half of each image replaced by that of another class's, or both on top of each other."""
    made, middle, kind = images.copy(), images.shape[1] // 2, int(rng.integers(3))
    if kind == 0:
        made[:, middle:] = others[:, middle:]
    elif kind == 1:
        made[:, :, middle:] = others[:, :, middle:]
    else:
        made = np.maximum(images, others)
    return made


def episodes(asked: int, split: str = "test") -> Episodes:
    """The held-out episodes, as `fmmeta evaluate` chooses them."""
    settings = EvaluateConfig(
        model_name_or_path="tiny",
        dataset=["digits"],
        n_way="3",
        k_shot=[1],
        num_query=5,
        episodes=asked,
        eval_split=split,
    )
    config = settings.run_config()
    return episodes_of(settings, 1, load_tokenizer(config, describe(config), print))


def pixel_scores(chosen: Episodes) -> list[float]:
    """Accuracy of the nearest support image of each held-out episode."""
    found = []
    for draw in chosen.draws():
        support, query = (
            np.stack([decode(draw.store.image(row))[..., 0].ravel() / 255 for row, _ in rows])
            for rows in (draw.support, draw.query)
        )
        labels = np.array([label for _, label in draw.support])
        nearest = ((query[:, None] - support[None]) ** 2).sum(-1).argmin(1)
        found.append(float((labels[nearest] == [label for _, label in draw.query]).mean()))
    return found


def train(rule: str, seed: int, folder: Path, **settings: Any) -> str:
    """Meta-train the built-in model from random weights on made classes; return the model's folder."""
    torch.manual_seed(seed)
    AutoModel.from_config(tiny_vit_config()).save_pretrained(folder / "start")
    ImageReader(image_settings()).save_pretrained(folder / "start")
    rows = made_classes(np.random.default_rng(seed))
    names = sorted({row["label"] for row in rows})
    (folder / "splits.json").write_text(json.dumps({"train": names}))
    given = {
        **SHARED,
        **RULES[rule],
        "algorithm": rule,
        "seed": seed,
        "class_splits": str(folder / "splits.json"),
    }
    given |= {"model_name_or_path": str(folder / "start"), "output_dir": str(folder / "run"), **settings}
    MetaTrainer(Config(**given), dataset=rows).train()
    return str(folder / "run" / "model")


def scores_of(model: str, asked: int, split: str) -> list[float]:
    """Accuracy of each held-out episode, learned as the model was trained."""
    shape = {"n_way": "3", "k_shot": [1], "num_query": 5, "eval_split": split}
    (cell,) = fmmeta.evaluate(model, "digits", episodes=asked, **shape)["cells"]
    return [score["accuracy"] for score in cell["scores"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--episodes", type=int, default=600)
    asked = parser.parse_args()
    runs = read(asked.json).get("runs", {}) if asked.json.is_file() else {}
    pixels = {split: pixel_scores(episodes(asked.episodes, split)) for split in SPLITS}
    for seed in asked.seeds:
        for rule in RULES:
            if (name := f"{rule} {seed}") in runs:
                continue
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                began = time.perf_counter()
                model = train(rule, seed, Path(folder))
                seconds = round(time.perf_counter() - began)
                scores = {split: scores_of(model, asked.episodes, split) for split in SPLITS}
            runs[name] = {"seconds": seconds, "scores": scores}
            print(name, seconds, *(summary(scores[split], pixels[split]) for split in SPLITS), flush=True)
            results = {"episodes": asked.episodes, "pixels": pixels, "runs": runs}
            write_json(asked.json, {**results, "rows": rows_of(pixels, runs)})
    print(table(["classes", "rule", "accuracy %", "minus raw pixels", "each seed"], rows_of(pixels, runs)))


def summary(scores: list[float], pixels: list[float]) -> tuple[str, str]:
    """Accuracy, and its paired difference to that of pixels, in points with 95 % intervals."""
    gain = [one - other for one, other in zip(scores, pixels, strict=True)]
    accuracy, difference = ([100 * float(part or 0) for part in mean_ci95(one)] for one in (scores, gain))
    return f"{accuracy[0]:.1f} ± {accuracy[1]:.1f}", f"{difference[0]:+.1f} ± {difference[1]:.1f}"


def rows_of(pixels: dict[str, list[float]], runs: dict[str, Any]) -> list[list[str]]:
    """The table: of each split raw pixels, then each rule by the mean over its seeds of every episode."""
    rows = []
    for split, classes in SPLITS.items():
        rows.append([classes, "raw pixels", summary(pixels[split], pixels[split])[0], "", ""])
        for rule in RULES:
            mine = [run["scores"][split] for name, run in runs.items() if name.startswith(f"{rule} ")]
            if mine:
                each = ", ".join(summary(one, pixels[split])[1].split()[0] for one in mine)
                rows.append([classes, rule, *summary(np.mean(mine, axis=0).tolist(), pixels[split]), each])
    return rows


if __name__ == "__main__":
    main()
