"""Processes of the fork server behave like those of an interpreter: arguments, streams and exit codes."""

import os
import subprocess
import sys

import pytest

from fmmeta.parallel import network
from fmmeta.reliability.signals import process_stat
from harness.fork_server import SESSION_FOLDER, free_port, shared
from harness.fork_server_process import PRELOADED
from tests.support.launch import ProcessResults, environment, imported, python, run_ranks
from tests.support.short_runs import until

SHOW = (
    "import os, sys; print(sys.argv, os.getcwd(), os.environ.get('X'), os.environ.get('RANK'),"
    " sys.stdin.read()); "
)
ENDS = {
    "nothing": "",
    "a number": "sys.exit(75)",
    "a text": "sys.exit('why')",
    "None": "sys.exit(None)",
    "an error": "1 / 0",
    "at exit": "import atexit; atexit.register(print, 'late')",
    "a thread": (
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()"
    ),
    "at once": "os._exit(3)",
    "a signal": "import signal; os.kill(os.getpid(), signal.SIGTERM)",
    "stderr": "print('aside', file=sys.stderr)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_exit_code_and_output_equal_those_of_an_interpreter(code, tmp_path):
    words, streams = ["-c", SHOW + code, "--flag", "x"], {"capture_output": True, "text": True}
    wanted = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(X="1"), input="given", check=False, **streams
    )
    found = python(words, tmp_path, cwd=tmp_path, stdin="given", X="1")
    assert (found.returncode, found.stdout) == (wanted.returncode, wanted.stdout)
    assert found.stderr.splitlines()[-1:] == wanted.stderr.splitlines()[-1:]


def test_a_process_ends_with_its_server(tmp_path):
    request = {
        "env": {},
        "cwd": str(tmp_path),
        "stdin": os.devnull,
        "log": "log",
        "errors": "log",
        "before": "",
    }
    code = (
        "import os, time; from harness.fork_server_process import setup_child;"
        " out = os.dup(1); pid = os.fork();"
        f" pid or setup_child({request}); os.write(out, b'%d\\n' % pid) if pid else open('there', 'w');"
        " time.sleep(100)"
    )
    words, env = [sys.executable, "-c", code], environment()
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as server:
        pid = int(next(server.stdout))
        until((tmp_path / "there").exists)
        server.kill()
    until(lambda: process_stat(pid)[1][:1] in ([], ["Z"]), 5)


def before() -> None:
    os.environ["BEFORE"] = "yes"


def test_ranks_have_different_ranks_hashes_and_seeds():
    code = (
        "import os, random, numpy; print(os.environ['BEFORE'], os.environ['RANK'], hash('x'),"
        " random.random(), numpy.random.rand())"
    )
    ended = run_ranks(["-c", code], 2, per_rank={1: {"OTHER": "1"}}, before=before).ok()
    first, second = (text.split() for text in ended.output)
    assert (first[:2], second[:2]) == (["yes", "0"], ["yes", "1"])
    assert all(one != other for one, other in zip(first[1:], second[1:], strict=True))


def test_timeout_kills_ranks_and_shows_their_output():
    with pytest.raises(AssertionError, match=r"ranks still ran after 1 s:\n(?s:.*)here(?s:.*)here"):
        run_ranks(["-c", "import time; print('here', flush=True); time.sleep(100)"], 2, timeout_s=1)


def test_failures_are_shown():
    ended = run_ranks(["-c", "import os; assert os.environ['RANK'] == '0', 'broken'"], 2)
    with pytest.raises(AssertionError, match=r"exit codes \[0, 1\]\n(?s:.*)AssertionError: broken"):
        ended.ok()
    waits = "fmmeta: rank 1 waits for rank 0 on here (reading): 10 s so far, 60 s at most\n"
    for text, others in ((waits, ""), (f"{waits}b\n", "b")):
        assert ProcessResults([0, 0], ["a", text]).others == others


@pytest.fixture(scope="module")
def is_a_rank():
    """A fixture of a file that trains in this process leaves this behind."""
    os.environ["LOCAL_RANK"] = "0"


def test_a_fixture_of_a_file_leaves_no_variable_of_a_launcher(is_a_rank):
    assert "LOCAL_RANK" not in os.environ


def test_imports_of_test_files_leave_no_variable():
    """lm_eval sets one when it is imported, and all ranks would be fresh interpreters."""
    assert imported(environment()) == imported(shared().env)


def test_environment_read_by_imports_starts_an_interpreter():
    """Variables that are read while libraries are imported need a new interpreter."""
    code = f"import sys; print({PRELOADED[0]!r} in sys.modules)"
    for how, forked in (
        ({}, True),
        ({"per_rank": {0: {"HF_HOME": "/nowhere"}}}, False),
        ({"fresh": True}, False),
    ):
        assert run_ranks(["-c", code], 1, **how).ok().output == [f"{forked}\n"]
    assert "HF_HOME" in imported(environment(HF_HOME="/nowhere"))
    assert len(shared().servers) == 2


def test_ports_are_given_once(tmp_path, monkeypatch):
    monkeypatch.setenv(SESSION_FOLDER, str(tmp_path))
    monkeypatch.setattr(network, "unused_port", iter([1, 1, 2, 1, 2, 3]).__next__)
    assert [free_port() for _ in range(3)] == [1, 2, 3]


def test_a_port_for_ranks_is_none_that_linux_gives_to_connections():
    """Ranks that start as interpreters bind their port seconds after it was chosen."""
    found = {network.unused_port() for _ in range(20)}
    assert all(10_000 <= port < 32_768 for port in found)
    assert len(found) > 10
