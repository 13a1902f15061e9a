"""The text of `--help`: the flags of a command in titled groups, made from the dataclass of its settings."""

import textwrap
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, nearest
from fmmeta.config import recipes
from fmmeta.config.fields import default_of, kind_of, shown
from fmmeta.config.settings import GROUPS, Config, OfStoredModel, names_of

INDENT = 30  # columns before the text of a flag
FEW = 45  # flags that --help shows all; of more it shows those that most runs need
NO_BREAK = "\u00a0"
KINDS: dict[Any, str] = {int: " N", float: " X", str: " NAME", bool: ""}
Groups = Mapping[str, tuple[str, list[Field[Any]]]]
"""Title and settings of each group, by its name."""


def groups_of(command: str, settings: Any) -> Groups:
    """The settings of a command by group: first the command's own, then those that it shares with a run."""
    known = {item.name: item for item in fields(settings)}
    shared = dict[str, tuple[str, list[Field[Any]]]]()
    for group, (title, _) in GROUPS.items():
        if items := [known.pop(name) for name in names_of(group) if name in known]:
            shared[group] = (title, items)
    own = {command: (command.capitalize(), list(known.values()))} if known else {}
    return {**own, **shared}


def is_common(item: Field[Any]) -> bool:
    """Whether --help shows a setting: one that most runs need, or one that only this command has."""
    known = Config.__dataclass_fields__.get(item.name)
    return known is None or known.metadata["help"].rule.common


def help_text(
    command: str, about: str, usage: str, settings: Any, asked: str | None, everything: bool, width: int
) -> str:
    """The help of a command. asked: the group of `--help GROUP`; everything: as for --help-all.

    Raises `UsageError` for an unknown group.
    """
    groups = groups_of(command, settings)
    if asked is not None and asked not in groups:
        known = f"use {any_of(groups)}" if groups else f"`fmmeta {command}` takes no flags"
        raise UsageError(f"help={asked} is no group of flags{nearest(asked, groups)}; {known}")
    total = sum(len(items) for _, items in groups.values())
    shortened = asked is None and not everything and total > FEW
    lines = [f"usage: fmmeta {command} {usage}", "", *textwrap.wrap(about, width)]
    if issubclass(settings, Config):
        lines += textwrap.wrap(f"Recipes: {', '.join(recipes.names())}.", width)
    for group, (title, items) in groups.items():
        shown_here = [item for item in items if not shortened or is_common(item)]
        if shown_here and asked in (None, group):
            lines += ["", title if len(groups) == 1 else f"{title} ({group})"]
            lines += [line for item in shown_here for line in flag_lines(item, settings, width)]
    if groups:
        flag, text = "--config FILE", "YAML or JSON file with the same names; flags win"
        if issubclass(settings, Config):
            flag = "--config RECIPE|FILE"
            text = f"Packaged recipe, or a {text}; the flag's name can be left out"
        lines += ["", *row(flag, text, width)]
    if shortened:
        end = (
            f"These are the flags that most runs need. `fmmeta {command} --help-all` lists all {total},"
            f" `fmmeta {command} --help GROUP` those of one group: {', '.join(groups)}."
        )
        lines += ["", *textwrap.wrap(end, width, break_on_hyphens=False)]
    return "\n".join(lines)


def flag_lines(item: Field[Any], settings: Any, width: int) -> list[str]:
    """A flag with the kind of its value, its text and its default."""
    kind, is_list = kind_of(settings, item.name)
    value = " N|auto" if item.metadata["help"].rule.or_auto is not None else KINDS[kind]
    flag = f"--{item.name}{value}{' ...' if is_list else ''}"
    text, default = text_and_default(item, settings)
    text, opening, of_text = text.partition(" (default: ")
    choices = item.metadata.get("choices", ())
    if any(one not in text for one in choices):
        text += f"; one of {any_of(choices)}"
    if opening:
        text += opening + of_text
    elif default not in (None, "", []):
        text += f" (default: {shown(default)}{f'; --no_{item.name}' if default is True else ''})"
    return row(flag, text.replace("(default: ", f"(default:{NO_BREAK}"), width)


def text_and_default(item: Field[Any], settings: Any) -> tuple[str, Any]:
    """The help text of a command's flag, and its default unless the text names it."""
    text = str(item.metadata["help"]).replace("%%", "%")
    if item.metadata["help"].rule.remembered and issubclass(settings, OfStoredModel):
        return f"{text.split(' (default:')[0]} (default: as the model was meta-trained)", None
    return text, default_of(item)


def row(flag: str, text: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(text, max(width - INDENT, 20), break_on_hyphens=False)
    wrapped = [line.replace(NO_BREAK, " ") for line in wrapped]
    if len(flag) + 4 > INDENT:
        return [f"  {flag}", *(" " * INDENT + line for line in wrapped)]
    return [f"  {flag}".ljust(INDENT) + wrapped[0], *(" " * INDENT + line for line in wrapped[1:])]
