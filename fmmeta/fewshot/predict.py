"""`fmmeta predict`: answers of an adapted model to a file or to standard input, line by line.

{"text": ...} or plain text  -->  {"text", "label", "score"}          a class and its probability
                                  {"input", "output"}                 a greedy answer (causal_lm)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fmmeta.config import Config, UsageError
from fmmeta.fewshot.language import generate
from fmmeta.fewshot.settings import PredictConfig, remembered
from fmmeta.fewshot.single import Single, class_logits, start
from fmmeta.models.load import describe
from fmmeta.progress import Progress
from fmmeta.tasks.batch import IGNORE
from fmmeta.tasks.encode import encode

KEYS = ("text", "sentence", "utterance", "input", "prompt", "question")


@dataclass(frozen=True)
class Answer:
    """An input and the model's answer: a class with its probability, or a text. `truth`: the right one, where it is known."""

    input: str
    output: str
    score: float | None = None
    truth: str | None = None

    def as_dict(self) -> dict[str, Any]:
        known = {} if self.truth is None else {"truth": self.truth}
        if self.score is None:
            return {"input": self.input, "output": self.output, **known}
        return {"text": self.input, "label": self.output, "score": round(self.score, 6), **known}


def run(settings: PredictConfig) -> None:
    """`fmmeta predict`. Standard input is answered as it comes, a file in batches."""
    single = load(settings)
    size = 1 if settings.input == "-" else settings.micro_batch_size
    with ExitStack() as stack:
        source = sys.stdin if settings.input == "-" else stack.enter_context(opened(settings.input, "r", "input"))
        sink = sys.stdout if settings.output == "-" else stack.enter_context(opened(settings.output, "w", "output"))
        for texts in batched(read_texts(source, settings), size):
            for one in answer(single, texts, settings.max_new_tokens):
                print(json.dumps(one.as_dict(), ensure_ascii=False), file=sink, flush=True)


def load(settings: PredictConfig) -> Single:
    """The model of the folder, its own number of classes in its head. Raises `UsageError`."""
    memory = remembered(settings.model_name_or_path)
    given = {name: value for name in ("task_type", "max_length", "prompt_template", "feature_norm")
             if (value := getattr(settings, name) or memory.get(name)) is not None}  # fmt: skip
    base: dict[str, Any] = {"model_name_or_path": settings.model_name_or_path, "algorithm": "none",
                            "trust_remote_code": settings.trust_remote_code, "attn_implementation": settings.attn_implementation,
                            "pooling": settings.pooling, "micro_batch_size": settings.micro_batch_size, **given}  # fmt: skip
    labels: tuple[str, ...] = ()
    if base.get("task_type", "classification") == "classification":
        names = describe(Config(**base)).hf_config.id2label
        labels = tuple(memory.get("labels") or (names[number] for number in sorted(names)))
        if len(labels) < 2:
            raise UsageError(f"model_name_or_path={settings.model_name_or_path} names fewer than two classes; adapt it first "
                             "(fmmeta adapt)")  # fmt: skip
        base |= {"n_way": len(labels), "head_init": "learned"}
    quiet = Progress(speaks=False)
    return start(Config(**base), quiet, labels)


def answer(single: Single, texts: Sequence[str], max_new_tokens: int) -> list[Answer]:
    """The model's answers, in the order of the texts."""
    examples = encode(single.tokenizer, single.config, texts, [""] * len(texts))
    if single.config.task_type == "causal_lm":
        prompts = [list(row.input_ids)[: sum(label == IGNORE for label in row.labels)] for row in examples]  # type: ignore[union-attr]
        outputs = generate(single.worker, single.tokenizer, prompts, max_new_tokens, single.config.micro_batch_size)
        return [Answer(text, output) for text, output in zip(texts, outputs, strict=True)]
    names = single.description.hf_config.id2label
    shares = class_logits(single, examples).softmax(1)
    best = shares.argmax(1).tolist()
    return [Answer(text, names[label], float(share[label])) for text, label, share in zip(texts, best, shares, strict=True)]


def read_texts(lines: Iterable[str], settings: PredictConfig) -> Iterator[str]:
    """The texts of plain lines, or of JSON objects. Raises `UsageError` naming the line."""
    for number, line in enumerate(decoded(lines), 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield line
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"input line {number} is no JSON object ({error}); mend it") from None
        keys = [settings.text_column] if settings.text_column else KEYS
        found = next((key for key in keys if isinstance(values.get(key), str)), None)
        if found is None:
            raise UsageError(f"input line {number} has no text under {', '.join(keys)}; name the key with --text_column")
        yield values[found]


def decoded(lines: Iterable[str]) -> Iterator[str]:
    """The lines themselves. Raises `UsageError` for one that is no UTF-8."""
    numbered, number = iter(lines), 0
    while True:
        number += 1
        try:
            yield next(numbered)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"input is not UTF-8 at line {number} or soon after it ({error.reason}); convert it") from None


def batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    part: list[str] = []
    for text in texts:
        part.append(text)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


def opened(path: str, mode: str, setting: str) -> Any:
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{setting}={path} cannot be opened: {error.strerror}; give another file") from None
