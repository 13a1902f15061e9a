"""Transfers the state of a run to a group that is new or behind (--elastic).

Everything that a checkpoint holds is sent, rank by rank and bit for bit: theta, outer optimizer, position,
counters, the last line of metrics.jsonl. It is used only when it is complete, so that a group lost meanwhile
costs another quorum and no more. No pickles: JSON and plain tensors.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.elastic.communicator import ElasticCommunicator
from fmmeta.elastic.membership import Membership
from fmmeta.meta.parameters import StateDict
from fmmeta.parallel.collectives import Communicator
from fmmeta.training.loop import Run

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}  # of vectors and tables


def transfer_state(
    run: Run, cross: ElasticCommunicator, membership: Membership, log: Callable[[str], None]
) -> None:
    """Send the donor's state to the groups that need it. Raises `PeerLost`. Collective: all groups."""
    donor, meta_params = membership.donor, run.state.meta_params
    sends = membership.here == donor
    state = run.state.state_dict() if sends else StateDict()
    header = {"facts": state.facts, "line": run.logger.line}
    header |= {"vectors": kinds(state.vectors), "tables": kinds(state.tables)}
    header = json.loads(broadcast_bytes(cross, json.dumps(header).encode() if sends else b"", donor))
    with cross.own.raise_on_all("looking at the state to take over"):
        check_kinds(header["vectors"], meta_params.theta)
        check_kinds(header["tables"], meta_params.rates)
    for tensors, listed in ((state.vectors, header["vectors"]), (state.tables, header["tables"])):
        for name, (dtype, shape) in listed.items():
            tensor = tensors[name] if sends else torch.empty(shape, dtype=DTYPES[dtype])
            tensors[name] = cross.broadcast_(tensor, donor)
    if membership.needs_state(membership.here):
        before = run.state.outer_step
        run.state.load_state_dict(StateDict(state.vectors, state.tables, header["facts"]))
        run.worker.write(meta_params.theta)
        run.logger.line = header["line"]
        label = membership.members[donor].label
        log(f"state received from group {label}: outer step {before} -> {run.state.outer_step}")


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Dtype and shape of each tensor by name, as JSON values."""
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}


def check_kinds(sent: Mapping[str, Any], like: Tensor | None) -> None:
    """Compare dtype and shape before receiving: gloo ends the process on a message of another size.

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
    """The bytes of rank `root`. Collective: comm."""
    size = int(comm.broadcast_(torch.tensor([len(payload)]), root))
    data = torch.frombuffer(bytearray(payload or bytes(size)), dtype=torch.uint8)
    return comm.broadcast_(data, root).numpy().tobytes()
