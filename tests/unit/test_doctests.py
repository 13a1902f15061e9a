"""Examples in docstrings run, and every name in `fmmeta.__all__` has a docstring."""

import doctest
import importlib
import inspect

import pytest

import fmmeta
from tests.support.helpers import ROOT

EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "fmmeta").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_of_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("name", fmmeta.__all__)
def test_public_names_are_documented(name):
    public = getattr(fmmeta, name)
    methods = [one for key, one in vars(public).items() if inspect.isfunction(one) and key[0] != "_"]
    assert all(inspect.getdoc(one) for one in (public, *methods))
