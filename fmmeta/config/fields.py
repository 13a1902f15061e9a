"""How a setting is declared (one line with its default, its help text and its rules), and how a value is
converted to its type and checked by its rules.
"""

import os
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, nearest, shortened

LARGEST = 3.4e38  # what fp32 holds
FORMS = (  # endings that promise a format
    *(".json", ".jsonl", ".yaml", ".yml", ".csv", ".tsv", ".xls", ".xlsx", ".ods", ".parquet", ".arrow"),
    *(".html", ".md", ".svg", ".png", ".jpg", ".pdf", ".gz", ".bz2", ".xz", ".zst", ".zip", ".safetensors"),
)
KINDS: dict[type, tuple[str, Any]] = {  # what a message calls a type, and the types that are converted to it
    bool: ("True or False", bool),
    str: ("a text", (str, os.PathLike, int)),
    int: ("a whole number", Integral),
    float: ("a number", Real),
}

hints_of = cache(get_type_hints)
"""The types of a dataclass's fields, by name."""


def shown(value: Any) -> str:
    """A value as messages show it: lists as the flag takes them."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def kind_of(settings: Any, name: str) -> tuple[type, bool]:
    """The type of a setting's values without None, and whether the setting is a list of them."""
    hint = hints_of(settings)[name]
    return next(one for one in get_args(hint) or (hint,) if one is not type(None)), get_origin(hint) is list


def is_open(settings: Any, name: str, value: Any) -> bool:
    """Whether a value leaves the setting open: None, or auto of a switch, where None is the default."""
    if settings.__dataclass_fields__[name].default is not None:
        return False
    return value is None or (kind_of(settings, name)[0] is bool and str(value) == "auto")


