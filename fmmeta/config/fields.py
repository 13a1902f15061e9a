"""How a setting is declared: one line with its default, its help text and the rules that hold for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class SettingRule:
    """What holds for the values of a setting, and where they are stored and compared."""

    least: float | None = None
    below: float | None = None  # values from 0 to below this one
    positive: str = ""  # above 0; what to do instead
    resume: Literal["fixed", "free", "hidden"] = "fixed"  # free: may change; hidden: and is not named then
    remembered: bool = False  # stored in an exported model's fmmeta.json
    keyed: bool = False  # changes how rows become tokens
    synonyms: tuple[str, ...] = ()  # names of the transformers Trainer, for the hint at an unknown flag


class Help(str):
    """A help text with the rule of its setting. HfArgumentParser passes all other metadata on to argparse."""

    rule: SettingRule


def setting(default: Any, text: str, choices: tuple[str, ...] | None = None, **rule: Any) -> Any:
    """A dataclass field. rule: fields of `SettingRule`."""
    described = Help(text.replace("%", "%%"))
    described.rule = SettingRule(**rule)
    metadata = {"help": described, **({"choices": list(choices)} if choices else {})}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def rules(settings: Any) -> dict[str, SettingRule]:
    """By name, of a dataclass of settings or an instance."""
    return {item.name: item.metadata["help"].rule for item in fields(settings)}


def names_where(settings: Any, holds: Callable[[SettingRule], bool]) -> tuple[str, ...]:
    return tuple(name for name, rule in rules(settings).items() if holds(rule))
