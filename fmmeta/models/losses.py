"""The loss: a mean over a whole set, however the set is cut into micro-batches and over ranks.

Shapes: B rows of a micro-batch, T tokens, C classes, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fmmeta.tasks.batch import IGNORE, MicroBatch


def objective(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return this micro-batch's part of the set's mean loss, the rows it gets right, and its rows.

    Summed over all micro-batches of all ranks the loss is the mean over the set: over rows for [B, C] logits, over
    label tokens for [B, T, V] ones. A causal_lm row is right when each of its label tokens is the most likely one.
    """
    counted = batch.weights > 0
    if logits.ndim == 2:
        logits = logits[:, : batch.classes or None]  # an episode of fewer classes than the head has
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        right = logits.argmax(-1) == batch.labels
    else:
        logits, labels = logits[:, :-1].float(), batch.labels[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none").sum(1)
        right = ((logits.argmax(-1) == labels) | (labels == IGNORE)).all(1)
    return (losses * batch.weights).sum(), (right & counted).sum(), counted.sum()
