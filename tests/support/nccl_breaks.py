"""Breaks each of NCCL's rules (nccl_rules.py) once; started on four ranks, two groups of two.

    python -m tests.support.nccl_breaks OUT_DIR

Writes OUT_DIR/RANK.json: by name of a break, what this rank raised. `ALONE` are breaks by one rank alone that
NCCL refuses too, `GLOO_ONLY` others by one rank, `TOGETHER` those that take two: the second of them raises.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from tests.support import nccl_rules

Call = Callable[[Any, torch.device], Any]


def reduction(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def aborted(group: Any, device: torch.device) -> None:
    group.abort()
    group.allreduce([torch.zeros(2, device=device)])


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
    "host memory": ("host", lambda group, device: group.allreduce([nccl_rules.mark_host(torch.zeros(2))])),
    "part of a vector in host memory": (
        "host",
        lambda group, device: group.allreduce([nccl_rules.mark_host(torch.zeros(4))[2:]]),
    ),
}
GLOO_ONLY: dict[str, tuple[str, Call]] = {  # NCCL takes these, with another result or none at all
    "a sum of truth values": (
        "dtype",
        lambda group, device: group.allreduce([torch.ones(2, dtype=torch.bool)]),
    ),
    "a sum of 8-bit floats": (
        "dtype",
        lambda group, device: group.allreduce([torch.ones(2).to(torch.float8_e4m3fn)]),
    ),
    "a monitored barrier": ("operation", lambda group, device: group.monitored_barrier()),
    "a second thread": ("thread", lambda group, device: in_thread(group)),
    "abort": ("abort", aborted),
}
TOGETHER: dict[str, tuple[str, Call, Call]] = {  # rule, what the first rank does, what the second does
    "shapes": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(3)]),
        lambda group, cross: group.allreduce([torch.zeros(4)]),
    ),
    "dtypes": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(2, dtype=torch.float64)]),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "reductions": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(2)], reduction(dist.ReduceOp.MAX)),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "operations": (
        "order",
        lambda group, cross: group.broadcast([torch.zeros(2)]),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "roots": (
        "order",
        lambda group, cross: group.broadcast(torch.zeros(2), 0),
        lambda group, cross: group.broadcast(torch.zeros(2), 1),
    ),
    "order of two": (
        "order",
        lambda group, cross: [
            dist.broadcast(torch.zeros(2), 0, group=group, async_op=True),
            dist.all_reduce(torch.zeros(2), group=group, async_op=True),
        ],
        lambda group, cross: [
            dist.all_reduce(torch.zeros(2), group=group, async_op=True),
            dist.broadcast(torch.zeros(2), 0, group=group, async_op=True),
        ],
    ),
    "numbers": (
        "order",
        lambda group, cross: group.broadcast(torch.zeros(2), 0),
        lambda group, cross: group.shutdown(),
    ),
    "a send of another shape": (
        "order",
        lambda group, cross: group.send([torch.zeros(2)], 1, 0),
        lambda group, cross: group.recv([torch.zeros(3)], 0, 0),
    ),
    "two sends": (
        "order",
        lambda group, cross: group.send([torch.zeros(2)], 1, 0),
        lambda group, cross: group.send([torch.zeros(2)], 0, 0),
    ),
    "cross before group": (
        "interleaving",
        lambda group, cross: [cross.allreduce([torch.zeros(2)]), group.allreduce([torch.zeros(2)])],
        lambda group, cross: [group.allreduce([torch.zeros(2)]), cross.allreduce([torch.zeros(2)])],
    ),
}


def in_thread(group: Any) -> None:
    """Issue one operation in this thread and one in another, whose error is raised here."""
    raised: list[Exception] = []
    group.broadcast(torch.zeros(2), 0).wait()

    def issue() -> None:
        try:
            group.broadcast(torch.zeros(2), 0).wait()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=issue)
    thread.start()
    thread.join()
    raise raised[0]


def attempt(call: Callable[[], Any]) -> str:
    """What a call raises; pending operations are left alone."""
    try:
        call()
    except nccl_rules.RuleBroken as error:
        return str(error)
    return ""


def main(out: str) -> None:
    nccl_rules.install()
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    ranks = world.split(2)
    cpu, cross, first = torch.device("cpu"), ranks.cross.backend, ranks.group.rank == 0
    found = {}
    for name, (_, call) in {**ALONE, **GLOO_ONLY}.items():
        group = dist.new_group([0, 1])
        found[name] = attempt(lambda: call(group, cpu))  # noqa: B023
    for name, (_, *calls) in TOGETHER.items():
        group = dist.new_group([0, 1])
        if first:
            pending = calls[0](group, cross)  # noqa: F841
        world.comm.barrier()
        if not first:
            found[name] = attempt(lambda: calls[1](group, cross))  # noqa: B023
    found["on cross"] = attempt(lambda: ALONE["bits"][1](cross, cpu))
    found["by torch.distributed"] = attempt(
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int64), dist.ReduceOp.BXOR)
    )
    found["counted"] = str(len(nccl_rules.broken))
    Path(out, f"{launch.global_rank}.json").write_text(json.dumps(found))
    world.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # the first ranks' operations are pending


if __name__ == "__main__":
    main(*sys.argv[1:])
