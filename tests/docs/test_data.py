"""The table of strata in docs/data.md is what the benchmark prints, and no group is further than one task
from its share.
"""

from __future__ import annotations

import pytest

from benchmarks.strata import all_classes, strata_table
from tests.support.helpers import DATA
from tests.support.launch import ROOT


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")
def test_strata_of_clinc150_reach_every_group():
    table, worst = strata_table(all_classes(str(DATA / "clinc150")))
    text = (ROOT / "docs" / "data.md").read_text()
    assert table in text
    assert f"from its share of a stratum: {worst:g} tasks." in text
    assert worst <= 1
