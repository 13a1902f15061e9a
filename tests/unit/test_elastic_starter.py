"""`fmmeta elastic` waits for its groups: exit code, signals, and ranks that are left of a failed group."""

import signal
import subprocess
import sys
import threading

import pytest

from fmmeta.elastic import starter
from fmmeta.elastic.starter import wait
from tests.support.messages import refusal

WAITS = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print(flush=True); time.sleep(60)"
)


def group(*scripts: str) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
        for script in scripts
    ]


@pytest.mark.parametrize(
    ("scripts", "code"),
    [(["", ""], 0), (["", "import os; os._exit(9)"], 9), (["import os; os.kill(os.getpid(), 9)", ""], -9)],
)
def test_the_exit_code_is_that_of_the_group_that_failed(scripts, code):
    assert wait([group(script) for script in scripts], []) == code


def test_a_signal_reaches_every_rank():
    groups, stops = [group(WAITS, WAITS), group(WAITS)], list[int]()
    for rank in (rank for ranks in groups for rank in ranks):
        assert rank.stdout is not None
        rank.stdout.readline()
    threading.Timer(0.1, lambda: stops.append(signal.SIGINT)).start()
    assert wait(groups, stops) == 75
    assert [rank.returncode for ranks in groups for rank in ranks] == [75] * 3


def test_the_other_ranks_of_a_failed_group_are_killed(monkeypatch):
    """They would wait for the lost one; other groups continue."""
    monkeypatch.setattr(starter, "KILL_S", 0.2)
    groups = [
        group("import os; os._exit(70)", "import time; time.sleep(60)"),
        group("import time; time.sleep(1)"),
    ]
    assert wait(groups, []) == 70
    assert [[rank.returncode for rank in ranks] for ranks in groups] == [[70, -9], [0]]


def test_more_groups_than_gpus_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    monkeypatch.setattr(starter.torch.cuda, "device_count", lambda: 1)
    config = starter.ElasticConfig(groups=2, output_dir=str(tmp_path))
    assert refusal(starter.run, config).startswith("groups=2 x ranks_per_group=1 needs 2 GPUs")
