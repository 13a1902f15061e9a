"""Learners of preferences: which of two answers to a prompt is better. `outputs` are rewards [B, 2], of the
chosen answer and of the rejected one.

    loss = -log sigmoid (r_chosen - r_rejected)                    Bradley and Terry 1952

    preference   r = beta (log pi(y | x) - log pi_ref(y | x))      DPO, Rafailov et al. 2023, equation 7
    reward       r = a linear head on the last hidden state        a reward model, as before RLHF

A log-probability is the sum over an answer's tokens, its end token included. pi_ref is the base, without
adapters; where the data have the columns `chosen_logp` and `rejected_logp`, these are its log-probabilities.
The loss of a spec (`LearnerSpec.loss`) takes r as logits of two classes, the first of which is right.

Rows have the columns of TRL's preference data: `prompt` (optional), `chosen` and `rejected`, texts or lists
of turns, whose last one is the answer. Prompts are written by --prompt_template, as for causal_lm.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner, RowLosses, at_least_fp32, row_losses
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.lora import base_alone
from fmmeta.tasks.batching import IGNORE, Collated, Example, MicroBatch, pad_right
from fmmeta.tasks.data.columns import (
    PairInput,
    Row,
    RowReader,
    column_like,
    only_answer,
    pick,
    template_columns,
)
from fmmeta.tasks.data.encode import encode_pairs, encode_texts, text_prompt
from fmmeta.tasks.data.turns import read_turns

SIDES = ("chosen", "rejected")
REFERENCE = ("chosen_logp", "rejected_logp")


class PairLearner(HFLearner):
    """What both learners share. A row is a pair of answers; the first one is right.

    outputs: names of those of the head.
    """

    inputs, outputs = ("prompt", *SIDES), tuple[str, ...]()
    example: Mapping[str, Any] = {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        sides = [column_like(side, columns) or "" for side in SIDES]
        if missing := [side for side, column in zip(SIDES, sides, strict=True) if not column]:
            raise UsageError(f"the data has no column {missing[0]}; it has {', '.join(columns)}: rename one")
        free = [column for column in columns if column not in (*template_columns(config), *sides)]
        needed, source = bool(template_columns(config)), None
        if picked := pick(config, free, "input_column", needed):
            source = PairInput.of(config, picked, columns, config.input_column is None)
        whole = PairInput((), chat=config.prompt_template == "chat", answered=True)

        def read(row: Row) -> dict[str, Any]:
            answers = [only_answer(row, column) for column in sides]
            several = [len(read_turns(row.values[column]) or ()) > 1 for column in sides]
            begins = [
                whole.text(row, column) if turns else "" for column, turns in zip(sides, several, strict=True)
            ]
            prompt = source.read(row)[0] if source else begins[0]
            if begins[0] != begins[1] or begins[0] not in ("", prompt):
                raise UsageError(
                    f"has different turns before the answers in {' and '.join(sides)}, or others than in its"
                    " prompt; compare answers to one prompt"
                )
            if answers[0] == answers[1]:
                raise UsageError(
                    f"has the same answer {shortened(answers[0])} in {' and '.join(sides)}; leave it out"
                )
            return {"prompt": prompt, **dict(zip(SIDES, answers, strict=True))}

        return RowReader(read)

    @classmethod
    def tokens(
        cls, config: Config, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]
    ) -> list[Example]:
        """Prompts with their answers, and labels on the answers."""
        return encode_pairs(tokenizer, prompts, answers, config.max_length, config.prompt_template)

    @classmethod
    def facts(cls, support: Sequence[Any], query: Sequence[Any] = ()) -> dict[str, Any]:
        return {"names": cls.outputs}

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        prompts = [row["prompt"] for row in rows]
        sides = [cls.tokens(config, tokenizer, prompts, [row[side] for row in rows]) for side in SIDES]
        return [
            Example([*pair[0].input_ids, *pair[1].input_ids], 0, values={**row, "pair": pair})
            for row, *pair in zip(rows, *sides, strict=True)
        ]

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        """input_ids [B, 2, T], attention_mask [B, 2, T]. Targets: none, the first answer is right."""
        ids = [side.input_ids for row in rows for side in row.values["pair"]]
        inputs = {"input_ids": (ids, pad_token_id), "attention_mask": ([[1] * len(one) for one in ids], 0)}
        return {name: pad_right(*padded).unflatten(0, (-1, 2)) for name, padded in inputs.items()}, {}

    def losses(self, outputs: Tensor, batch: MicroBatch) -> RowLosses:
        rewards = at_least_fp32(outputs)
        first = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
        losses = self.loss(rewards, first)
        right = (rewards[:, 0] > rewards[:, 1]) & ~losses.isnan()
        return RowLosses(losses, right.long(), torch.ones_like(first))

    def answers(self, outputs: Tensor, batch: MicroBatch) -> Iterator[tuple[list[float], list[float]]]:
        """The margin r_chosen - r_rejected, positive where the model prefers the chosen answer, and 1."""
        margins = -at_least_fp32(outputs).diff(dim=1)[:, 0]
        rows = zip(margins.tolist(), batch.weights.tolist(), strict=True)
        return (([margin], [1.0]) for margin, weight in rows if weight > 0)

    @classmethod
    def present(
        cls, answer: Sequence[float], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> float:
        """The margin."""
        return answer[0]

    @classmethod
    def metrics(cls, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"margin": sum(predictions) / len(predictions)}


class PreferenceLearner(PairLearner):
    """DPO. beta: how far the model may move from the reference; a subclass may have another."""

    auto, peft_task = "AutoModelForCausalLM", "CAUSAL_LM"
    beta = 0.1

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        pairs = super().rows(config, tokenizer, columns, answered)
        named = [column_like(one, columns) for one in REFERENCE]
        constant = config.lora_r and not config.outer_parameters
        if any(named) != all(named) or not (constant or all(named)):
            use = "leave --outer_parameters out: the base" if config.lora_r else "give --lora_r 8, whose base"
            raise UsageError(
                f"task_type={config.task_type} compares with a reference model; {use} is the reference, or"
                f" both columns {' and '.join(REFERENCE)} of the data"
            )

        def read(row: Row) -> dict[str, Any]:
            found: list[Any] = [row.values.get(column) for column in named if column]
            if not all(type(one) in (int, float) and math.isfinite(one) for one in found):
                raise UsageError(f"has {' and '.join(REFERENCE)}={found}, which are no numbers; fix the row")
            return {**pairs.read(row), **({"reference": [*map(float, found)]} if found else {})}

        return RowReader(read)

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        """With labels [B, 2, T], IGNORE before an answer, and log-probabilities of the reference [B, 2]."""
        inputs, targets = super().collate(rows, pad_token_id)
        labels = pad_right([side.labels for row in rows for side in row.values["pair"]], IGNORE)
        inputs["labels"] = labels.unflatten(0, (-1, 2))
        if "reference" in rows[0].values:
            inputs["reference"] = torch.tensor([row.values["reference"] for row in rows])
        return inputs, targets

    def forward(self, reference: Tensor | None = None, **inputs: Tensor) -> Tensor:
        own = self.log_probabilities(**inputs)
        if reference is None:
            with torch.no_grad(), base_alone(self.hf):
                reference = self.log_probabilities(**inputs)
        return self.beta * (own - reference)

    def log_probabilities(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        """Of the answers [B, 2], in nats."""
        flat = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        logits = at_least_fp32(self.hf(**flat, use_cache=False).logits)[:, :-1]
        following = labels.flatten(0, 1)[:, 1:]
        losses = row_losses(None, logits.flatten(0, 1), following.flatten())
        return -losses.view_as(following).sum(1).view(-1, 2)


class RewardLearner(PairLearner, NativeClassifier):
    """A sequence classifier of transformers with one output, the reward of an answer."""

    auto, pipeline = "AutoModelForSequenceClassification", "text-classification"
    problem_type, pooled, outputs, pair = None, None, ("r",), ()

    @classmethod
    def tokens(
        cls, config: Config, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]
    ) -> list[Example]:
        """A tokenizer without a token that ends a text, as BERT's, adds its special ones to the whole."""
        if tokenizer.eos_token_id is not None:
            return super().tokens(config, tokenizer, prompts, answers)
        prompt = text_prompt(config.prompt_template)
        texts = [
            prompt.before(text) + prompt.answer(answer) for text, answer in zip(prompts, answers, strict=True)
        ]
        return [Example(ids, 0) for ids in encode_texts(tokenizer, texts, config.max_length)]

    def forward(self, **inputs: Tensor) -> Tensor:
        flat = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        return super().forward(**flat)[1][:, 0].view(-1, 2)
