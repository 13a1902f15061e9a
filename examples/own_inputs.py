"""Inputs of your own for a classifier that transformers knows: a grey image from a column of numbers.

From this folder, with rows such as {"pixels": [[0.1, ...], ...], "label": "seven"}:

fmmeta train --task_type own_inputs:spec --model_name_or_path MODEL --dataset rows.jsonl
"""

from dataclasses import replace

import torch

from fmmeta.config.learners import CLASSIFICATION
from fmmeta.learners.classification import NativeClassifier
from fmmeta.tasks.batching import Example, labels_of
from fmmeta.tasks.data.columns import RowReader, pick


class GrayImages(NativeClassifier):
    pair = ()

    @classmethod
    def rows(cls, config, tokenizer, columns, answered=True):
        """Store all columns of a row; the class is in `label`."""
        return RowReader(lambda row: row.values, label=pick(config, columns, "label_column", answered) or "")

    @classmethod
    def encode(cls, config, tokenizer, rows, facts):
        return [Example([0], -1, values=row) for row in rows]

    @classmethod
    def collate(cls, rows, pad_token_id):
        """Inputs and targets by name; the first dimension of each tensor is the rows."""
        gray = torch.tensor([row.values["pixels"] for row in rows])
        return {"pixel_values": gray[:, None].expand(-1, 3, -1, -1)}, {"labels": labels_of(rows)}


spec = replace(CLASSIFICATION, learner=GrayImages)
