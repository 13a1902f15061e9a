"""Settings that a model stores in its fmmeta.json: how it learns a task, and what it was trained on."""

from collections.abc import Sequence
from typing import Any

from fmmeta.config.fields import of_type
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
    """The content of an fmmeta.json without its nulls and NaNs. Raises `ValueError` for wrong content.

    Facts that are checked where they are used are returned as they are.
    """
    if not isinstance(facts, dict):
        raise ValueError("it holds no settings")
    facts = translated(facts, Config.__dataclass_fields__)
    facts = {name: value for name, value in facts.items() if value is not None and value == value}
    for name in {*REMEMBERED, "n_way"} & set(facts):
        facts[name] = of_type(Config, name, facts[name])
    labels = facts.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError("labels is not a list of texts")
    if not isinstance(facts.get("classes", 0), int):
        raise ValueError("classes is not a whole number")
    used_splits.read(facts)
    return facts
