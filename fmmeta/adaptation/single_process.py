"""Loads one model in one process for `adapt` and `predict`: no groups, no DeepSpeed, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.security import printable
from fmmeta.common.text import shortened, to_json
from fmmeta.config.settings import Config
from fmmeta.evaluation.generation import generate
from fmmeta.models.load import Description, describe, load_tokenizer
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.parallel.workers.create import create_worker
from fmmeta.parallel.workers.plain import PlainWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.encode import encode


@dataclass(frozen=True)
class Answer:
    """An input and the model's answer: a class and its probability, or a text (score None).

    truth: the correct answer, where it is known.
    """

    input: str
    output: str
    score: float | None = None
    truth: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The keys of a line of output: text, label and score of a class, or input and output; and truth."""
        truth = {} if self.truth is None else {"truth": self.truth}
        if self.score is None:
            return {"input": self.input, "output": self.output, **truth}
        return {"text": self.input, "label": self.output, "score": round(self.score, 6), **truth}

    def line(self) -> str:
        """A line of JSON, with control characters of terminals escaped."""
        return printable(to_json(self.as_dict(), ensure_ascii=False))


@dataclass
class LoadedModel:
    """A model on a plain worker, with its tokenizer and batcher. frozen: untrained tensors by name."""

    config: Config
    description: Description
    tokenizer: Any
    ranks: ProcessGroups
    worker: PlainWorker
    head_names: tuple[str, ...]
    frozen: dict[str, Tensor]
    batcher: Batcher

    def answer(self, texts: Sequence[str], max_new_tokens: int) -> list[Answer]:
        """Answer texts, in their order.

        Raises `UsageError` for a text without tokens, and for probabilities that are not finite.
        """
        config, names = self.config, self.description.hf_config.id2label
        examples = encode(self.tokenizer, config, texts, [""] * len(texts))
        causal = config.task_type == "causal_lm"
        prompts = [
            row.input_ids[: row.labels.count(IGNORE)] if causal else row.input_ids  # type: ignore
            for row in examples
        ]
        for text, ids in zip(texts, prompts, strict=True):
            if not ids:  # some tokenizers drop white space
                raise UsageError(
                    f"text={shortened(text)} has no tokens for model_name_or_path={config.model_name_or_path};"
                    " fix or remove it"
                )
        if causal:
            outputs = generate(self.worker, self.tokenizer, prompts, max_new_tokens, config.micro_batch_size)
            return [Answer(text, output) for text, output in zip(texts, outputs, strict=True)]
        answers = []
        for text, probabilities in zip(texts, self.class_logits(examples).softmax(1), strict=True):
            if not probabilities.isfinite().all():
                raise UsageError(
                    f"model_name_or_path={config.model_name_or_path} gives no finite scores for"
                    f" {shortened(text)}; adapt it with a lower --inner_lr"
                )
            label = int(probabilities.argmax())
            answers.append(Answer(text, names[label], float(probabilities[label])))
        return answers

    def class_logits(self, examples: Sequence[Example]) -> Tensor:
        """Logits [Q, C] of Q examples, in their order; the labels of the examples are not used."""
        numbered = [Example(example.input_ids, index) for index, example in enumerate(examples)]
        batches = self.batcher.deal(numbered)
        logits = torch.cat([rows.cpu() for rows in self.worker.logits(batches)])
        return logits[torch.cat([batch.labels for batch in batches]).argsort()]


def load_single_process(
    config: Config, progress: Progress, labels: Sequence[str] = (), bf16: bool = False
) -> LoadedModel:
    """Load the model of `config`. `labels`: names of its classes. Raises `UsageError`."""
    description = describe(config)
    if labels:
        description = replace(description, labels=tuple(labels))
        description.hf_config.num_labels = len(labels)
        description.hf_config.id2label = dict(enumerate(labels))
        description.hf_config.label2id = {label: number for number, label in enumerate(labels)}
    tokenizer = load_tokenizer(config, description, progress.notice)
    ranks = World(Launch(), pick_device(Launch())).split(1, default_group=False)
    deepspeed, precision = deepspeed_config.read(None, bf16, progress.notice)
    created = create_worker(config, description, deepspeed, precision, "plain", ranks)
    assert isinstance(created.worker, PlainWorker)
    batcher = Batcher(description.hf_config.pad_token_id, config.micro_batch_size)
    return LoadedModel(
        config, description, tokenizer, ranks, created.worker, created.head_names, created.frozen, batcher
    )
