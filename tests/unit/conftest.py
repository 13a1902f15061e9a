"""Every unit test leaves the environment as it found it, and hypothesis draws the same examples every time."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("fmmeta", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("fmmeta")


@pytest.fixture(autouse=True)
def same_environment():
    """`World` writes launcher variables into the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
