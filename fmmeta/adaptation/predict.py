"""`fmmeta predict`: answers of an adapted model to a file or to standard input, line by line.

{"text": ...} or plain text  -->  {"text", "label", "score"}          a class and its probability
                                  {"input", "output"}                 a greedy answer (causal_lm)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmmeta.adaptation.inputs import batched, sink, texts_of
from fmmeta.adaptation.single_process import LoadedModel, class_logits, load_single_process
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.security import printable
from fmmeta.common.text import shortened, to_json
from fmmeta.config.settings import Config
from fmmeta.evaluation.generation import generate
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.models.files import HEAD_FILE, base_of, cached_file
from fmmeta.models.lengths import fitted
from fmmeta.models.load import Description, describe
from fmmeta.models.stored_settings import remembered
from fmmeta.tasks.batching import IGNORE
from fmmeta.tasks.data.encode import encode


@dataclass(frozen=True)
class Answer:
    """An input and the model's answer: a class with its probability, or a text.

    `truth`: the right one, where it is known.
    """

    input: str
    output: str
    score: float | None = None
    truth: str | None = None

    def as_dict(self) -> dict[str, Any]:
        known = {} if self.truth is None else {"truth": self.truth}
        if self.score is None:
            return {"input": self.input, "output": self.output, **known}
        return {"text": self.input, "label": self.output, "score": round(self.score, 6), **known}

    def line(self) -> str:
        """A line of JSON, without a character that steers a terminal."""
        return printable(to_json(self.as_dict(), ensure_ascii=False))


def run(settings: PredictConfig) -> None:
    """`fmmeta predict`. Standard input is answered as it comes, a file in batches."""
    single = load(settings)
    size = 1 if settings.input == "-" else settings.micro_batch_size
    with sink(settings.output) as file:
        for texts in batched(texts_of(settings), size):
            for one in answer(single, texts, settings.max_new_tokens):
                print(one.line(), file=file, flush=True)


def load(settings: PredictConfig) -> LoadedModel:
    """The model of the folder, its own number of classes in its head. Raises `UsageError`."""
    memory = remembered(settings.model_name_or_path)
    names = ("task_type", "max_length", "prompt_template", "feature_norm")
    values = {
        name: memory.get(name) if getattr(settings, name) is None else getattr(settings, name)
        for name in names
    }
    base: dict[str, Any] = {
        "model_name_or_path": settings.model_name_or_path,
        "algorithm": "none",
        "trust_remote_code": settings.trust_remote_code,
        "attn_implementation": settings.attn_implementation,
        "pooling": settings.pooling,
        "micro_batch_size": settings.micro_batch_size,
        **{name: value for name, value in values.items() if value is not None},
    }
    config = Config(**base)
    description = describe(config)
    labels: tuple[str, ...] = ()
    if config.task_type == "classification":
        refuse_fresh_head(config, description, memory)
        names = description.hf_config.id2label
        labels = tuple(memory.get("labels") or (names[number] for number in sorted(names)))
        if len(labels) < 2:
            raise UsageError(
                f"model_name_or_path={settings.model_name_or_path} names fewer than two classes; adapt it"
                " first (fmmeta adapt)"
            )
        config = replace(config, n_way=len(labels), head_init="learned")
    return load_single_process(fitted(config, description.hf_config), Progress(enabled=False), labels)


def refuse_fresh_head(config: Config, description: Description, memory: dict[str, Any]) -> None:
    """Raise `UsageError` for a classifier whose head has learned nothing, or of other features: it would
    answer at random.
    """
    name, pooled = config.model_name_or_path, description.pooling != "model"
    if (
        "algorithm" in memory
    ):  # a folder that fmmeta wrote: what a task begins from, or with labels a task's model
        learned = bool(memory.get("labels"))
        own = memory.get("pooling", description.pooling)
        if learned and description.pooling != own:
            raise UsageError(
                f"pooling={description.pooling} does not fit the head of model_name_or_path={name}, which was"
                f" trained with {own}; use --pooling {own}"
            )
        if learned and pooled and cached_file(name, HEAD_FILE) is None:
            raise UsageError(
                f"model_name_or_path={name} holds no {HEAD_FILE}, where its classes are; fetch it again"
            )
    elif config.builtin_model:
        learned = False
    elif pooled:
        learned = cached_file(name, HEAD_FILE) is not None
    else:  # adapters of other origin bring their head along
        heads = [
            kind
            for kind in description.hf_config.architectures or ()
            if kind.endswith("ForSequenceClassification")
        ]
        learned = bool(heads) or base_of(name) != name
    if not learned:
        raise UsageError(
            f"model_name_or_path={name} has no trained head, and would answer at random; run fmmeta adapt"
            " first, and give the folder that it writes"
        )


def answer(single: LoadedModel, texts: Sequence[str], max_new_tokens: int) -> list[Answer]:
    """The model's answers, in the order of the texts.

    Raises `UsageError` for a text without tokens, and where there is none.
    """
    examples = encode(single.tokenizer, single.config, texts, [""] * len(texts))
    causal = single.config.task_type == "causal_lm"
    asked = [list(row.input_ids)[: row.labels.count(IGNORE)] if causal else row.input_ids for row in examples]  # type: ignore
    for text, ids in zip(texts, asked, strict=True):
        if not ids:  # blanks, to some tokenizers
            raise UsageError(
                f"text={shortened(text)} has no tokens for"
                f" model_name_or_path={single.config.model_name_or_path}; fix or remove it"
            )
    if causal:
        outputs = generate(
            single.worker, single.tokenizer, asked, max_new_tokens, single.config.micro_batch_size
        )
        return [Answer(text, output) for text, output in zip(texts, outputs, strict=True)]
    names = single.description.hf_config.id2label
    shares = class_logits(single, examples).softmax(1)
    for text, share in zip(texts, shares, strict=True):
        if not bool(share.isfinite().all()):
            raise UsageError(
                f"model_name_or_path={single.config.model_name_or_path} gives no finite scores for "
                f"{shortened(text)}; adapt it with a lower --inner_lr"
            )
    best = shares.argmax(1).tolist()
    return [
        Answer(text, names[label], float(share[label]))
        for text, label, share in zip(texts, best, shares, strict=True)
    ]
