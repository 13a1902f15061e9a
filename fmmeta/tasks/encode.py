"""Text to tokens: classification texts, and causal_lm pairs whose labels cover the answer only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmmeta.config import Config
from fmmeta.tasks.batch import IGNORE, Example

PROMPT = "Input: {}\nOutput:"
LONGEST_TOKEN = 64  # characters: what lies further off than max_length of these is cut before a tokenizer sees it


def encode(tokenizer: Any, config: Config, left: Sequence[str], right: Sequence[str]) -> list[Example]:
    """Rows by role to examples: texts, whose label is yet to be given (-1), or pairs of input and output."""
    if config.task_type == "causal_lm":
        return encode_pairs(tokenizer, left, right, config.max_length)
    return [Example(ids, -1) for ids in encode_texts(tokenizer, left, config.max_length)]


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special tokens, at most `max_length`."""
    texts = [text[: LONGEST_TOKEN * max_length] for text in texts]
    return tokenizer(texts, truncation=True, max_length=max_length, verbose=False)["input_ids"]


def encode_pairs(tokenizer: Any, inputs: Sequence[str], outputs: Sequence[str], max_length: int) -> list[Example]:
    """One example per pair: prompt, answer, end of text. Too long ones lose the start of the prompt.

    The answer keeps at most max_length - 1 tokens, so that at least one token precedes it.
    """
    reach = LONGEST_TOKEN * max_length
    inputs, outputs = [text[-reach:] for text in inputs], [text[:reach] for text in outputs]
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
