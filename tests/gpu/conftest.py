"""Tests of this folder have GPUs: real ones, or pretended ones in the processes that they start.

Where a pretended GPU cannot be built the tests are skipped. With FMMETA_REQUIRE_CUDA=1, as in CI, they fail.
"""

import pytest
import torch

from tests.support import pretended_cuda


@pytest.fixture(scope="session")
def gpu_available():
    """A GPU, or the library of the pretended one."""
    if torch.cuda.is_available():
        return
    if reason := pretended_cuda.unavailable():
        pretended_cuda.skip(reason)
    pretended_cuda.build()


@pytest.fixture(scope="module", autouse=True)
def gpu(gpu_available):
    """Processes that are started by the tests of a file have GPUs."""
    if torch.cuda.is_available():
        yield
    else:
        with pretended_cuda.on_device():
            yield


@pytest.fixture(scope="module")
def pretended(gpu):
    """The GPU is a pretended one, which counts."""
    if torch.cuda.is_available():
        pytest.skip("only a pretended GPU counts what it does, and there is a real one")
