"""The documentation site: every page is in the navigation, names and messages that pages quote exist, and the
site builds in strict mode.
"""

import ast
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import fmmeta
from fmmeta.cli import COMMANDS
from fmmeta.config.settings import Config
from tests.support.launch import ROOT

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
NO_SITE = "the site needs mkdocs: pip install 'fmmeta[docs]'"


class IgnoresTags(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions."""


IgnoresTags.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
MKDOCS = yaml.load((ROOT / "mkdocs.yml").read_text(), IgnoresTags)


def pages_of(entry: object) -> Iterator[str]:
    """Files that a part of the navigation names."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []:
        yield from pages_of(part)


def hooks() -> ModuleType:
    """docs/hooks.py as a module."""
    for package in ("mkdocs", "griffe"):
        pytest.importorskip(package, reason=NO_SITE)
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(command: str) -> set[str]:
    """Flags of a command, without dashes."""
    fields = pkgutil.resolve_name(COMMANDS[command].settings).__dataclass_fields__
    passed_on = Config.__dataclass_fields__ if command == "elastic" else ()  # to the groups that it starts
    return {*fields, *passed_on, "config", "help"}


def flags_of_commands(text: str) -> Iterator[tuple[str, str]]:
    """Command and flag of every command line in the code blocks of a page."""
    blocks = "\n".join(re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    for line in blocks.splitlines():
        words = re.search(rf"\bfmmeta ({'|'.join(COMMANDS)})\b(.*)|launch/train\.py(.*)", line)
        if words and not line.startswith("fmmeta:"):
            flags = re.findall(r"--(\w+)", (words[2] or words[3] or "").split("#")[0].split("|")[0])
            yield from ((words[1] or "train", flag) for flag in flags)


def tables(text: str) -> Iterator[list[str]]:
    """Cells of the rows of a page's tables, without their headers."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_navigation_names_every_page():
    assert set(PAGES) <= set(pages_of(MKDOCS["nav"]))


def test_the_site_loads_nothing_from_other_hosts():
    assert MKDOCS["theme"]["font"] is False
    assert "extra_javascript" not in MKDOCS
    assert not any("//" in file for file in MKDOCS["extra_css"])


@pytest.mark.parametrize("page", [name for name in PAGES if not name.startswith("log/")])
def test_flags_of_command_lines_in_a_page_exist(page):
    unknown = {(command, flag) for command, flag in flags_of_commands(PAGES[page])}
    assert not {(command, flag) for command, flag in unknown if flag not in settings_of(command)}


def test_names_in_the_migration_tables_exist():
    rows = list(tables(PAGES["reference/coming-from.md"]))
    names = [name for row in rows for name in re.findall(r"`([^`]*)`", row[1])]
    known = {
        *(f"--{flag}" for command in COMMANDS for flag in settings_of(command)),
        *(f"fmmeta {command}" for command in COMMANDS),
        *(f"fmmeta.{name}" for name in fmmeta.__all__),
    }
    assert len(rows) >= 40
    assert not {name for name in names if name not in known}
    assert all(len(row) == 3 and (row[1] == "-" or "`" in row[1]) for row in rows)
    assert all(row[2] for row in rows if row[1] == "-")


def templates(source: str) -> Iterator[str]:
    """The texts in a module as patterns, with any value in place of each expression."""
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in parts]
        if sum(map(len, texts)) > 15:
            yield "".join(re.escape(text) or ".+" for text in texts)


def test_messages_in_the_page_of_failures_are_those_of_the_code():
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "fmmeta").rglob("*.py")]
    known = re.compile("|".join({one for source in sources for one in templates(source)}))
    page = PAGES["explanation/failures.md"]
    quoted = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(quoted) > 10
    assert not [line for line in quoted if not known.search(line)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_every_flag_once(command):
    text = hooks().command_page(command)
    shown = re.findall(r"^`--(\w+)`\{ #(\w+) \}", text, re.MULTILINE)
    assert sorted(shown) == sorted(
        (name, name) for name in pkgutil.resolve_name(COMMANDS[command].settings).__dataclass_fields__
    )


def test_flags_of_train_are_in_titled_groups():
    titles = re.findall(r"^## (.*)$", hooks().command_page("train"), re.MULTILINE)
    assert titles[0] == "Model"
    assert len(titles) > 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_in_strict_mode_without_requests_to_other_hosts(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=NO_SITE)
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    site = tmp_path / "site"
    written = {page.name for page in (site / "reference" / "commands").iterdir()}
    assert {f"{name}.html" for name in COMMANDS} <= written
    api = (site / "reference" / "python-api.html").read_text()
    assert all(f'id="fmmeta.{name}"' in api for name in fmmeta.__all__)
    assert "tasks_per_pass" in (site / "search" / "search_index.json").read_text()
    for page in Path(site).rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\s\">]+)|<link[^>]*stylesheet[^>]*href=\"?(https?:)",
            page.read_text(),
        )
        assert not loaded, page


def test_every_target_of_the_makefile_installs_the_locked_versions():
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--editable" in line]
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)
