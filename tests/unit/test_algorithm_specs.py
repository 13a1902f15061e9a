"""Only the registry compares names of algorithms, and only a spec of the user is imported by name."""

import ast
import sys
from pathlib import Path

import pytest

from fmmeta.cli import parse
from fmmeta.config.algorithms import BUILT_IN, find
from fmmeta.config.registry import installed
from fmmeta.config.settings import Config
from tests.support.helpers import ROOT
from tests.support.messages import check_message, refusal

PACKAGE = ROOT / "fmmeta"
REGISTRY = PACKAGE / "config/algorithms.py"
OTHER_MEANINGS = {("evaluation/settings.py", "in_context")}
DEFAULTS = {("config/settings.py", "fomaml"), ("config/learners.py", "ttt")}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_spec_has_its_name_and_a_reference(name):
    spec = find(name)
    assert spec.name == name
    assert spec.trains_nothing == (spec.reference is None)
    assert spec.trains_nothing == (spec.passes is None)


def test_only_the_registry_compares_algorithm_names():
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        own = str(path.relative_to(PACKAGE))
        if path == REGISTRY:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [node.subject] if isinstance(node, ast.Match) else []
            compared += [node.slice] if isinstance(node, ast.Subscript) else []
            attributes = {part.attr for part in compared if isinstance(part, ast.Attribute)}
            found |= {(own, "compared")} if "algorithm" in attributes else set()
            if isinstance(node, ast.Constant) and node.value in {*BUILT_IN} - {"none"}:
                found.add((own, node.value))
    in_their_files = {(own, name) for own, name in found if own.startswith("meta/algorithms/")}
    assert found - in_their_files == DEFAULTS | OTHER_MEANINGS
    for own, name in in_their_files:  # a spec's own name, once
        assert BUILT_IN[name].partition(":")[0] == f"fmmeta.{own[:-3].replace('/', '.')}"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path

    return write


def test_spec_is_imported_from_the_current_folder(module):
    module(
        "rule_a",
        "from fmmeta.config.algorithms import AlgorithmSpec\nspec = AlgorithmSpec('mine', order=2)\n",
    )
    config = parse(["--algorithm", "rule_a:spec"])
    assert find(config.algorithm).name == "mine"
    message = refusal(Config, algorithm="rule_a:spec", inner_optimizer="adamw")
    check_message(message, "inner_optimizer=adamw", "algorithm=rule_a:spec", "use sgd or momentum")


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("nowhere:spec", "No module named 'nowhere'", "write module:name"),
        ("rule_b:missing", "module 'rule_b' has no attribute", "write module:name"),
        ("rule_b:value", "is a int and no AlgorithmSpec", "name one"),
        ("rule_c:spec", "division by zero", "write module:name"),
        (":spec", "cannot be imported", "write module:name"),
    ],
)
def test_bad_names_are_refused_in_one_line(module, name, cause, remedy):
    module("rule_b", "value = 3\n")
    module("rule_c", "1 / 0\n")
    check_message(refusal(parse, ["--algorithm", name]), f"algorithm={name} ", cause, remedy)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package whose entry points are one spec, an object that is none, and a broken module."""
    facts = tmp_path / "own_rules-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rules\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[fmmeta.algorithms]\nown_rule = own_rules:spec\nno_spec = own_rules:number\n"
        "broken = own_rules_broken:spec\nfomaml = own_rules:number\n"
    )
    (tmp_path / "own_rules.py").write_text(
        "from fmmeta.config.algorithms import AlgorithmSpec\nspec, number = AlgorithmSpec('own_rule'), 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("own_rules", None)


def test_an_installed_package_adds_algorithms_by_entry_points(package):
    """A built-in name cannot be replaced; the current folder is not searched."""
    path = list(sys.path)
    assert Config(algorithm="own_rule").algorithm == "own_rule"
    assert find("own_rule").name == "own_rule"
    assert find("fomaml").rule is not None
    assert sys.path == path
    check_message(refusal(find, "no_spec"), "algorithm=no_spec is a int and no AlgorithmSpec", "name one")
    check_message(refusal(find, "broken"), "algorithm=broken cannot be imported from own_rules_broken:spec")
    check_message(refusal(find, "unknown"), "algorithm=unknown is unknown", "own_rule", "module:spec")


def test_only_a_module_spec_adds_the_current_folder_to_the_path(module):
    folder = str(module("rule_d", "value = 3\n"))
    sys.path[:] = [place for place in sys.path if place not in ("", folder)]
    for name in BUILT_IN:
        find(name)
    assert folder not in sys.path
    refusal(parse, ["--algorithm", "rule_d:value"])
    assert folder in sys.path