def of_type(settings: Any, name: str, value: Any) -> Any:
    """A value of a dataclass's field, converted as the flag's text is. Raises `UsageError`.

    A single value for a list becomes a list of one.
    """
    if is_open(settings, name, value):
        return None
    kind, is_list = kind_of(settings, name)
    if is_list:
        return [_of_kind(kind, name, one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    return _of_kind(kind, name, value)


def _of_kind(kind: type, name: str, value: Any) -> Any:
    wanted, accepted = KINDS[kind]
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise UsageError(f"{name}={shortened(value)} is not {wanted}; give one")
    if isinstance(value, Integral) and abs(int(value)) > LARGEST:  # such numbers cannot always be printed
        raise UsageError(f"{name} is no number to compute with; use one up to {LARGEST:g}")
    return kind(value)


@dataclass(frozen=True)
class SettingRule:
    """The values that a setting may have, the settings that it needs, and where it is stored and compared."""

    open: Any = None  # the value of a run that leaves the setting open, which is None then
    least: float | None = None
    most: float = LARGEST
    below: float | None = None  # values from 0 to below this one
    positive: str | bool = False  # above 0; what to use instead, or True: a number such as the example
    example: str = ""  # a number to use: by default the setting's own default
    or_auto: int | None = None  # a text: auto, or a whole number from this one
    needs: tuple[str, ...] = ()  # another setting, and its values (none: any but 0 and False)
    # why this setting does not go with another one, by name=value, or by name for all values but the default
    excludes: Mapping[str, str] = field(default_factory=dict)
    of: str = ""  # a field of LearnerSpec (of_classes, generates), or draws_classes; others do not read it
    per_algorithm: bool = False  # only algorithms read it that name it in AlgorithmSpec.supports
    resume: Literal["fixed", "free", "hidden"] = "fixed"  # free: may change; hidden: changes are not named
    remembered: bool = False  # stored in an exported model's fmmeta.json
    writes: tuple[str, ...] = ()  # a file that is written: its endings; those of other formats are refused
    keyed: bool = False  # changes how rows become tokens
    common: bool = False  # shown by --help; --help-all shows all


class Help(str):
    """A help text with the rule of its setting. HfArgumentParser passes all other metadata on to argparse."""

    rule: SettingRule


def setting(default: Any, text: str, choices: tuple[str, ...] | None = None, **rule: Any) -> Any:
    """A dataclass field. rule: fields of `SettingRule`."""
    described = Help(text.replace("%", "%%"))
    usual = rule.get("open", default)
    is_number = isinstance(usual, (int, float)) and not isinstance(usual, bool)
    described.rule = SettingRule(**{"example": f"{usual:g}" if is_number else "", **rule})
    metadata = {"help": described, **({"choices": list(choices)} if choices else {})}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    """The value of a run that does not set it. `unset_of`: what the field holds until it is set."""
    rule: SettingRule = item.metadata["help"].rule
    return unset_of(item) if rule.open is None else rule.open


def unset_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def rules(settings: Any) -> dict[str, SettingRule]:
    """By name, of a dataclass of settings or an instance."""
    return {item.name: item.metadata["help"].rule for item in fields(settings)}


def names_where(settings: Any, holds: Callable[[SettingRule], bool]) -> tuple[str, ...]:
    return tuple(name for name, rule in rules(settings).items() if holds(rule))


def check_values(c: Any) -> None:
    """Check each setting of a dataclass by its choices and bounds. Raises `UsageError`."""
    for item in fields(c):
        name, given, choices = item.name, getattr(c, item.name), item.metadata.get("choices")
        for value in given if isinstance(given, list) else [given]:
            if choices and value is not None and value not in choices:
                close = nearest(str(value), choices)
                raise UsageError(f"{name}={value} is unknown{close}; use {any_of(choices)}")
        rule: SettingRule = item.metadata["help"].rule
        check_bounds(name, given, rule)
        ending = os.path.splitext(str(given))[1].lower()
        if rule.writes and ending in FORMS and ending not in rule.writes:
            raise UsageError(
                f"{name}={given} ends with {ending}, and {any_of(rule.writes)} is written; change the ending"
            )
        for value in given if isinstance(given, list) else [given]:
            if value == "" and default_of(item) != "":
                raise UsageError(f"{name}= is empty; give a value, or leave it out")
            if isinstance(value, str) and "\0" in value:
                raise UsageError(f"{name}={value!r} holds a null character; remove it")
            if isinstance(value, str) and value.startswith("~/"):
                raise UsageError(
                    f"{name}={value} begins with ~, which only a shell replaces; write the whole path"
                )


def check_bounds(name: str, value: Any, rule: SettingRule) -> None:
    """Check a value by the bounds of its rule; None is always accepted. Raises `UsageError`."""
    if value is None or (rule.or_auto is not None and value == "auto"):
        return
    given, limited = f"{name}={value}", rule.least is not None or rule.positive
    instead = f"such as {rule.example}" if rule.positive is True else rule.positive
    above = "no number to compute with" if rule.most == LARGEST else f"above {rule.most}"
    least = "one" if rule.least is None else f"{rule.least} or more,"
    refuse_first(
        [
            (
                rule.or_auto is not None and not (value.isdecimal() and int(value) >= rule.or_auto),
                f"{given} is neither auto nor a number; use auto, or {rule.or_auto} or more",
            ),
            (
                rule.below is not None and not 0 <= value < rule.below,
                f"{given} is not in [0, {rule.below}); use {rule.example}, say",
            ),
            (
                rule.least is not None and value < rule.least,
                f"{given} is below {rule.least}; use {rule.least} or more",
            ),
            (rule.positive and not value > 0, f"{given} is no positive number; use one, {instead}"),
            (limited and not value <= rule.most, f"{given} is {above}; use {least} up to {rule.most}"),
        ]
    )


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], every: Container[str]) -> None:
    """Raise `UsageError` for a name that is no setting.

    known: names of the settings that a call reads; every: of all of its kind.
    """
    for name, value in given.items():
        if name not in known:
            close = nearest(name, () if name in every else known, "; leave it out")
            raise UsageError(f"{name}={shortened(value)} is no setting{close}")


class RefusesUnknownNames:
    """Base of dataclasses of settings."""

    def __new__(cls, *_: Any, **given: Any):
        """Raises `UsageError` for a keyword that is no setting, which would be a `TypeError`."""
        names = getattr(cls, "__dataclass_fields__", {})
        refuse_unknown(given, names, names)
        return super().__new__(cls)


def refuse_first(problems: Iterable[tuple[Any, str]]) -> None:
    """Raise `UsageError` with the message of the first pair whose condition holds."""
    for holds, message in problems:
        if holds:
            raise UsageError(message)
