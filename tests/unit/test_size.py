"""What `python -m tests.support.size` counts, and the budgets of the folders."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.size import ROOT, by_folder, modules, statements

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
    assert statements("") == 0


def test_the_total_is_the_sum_over_folders():
    sizes = by_folder()
    assert sizes.total() == sum(statements(source) for _, source in modules())
    assert {"fmmeta/meta", "fmmeta/parallel", "fmmeta/cli.py"} <= sizes.keys()
    command = [sys.executable, "-m", "tests.support.size"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1].split() == [f"{sizes.total():,}", "fmmeta"]


def test_no_folder_exceeds_its_budget():
    """tests/budget.json: statements of each folder. Numbers go down with the code; a commit that raises one
    says why.
    """
    budget = json.loads(Path(ROOT, "tests", "budget.json").read_text(encoding="utf-8"))
    sizes = by_folder()
    assert budget.keys() == sizes.keys()
    assert {name: size for name, size in sizes.items() if size > budget[name]} == {}
    assert {name: size for name, size in sizes.items() if size < budget[name] - 20} == {}, "lower the budget"
