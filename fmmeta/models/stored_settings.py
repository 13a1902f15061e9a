"""Settings that a model stores in its fmmeta.json: how it learns a task, and what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

from fmmeta.config.renamed import translated
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.models.files import read_json
from fmmeta.tasks.data import used_splits


def trained_with(models: Sequence[str]) -> list[used_splits.UsedSplits]:
    """The splits that these models were trained with. Raises `UsageError`."""
    return [one for model in models for one in used_splits.read(remembered(model))]


def remembered(model_name_or_path: str) -> dict[str, Any]:
    """The settings and facts in a model's fmmeta.json. Raises `UsageError` for a broken one."""
    return read_json(model_name_or_path, "fmmeta.json", checked) or {}


def checked(facts: Any) -> dict[str, Any]:
    """The content of an fmmeta.json without its nulls and NaNs. Raises `ValueError` for wrong content."""
    if not isinstance(facts, dict):
        raise ValueError("it holds no settings")
    facts = translated(facts, Config.__dataclass_fields__)
    for name, value in facts.items():
        if value is not None and (wanted := misfit(name, value)):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}, and should be {wanted}")
    used_splits.read(facts)
    return {name: value for name, value in facts.items() if value is not None and value == value}


def misfit(name: str, value: Any) -> str | None:
    """The type that a setting in fmmeta.json should have, if its value has another one.

    Other facts are checked where they are used.
    """
    if name not in (*REMEMBERED, "n_way", "classes", "labels"):
        return None
    hint = {**get_type_hints(Config), "labels": list[str], "classes": int}[name]
    listed = get_origin(hint) is list
    kind = get_args(hint)[0] if listed else hint
    allowed = (int, float) if kind is float else kind
    values = value if listed and isinstance(value, list) else [value]
    right = isinstance(value, list) == listed and all(
        isinstance(one, allowed) and not isinstance(one, bool) for one in values
    )
    return None if right else f"{'a list of ' if listed else ''}{kind.__name__}"
