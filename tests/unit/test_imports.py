"""Folders import only from earlier folders; one module imports torch.distributed, one DeepSpeed."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx
import pytest

from tests.support.helpers import ROOT
from tests.support.launch import environment

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


def folder_of(name: str) -> str:
    """`fmmeta.tasks.batching.Example` -> `tasks`."""
    return name.split(".")[1]


def test_the_order_names_every_folder_and_contributing_shows_it():
    own = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert own == set(ORDER)
    assert len(own) <= 20
    shown = re.findall(
        r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
    )[0]
    assert shown.replace(",", " ").split() == [name for name in ORDER if name != "__main__"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_imports_from_those_before_it(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    before = {*ORDER[: ORDER.index(own)], own}
    assert {folder_of(name) for name in imported(path) if name.startswith("fmmeta.")} <= before


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
    users = [path for path in files if others & {name.split(".")[0] for name in imported(path)}]
    assert files
    assert users == []


def test_no_file_imports_itself_through_others():
    """Imports inside functions and under TYPE_CHECKING count."""
    graph = networkx.DiGraph()
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    for module, path in modules.items():
        for name in imported(path):
            graph.add_edge(module, name if name in modules else name.rpartition(".")[0])
    assert [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_no_class_name_is_used_twice():
    seen: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                seen[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in seen.items() if len(places) > 1} == {}


@pytest.mark.parametrize(
    ("package", "owner"), [("torch.distributed", "process_groups.py"), ("deepspeed", "zero.py")]
)
def test_one_module_alone_imports(package, owner):
    users = {
        path.name
        for path in FILES
        for name in imported(path)
        if name == package or name.startswith(f"{package}.")
    }
    assert users == {owner}


def test_torch_distributed_is_not_reached_by_its_full_name():
    assert [
        path.name
        for path in FILES
        if "torch.distributed." in path.read_text() and path.name != "process_groups.py"
    ] == []


@pytest.mark.parametrize(
    "module",
    [
        "fmmeta",
        "fmmeta.config.settings",
        "fmmeta.cli",
        "fmmeta.parallel.layout",
        "fmmeta.tasks.schedule.meta_batches",
        "fmmeta.report.page",
        "fmmeta.training.trackers",
    ],
)
def test_cheap_modules_import_nothing_heavy(module):
    code = (
        f"import time; t = time.process_time(); import {module}; t = time.process_time() - t; import json,"
        " sys; print(json.dumps([t, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=60,
    )
    seconds, loaded = json.loads(ran.stdout)
    assert not {"torch", "transformers", "deepspeed", "datasets"} & set(loaded)
    if module == "fmmeta":
        assert seconds < 0.5
        assert "dataclasses" not in loaded  # not even the settings
