"""digits.yaml: classes that are made from those of the suite."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from experiments.data import bent
from experiments.run import evaluated
from fmmeta.learners.tiny import image_settings, tiny_vit_config
from fmmeta.tasks.data.images import ImageReader
from fmmeta.tasks.suites import digits


def made(rng: np.random.Generator) -> np.ndarray:
    """The images of a class: of a training class, joined with another one or not, turned, mirrored, bent."""
    rows, splits = digits()
    both = []
    for number in rng.integers(len(splits["train"]), size=2):
        every = [row.values["image"] for row in rows if row.values["label"] == splits["train"][number]]
        both.append(np.stack(every)[rng.permutation(len(every))[:20]])
    images, others, middle = both[0].copy(), both[1], both[0].shape[1] // 2
    if rng.random() < 0.9:
        kind = int(rng.integers(3))
        halves = (np.s_[:, middle:], np.s_[:, :, middle:], np.s_[:])
        others = np.maximum(images, others) if kind == 2 else others
        images[halves[kind]] = others[halves[kind]]
    turns = int(rng.integers(8))
    images = np.rot90(images, turns % 4, (1, 2))[:, :, :: -1 if turns >= 4 else 1]
    return bent(rng, bent(rng, images, alike=True), alike=False)


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """As the runner measures, from random weights on classes that are made."""
    seed, folder = cell.axes["seed"], f"{study.folder}/start {cell.axes['seed']}"
    torch.manual_seed(seed)
    AutoModel.from_config(tiny_vit_config()).save_pretrained(folder)
    ImageReader(image_settings()).save_pretrained(folder)
    rng, names = np.random.default_rng(seed), [f"made {number}" for number in range(1000)]
    rows = [{"image": image, "label": name} for name in names for image in made(rng)]
    Path(folder, "splits.json").write_text(json.dumps({"train": sorted(names)}))
    study.trained(cell, dataset=rows)
    return evaluated(study, cell)
