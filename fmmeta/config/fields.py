"""How a setting is declared: one line with its default, its help text and its rules."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from fmmeta.config.values import LARGEST


@dataclass(frozen=True)
class SettingRule:
    """The values that a setting may have, the settings that it needs, and where it is stored and compared."""

    least: float | None = None
    most: float = LARGEST
    below: float | None = None  # values from 0 to below this one
    positive: str = ""  # above 0; what to use instead
    or_auto: int | None = None  # a text: auto, or a whole number from this one
    needs: tuple[str, ...] = ()  # another setting, and its values (none: any but 0 and False)
    task_type: str = ""  # the only one that reads it
    per_algorithm: bool = False  # only algorithms read it that name it in AlgorithmSpec.supports
    resume: Literal["fixed", "free", "hidden"] = "fixed"  # free: may change; hidden: changes are not named
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


def default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def rules(settings: Any) -> dict[str, SettingRule]:
    """By name, of a dataclass of settings or an instance."""
    return {item.name: item.metadata["help"].rule for item in fields(settings)}


def names_where(settings: Any, holds: Callable[[SettingRule], bool]) -> tuple[str, ...]:
    return tuple(name for name, rule in rules(settings).items() if holds(rule))
