"""HTML and SVG as nested calls. Text is escaped here and nowhere else: whatever is no `Markup` is text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Markup(str):
    """Text that is markup already."""


NONE = "\u2013"  # where there is no number
VOID = {"meta", "link", "br", "path", "line", "rect", "circle"}


def tag(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element; `cls` is its class, `_` in names of attributes is `-`; attributes that are None are left
    out.
    """
    pairs = {
        "class" if key == "cls" else key.rstrip("_").replace("_", "-"): value
        for key, value in attributes.items()
    }
    opened = name + "".join(
        f' {key}="{escape(str(value))}"' for key, value in pairs.items() if value is not None
    )
    if name in VOID:
        return Markup(f"<{opened}/>" if name in ("path", "line", "rect", "circle") else f"<{opened}>")
    return Markup(f"<{opened}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child) for child in children if child is not None
        )
    )


def row(*cells: str, cls: str | None = None) -> Markup:
    """Of a table. Roles are written out, since a style that stacks cells on a phone would take them away."""
    return tag("tr", *cells, cls=cls, role="row")


def cell(content: str = "", cls: str | None = None) -> Markup:
    return tag("td", content, cls=cls, role="cell")


def row_head(content: str) -> Markup:
    return tag("th", content, scope="row", role="rowheader")


def column_head(content: str = "", cls: str | None = None, title: str | None = None) -> Markup:
    return tag("th", content, scope="col", cls=cls, title=title, role="columnheader")


def table(
    head: Sequence[str], rows: Sequence[str], cls: str | None = None, caption: str | None = None
) -> Markup:
    said = None if caption is None else tag("caption", caption)
    parts = [
        tag(part, *inner, role="rowgroup")
        for part, inner in (("thead", [row(*head)] if head else ()), ("tbody", rows))
        if inner
    ]
    return tag("table", said, *parts, cls=cls, role="table")


def scrolling(content: str, name: str) -> Markup:
    """What may be wider than the page moves inside its own frame, by keyboard as well."""
    return tag("div", content, cls="scroll", role="region", tabindex="0", aria_label=name)


def section(name: str, title: str, *content: str | None) -> Markup:
    """A part of the page, with its title."""
    return tag("section", tag("h2", title, id=name), *content, aria_labelledby=name)


def quiet(*content: str) -> Markup:
    return tag("p", *content, cls="quiet")
