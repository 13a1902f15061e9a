"""Settings that a model stores in its fmmeta.json: how it learns a task, and what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fmmeta.common.errors import UsageError
from fmmeta.config.renamed import translated
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.models.files import cached_file
from fmmeta.tasks.data import used_splits


def trained_with(models: Sequence[str]) -> list[used_splits.UsedSplits]:
    """The splits that these models were trained with. Raises `UsageError`."""
    return [one for model in models for one in used_splits.read(remembered(model))]


def remembered(model_name_or_path: str) -> dict[str, Any]:
    """What a model's fmmeta.json says. Raises `UsageError` for a broken one."""
    if model_name_or_path == "tiny":
        return {}
    path = cached_file(model_name_or_path, "fmmeta.json")
    if path is None:
        return {}
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no settings")
        facts = translated(facts, Config.__dataclass_fields__)
        for name, value in facts.items():
            if value is not None and (wanted := misfit(name, value)):
                raise ValueError(f"{name} is {json.dumps(value)[:40]}, and should be {wanted}")
        used_splits.read(facts)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"model_name_or_path={model_name_or_path}: fmmeta.json cannot be read ({error}); fix or remove it"
        ) from None
    return {
        name: value for name, value in facts.items() if value is not None and value == value
    }  # NaN is not


def misfit(name: str, value: Any) -> str | None:
    """What the value of a setting in fmmeta.json should be, if it is not.

    Other facts are read where they count.
    """
    types = {**get_type_hints(Config), "labels": list[str], "classes": int}
    if name not in (*REMEMBERED, "n_way", "classes", "labels"):
        return None
    listed = get_origin(types[name]) is list
    kind = get_args(types[name])[0] if listed else types[name]
    values = value if listed and isinstance(value, list) else [value]
    allowed = (int, float) if kind is float else kind
    right = (
        all(isinstance(one, allowed) and not isinstance(one, bool) for one in values)
        and isinstance(value, list) == listed
    )
    return None if right else f"{'a list of ' if listed else ''}{kind.__name__}"
