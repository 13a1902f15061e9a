"""The learner of causal language models. `outputs` are the logits [B, T, V].

Target of a micro-batch: `labels` [B, T], the token itself where a loss is taken on it, IGNORE elsewhere. A
row's answer is a run of label tokens; it is right when each of them is the most likely one. Rows that share
a sequence come with position_ids and without attention_mask: transformers then keeps them apart where the
positions restart (masking_utils.find_packed_sequence_indices). Their answers share an element of RowLosses.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.learners.base import HFLearner, RowLosses, at_least_fp32
from fmmeta.learners.shared_prefix import Answers, rows_of
from fmmeta.tasks.batching import IGNORE, MicroBatch


class CausalLearner(HFLearner):
    """A causal language model; it has no separate head to reset."""

    peft_task = "CAUSAL_LM"

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.hf(**inputs, use_cache=False).logits

    def losses(self, outputs: Tensor, batch: MicroBatch) -> RowLosses:
        logits, labels = at_least_fp32(outputs), batch.targets["labels"][:, 1:]
        # over the last dimension: sums over a strided one lose digits where the vocabulary is large
        following = F.pad(labels, (0, 1), value=IGNORE)
        losses = self.loss(logits.flatten(0, 1), following.flatten())
        losses = losses.view_as(following)[:, :-1]
        wrong = ((logits.argmax(-1)[:, :-1] != labels) & (labels != IGNORE)) | losses.isnan()
        # the answer that each token belongs to, from 1: several where a sequence holds packed rows or pairs
        labelled = F.pad(labels != IGNORE, (1, 0))  # the first token is not predicted
        numbers = (labelled.long().diff(dim=1) > 0).cumsum(1)
        failed = numbers.new_zeros(len(numbers), numbers.shape[1] + 1).scatter_reduce(
            1, numbers, wrong.long(), "amax"
        )
        answers = numbers[:, -1]
        return RowLosses(losses.sum(1), answers - failed.sum(1), answers)

    def logits(self, outputs: Tensor) -> Tensor:
        return at_least_fp32(outputs)

    def answers(self, outputs: Tensor, batch: MicroBatch) -> Iterator[tuple[list[int], list[int]]]:
        guess = outputs.argmax(-1).masked_fill_(outputs.isnan().any(-1), -1).cpu()
        labels = batch.targets["labels"].cpu()
        single = torch.arange(labels.shape[1]).expand_as(labels)
        rows = (batch.inputs.get("position_ids", single).cpu() == 0).cumsum(1)  # of packed sequences
        for i in (i for i, weight in enumerate(batch.weights.tolist()) if weight > 0):
            here, target = rows[i, 1:], labels[i, 1:]
            for row in here.unique():
                where = (here == row) & (target != IGNORE)
                yield guess[i, :-1][where].tolist(), target[where].tolist()

    @cached_property
    def prefixes(self) -> Answers:
        """Scores and continues rows that share a prefix."""
        return Answers(self)

    def score(self, batches: Sequence[MicroBatch]) -> RowLosses | None:
        if not batches or not self.prefixes.can_score(batches):
            return None
        most = max(len(batch.weights) for batch in batches)
        tokens = max(batch.targets["labels"].numel() for batch in batches)
        losses, right = self.prefixes.losses(rows_of(batches), most, tokens)
        return RowLosses(losses, right.long(), torch.ones_like(right, dtype=torch.long))
