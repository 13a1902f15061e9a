"""What processes agree on through a key-value store of torch: a fresh key prefix, and signed values.

torchrun's agent keeps its store over `--max-restarts` when the rendezvous is static (torch's comment says
otherwise), and ranks that read each other's old addresses wait for ever. So every process writes a random
number:

    all     join/<rank> = own number
    first   roster = a new name and the numbers it has read; again, whenever one of them has changed
    all     ack/<rank> = the roster's name, if the roster has the own number
    first   final = that name, when all have acknowledged it

An old value is never mistaken for a new one, since no number comes twice.
"""

import hmac
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

PAUSE_S = 0.02
PROOF = 64  # hex digits of an HMAC (`proof`)


class StoreProtocol(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def agree_on_generation(
    store: StoreProtocol, rank: int, size: int, timeout_s: float, number: str | None = None
) -> str:
    """Return a name that is new and the same on all ranks.

    Raises `TimeoutError`. Collective: world, through `store`.
    """
    number = number or uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    store.set(f"join/{rank}", number)
    known: list[str] = []
    name = ""
    while time.monotonic() < deadline:
        if rank == 0:
            numbers = read(store, [f"join/{one}" for one in range(size)])
            if numbers and numbers != known:
                known, name = numbers, uuid.uuid4().hex
                store.set("roster", json.dumps([name, *known]))
            if name and read(store, [f"ack/{one}" for one in range(1, size)]) == [name] * (size - 1):
                store.set("final", name)
                return name
        else:
            roster = read(store, ["roster"])
            offered, *numbers = json.loads(roster[0]) if roster else [""]
            if len(numbers) == size and numbers[rank] == number:
                if offered != name:
                    name = offered
                    store.set(f"ack/{rank}", name)
                if read(store, ["final"]) == [name]:
                    return name
        time.sleep(PAUSE_S)
    raise TimeoutError(f"rank {rank} has not met the other {size - 1} ranks within {timeout_s:g} s")


def read(store: StoreProtocol, keys: Sequence[str]) -> list[str]:
    """The values of these keys; an empty list if one of them does not exist yet."""
    if not store.check(list(keys)):
        return []
    return [value.decode() for value in store.multi_get(list(keys))]


class SharedStore:
    """Signed values by key, for the ranks of one launch. Rank 0 or torchrun's agent is the store host.

    Each value carries an HMAC with the secret of the launch: another client of the store can remove values,
    but a value that it writes is read as empty. Calls do not wait for the rank that writes, but while the
    store host is stopped every call blocks: call from a thread that may wait, and use one object per thread.
    """

    def __init__(self, store: StoreProtocol, secret: bytes) -> None:
        self.store, self.secret = store, secret

    def set(self, key: str, text: str) -> None:
        self.store.set(key, proof(self.secret, key, text) + text)

    def get(self, key: str) -> str:
        """A value; empty if the key does not exist."""
        return self.get_existing([key])[0] if self.store.check([key]) else ""

    def get_existing(self, keys: Sequence[str]) -> list[str]:
        """Values of keys that exist, in one request; empty where the signature is not valid."""
        found = [value.decode(errors="replace") for value in self.store.multi_get(list(keys))]
        return [
            value[PROOF:] if is_proof(value[:PROOF], self.secret, key, value[PROOF:]) else ""
            for key, value in zip(keys, found, strict=True)
        ]


def proof(secret: bytes, *signed: Any) -> str:
    """HMAC of JSON values, in PROOF hex digits: evidence that the writer knows the secret."""
    return hmac.new(secret, json.dumps(signed, sort_keys=True).encode(), "sha256").hexdigest()


def is_proof(found: Any, secret: bytes, *signed: Any) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), proof(secret, *signed).encode())
