"""How a group that is new, or has missed the end of an outer step, comes to the state of one that is furthest on (--elastic).

Everything that a checkpoint holds travels, rank by rank and bit for bit: theta, outer optimizer, position, counters, the last
line of metrics.jsonl. Nothing of it is used before all of it is there, so that a group lost meanwhile costs another roll call and
no more. No pickles: JSON and plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from fmmeta.feed import Feed
from fmmeta.guard import Guard
from fmmeta.journal import Journal
from fmmeta.parallel.communicator import Communicator
from fmmeta.parallel.crew import Crew
from fmmeta.parallel.roll import Roll
from fmmeta.parallel.worker import Worker
from fmmeta.state import State


class Running(Protocol):
    """What is looked at and moved of a run (run.py)."""

    folder: Path
    guard: Guard
    feed: Feed
    worker: Worker
    state: State
    journal: Journal

    def begin_writing(self) -> None: ...


def heal(run: Running, crew: Crew, roll: Roll, notice: Callable[[str], None]) -> None:
    """Those behind take over the root's state. Raises `Lost`. Collective: everyone."""
    here, root = roll.here == roll.root, roll.root
    vectors, tables, state = run.state.give() if here else ({}, {}, {})
    shapes = {name: list(table.shape) for name, table in tables.items()}
    head = {"state": state, "line": run.journal.line, "vectors": list(vectors), "tables": shapes}
    head = json.loads(broadcast_bytes(crew, json.dumps(head).encode() if here else b"", root))
    for name in head["vectors"]:
        vectors[name] = crew.broadcast_(vectors[name] if here else torch.empty(run.state.theta.shape), root)
    for name, shape in head["tables"].items():
        tables[name] = crew.broadcast_(tables[name] if here else torch.empty(shape), root)
    if not roll.heals(roll.here):
        return
    before = run.state.outer_step
    run.state.take(vectors, tables, head["state"])
    run.worker.write(run.state.theta)
    run.journal.line = head["line"]
    whom = roll.members[root].name.rpartition(":")[0]
    notice(f"healed from group {whom}: outer step {before} -> {run.state.outer_step}")


def broadcast_bytes(comm: Communicator, payload: bytes, root: int) -> bytes:
    """The root's bytes. Collective: comm."""
    size = int(comm.broadcast_(torch.tensor([len(payload)]), root))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.zeros(size, dtype=torch.uint8)
    return comm.broadcast_(data, root).numpy().tobytes()
