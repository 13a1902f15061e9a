"""What users give as settings: of the type that was asked for, or refused in one line. And numbers as strict JSON."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 3.4e38  # what fp32 holds
WANTED = {bool: "True or False", str: "a text", int: "a whole number", float: "a number"}


class UsageError(ValueError):
    """Something the user gave cannot work. The text is one line: the value, what is wrong, what to do."""


hints_of = cache(get_type_hints)
"""The types of a dataclass's fields, by name."""


def of_type(settings: Any, name: str, value: Any) -> Any:
    """A value of a dataclass's field as the flag's text would have become it: one where a list is expected is a list of one, None
    is what it may be where it is the default. Raises `UsageError`.
    """
    if value is None and settings.__dataclass_fields__[name].default is None:
        return None
    hint = hints_of(settings)[name]
    kind = next(one for one in get_args(hint) or (hint,) if one is not type(None))
    if get_origin(hint) is list:
        return [_of_kind(kind, name, one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    return _of_kind(kind, name, value)


def _of_kind(kind: type, name: str, value: Any) -> Any:
    if isinstance(value, bool) or kind is bool:
        if isinstance(value, bool) and kind is bool:
            return value
    elif kind is str and isinstance(value, (str, os.PathLike, int)):
        return str(value)
    elif (kind is int and isinstance(value, Integral)) or (kind is float and isinstance(value, Real)):
        try:
            number = float(value)
        except OverflowError:
            raise UsageError(f"{name} is no number to compute with; use one up to {LARGEST:g}") from None
        return int(value) if isinstance(value, Integral) and kind is int else number
    raise UsageError(f"{name}={shortened(value)} is not {WANTED[kind]}; give one")


def shortened(value: Any) -> str:
    """A value as a message shows it: on one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def strict(value: Any) -> Any:
    """The same with None for numbers that JSON does not have: the interval of one episode, a loss that diverged."""
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, **how: Any) -> str:
    """Strict JSON of what files and programs get. `how`: as json.dumps."""
    return json.dumps(strict(value), allow_nan=False, **how)


def as_stored(settings: Any) -> Any:
    """Settings as they are stored and compared: what JSON has, with numbers that are not finite as text (mix_temperature=inf)."""
    return json.loads(json.dumps(settings), parse_constant=lambda name: str(float(name)))
