"""Hooks of the documentation site: a page for each command, the list of public names, links out of docs/.

mkdocs calls the functions named `on_...`; griffe (mkdocstrings) uses `FenceDoctests`. Nothing here imports
torch.
"""

import pkgutil
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

import fmmeta
from fmmeta.cli import COMMANDS
from fmmeta.config.fields import hints_of, shown
from fmmeta.config.help import groups_of, text_and_default
from fmmeta.config.settings import Config

ROOT = Path(__file__).parent.parent


def on_config(config):
    """Put the pages of the commands into the navigation."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    next(entry for entry in reference if "Command line" in entry)["Command line"] += [
        {f"fmmeta {name}": f"reference/commands/{name}.md"} for name in COMMANDS
    ]
    return config


def on_files(files, config):
    """Add the generated pages."""
    for name in COMMANDS:
        files.append(File.generated(config, f"reference/commands/{name}.md", content=command_page(name)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Fill in the lists of commands and of public names; point links that leave docs/ to the repository."""
    markdown = markdown.replace("<!-- commands -->", commands_table())
    markdown = markdown.replace("<!-- public names -->", "\n\n".join(map(api_entry, fmmeta.__all__)))
    if page.file.generated_by:
        return markdown
    out = "../" * (page.file.src_uri.count("/") + 1)  # from the page to the repository
    home = f"{config.extra['repository']}/blob/main/"
    return re.sub(rf"\]\({re.escape(out)}([^)]+)\)", rf"]({home}\1)", markdown)


def on_page_content(html, page, config, files):
    """Mark short inline code, which does not break into lines (docs/site.css)."""
    return re.sub(r"<code>(?=[^<]{1,34}</code>)", '<code class="short">', html)


def commands_table():
    listed = "\n".join(
        f"| [fmmeta {name}](commands/{name}.md) | {one.text} |" for name, one in COMMANDS.items()
    )
    return f"| command | what it does |\n|---|---|\n{listed}\n"


def command_page(command):
    """All flags of a command in titled groups, its own first."""
    settings, text = pkgutil.resolve_name(COMMANDS[command].settings), COMMANDS[command].text
    blocks = [f"# fmmeta {command}\n", f"{text[:1].upper()}{text[1:]}.\n"]
    groups = groups_of(command, settings)
    for title, items in groups.values():
        blocks += [f"## {title}\n", *(described(settings, item) for item in items)]
    return "\n".join(blocks if groups else [*blocks, "It takes no flags.\n"])


def described(settings, item):
    """An entry of a definition list: flag, values and default, help text."""
    text, default = text_and_default(item, settings)
    rule = item.metadata["help"].rule
    parts = [f"`--{item.name}`{{ #{item.name} }}", values_of(settings, item)]
    if default not in (None, [], ""):
        parts.append(f"default `{shown(default)}`")
    resume = "" if rule.resume == "fixed" or settings is not Config else " May change on resume."
    body = escaped(text).rstrip(".") + "."
    return f"{parts[0]} <small>{' · '.join(parts[1:])}</small>\n:   {body}{resume}\n"


def values_of(settings, item):
    """The values of a setting: choices, or type and bounds."""
    rule, hint = item.metadata["help"].rule, str(hints_of(settings)[item.name])
    if item.metadata.get("choices"):
        return " ".join(f"`{one}`" for one in item.metadata["choices"])
    kind = "list of " if "list" in hint else ""
    kind += next((name for key, name in KINDS.items() if key in hint), "text")
    if rule.or_auto is not None:
        return f"`auto` or a whole number from {rule.or_auto}"
    if rule.positive:
        kind += " above 0"
    elif rule.below is not None:
        kind += f" from 0 to below {rule.below:g}"
    elif rule.least is not None:
        kind += f" from {rule.least:g}"
    return kind


KINDS = {"bool": "true or false", "int": "whole number", "float": "number"}


def escaped(text):
    """Help text as Markdown: flags, patterns and placeholders as code."""
    text = re.sub(r"(\{\"\d.*?\}\}|\{\".*?\}|\{\w+\}|--\w+|\b\w+=\w+\b)", r"`\1`", text)
    return text.replace("*", r"\*").replace("<", "&lt;")


def api_entry(name):
    """What mkdocstrings shows of a public name: of Config not the settings, which have their own pages."""
    if name == "Config":
        options = "\n    options:\n      show_signature: false\n      members: [as_dict]"
        return f"::: fmmeta.{name}{options}"
    return f"::: fmmeta.{name}"


class FenceDoctests(griffe.Extension):
    """Shows the doctest examples of docstrings as code blocks."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            blocks = re.split(r"\n{2,}", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(fenced, blocks))


def fenced(block):
    """A paragraph; from its first line with >>> on a code block."""
    before, prompt, example = block.partition(">>> ")
    return f"{before}\n```pycon\n{prompt}{example}\n```" if prompt else block
