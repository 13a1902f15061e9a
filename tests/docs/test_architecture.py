"""The figure is what its source draws; modules and links that the pages name exist."""

import re

import pytest

from tests.support.launch import ROOT

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "experiments")),
]
PAGES = [page for page in PAGES if page.parent.name != "log"]  # a dated log keeps the names of its time
BASES = (ROOT, ROOT / "fmmeta", ROOT / "tests")


def test_the_figure_equals_the_output_of_its_source():
    source: dict[str, object] = {"__name__": "figure"}
    exec((ROOT / "docs" / "architecture_figure.py").read_text(), source)
    assert (ROOT / "docs" / "architecture.svg").read_text() == source["figure"]()  # type: ignore[operator]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_modules_exist(page):
    named = set(re.findall(r"[\w./]*\w/\w+\.py\b", page.read_text()))
    missing = {name for name in named if not any((base / name.lstrip("./")).exists() for base in BASES)}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_hold(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{target}#{heading}"
