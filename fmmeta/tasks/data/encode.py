"""Text to tokens: classification texts, and causal_lm pairs whose labels cover the answer only."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.prompts import Prompt, make_prompt

LONGEST_TOKEN = 64  # characters: texts are cut to max_length of these before they are tokenised


def encode(tokenizer: Any, config: Config, inputs: Sequence[str], targets: Sequence[str]) -> list[Example]:
    """Examples of (input, output) pairs for causal_lm; else of texts, whose label -1 the caller replaces."""
    if config.task_type == "causal_lm":
        return encode_pairs(tokenizer, inputs, targets, config.max_length, config.prompt_template)
    return [Example(ids, -1) for ids in encode_texts(tokenizer, inputs, config.max_length)]


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special tokens, at most `max_length`."""
    texts = [text[: LONGEST_TOKEN * max_length] for text in texts]
    return tokenizer(texts, truncation=True, max_length=max_length, verbose=False)["input_ids"]


def encode_pairs(
    tokenizer: Any, inputs: Sequence[str], outputs: Sequence[str], max_length: int, template: str = "plain"
) -> list[Example]:
    """One example per pair: prompt, answer, end of text. `template`: see prompts.py.

    Pairs that are too long lose the start of the prompt, or of the input for chats, whose template stays
    whole; if that is not enough, the answer loses its end. At least one token precedes the answer.
    """
    reach = LONGEST_TOKEN * max_length
    inputs, outputs = [text[-reach:] for text in inputs], [text[:reach] for text in outputs]
    prompt = make_prompt(template, tokenizer)
    if not prompt.specials:
        refuse_long_frame(tokenizer, prompt, max_length)
        return [
            encode_chat(tokenizer, prompt, *pair, max_length) for pair in zip(inputs, outputs, strict=True)
        ]
    prompts = tokenizer([prompt.before(text) for text in inputs], verbose=False)["input_ids"]
    answers = tokenizer([prompt.answer(text) for text in outputs], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    examples = []
    for before, answer in zip(prompts, answers, strict=True):
        if end and before[-1:] == end:  # some tokenizers end every text
            before = before[:-1]
        answer = (answer + end)[: max_length - 1]
        before = before[max(0, len(before) + len(answer) - max_length) :]
        examples.append(labelled(before + answer, len(before)))
    return examples


def encode_chat(tokenizer: Any, prompt: Prompt, text: str, output: str, max_length: int) -> Example:
    """One turn of a chat, tokenised as a whole; the labels begin at its first token that differs from the
    prompt's tokens.
    """
    while True:
        before = plain_tokens(tokenizer, prompt.before(text))
        ids = plain_tokens(tokenizer, prompt.before(text) + prompt.answer(output))
        over = len(ids) - max_length
        if over <= 0 or not text:
            break
        shorter = tokenizer.decode(plain_tokens(tokenizer, text)[over:])
        text = shorter if len(shorter) < len(text) else text[1:]
    common = takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))
    return labelled(ids[:max_length], len(list(common)))


def refuse_long_frame(tokenizer: Any, prompt: Prompt, max_length: int) -> None:
    """Raise `UsageError` if the tokens of a chat template alone fill `max_length`."""
    frame = len(plain_tokens(tokenizer, prompt.before("")))
    if frame >= max_length:
        raise UsageError(
            f"max_length={max_length} leaves no room: the chat template takes {frame} tokens by itself;"
            " raise it"
        )


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def labelled(ids: list[int], prompt: int) -> Example:
    """Labels on everything but the first `prompt` tokens."""
    return Example(ids, [IGNORE] * prompt + ids[prompt:])
