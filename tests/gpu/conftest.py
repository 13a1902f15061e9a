"""Tests of this folder have GPUs: real ones, or pretended ones in the processes that they start.

Where a pretended GPU cannot be built the tests are skipped. With FMMETA_REQUIRE_CUDA=1, as in CI, they fail.
"""

import os

import pytest
import torch

from tests.support import pretended_cuda


@pytest.fixture(scope="session")
def gpu_available():
    """A GPU, or the library of the pretended one."""
    if torch.cuda.is_available():
        return
    if reason := pretended_cuda.unavailable():
        (pytest.fail if os.environ.get("FMMETA_REQUIRE_CUDA") else pytest.skip)(reason)
    pretended_cuda.build()


@pytest.fixture(scope="module", autouse=True)
def gpu(gpu_available):
    """Processes that are started by the tests of a file have GPUs."""
    if torch.cuda.is_available():
        yield
    else:
        with pretended_cuda.on_device():
            yield
