"""The learner of causal language models. `outputs` are the logits [B, T, V], or [1, N, V] of `places`.

Target of a micro-batch: `labels` [B, T], the token itself where a loss is taken on it, IGNORE elsewhere. A
row's answer is a run of label tokens; it is right when each of them is the most likely one. Rows that share
a sequence come with position_ids and without attention_mask: transformers then keeps them apart where the
positions restart (masking_utils.find_packed_sequence_indices). Their answers share an element of RowLosses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner, RowLosses, at_least_fp32
from fmmeta.learners.shared_prefix import Answers, outputs_at, rows_of
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch
from fmmeta.tasks.data.columns import (
    CHATS,
    OPTIONS,
    USUAL,
    PairInput,
    Row,
    RowReader,
    answers_of,
    column_like,
    options_of,
    pick,
    template_columns,
)
from fmmeta.tasks.data.encode import AnswerReader, answer_reader, encode_pairs


class CausalLearner(HFLearner):
    """A causal language model; it has no separate head to reset. Rows have an input and an answer, or several
    right ones (`answers`), the first of which is learned, and maybe `options` to choose from.

    router_loss: of the last pass of a mixture of experts, without its coefficient.
    """

    router_loss: Tensor | None = None
    peft_task = "CAUSAL_LM"
    inputs, pair = USUAL["input_column"], ("input", "output")

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        usual = config.input_column is None
        free = [one for one in columns if not (usual and one in template_columns(config))]
        picked = str(pick(config, free, "input_column"))
        answer = str(pick(config, columns, "output_column")) if answered else ""
        chat = usual and answer.lower() in CHATS
        source = PairInput.of(config, answer if chat else picked, columns, usual, chat)
        if answer in source.columns and not chat:
            raise UsageError(
                f"prompt_template={config.prompt_template} names {{{answer}}}, the column of the answer;"
                " write {output}, after all other names"
            )
        options = column_like(OPTIONS, columns) or OPTIONS

        def read(row: Row) -> dict[str, Any]:
            stored = dict[str, Any]()
            if answered:
                right = answers_of(row, answer)
                if config.answers and right[1:]:
                    raise UsageError(
                        f"has {len(right)} answers in {answer}, which with answers={config.answers} is the"
                        " name of a class; write one"
                    )
                several = {"answers": right[1:] and right, "options": options_of(row, options, right)}
                stored = {"output": right[0], **{name: texts for name, texts in several.items() if texts}}
            text, alone = source.read(row)
            return {"input": text, **({} if alone == text else {"alone": alone}), **stored}

        label = answer if config.answers else ""
        return RowReader(read, (*source.columns, answer, *([] if label else [options])), label)

    @classmethod
    def content(cls, row: Any) -> Sequence[str]:
        """Of a prompt that --prompt_template has filled, its columns alone."""
        return row.get("alone", row["input"]), row["output"]

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        inputs, outputs = [row["input"] for row in rows], [row.get("output", "") for row in rows]
        examples = encode_pairs(tokenizer, inputs, outputs, config.max_length, config.prompt_template)
        return [
            replace(one, weight=row["weight"]) if "weight" in row else one
            for one, row in zip(examples, rows, strict=True)
        ]

    @classmethod
    def present(
        cls, answer: Sequence[int], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> str:
        return tokenizer.text([one for one in answer if one >= 0])

    @classmethod
    def reader(cls, config: Config, tokenizer: Any, ends: Sequence[int]) -> AnswerReader:
        return answer_reader(tokenizer, config.prompt_template, ends)

    def forward(self, places: Tensor | None = None, **inputs: Tensor) -> Tensor:
        outputs = outputs_at(self.hf, places, **inputs, **self.options, use_cache=False)
        self.router_loss = getattr(outputs, "aux_loss", None)
        return outputs.logits

    def places(self, batch: MicroBatch) -> Tensor | None:
        """Those of the tokens before label tokens: the others need no logits, which are large."""
        # a compiled model would be compiled for each number of places; losses of yours may read all logits
        if self.prefixes.compiled or type(self).losses is not CausalLearner.losses:
            return None
        return (following(batch) != IGNORE).flatten().nonzero()[:, 0]

    def losses(self, outputs: Tensor, batch: MicroBatch) -> RowLosses:
        targets, labels = following(batch), batch.targets["labels"][:, 1:]
        places, flat = batch.inputs.get("places"), targets.flatten()
        seen = flat if places is None else flat[places]
        # over the last dimension: sums over a strided one lose digits where the vocabulary is large
        logits = at_least_fp32(outputs).flatten(0, 1)
        losses = self.loss(logits, seen)
        wrong = ((logits.argmax(-1) != seen) & (seen != IGNORE)) | losses.isnan()
        losses, wrong = (spread(each, places, targets, 0)[:, :-1] for each in (losses, wrong))
        found = self.per_row(losses, wrong, labels)
        aux, self.router_loss = self.router_loss, None  # it holds the graph
        # of the whole set, so that the weighted losses of rows contain it once
        shared = 0.0 if aux is None else self.hf.router_aux_loss_coef * aux / batch.weights.sum()
        return found._replace(loss=found.loss + shared)

    def per_row(self, losses: Tensor, wrong: Tensor, labels: Tensor) -> RowLosses:
        """The losses of rows, from the loss of each token and whether its prediction is wrong [B, T-1].

        labels: of the same tokens, all but the first of each row.
        """
        # the answer that each token belongs to, from 1: several where a sequence holds packed rows or pairs
        labelled = F.pad(labels != IGNORE, (1, 0))  # the first token is not predicted
        numbers = (labelled.long().diff(dim=1) > 0).cumsum(1)
        failed = numbers.new_zeros(len(numbers), numbers.shape[1] + 1).scatter_reduce(
            1, numbers, wrong.long(), "amax"
        )
        answers = numbers[:, -1]
        return RowLosses(losses.sum(1), answers - failed.sum(1), answers)

    def answers(self, outputs: Tensor, batch: MicroBatch) -> Iterator[tuple[list[int], list[int]]]:
        best = outputs.argmax(-1).masked_fill_(outputs.isnan().any(-1), -1).flatten()
        guess = spread(best, batch.inputs.get("places"), batch.targets["labels"], -1).cpu()
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
        if not batches or self.options or not self.prefixes.can_score(batches):
            return None
        most = max(len(batch.weights) for batch in batches)
        tokens = max(batch.targets["labels"].numel() for batch in batches)
        losses, right = self.prefixes.losses(rows_of(batches), most, tokens)
        return RowLosses(losses, right.long(), torch.ones_like(right, dtype=torch.long))


def following(batch: MicroBatch) -> Tensor:
    """The label that each token predicts, that of the next one; [B, T], IGNORE at the end."""
    return F.pad(batch.targets["labels"][:, 1:], (0, 1), value=IGNORE)


def spread(values: Tensor, places: Tensor | None, like: Tensor, fill: int) -> Tensor:
    """Values [N] at `places` of the flattened rows, as [B, T]; `fill` elsewhere. None: at all of them."""
    if places is not None:
        values = values.new_full((like.numel(),), fill).scatter(0, places, values)
    return values.view_as(like)
