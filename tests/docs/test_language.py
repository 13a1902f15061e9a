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
    found: dict[str, list[Path]] = {
        "pages": [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    }
    found["pages"] += [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"]
    for file in (ROOT / "fmmeta").rglob("*.py"):
        inside = file.relative_to(ROOT / "fmmeta").parts
        found.setdefault(inside[0] if len(inside) > 1 else "top", []).append(file)
    for file in python_files():
        folder = file.relative_to(ROOT / "tests").parts[0]
        found.setdefault("tests" if folder.endswith(".py") else f"tests/{folder}", []).append(file)
    return found


def python_files() -> list[Path]:
    """Python files of the tests; this one has the words in its table."""
    return [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]


def imported_test_modules(file: Path) -> Iterator[str]:
    """Names of test modules that a file imports, also in code that it holds as text for a subprocess."""
    pattern = r"^\s*(?:from|import)\s+(tests\.(?:[\w.]+\.)?test_\w+)"
    yield from re.findall(pattern, file.read_text(), re.MULTILINE)


@pytest.mark.parametrize("folder", sorted(files()))
def test_forbidden_words_do_not_occur(folder):
    found = []
    for file in sorted(files()[folder]):
        found += [
            f"{file.relative_to(ROOT)}: {text[max(match.start() - 40, 0) : match.end() + 40]!r}"
            for text in prose(file)
            for match in FORBIDDEN.finditer(text)
        ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_forbidden_words():
    assert FORBIDDEN.search("tasks that could not be\nhad")
    assert FORBIDDEN.search("Nobody waits")
    assert not FORBIDDEN.search("recommended, amended, akin, belies")


def test_no_test_module_imports_another():
    """What two test modules share is in tests/support."""
    found = {
        f"{file.relative_to(ROOT / 'tests').with_suffix('')} {name.removeprefix('tests.')}"
        for file in python_files()
        for name in imported_test_modules(file)
    }
    assert not found, f"move what is shared to tests/support: {sorted(found)}"


def test_the_library_is_tested_without_benchmarks_and_studies():
    """Tests of benchmarks are in tests/benchmarks; what both need is in harness/."""
    folders = [ROOT / "tests" / name for name in ("unit", "workers", "distributed", "support")]
    pattern = re.compile(r"^\s*(?:from|import) (?:benchmarks|experiments)\b(?!\.elastic)", re.MULTILINE)
    found = [file for folder in folders for file in folder.rglob("*.py") if pattern.search(file.read_text())]
    assert not found


def test_studies_and_harness_import_no_tests():
    files = [file for name in ("experiments", "harness") for file in (ROOT / name).glob("*.py")]
    assert not [
        file for file in files if re.search(r"^(?:from|import) tests\b", file.read_text(), re.MULTILINE)
    ]
