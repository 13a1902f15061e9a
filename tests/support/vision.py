"""Models, files and functions for tests of images and of collate functions."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from fmmeta.config.learners import CLASSIFICATION
from fmmeta.config.settings import Config
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.tiny import image_settings
from fmmeta.tasks.batching import Collated, Example, labels_of
from fmmeta.tasks.data.columns import RowReader, pick
from fmmeta.tasks.data.images import ImageReader

SIZE = 8  # pixels
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "vit": {**TINY, "image_size": SIZE, "patch_size": 4, "initializer_range": 0.2},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}


def save_vision(folder: Path, kind: str = "vit", size: int = SIZE, **settings: Any) -> Path:
    """An image classifier with its image processor, which resizes to `size`."""
    from transformers import AutoModelForImageClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], "image_size": size, **settings})
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    ImageReader({**image_settings(), "size": {"height": size, "width": size}}).save_pretrained(folder)
    return folder


def pixels(label: int, number: int, size: int = SIZE) -> np.ndarray:
    """An image of a class: a bright stripe at its own place, and noise. uint8 [size, size, 3]."""
    rng = np.random.default_rng([label, number])
    image: Any = rng.integers(0, 90, (size, size, 3))
    image[label % size, :, label % 3] = 250
    return image.astype(np.uint8)


def write_images(root: Path, classes: int = 15, rows: int = 8, size: int = SIZE) -> Path:
    """A folder of PNG files for each class."""
    from PIL import Image

    for label in range(classes):
        (root / f"c{label:02}").mkdir(parents=True)
        for number in range(rows):
            Image.fromarray(pixels(label, number, size)).save(root / f"c{label:02}" / f"{number}.png")
    return root


class NestedConfig(PreTrainedConfig):
    model_type = "nested"
    hidden_size = 12
    pad_token_id = 0


class NestedModel(PreTrainedModel):
    """Reads {"graph": {"nodes": [B, N, 4]}, "parts": [[B, 4], ...]}."""

    config_class = NestedConfig
    base_model_prefix = "nested"

    def __init__(self, config: NestedConfig) -> None:
        super().__init__(config)
        self.nodes, self.parts = (nn.Linear(4, config.hidden_size) for _ in range(2))
        self.post_init()

    def forward(self, graph: dict[str, torch.Tensor], parts: list[torch.Tensor]) -> BaseModelOutput:
        hidden = (
            self.nodes(graph["nodes"]) + torch.stack([self.parts(part) for part in parts]).sum(0)[:, None]
        )
        return BaseModelOutput(last_hidden_state=hidden.tanh())


AutoConfig.register("nested", NestedConfig)
AutoModel.register(NestedConfig, NestedModel)


def save_nested(folder: Path) -> Path:
    torch.manual_seed(0)
    NestedModel(NestedConfig()).save_pretrained(folder)
    return folder


def nested_rows(classes: int = 15, rows: int = 8) -> list[dict[str, Any]]:
    """Rows with lists of numbers that depend on the class, and no text."""
    found = []
    for label in range(classes):
        mean = np.random.default_rng(label).normal(size=4)
        for number in range(rows):
            near = mean + 0.1 * np.random.default_rng([label, number]).normal(size=(3, 4))
            found.append({"nodes": near[:2].tolist(), "part": near[2].tolist(), "label": f"c{label:02}"})
    return found


def nested(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function."""
    nodes, part = (torch.tensor([row[name] for row in rows]) for name in ("nodes", "part"))
    return {"graph": {"nodes": nodes}, "parts": [part, part]}


def other_keys_on_rank_1(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function with a mistake."""
    made = nested(rows)
    return {**made, "more": made["parts"][0]} if os.environ.get("RANK") == "1" else made


def other_keys_later(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function whose keys depend on the rows."""
    made = nested(rows)
    return {"graph": made["graph"]} if any(row["label"] == "c03" for row in rows) else made


def one_row_less(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(len(rows) - 1, 3, SIZE, SIZE)}


def darker(example: Any, rng: np.random.Generator) -> Any:
    """A transform of images."""
    from dataclasses import replace

    return replace(example, pixels=(example.pixels // 2).astype(np.uint8))


class Nested(NativeClassifier):
    """Reads all columns of a row."""

    pair, inputs_of = (), staticmethod(nested)

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        return RowReader(lambda row: row.values, label=str(pick(config, columns, "label_column")))

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        return [Example([0], -1, values=row) for row in rows]

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        return cls.inputs_of([dict(row.values) for row in rows]), {"labels": labels_of(rows)}


class OtherKeysOnRank1(Nested):
    inputs_of = staticmethod(other_keys_on_rank_1)


class OtherKeysLater(Nested):
    inputs_of = staticmethod(other_keys_later)


class OneRowLess(Nested):
    inputs_of = staticmethod(one_row_less)


class Stacked(NativeClassifier):
    """The same inputs as without `collate`."""

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        return {"pixel_values": torch.stack([row.values["pixel_values"] for row in rows])}, {
            "labels": labels_of(rows)
        }


of_nested, of_other_keys_on_rank_1, of_other_keys_later, of_one_row_less, of_stacked = (
    replace(CLASSIFICATION, learner=kind)
    for kind in (Nested, OtherKeysOnRank1, OtherKeysLater, OneRowLess, Stacked)
)
