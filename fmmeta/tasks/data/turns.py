"""Conversations, as rows have them:

    [{"role": "user", "content": ...}, ...]     `messages`, and `prompt` and `completion` of TRL
    [{"from": "human", "value": ...}, ...]      `conversations`

A token store has the input as one text: that of a single turn of a user, or the turns as JSON.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ROLES = {"human": "user", "gpt": "assistant"}
PAIR = " [SEP] "
"""Between the texts of a pair. It becomes the tokenizer's separator, or a line break without one."""
BEGIN = '[{"role": "'
Turns = list[dict[str, str]]


def read_turns(value: Any) -> Turns | None:
    """The turns of a value of a row; None for any other value."""
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        return None
    given = ((one.get("role", one.get("from")), one.get("content", one.get("value"))) for one in value)
    turns = [
        {"role": ROLES.get(role, role), "content": text}
        for role, text in given
        if isinstance(role, str) and isinstance(text, str)
    ]
    return turns if len(turns) == len(value) else None


def last_answer(turns: Turns) -> int:
    """The number of the last turn of an assistant; -1 without one."""
    return max((number for number, one in enumerate(turns) if one["role"] == "assistant"), default=-1)


def as_text(turns: Turns) -> str:
    """Turns as an input; "" without any."""
    alone = len(turns) == 1 and turns[0]["role"] == "user"
    return turns[0]["content"] if alone else json.dumps(turns, ensure_ascii=False) if turns else ""


def from_text(text: str) -> Turns:
    """The turns of an input."""
    if text.startswith(BEGIN):
        with suppress(ValueError, RecursionError):
            return read_turns(json.loads(text)) or [{"role": "user", "content": text}]
    return [{"role": "user", "content": text}]
