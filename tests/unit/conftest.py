"""Every unit test leaves the environment as it found it, and hypothesis draws the same examples every time."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from fmmeta.signals import STOPPING

settings.register_profile("fmmeta", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("fmmeta")


@pytest.fixture(autouse=True)
def same_environment():
    """`World` writes launcher variables into the environment, the command line takes the signals."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(before)
