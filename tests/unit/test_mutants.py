"""Every planted defect still applies to the code, and names tests that exist."""

import ast
import json

import pytest

from tests.mutants.run import DOCS, ROOT, page
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant):
    source = (ROOT / "fmmeta" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    ast.parse(source.replace(mutant.old, mutant.new))
    for test in mutant.tests:
        assert (ROOT / "tests" / test).exists(), test


def test_the_docs_name_the_test_that_notices_each():
    results = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())
    assert page(DOCS.read_text(), results) == DOCS.read_text(), "run: make mutants"


def test_there_are_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(not mutant.equivalent for mutant in MUTANTS) >= 40
    assert sum(mutant.equivalent for mutant in MUTANTS) >= 5
