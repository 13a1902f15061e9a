"""The loss: a mean over a whole set, independent of micro-batches and ranks.

Shapes: B rows of a micro-batch, T tokens, C classes, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.tasks.batching import IGNORE, MicroBatch


def objective(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return this micro-batch's part of the set's mean loss, its number of correct rows, and its number of
    rows.

    Summed over all micro-batches of all ranks the loss is the mean over the set: over rows for [B, C] logits,
    over label tokens for [B, T, V] ones. A causal_lm row is correct when each of its label tokens is the most
    likely one. NaN logits count as wrong.
    """
    losses, right, rows = per_row(logits, batch)
    return losses.sum(), right.sum(), rows.sum()


def per_row(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """`objective` before its sums: [B] each. Packed rows that share a sequence share an element."""
    counted = batch.weights > 0
    if logits.ndim == 2:
        logits = logits[:, : batch.classes or None]  # an episode of fewer classes than the head has
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        rows, right = counted.long(), ((logits.argmax(-1) == batch.labels) & ~losses.isnan()).long()
    else:
        logits, labels = logits[:, :-1].float(), batch.labels[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
        wrong = ((logits.argmax(-1) != labels) & (labels != IGNORE)) | losses.isnan()
        single = torch.arange(batch.labels.shape[1], device=labels.device).expand_as(batch.labels)
        # the row of each token in its sequence, from 1; more than one where packed rows restart at position 0
        numbers = (batch.inputs.get("position_ids", single) == 0).cumsum(1)
        failed = numbers.new_zeros(len(numbers), numbers.shape[1] + 1).scatter_reduce(
            1, numbers[:, 1:], wrong.long(), "amax"
        )
        losses, rows = losses.sum(1), numbers[:, -1]
        right = rows - failed.sum(1)
    return losses * batch.weights, right * counted, rows * counted
