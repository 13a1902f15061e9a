"""Plain technical English in docstrings, comments, messages, pages and tests; what tests may import."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import ROOT

# What to write instead.
WORDS = {
    "lest": "so that ... not",
    "(no|some|every|any)body": "no rank, a rank, all ranks, a user",
    "who(so)?ever": "the rank that, a process that",
    "anew|afresh": "again",
    "kin": "variants",
    "mend(s|ed|ing)?": "fix, repair",
    "put(s|ting)? up with": "accept",
    "be had|been had|have had": "loaded, available",
    "born|birth": "created, loaded",
    "mother|house": "server, storage",
    "of (its|their|his|our|your) own": "own, separate",
    "(go|goes|going|went|gone) on": "resume, continue",
    "(is|are|was|were) (said|told|asked|heard)|hears? of|heard of": "logged, passed, requested",
    "speaks?|spoke|speaking": "logs",
    "remembers?|remembered": "stores, stored",
    "(is|are|was|were|be) gone": "died, was removed, has left",
    "ways? back": "backward, gradient through",
    "stands? (still|beside|in)": "is frozen, is next to, is in",
    "dealt|deals?": "assigned, assigns",
    "lies?|lay in": "is stored, is",
    "on its way": "pending",
    "bombs?": "oversized files",
}
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)


def prose(file: Path) -> Iterator[str]:
    """Strings and comments of a module, or a page; without code blocks and `code`."""
    text = file.read_text()
    if file.suffix == ".md":
        yield re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"`[^`]*`", "", node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield re.sub(r"`[^`]*`", "", token.string)


def files() -> dict[str, list[Path]]:
    """Modules by folder of fmmeta and of tests, and the pages."""
    found = {"pages": [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]}
    found["pages"] += [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"]
    for file in [*(ROOT / "fmmeta").rglob("*.py"), *python_files()]:
        package, *folders = file.relative_to(ROOT).parts[:-1]
        found.setdefault("/".join([package, *folders[:1]]), []).append(file)
    return found


def python_files() -> list[Path]:
    """Python files of the tests; this one has the words in its table."""
    return [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]


FILES = files()


@pytest.mark.parametrize("folder", FILES)
def test_forbidden_words_do_not_occur(folder):
    found = [
        f"{file.relative_to(ROOT)}: {text[max(match.start() - 40, 0) : match.end() + 40]!r}"
        for file in FILES[folder]
        for text in prose(file)
        for match in FORBIDDEN.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_forbidden_words():
    assert all(map(FORBIDDEN.search, ("tasks that could not be\nhad", "Nobody waits")))
    assert not FORBIDDEN.search("recommended, amended, akin, belies")


def test_no_test_module_imports_another():
    """What two test modules share is in tests/support; code that a test holds as text counts."""
    pattern = re.compile(r"^\s*(?:from|import)\s+(tests\.(?:[\w.]+\.)?test_\w+)", re.MULTILINE)
    found = [
        f"{file.relative_to(ROOT)} {name}"
        for file in python_files()
        for name in pattern.findall(file.read_text())
    ]
    assert not found, "move what is shared to tests/support"
