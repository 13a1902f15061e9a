"""Does meta-training on four digits help with three others, beyond comparing pixels?

    python -m benchmarks.digits --json benchmarks/results/digits.json

The suite `digits`, 3-way 1-shot: ProtoNet and FOMAML from random weights beside prototypes of raw pixels (the
nearest support image by Euclidean distance), on the same held-out episodes. Prints accuracies, and paired
differences with 95 % intervals. Runs that the JSON file holds are not done again.

Four classes are too few to learn from. So the classes of a training episode are made from them (task
augmentation, Ni et al. 2021, arXiv 2010.07092): each class is joined with a half of another one or not,
turned and mirrored, and bent, all of its images alike; then each image is bent a little by itself. Held-out
images stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import fmmeta
from benchmarks.common import read, table, write_json
from fmmeta import Config, MetaTrainer
from fmmeta.evaluation.command import Episodes, episodes_of
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.metrics.scores import mean_ci95
from fmmeta.models.load import describe, load_tokenizer
from fmmeta.tasks.augment import TextEpisode
from fmmeta.tasks.data.images import decode

EPISODE = {"n_way": 3, "k_shot": 1, "num_query": 5}
SHARED: dict[str, Any] = {
    **EPISODE,
    "dataset": ["digits"],
    "episode_transforms": ["benchmarks.digits:new_classes"],
    "meta_batch_size": 4,
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
    "protonet": {"outer_steps": 2000},
    "fomaml": {"outer_steps": 1000, "inner_steps": 3, "inner_lr": 0.05, "head_init": "prototype"},
}
JOINED = 0.9  # share of the classes that are joined with another one
OF_CLASS, OF_IMAGE = (0.2, 0.3), (0.1, 0.1)  # spread of affine maps and of bends, in half widths of an image


def bend(rng: np.random.Generator, images: int, affine: float, elastic: float, size: int) -> torch.Tensor:
    """Places of pixels [images, size, size, 2]: an affine map near the identity, and a smooth bend."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    maps = torch.eye(2).repeat(images, 1, 1) + affine * normal(images, 2, 2)
    shifts = 0.5 * affine * normal(images, 2, 1)
    grid = F.affine_grid(torch.cat([maps, shifts], 2), [images, 1, size, size], align_corners=False)
    bends = F.interpolate(
        elastic * normal(images, 2, 3, 3), size=(size, size), mode="bilinear", align_corners=True
    )
    return grid + bends.permute(0, 2, 3, 1)


def new_classes(episode: TextEpisode, rng: np.random.Generator) -> TextEpisode:
    """An episode transform: other classes, made from those of the episode."""
    sets = (episode.support, episode.query)
    classes = [
        [[row.pixels for row in rows if row.label == label] for rows in sets]
        for label in range(len(episode.classes))
    ]
    made = list[list[np.ndarray]]()
    for own in classes:
        other = classes[int(rng.integers(len(classes)))]
        images = np.stack([*own[0], *own[1]])
        if rng.random() < JOINED:
            images = joined(rng, images, np.stack([*other[0], *other[1]]))
        pixels = torch.from_numpy(images[..., 0].copy()).float()[:, None]
        turns = int(rng.integers(8))
        pixels = torch.rot90(pixels, turns % 4, (2, 3))
        pixels = pixels.flip(3) if turns >= 4 else pixels
        count, size = len(pixels), pixels.shape[-1]
        grid = bend(rng, 1, *OF_CLASS, size).expand(count, -1, -1, -1)
        pixels = F.grid_sample(pixels, grid, align_corners=False)
        pixels = F.grid_sample(pixels, bend(rng, count, *OF_IMAGE, size), align_corners=False)
        grey = pixels.round().clamp(0, 255).to(torch.uint8)[:, 0, :, :, None].expand(-1, -1, -1, 3).numpy()
        made.append(list(grey))
    support, query = ([replace(row, pixels=made[row.label].pop(0)) for row in rows] for rows in sets)
    return replace(episode, support=support, query=query)


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


def trained_scores(rule: str, seed: int, asked: int, split: str = "test") -> dict[str, Any]:
    """Accuracy of each held-out episode after meta-training with a rule."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = {**SHARED, **RULES[rule], "algorithm": rule, "seed": seed}
        began = time.perf_counter()
        MetaTrainer(Config(**settings, output_dir=folder)).train()
        seconds = round(time.perf_counter() - began)
        model, shape = f"{folder}/model", {"n_way": "3", "k_shot": [1], "num_query": 5}
        found = fmmeta.evaluate(model, "digits", episodes=asked, eval_split=split, **shape)
    (cell,) = found["cells"]
    return {"seconds": seconds, "scores": [score["accuracy"] for score in cell["scores"]]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=600)
    asked = parser.parse_args()
    stored = read(asked.json) if asked.json.is_file() else {}
    chosen = episodes(asked.episodes)
    identity = chosen.fingerprint()
    runs = stored.get("runs", {}) if stored.get("episodes_fingerprint") == identity else {}
    pixels = pixel_scores(chosen)
    for rule in RULES:
        for seed in asked.seeds:
            if (name := f"{rule} {seed}") not in runs:
                runs[name] = trained_scores(rule, seed, asked.episodes)
                print(name, summary(runs[name]["scores"], pixels), flush=True)
            results = {"episodes_fingerprint": identity, "pixels": pixels, "runs": runs}
            write_json(asked.json, {**results, "rows": rows_of(pixels, runs)})
    print(table(["held-out classes 7, 8, 9", "accuracy %", "minus raw pixels"], rows_of(pixels, runs)))


def summary(scores: list[float], pixels: list[float]) -> tuple[str, str]:
    """Accuracy, and its paired difference to that of pixels, in points with 95 % intervals."""
    gain = [one - other for one, other in zip(scores, pixels, strict=True)]
    accuracy, difference = ([100 * (part or 0.0) for part in mean_ci95(values)] for values in (scores, gain))
    return f"{accuracy[0]:.1f} ± {accuracy[1]:.1f}", f"{difference[0]:+.1f} ± {difference[1]:.1f}"


def rows_of(pixels: list[float], runs: dict[str, Any]) -> list[list[str]]:
    """The table: raw pixels, then the mean over the seeds of each episode's accuracy, and each seed."""
    rows = [["prototypes of raw pixels", summary(pixels, pixels)[0], ""]]
    for rule in RULES:
        mine = {name: run["scores"] for name, run in runs.items() if name.startswith(f"{rule} ")}
        if not mine:
            continue
        mean = np.mean(list(mine.values()), axis=0).tolist()
        each = ", ".join(summary(scores, pixels)[1].split()[0] for scores in mine.values())
        rows.append([f"{rule}, {len(mine)} seeds", *summary(mean, pixels)])
        rows[-1][-1] += f" (seeds: {each})"
    return rows


if __name__ == "__main__":
    main()
