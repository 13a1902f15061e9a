"""Options and fixtures of all tests; prepared data goes into a temporary folder, not the user's cache."""

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fmmeta.common.processes import NATIVE
from fmmeta.reliability.signals import STOPPING
from harness import fork_server
from harness.fork_server import without_ranks

BEFORE = pytest.StashKey[dict[str, str]]()
FOLDER = pytest.StashKey[Path]()  # of the session; its processes inherit the variables that name it
MANY_FILES = 20  # with so many the servers are needed: they import while the first tests run


def pytest_addoption(parser):
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of a file, in random order"
    )


def pytest_configure(config):
    if not is_worker(config):
        config.stash[FOLDER] = fork_server.begin_session()
        os.environ["HF_DATASETS_CACHE"] = str(config.stash[FOLDER] / "datasets")
        os.environ.setdefault("RUST_LOG", "warn")  # torchft reads it when it is imported
    fork_server.SESSION_ENVIRONMENT.update(fork_server.environment())
    config.stash[BEFORE] = dict(os.environ)


def pytest_unconfigure(config):
    if not is_worker(config):
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def is_worker(config) -> bool:
    """Whether another pytest process has started this one, to run some of its tests."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The order of the tests."""
    if seed := config.getoption("--shuffle"):
        rng = random.Random(seed)
        files = {item.path: rng.random() for item in items}  # a file's fixtures are made once
        items.sort(key=lambda item: (files[item.path], rng.random()))


def pytest_collection_finish(session):
    back_to(session.config.stash[BEFORE])  # a library that sets a variable when it is imported: lm_eval
    gc.collect()
    gc.freeze()  # what was imported is not searched in every test
    if len({item.path for item in session.items}) >= MANY_FILES:
        fork_server.shared()


def back_to(before: Mapping[str, str]) -> None:
    """Make the environment what it was."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def same_environment():
    """Commands that run in the process of a test take the signals and set variables, RANK among them; so do
    fixtures of a file, which are made before this one. Libraries keep a state of the process: lm_eval starts
    accelerate's. A command skips the interpreter's shutdown, and so ends pytest, if an earlier
    test has left a `native_thread`.
    """
    NATIVE.clear()
    back_to(without_ranks(os.environ))
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    back_to(before)
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
