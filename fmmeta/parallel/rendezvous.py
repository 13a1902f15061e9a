"""Agrees on a fresh key prefix among the processes of a launch, in a store that may hold old keys.

torchrun's agent keeps its store over `--max-restarts` when the rendezvous is static (torch's comment says
otherwise), and ranks that read each other's old addresses wait for ever. So every process writes a random
number:

    all     join/<rank> = own number
    first   roster = a new name and the numbers it has read; again, whenever one of them has changed
    all     ack/<rank> = the roster's name, if the roster has the own number
    first   final = that name, when all have acknowledged it

An old note is never mistaken for a new one, since no number comes twice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

PAUSE_S = 0.02


class StoreProtocol(Protocol):
    """What a store of torch can do."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def agree_on_generation(
    notes: StoreProtocol, rank: int, size: int, timeout_s: float, number: str | None = None
) -> str:
    """Return a name that is new and the same for all.

    Raises `TimeoutError`. Collective: world, through `notes`.
    """
    number = number or uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    notes.set(f"join/{rank}", number)
    known: list[str] = []
    name = ""
    while time.monotonic() < deadline:
        if rank == 0:
            numbers = read(notes, [f"join/{one}" for one in range(size)])
            if numbers and numbers != known:
                known, name = numbers, uuid.uuid4().hex
                notes.set("roster", json.dumps([name, *known]))
            if name and read(notes, [f"ack/{one}" for one in range(1, size)]) == [name] * (size - 1):
                notes.set("final", name)
                return name
        else:
            roster = read(notes, ["roster"])
            offered, *numbers = json.loads(roster[0]) if roster else [""]
            if len(numbers) == size and numbers[rank] == number:
                if offered != name:
                    name = offered
                    notes.set(f"ack/{rank}", name)
                if read(notes, ["final"]) == [name]:
                    return name
        time.sleep(PAUSE_S)
    raise TimeoutError(f"rank {rank} has not met the other {size - 1} ranks within {timeout_s:g} s")


def read(notes: StoreProtocol, keys: Sequence[str]) -> list[str]:
    """The notes with these keys; none if one of them is not there yet."""
    if not notes.check(list(keys)):
        return []
    return [value.decode() for value in notes.multi_get(list(keys))]
