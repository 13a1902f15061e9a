"""--compile: torch.compile of the transformer, once for rows of any number and length.

Names, weights and (up to rounding) numbers of the model do not change. Ansel et al., "PyTorch 2", 2024
(ASPLOS). The first passes compile for seconds to minutes; torch caches the compiled code for the next run.
"""

import os
import shutil

import torch
from torch import nn

from fmmeta.common.errors import UsageError
from fmmeta.models.learner import Learner

BACKEND = "inductor"


def check_compiler(device: str) -> None:
    """Raise `UsageError` if there is no C++ compiler, which code compiled for a CPU needs."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++"]
    if device == "cpu" and not any(map(shutil.which, names)):
        where = f"CXX={wanted} is not there" if wanted else "neither g++ nor clang++ is there"
        raise UsageError(f"compile=True needs a C++ compiler, and {where}; install one, or leave it out")


def compile_model(learner: Learner, device: torch.device) -> None:
    """Compile the HF model of a worker's `learner` in place.

    It computes with padding, because the number of real tokens would be one more size that changes, and with
    dense gradients of embeddings.
    """
    check_compiler(device.type)
    learner.unpadded.works = False
    for module in learner.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    learner.hf.compile(dynamic=True, backend=BACKEND)
