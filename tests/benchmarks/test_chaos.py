"""benchmarks/chaos.py: a run that is killed once ends with the undisturbed theta, with its goodput stored."""

import json
import sys

import psutil
import pytest

from benchmarks import chaos
from harness.fork_server import ROOT, environment


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_launch_loses_nothing(tmp_path):
    file, log = tmp_path / "chaos.json", tmp_path / "log"
    words = ["--rows", "restarted", "--kinds", "kill", "--faults", "1", "--minutes", "0.2", "--every", "3"]
    short = ["--task_seconds", "0.2", "--share", "1", "--json", str(file), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.chaos", *words, *short]
    with log.open("w") as output:
        started = psutil.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
        try:
            assert started.wait(360) == 0, log.read_text()
        finally:
            if started.is_running():
                started.terminate()
    ((name, row),) = json.loads(file.read_text())["rows"].items()
    assert name == "restarted, a fault every 3 s"
    assert chaos.is_good(row)
    assert row["lines_lost"] == 0
    assert (row["faults"], row["starts"]["launch"]) == ({"kill": 1}, 2)
    assert 0 < row["launched"] <= row["goodput"] + 1 < 100
    assert row["goodput"] < row["floor"]
    assert name in log.read_text()


def test_a_row_is_good_where_nothing_is_lost():
    good = {"no_step_logged_twice": True, "tasks_counted_once": True, "theta_equal_bit_for_bit": False}
    assert chaos.is_good({**good, "row": "elastic", "parity": 1e-7})
    assert not chaos.is_good({**good, "row": "elastic", "parity": 1e-4})
    assert not chaos.is_good({**good, "row": "restarted", "parity": 0.0})
    assert not chaos.is_good({**good, "row": "elastic", "parity": 0.0, "tasks_counted_once": False})
