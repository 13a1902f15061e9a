"""Options and fixtures of all tests; prepared data goes into a temporary folder, not the user's cache."""

from __future__ import annotations

import os

import pytest

from tests.support import fork_server, messages


def pytest_addoption(parser):
    parser.addoption(
        "--update-messages", action="store_true", help="store error messages in tests/messages.json"
    )


def pytest_configure(config):
    messages.update = config.getoption("--update-messages")


@pytest.fixture(scope="session", autouse=True)
def temporary_cache(tmp_path_factory):
    """Processes that tests start inherit it; the fork server starts with the environment of this moment."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    fork_server.SESSION_ENVIRONMENT.update(fork_server.environment())
