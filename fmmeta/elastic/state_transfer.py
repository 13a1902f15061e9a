"""Transfers the state of a run to a group that is new or behind (--elastic).

Everything that a checkpoint holds is sent, rank by rank and bit for bit: theta, outer optimizer, position,
counters, the last line of metrics.jsonl. It is used only when it is complete, so that a group lost meanwhile
costs another quorum and no more. No pickles: JSON and plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.membership import Membership
from fmmeta.parallel.process_groups import Communicator
from fmmeta.training.loop import Run

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}  # of vectors and tables


def transfer_state(
    run: Run, crew: ElasticCommunicator, roll: Membership, notice: Callable[[str], None]
) -> None:
    """Groups that are behind take over the donor's state. Raises `PeerLost`. Collective: all groups."""
    here, root = roll.here == roll.root, roll.root
    vectors, tables, state = run.state.state_dict() if here else ({}, {}, {})
    head = {"state": state, "line": run.logger.line, "vectors": kinds(vectors), "tables": kinds(tables)}
    head = json.loads(broadcast_bytes(crew, json.dumps(head).encode() if here else b"", root))
    with crew.own.raise_on_all("looking at the state to take over"):
        check_kinds(head["vectors"], run.state.theta)
        check_kinds(head["tables"], run.state.meta_params.rates)
    for kind, tensors in (("vectors", vectors), ("tables", tables)):
        for name, (dtype, shape) in head[kind].items():
            tensors[name] = crew.broadcast_(
                tensors[name] if here else torch.empty(shape, dtype=DTYPES[dtype]), root
            )
    if not roll.heals(roll.here):
        return
    before = run.state.outer_step
    run.state.load_state_dict(vectors, tables, head["state"])
    run.worker.write(run.state.theta)
    run.logger.line = head["line"]
    whom = roll.members[root].name.rpartition(":")[0]
    notice(f"healed from group {whom}: outer step {before} -> {run.state.outer_step}")


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Dtype and shape of each tensor by name, as JSON values."""
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}


def check_kinds(sent: Mapping[str, Any], like: Tensor | None) -> None:
    """Compare dtype and shape first: gloo ends the process on a message of another size.

    Raises `UsageError`.
    """
    wanted = None if like is None else kinds({"": like})[""]
    for name, kind in sent.items():
        if kind != wanted:
            raise UsageError(
                f"elastic=True: {name} of the other groups is {kind} and has to be {wanted} here; start this"
                " group with the same versions of fmmeta and torch as the others"
            )


def broadcast_bytes(comm: Communicator, payload: bytes, root: int) -> bytes:
    """The root's bytes. Collective: comm."""
    size = int(comm.broadcast_(torch.tensor([len(payload)]), root))
    data = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.zeros(size, dtype=torch.uint8)
    )
    return comm.broadcast_(data, root).numpy().tobytes()
