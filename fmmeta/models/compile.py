"""--compile: torch.compile of the transformer, once for rows of any number and length.

The model's names, weights and numbers stay (up to rounding): only how a pass is computed changes. Ansel et
al., "PyTorch 2", 2024 (ASPLOS). The first passes compile, seconds to minutes; what they found is kept in
torch's cache for the next run.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from fmmeta.common.errors import UsageError
from fmmeta.models.learner import Learner

BACKEND = "inductor"


def check_compiler(device: str) -> None:
    """On a CPU compiled code is C++. Raises `UsageError` where nothing compiles it."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++"]
    if device == "cpu" and not any(shutil.which(name) for name in names):
        where = f"CXX={wanted} is not there" if wanted else "neither g++ nor clang++ is there"
        raise UsageError(f"compile=True needs a C++ compiler, and {where}; install one, or leave it out")


def compile_model(learner: Learner, device: torch.device) -> None:
    """Compile the HF model of `learner`, which a worker holds, in place.

    With padding, since how many tokens are real would be one more size that changes; and with dense gradients
    of embeddings.
    """
    check_compiler(device.type)
    learner.unpadded.works = False
    for module in learner.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    learner.hf.compile(dynamic=True, backend=BACKEND)
