"""Options and fixtures of all tests; prepared data goes into a temporary folder, not the user's cache."""

from __future__ import annotations

import gc
import os
import random

import pytest

from tests.support import fork_server, messages


def pytest_addoption(parser):
    parser.addoption(
        "--update-messages", action="store_true", help="store error messages in tests/messages.json"
    )
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of a file, in random order"
    )


def pytest_configure(config):
    messages.update = config.getoption("--update-messages")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before tests are deselected: which stored messages have a test, and the order of the tests."""
    messages.set_collected([item.nodeid for item in items], config.args)
    if seed := config.getoption("--shuffle"):
        rng = random.Random(seed)
        files = {item.path: rng.random() for item in items}  # a file's fixtures are made once
        items.sort(key=lambda item: (files[item.path], rng.random()))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported is not searched in every test


def pytest_runtest_setup(item):
    if messages.update:
        messages.store(item.nodeid, [])


@pytest.fixture(scope="session", autouse=True)
def temporary_cache(tmp_path_factory):
    """Processes that tests start inherit it; the fork server starts with the environment of this moment."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    fork_server.SESSION_ENVIRONMENT.update(fork_server.environment())
