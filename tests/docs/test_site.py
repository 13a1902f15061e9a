"""The documentation: every page is in the navigation; names, links and messages in pages exist; the figure is
what its source draws; the page of what works agrees with the code; the site builds in strict mode.
"""

import ast
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import yaml
from transformers import AutoConfig

import fmmeta
from fmmeta.cli import COMMANDS, parse
from fmmeta.config.algorithms import BUILT_IN
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe
from fmmeta.learners.stages import family_of
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.tensor_parallel import plan_of
from tests.support.helpers import tables_of
from tests.support.launch import ROOT, environment
from tests.support.messages import refusal

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
READ = [
    page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "log"
]  # a dated log keeps old names
READ += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
READ += [ROOT / folder / "README.md" for folder in ("benchmarks", "experiments")]
BASES = (ROOT, ROOT / "fmmeta", ROOT / "tests")
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


@pytest.fixture(scope="module")
def command_page():
    """The function of docs/hooks.py that writes the page of a command."""
    for package in ("mkdocs", "griffe"):
        pytest.importorskip(package, reason=NO_SITE)
    return runpy.run_path(str(DOCS / "hooks.py"))["command_page"]


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


def test_the_navigation_names_every_page_and_the_site_loads_nothing_from_other_hosts():
    assert set(PAGES) <= set(pages_of(MKDOCS["nav"]))
    assert MKDOCS["theme"]["font"] is False
    assert "extra_javascript" not in MKDOCS
    assert not any("//" in file for file in MKDOCS["extra_css"])


@pytest.mark.parametrize("page", [name for name in PAGES if not name.startswith("log/")])
def test_flags_of_command_lines_in_a_page_exist(page):
    assert not [words for words in flags_of_commands(PAGES[page]) if words[1] not in settings_of(words[0])]


def test_names_in_the_migration_tables_exist():
    rows = [row for table in tables_of(PAGES["reference/coming-from.md"]).values() for row in table]
    known = {f"--{flag}" for command in COMMANDS for flag in settings_of(command)}
    known |= {f"fmmeta {command}" for command in COMMANDS} | {f"fmmeta.{name}" for name in fmmeta.__all__}
    assert len(rows) >= 40
    assert not {name for row in rows for name in re.findall(r"`([^`]*)`", row[1])} - known
    assert all(len(row) == 3 and ("`" in row[1] or (row[1] == "-" and row[2])) for row in rows)


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
    quoted = re.findall(r"```text\n(.*?)```", PAGES["explanation/failures.md"], re.DOTALL)
    lines = "".join(quoted).splitlines()
    assert len(lines) > 10
    assert not [line for line in lines if not known.search(line)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_every_flag_once(command, command_page):
    shown = re.findall(r"^`--(\w+)`\{ #(\w+) \}", command_page(command), re.MULTILINE)
    flags = pkgutil.resolve_name(COMMANDS[command].settings).__dataclass_fields__
    assert sorted(shown) == sorted((name, name) for name in flags)


def test_flags_of_train_are_in_titled_groups(command_page):
    titles = re.findall(r"^## (.*)$", command_page("train"), re.MULTILINE)
    assert (titles[0], len(titles) > 4) == ("Model", True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_in_strict_mode_without_requests_to_other_hosts(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=NO_SITE)
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = environment(NO_MKDOCS_2_WARNING="1", PYTHONPATH=str(ROOT))
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert set(COMMANDS) <= {page.stem for page in (tmp_path / "reference" / "commands").iterdir()}
    api = (tmp_path / "reference" / "python-api.html").read_text()
    assert all(f'id="fmmeta.{name}"' in api for name in fmmeta.__all__)
    assert "tasks_per_pass" in (tmp_path / "search" / "search_index.json").read_text()
    outside = r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*stylesheet[^>]*href=\"?https?:"
    assert not [page for page in tmp_path.rglob("*.html") if re.search(outside, page.read_text())]


def test_every_target_of_the_makefile_installs_the_locked_versions():
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--editable" in line]
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)


def test_the_figure_equals_the_output_of_its_source():
    draw = runpy.run_path(str(DOCS / "architecture_figure.py"))["figure"]
    assert (DOCS / "architecture.svg").read_text() == draw()


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_named_modules_links_and_headings_exist(page):
    text = page.read_text()
    named = {name.lstrip("./") for name in re.findall(r"[\w./]*\w/\w+\.py\b", text)}
    assert not {name for name in named if not any((base / name).exists() for base in BASES)}
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, f"{target}#{heading}"


PAGE = DOCS / "reference" / "what-works.md"


SUPPORTED = runpy.run_path(str(DOCS / "supported_models.py"))


def listed(heading: str) -> list[str]:
    """The first cells of the table under a heading of the page."""
    section = PAGE.read_text().split(f"## Refused {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)[1 if heading == "models" else 0 :]


@pytest.mark.parametrize(("file", "most"), [("docs/reference/what-works.md", 31), ("README.md", 8)])
def test_a_table_of_supported_models_is_that_of_the_code(file, most):
    text, content = (ROOT / file).read_text(), SUPPORTED["pages"]()[file]
    assert SUPPORTED["page"](text, content) == text, "run: python docs/supported_models.py"
    assert len(content.splitlines()) - 2 <= most


def test_the_table_of_what_goes_together_is_that_of_the_code():
    source, text = runpy.run_path(str(DOCS / "compatibility.py")), PAGE.read_text()
    assert source["page"](text) == text, "run: python docs/compatibility.py"
    assert all((ROOT / file).is_file() for file in source["ELSEWHERE"].values())
    assert set(source["ALGORITHMS"]) == set(BUILT_IN)


@pytest.mark.parametrize("row", SUPPORTED["rows"](), ids=lambda row: row[0])
def test_a_family_is_split_or_refused_as_the_table_says(row):
    name = row[0].strip("`")
    known = row[0].startswith("`")
    hf_config = AutoConfig.for_model(name) if known else SimpleNamespace(model_type="other")
    for works, split, ranks in ((row[3], family_of, ()), (row[4], plan_of, (2,))):
        if works == "yes":
            assert split(hf_config, *ranks)
        else:
            assert "ZeRO 3" in refusal(split, hf_config, *ranks)


LISTED = [(kind, one) for kind in ("settings", "DeepSpeed files", "models") for one in listed(kind)]


@pytest.mark.parametrize(("kind", "content"), LISTED)
def test_the_limitations_are_refused(kind, content, tmp_path):
    """Flags, the content of a DeepSpeed file, and that of a model's config.json."""
    (tmp_path / "config.json").write_text(content)
    if kind == "settings":
        assert "; " in refusal(parse, shlex.split(content))
    elif kind == "models":
        assert "; " in refusal(describe, Config(model_name_or_path=str(tmp_path)))
    else:
        message = refusal(deepspeed_config.read, str(tmp_path / "config.json"), False)
        assert "deepspeed=config.json sets " in message


def test_the_limitations_list_refusals_of_each_kind():
    assert Counter(kind for kind, _ in LISTED) == {"settings": 11, "DeepSpeed files": 8, "models": 3}
