"""Inputs of your own for a classifier that transformers knows: a grey image from a column of numbers.

From this folder, with rows such as {"pixels": [[0.1, ...], ...], "label": "seven"}:

fmmeta train --task_type own_inputs:spec --model_name_or_path MODEL --dataset rows.jsonl
"""

from dataclasses import replace

import torch

from fmmeta.config.learners import CLASSIFICATION


def images(rows):
    """The model's inputs by name; the first dimension of each tensor is the rows."""
    gray = torch.tensor([row["pixels"] for row in rows])
    return {"pixel_values": gray[:, None].expand(-1, 3, -1, -1)}


spec = replace(CLASSIFICATION, collate=images)
