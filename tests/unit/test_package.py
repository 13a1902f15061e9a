"""Folders import only from earlier folders, one module torch.distributed, one DeepSpeed; sizes of folders;
examples and docstrings.
"""

import ast
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import networkx
import pytest

import fmmeta
from tests.support.launch import ROOT, environment
from tests.support.size import by_folder, statements

PACKAGE = ROOT / "fmmeta"
ORDER = [
    "common",
    "config",
    "tasks",
    "learners",
    "parallel",
    "meta",
    "checkpoint",
    "report",
    "planning",
    "metrics",
    "reliability",
    "training",
    "elastic",
    "evaluation",
    "adaptation",
    "train",
    "doctor",
    "inspection",
    "cli",
    "__main__",
]
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, at the top or lazily."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_order_names_every_folder_and_contributing_shows_it():
    own = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert own == set(ORDER)
    assert len(own) <= 20
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[0].replace(",", " ").split()
    assert shown == [name for name in ORDER if name != "__main__"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_imports_from_those_before_it(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    folders = {name.split(".")[1] for name in imported(path) if name.startswith("fmmeta.")}
    assert folders <= {*ORDER[: ORDER.index(own)], own}


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("tests", {"benchmarks", "experiments"}),
        ("benchmarks", {"tests"}),
        ("experiments", {"tests"}),
        ("harness", {"tests", "benchmarks", "experiments"}),
    ],
)
def test_tests_and_benchmarks_share_the_harness_alone(folder, others):
    files = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / "tests" / "benchmarks"]
    assert files
    assert not [path for path in files if others & {name.split(".")[0] for name in imported(path)}]


def test_no_file_imports_itself_through_others():
    """Imports inside functions and under TYPE_CHECKING count."""
    graph = networkx.DiGraph()
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    for module, path in modules.items():
        for name in imported(path):
            graph.add_edge(module, name if name in modules else name.rpartition(".")[0])
    assert [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_no_class_name_is_used_twice():
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in FILES]
    names = Counter(node.name for body in bodies for node in body if isinstance(node, ast.ClassDef))
    assert [name for name, uses in names.items() if uses > 1] == []


@pytest.mark.parametrize(
    ("package", "owner"), [("torch.distributed", "process_groups.py"), ("deepspeed", "zero.py")]
)
def test_one_module_alone_imports(package, owner):
    parts = {path.name: {f"{name}." for name in imported(path)} for path in FILES}
    assert [name for name, names in parts.items() if any(one.startswith(f"{package}.") for one in names)] == [
        owner
    ]


def test_torch_distributed_is_not_reached_by_its_full_name():
    others = [path for path in FILES if path.name != "process_groups.py"]
    assert not [path.name for path in others if "torch.distributed." in path.read_text()]


CHEAP = (
    *("fmmeta", "fmmeta.config.settings", "fmmeta.cli", "fmmeta.parallel.layout", "fmmeta.report.page"),
    *("fmmeta.tasks.schedule.meta_batches", "fmmeta.training.trackers"),
)
IMPORT = """
import importlib, json, sys, time
found = []
for name in sys.argv[1:]:
    began = time.process_time()
    importlib.import_module(name)
    found.append((time.process_time() - began, sorted({one.split(".")[0] for one in sys.modules})))
print(json.dumps(found))
"""


def test_cheap_modules_import_nothing_heavy():
    words = [sys.executable, "-c", IMPORT, *CHEAP]
    found = json.loads(subprocess.check_output(words, env=environment(), text=True, timeout=60))
    heavy = {"torch", "transformers", "deepspeed", "datasets"}
    assert not [name for name, (_, loaded) in zip(CHEAP, found, strict=True) if heavy & set(loaded)]
    seconds, loaded = found[0]
    assert seconds < 0.5
    assert "dataclasses" not in loaded  # not even the settings


SOURCE = '''"""Module."""
import os

class A:
    """Class."""
    size: int = 1

    def first(self):
        """Function."""
        if self.size: return os
        ...

    async def second(self): print("a"); "a constant"
'''


def test_statements_count_everything_but_constants():
    assert statements(SOURCE) == 8  # import, class, attribute, 2 functions, if, return, print


def test_no_folder_exceeds_its_budget():
    """tests/budget.json: statements of each folder. Numbers go down with the code; a commit that raises one
    says why.
    """
    budget = json.loads((ROOT / "tests" / "budget.json").read_text(encoding="utf-8"))
    sizes = by_folder()
    assert budget.keys() == sizes.keys()
    assert {name: size for name, size in sizes.items() if size > budget[name]} == {}
    assert {name: size for name, size in sizes.items() if size < budget[name] - 20} == {}, "lower the budget"


EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "fmmeta").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_of_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > found.failed == 0


@pytest.mark.parametrize("name", fmmeta.__all__)
def test_public_names_are_documented(name):
    public = getattr(fmmeta, name)
    methods = [one for key, one in vars(public).items() if inspect.isfunction(one) and key[0] != "_"]
    assert all(inspect.getdoc(one) for one in (public, *methods))
