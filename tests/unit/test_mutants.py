"""Every planted defect still applies to the code, and names tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.run import ROOT
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant):
    source = (ROOT / "fmmeta" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    ast.parse(source.replace(mutant.old, mutant.new))
    for test in mutant.tests:
        assert (ROOT / "tests" / test).exists(), test


def test_there_are_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(not mutant.equivalent for mutant in MUTANTS) >= 40
    assert sum(mutant.equivalent for mutant in MUTANTS) >= 5
