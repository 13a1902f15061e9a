"""Converts values given from Python or a file to the type of their setting, or refuses them in one line."""

import os
from functools import cache
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened

LARGEST = 3.4e38  # what fp32 holds
WANTED = {bool: "True or False", str: "a text", int: "a whole number", float: "a number"}

hints_of = cache(get_type_hints)
"""The types of a dataclass's fields, by name."""


def shown(value: Any) -> str:
    """A value as messages show it: lists as the flag takes them."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def of_type(settings: Any, name: str, value: Any) -> Any:
    """A value of a dataclass's field, converted as the flag's text is. Raises `UsageError`.

    A single value for a list becomes a list of one; None is accepted if it is the default.
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
