"""Waits, kernels, copies and collectives of layouts are those of budgets.json; planted errors are noticed."""

import json
import signal
import time

import pytest

from harness.fork_server import environment, places, shared
from tests.gpu import budgets, planted
from tests.support.pretended_cuda import skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("pretended"),
]
REPAIR = "python -m tests.gpu.budgets --write"


@pytest.fixture(scope="module")
def table():
    found = budgets.table()
    if found["versions"] != budgets.versions():
        skip(f"the numbers are of {found['versions']}; {REPAIR}")
    return found["layouts"]


def test_the_table_has_every_layout(table):
    assert list(table) == list(budgets.LAYOUTS)


@pytest.mark.parametrize("name", budgets.LAYOUTS)
def test_a_layout_keeps_its_budget(name, table):
    assert budgets.measured([name])[name] == table[name], REPAIR


def train_with(name, layout, folder, words=""):
    """Output and numbers of a run with a planted error, which is ended once it has printed `words`."""
    file = folder / "numbers.json"
    command = ["-m", "tests.gpu.planted", str(file), name]
    ranks = [
        shared().start(command, folder / f"rank-{place['RANK']}.log", environment(**place))
        for place in places(max(1, -budgets.LAYOUTS[layout][0]))
    ]
    deadline = time.monotonic() + 200
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        shared().poll(1.0)
        if words and any(words in rank.text for rank in ranks):
            break
    for rank in ranks:
        shared().signal(rank, signal.SIGKILL)
    return "".join(rank.text for rank in ranks), json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("name", planted.ERRORS)
def test_a_planted_error_ends_the_run(name, tmp_path):
    layout, _, words = planted.ERRORS[name]
    assert words in train_with(name, layout, tmp_path, words)[0]


@pytest.mark.parametrize("name", planted.COUNTED)
def test_a_planted_wait_is_counted(name, table, tmp_path):
    layout, _, step, kind, text = planted.COUNTED[name]
    numbers = train_with(name, layout, tmp_path)[1]
    more = {key: n for key, n in numbers[step][kind].items() if n > table[layout][step][kind].get(key, 0)}
    assert any(key.startswith(text) for key in more)
