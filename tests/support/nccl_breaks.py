"""Breaks of NCCL's rules by one rank alone, which NCCL itself refuses too: rule and call, by name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[Any, torch.device], Any]


def reduction(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


ALONE: dict[str, tuple[str, Call]] = {
    "an integer of 16 bits": (
        "dtype",
        lambda group, device: group.allreduce([torch.zeros(2, dtype=torch.int16, device=device)]),
    ),
    "bits": (
        "operation",
        lambda group, device: group.allreduce(
            [torch.zeros(2, dtype=torch.int64, device=device)], reduction(dist.ReduceOp.BAND)
        ),
    ),
    "a receive from any rank": (
        "operation",
        lambda group, device: group.recv_anysource([torch.zeros(2, device=device)], 0),
    ),
    "strides": ("dense", lambda group, device: group.allreduce([torch.zeros(3, 2, device=device).T])),
    "a sparse tensor": (
        "dense",
        lambda group, device: group.allreduce([torch.zeros(2, 2, device=device).to_sparse()]),
    ),
}
HOST: dict[str, tuple[str, Call]] = {  # on a GPU
    "host memory": ("host", lambda group, device: group.allreduce([torch.zeros(2)])),
}
