"""What a process with the pretended device does: waits, with their origin, copies, kernels, collectives.

with count() as counted:
    step()
counted.waits      {"item < fmmeta/training/pass_stats.py:finite": 2}
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.pretended_cuda import LIBRARY

PACKAGES = ("fmmeta", "deepspeed", "transformers", "peft", "tests")
SKIPPED = ("tests/support/", "deepspeed/accelerator/", "deepspeed/utils/nvtx.py")  # they pass calls on
LINES = [False]  # whether origins have numbers of lines, which every edit changes

device = ctypes.CDLL(os.environ[LIBRARY])
for name in ("kernels", "in_use", "peak"):
    getattr(device, f"pretended_{name}").restype = ctypes.c_int64


@dataclass(eq=False)
class Counts:
    """What happened in a block. waits: by call and origin. copies: between host and device, by direction and
    kind; `copied` their bytes. collectives, sent: by name, times and bytes of the tensors that a rank gives.
    """

    kernels: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


total = Counts()
"""Of the process so far; its kernels are those of the library."""
counting: list[Counts] = [total]


def origin() -> str:
    """The innermost function of a known package on the stack, and that of fmmeta below it if it is another.

    Operators of the backward pass that no Python function has called are autograd's.
    """
    found: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 2:
        file, code = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code
        for package in () if any(part in file for part in SKIPPED) else PACKAGES:
            _, mark, rest = file.rpartition(f"/{package}/")
            if mark and (package == "fmmeta" or not found):
                name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
                line = f":{frame.f_lineno}" if LINES[0] else ""
                found.append(f"{package}/{rest}{line}:{name}")
                if package == "fmmeta":
                    return " < ".join(found)
                break
        frame = frame.f_back
    return " < ".join(found) or "autograd"


def note(kind: str, text: str, size: int = 0) -> None:
    """Add an event to every open count."""
    where = origin() if kind == "wait" else ""
    for counted in list(counting):
        if kind == "wait":
            counted.waits[f"{text} < {where}"] += 1
        elif kind == "copy":
            counted.copies[text] += 1
            counted.copied[text] += size
        else:
            counted.collectives[text] += 1
            counted.sent[text] += size


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
def listener(kind: bytes, text: bytes, size: int) -> None:
    note(kind.decode(), text.decode(), size)


@contextmanager
def count() -> Iterator[Counts]:
    """What happens in the block, in all threads."""
    counted, before = Counts(), device.pretended_kernels()
    counting.append(counted)
    try:
        yield counted
    finally:
        counting.remove(counted)
        counted.kernels = device.pretended_kernels() - before
