"""A model in one process, for `adapt` and `predict`: no groups, no DeepSpeed, no process group."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from fmmeta.parallel.layout import Launch, ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.parallel.workers.create import create_worker
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.columns import broken_text
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
                    f"text={shortened(text)} has no tokens for"
                    f" model_name_or_path={config.model_name_or_path}; fix or remove it"
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
        batches = self.batcher.split(numbered)
        logits = torch.cat([rows.cpu() for rows in self.worker.logits(batches)])
        return logits[torch.cat([batch.labels for batch in batches]).argsort()]


@dataclass(repr=False)
class AdaptedModel:
    """A model that has learned one task.

    labels: names of the classes, sorted; empty for causal_lm. inner_steps: steps that were taken. left_out:
    accuracy on the examples that were left out to choose them, None if none were. predictions: answers to the
    query set. output_dir: the folder that was written, if any. loaded: the model.
    """

    labels: tuple[str, ...]
    inner_steps: int
    left_out: float | None
    loaded: LoadedModel
    predictions: list[Answer] = field(default_factory=list)
    output_dir: str | None = None

    def __repr__(self) -> str:
        config = self.loaded.config
        left_out, accuracy = (
            None if share is None else f"{share:.4f}" for share in (self.left_out, self.accuracy)
        )
        return (
            f"{type(self).__name__}(base={config.model_name_or_path!r}, task_type={config.task_type!r},"
            f" labels={self.labels!r}, inner_steps={self.inner_steps}, left_out={left_out},"
            f" accuracy={accuracy}, output_dir={self.output_dir!r})"
        )

    @property
    def accuracy(self) -> float | None:
        """Share of correct answers to the query set, between 0 and 1; None without a query set."""
        if not self.predictions:
            return None
        return sum(one.output == one.truth for one in self.predictions) / len(self.predictions)

    def predict(self, texts: Sequence[str], max_new_tokens: int = 64) -> list[Answer]:
        """Answer new inputs.

        texts: non-empty strings; max_new_tokens: longest answer of a language model. Returns an `Answer` for
        each, in their order: `output` is a class with its probability as `score`, or a generated text. Raises
        `UsageError` for an input that is not a text.

        >>> import fmmeta
        >>> pairs = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]
        >>> adapted = fmmeta.adapt("tiny", pairs, inner_steps=10, early_stopping=False)
        >>> adapted.labels, [answer.output in adapted.labels for answer in adapted.predict(["green", "six"])]
        (('colour', 'number'), [True, True])
        """
        if isinstance(texts, str):
            raise UsageError(f"texts={shortened(texts)} is one text; give a list of texts")
        for index, text in enumerate(texts := list(texts)):
            if not isinstance(text, str):
                raise UsageError(f"texts[{index}]={shortened(text)} is no text; give strings")
            if not text:
                raise UsageError(f"texts[{index}] is empty; fix it")
            if wrong := broken_text(text):
                raise UsageError(f"texts[{index}] has {wrong}; fix it")
        return self.loaded.answer(texts, max_new_tokens) if texts else []


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
    plan = ParallelPlan(1, "plain", deepspeed_config.read(None, bf16, progress.notice))
    created = create_worker(config, description, plan, ranks)
    assert isinstance(created.worker, PlainWorker)
    batcher = Batcher(description.hf_config.pad_token_id, config.micro_batch_size)
    return LoadedModel(
        config, description, tokenizer, ranks, created.worker, created.head_names, created.frozen, batcher
    )
