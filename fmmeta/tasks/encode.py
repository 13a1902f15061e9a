"""Text to tokens: classification texts, and causal_lm pairs whose labels cover the answer only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmmeta.tasks.batch import IGNORE, Example

PROMPT = "Input: {}\nOutput:"


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special tokens, at most `max_length`."""
    return tokenizer(list(texts), truncation=True, max_length=max_length, verbose=False)["input_ids"]


def encode_pairs(tokenizer: Any, inputs: Sequence[str], outputs: Sequence[str], max_length: int) -> list[Example]:
    """One example per pair: prompt, answer, end of text. Too long ones lose the start of the prompt.

    The answer keeps at most max_length - 1 tokens, so that at least one token precedes it.
    """
    prompts = tokenizer([PROMPT.format(text) for text in inputs], verbose=False)["input_ids"]
    answers = tokenizer([f" {text}" for text in outputs], add_special_tokens=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    examples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if end and prompt[-1:] == end:  # tokenizers that end every text
            prompt = prompt[:-1]
        answer = (answer + end)[: max_length - 1]
        prompt = prompt[max(0, len(prompt) + len(answer) - max_length) :]
        examples.append(Example(prompt + answer, [IGNORE] * len(prompt) + answer))
    return examples
