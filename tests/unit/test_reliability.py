"""Signals, the watchdog and loss spikes in one process.

tests/distributed/test_signals.py sends signals to running launches.
"""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fmmeta.parallel.collectives import Communicator
from fmmeta.reliability.checks import Spikes
from fmmeta.reliability.signals import Launcher, Signals, process_stat
from fmmeta.reliability.watchdog import (
    Heartbeats,
    WatchdogStage,
    identity_of,
    stack_of,
    this_process,
    watching,
)
from fmmeta.training.run import StopAgreement
from tests.support.short_runs import until


def test_repeated_signal_is_ignored_and_a_later_one_exits(monkeypatch):
    left = []
    with Signals(leave=left.append) as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            until(lambda: signals.asked)
        time.sleep(0.1)
        assert (signals.asked, left) == ("SIGINT", [])
        signals.at -= 6
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: left)
        assert left == [128 + 15]
        signals.end()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert left == [143]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_request_that_several_threads_pass_on_counts_once():
    """The heartbeats look, find no request yet and ask the store, while the main thread learns of it."""
    left = []
    signals = Signals(leave=left.append)
    heartbeats = object.__new__(Heartbeats)
    heartbeats.signals, heartbeats.store = signals, Mock()
    heartbeats.store.get = lambda key: signals.adopt("SIGTERM") and "SIGTERM"
    assert heartbeats._pass_on_stop_signal()
    signals.at -= 6
    assert not signals.adopt("SIGINT")
    assert (signals.asked, left) == ("SIGTERM", [])
    signals.receive("SIGTERM", 143)
    assert left == [143]


def test_agreement_on_no_request_keeps_one_that_comes_meanwhile():
    signals = Signals(leave=lambda code: None)

    class Slow(Communicator):
        def gather_bytes(self, own):
            signals.receive("SIGTERM", 143)
            return [own]

    stop = StopAgreement(SimpleNamespace(world=Slow(None, 0, 1, torch.device("cpu"))), signals)
    assert not stop.agree()
    assert signals.asked == "SIGTERM"


def test_signal_during_startup_exits():
    left = []
    with Signals(starting=True, leave=left.append) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: left)
        signals.run()
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: signals.asked)
    assert left == [75]


def test_other_threads_install_no_handlers():
    with Signals() as signals, ThreadPoolExecutor(1) as pool:
        assert pool.submit(Signals().__enter__).result().handlers == {}
        assert signals.handlers


def test_a_shell_is_no_launcher():
    code = "from fmmeta.reliability.signals import Launcher; print(Launcher(True).watched)"
    script = f"{sys.executable} -c '{code}'; true"  # the shell stays, because there is more to do
    assert subprocess.check_output(["bash", "-c", script]) == b"False\n"
    assert Launcher(True).watched == (process_stat(os.getppid())[0] not in ("bash", "sh"))
    assert not Launcher(False).watched


def test_a_process_that_has_exited_has_no_state():
    child = subprocess.Popen(["sleep", "100"])
    state, parent, *_ = process_stat(child.pid)[1]
    assert state in "SRD"
    assert int(parent) == os.getpid()
    child.kill()
    child.wait()
    assert process_stat(child.pid) == ("", [])


def test_process_of_another_pid_namespace_has_another_identity():
    code = "from fmmeta.reliability.watchdog import identity_of; print(*identity_of(1))"
    words = ["unshare", "-rpf", "--mount-proc", sys.executable, "-c", code]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in ran.stderr:
        pytest.skip(f"no PID namespaces here: {ran.stderr}")
    here, there = this_process()["identity"], ran.stdout.split()
    assert (here, len(there)) == (identity_of(os.getpid()), 2), ran.stderr
    assert there[1] != here[1]
    assert identity_of(2**22 + 1) == []


def test_no_heartbeat_is_under_way_after_the_watched_block():
    asked = threading.Event()

    def get(key):
        asked.set()
        time.sleep(0.3)
        return ""

    world = Mock(gather=lambda own: [own])
    groups = Mock(world=world, layout=Mock(launch=Mock(global_rank=0)))
    with watching(WatchdogStage(None), Mock(get=get), groups, Signals()):
        assert asked.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeats"]


ENDS_DURING_A_REQUEST = """
import sys, time, torch.distributed
from contextlib import suppress
from datetime import timedelta
from fmmeta.cli import leave
from fmmeta.common.processes import native_thread

class Late:
    def __del__(self):
        time.sleep(1)

def ask():
    while True:
        with suppress(Exception):
            store.wait(["never"], timedelta(seconds=0.02))

store, sys.late = torch.distributed.TCPStore("127.0.0.1", 0, 1, True), Late()
native_thread("request", ask)
print("written")
leave("", 3)
"""


def test_a_process_ends_with_its_own_code_while_a_thread_is_in_a_library():
    """The thread returns from torch during a shutdown that takes a second, which aborts the process."""
    ran = subprocess.run([sys.executable, "-c", ENDS_DURING_A_REQUEST], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (3, b"written\n"), ran.stderr[-2000:]


def test_watchdog_bound_follows_the_slowest_step():
    stage = WatchdogStage(None)
    for took, bound in ((0, 1800), (12, 300), (70, 700), (3, 700)):
        stage.began -= took
        if took:
            stage.record_step()
        stage.begin("outer step 1", is_step=True)
        assert stage.bound_s == pytest.approx(bound, abs=0.5)


def test_a_given_watchdog_bound_begins_with_the_first_step():
    stage = WatchdogStage(5)
    assert stage.bound_s == 1800
    stage.begin("outer step 1", is_step=True)
    assert (stage.bound_s, stage.is_overdue) == (5, False)
    stage.began -= 6
    assert stage.is_overdue
    stage.begin_phase("task 1", passes=1)
    stage.count_pass()
    assert stage.text == "outer step 1, task 1, pass 2"
    stage.begin_phase("waiting")
    assert stage.text == "outer step 1, waiting"
    stage.leave_out(2)
    assert stage.elapsed_s == pytest.approx(4, abs=0.9)
    assert not stage.is_overdue
    stage.leave_out(9)  # no stage begins later than now
    assert stage.elapsed_s >= 0


def test_a_stack_names_file_and_line():
    assert stack_of(threading.get_ident()).startswith("watchdog.py:")
    assert "test_reliability.py:" in stack_of(threading.get_ident())
    assert stack_of(12345) == ""


def test_only_loss_spikes_are_marked():
    draw, spikes = random.Random(0), Spikes()
    noise = [2 * math.exp(-step / 100) + draw.gauss(0, 0.05) for step in range(300)]
    marks = [spikes.mark(loss + 2.0 * (step in (120, 250))) for step, loss in enumerate(noise)]
    assert [step for step, mark in enumerate(marks) if mark] == [120, 250]
    assert spikes.mark(math.nan) is None
    assert Spikes(spikes.state).mark(9.0) == spikes.mark(9.0) is not None
