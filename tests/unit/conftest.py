"""Hypothesis draws the same examples every time, and models are shared."""

import os

import pytest
from hypothesis import settings

from fmmeta.common.progress import terminal_log
from tests.support.models import save_bert, save_llama, write_classes

for name, examples in {"fast": 200, "thorough": 2000}.items():
    settings.register_profile(name, deadline=None, derandomize=True, max_examples=examples, database=None)
settings.load_profile(os.environ.get("FMMETA_HYPOTHESIS", "fast"))


@pytest.fixture
def terminal():
    """Messages are printed, as the commands print them."""
    with terminal_log():
        yield


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A folder with a BERT that tells words apart; a test that writes into it takes a copy.

    So for the next two.
    """
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def classes(tmp_path_factory):
    """Rows of 15 classes, 8 each."""
    return write_classes(tmp_path_factory.mktemp("classes") / "rows.jsonl", classes=15, rows=8)
