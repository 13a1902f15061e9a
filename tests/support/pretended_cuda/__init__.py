"""A pretended CUDA device: the real code of a GPU run on a machine without one, with the CPU build of torch.

    reason = unavailable()                 why there is none here; "" if there is one
    with on_device(): ...                  processes that are started inside have GPUS devices
    from ...pretended_cuda.events import count         what the host and the device did; in such a process

Tensors are on `cuda:0`, their memory is the host's. device.cpp is compiled once per version of torch and kept
in the user's cache. Python runs site/sitecustomize.py at the start of a process, which loads it with torch.

    shown       tensors on mixed devices, in operators and in NCCL; waits of the host; copies, pinned or not;
                kernels; collectives and their order (nccl_rules.py); bytes in use
    not shown   streams and races, since work has ended when it is issued; speed; rounding: kernels are the
                CPU's, so that results equal the CPU's bit for bit; compiled kernels of GPUs (Triton, CUTLASS)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
LIBRARY, COUNT = "FMMETA_PRETENDED_CUDA", "FMMETA_PRETENDED_GPUS"  # variables of processes with the device
GPUS = 8
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20", "-w")


@cache
def unavailable() -> str:
    """Why processes cannot have the device; "" if they can."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "a pretended GPU needs the CPU build of torch"
    if shutil.which("g++") is None:
        return "a pretended GPU needs g++, which is not on PATH"
    return ""


def skip(reason: str) -> NoReturn:
    """Skip a test for want of a GPU; fail it in CI, where there must be one."""
    import pytest

    (pytest.fail if os.environ.get("FMMETA_REQUIRE_CUDA") else pytest.skip)(reason)


@cache
def build() -> Path:
    """Compile device.cpp unless this version of it is there. Several processes may call it at once."""
    import torch

    source, torch_folder = HERE / "device.cpp", Path(torch.__file__).parent
    words = [*FLAGS, torch.__version__, str(torch_folder), source.read_text()]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fmmeta-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"pretended-cuda-{torch.__version__}-{key}.so"
    with (folder / "pretended-cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = Path(work, "device.so")
                command = ["g++", *FLAGS, str(source), "-o", str(made)]
                command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
                command += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
                ended = subprocess.run(command, capture_output=True, text=True)
                if ended.returncode:
                    raise RuntimeError(f"device.cpp does not compile:\n{ended.stderr[-6000:]}")
                made.rename(library)
    return library


def environment(library: Path, count: int = GPUS) -> dict[str, str]:
    """The variables of a process with the device; PYTHONPATH must be kept."""
    path = os.pathsep.join([str(HERE / "site"), str(HERE.parents[2])])
    return {LIBRARY: str(library), COUNT: str(count), "PYTHONPATH": path}


@contextmanager
def variables(given: dict[str, str | None]) -> Iterator[None]:
    """Environment variables that this process has inside the block; None: it does not have them."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        yield


def on_device(count: int = GPUS) -> AbstractContextManager[None]:
    """Processes that are started inside the block have `count` devices; this one does not."""
    return variables({**environment(build(), count)})


def on_cpu() -> AbstractContextManager[None]:
    """Processes that are started inside the block do not have the device."""
    return variables(dict.fromkeys((LIBRARY, COUNT, "PYTHONPATH")))


def gpus() -> int:
    """How many GPUs the tests of tests/gpu have, real ones or pretended ones."""
    import torch

    return torch.cuda.device_count() or GPUS
