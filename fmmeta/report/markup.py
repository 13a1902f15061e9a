"""HTML and SVG as nested calls. Text is escaped here and nowhere else: whatever is no `Markup` is text."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is markup already."""


NONE = "\u2013"  # where there is no number
VOID = {"meta", "link", "br", "path", "line", "rect", "circle"}


def tag(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element; `cls` is its class, `_` in names of attributes is `-`; attributes that are None are left out."""
    pairs = {"class" if key == "cls" else key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    opened = name + "".join(f' {key}="{escape(str(value))}"' for key, value in pairs.items() if value is not None)
    if name in VOID:
        return Markup(f"<{opened}/>" if name in ("path", "line", "rect", "circle") else f"<{opened}>")
    return Markup(f"<{opened}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child is not None))
