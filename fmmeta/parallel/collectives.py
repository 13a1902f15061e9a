"""Collectives among a set of ranks: sum, broadcast, gather of tensors and bytes, barrier; errors that all
ranks raise.

A sum runs in buckets (`Reduction`), so that a caller works on one bucket while later ones are in flight.
Nothing is pickled: tensors, bytes and JSON only.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import PeerError, UsageError
from fmmeta.common.security import disk_trouble

BUCKET = 2**23  # elements of one bucket: 32 MiB in fp32
SMALL = 2**16  # elements of the largest tensor in host memory that counts as a decision


@dataclass
class Reduction:
    """The pending all-reduce of one flat tensor.

    buckets: slices of the tensor, in the order in which they are reduced. Waiting for a bucket twice is
    harmless. Other communicators may be used while buckets are pending.
    """

    buckets: list[slice]
    pending: dict[int, tuple[Tensor, Tensor, Any]] = field(default_factory=dict)

    def wait(self, number: int) -> None:
        """Wait until bucket `number` of the tensor holds the sum."""
        if number in self.pending:
            part, staging, work = self.pending.pop(number)
            work.wait()
            if staging is not part:
                part.copy_(staging, non_blocking=part.is_cuda)

    def wait_all(self) -> None:
        """Wait until the whole tensor holds the sum."""
        for number in range(len(self.buckets)):
            self.wait(number)


class Communicator:
    """A set of `size` ranks, of which this process is `rank`. With one rank every collective returns at once.

    backend: a process group of torch; None for one rank. on_host: the same ranks over gloo, if `device` is a
    GPU: small tensors in host memory (decisions, numbers of bytes) go that way, because over NCCL each would
    wait for all that the device has yet to do. bytes_sent: payload of the sums since it was last set to 0.
    """

    on_host: "Communicator | None" = None

    def __init__(
        self,
        backend: Any,
        rank: int,
        size: int,
        device: torch.device,
        on_host: "Communicator | None" = None,
    ) -> None:
        self.backend, self.rank, self.size, self.device = backend, rank, size, device
        self.on_host = on_host
        self.bytes_sent = 0

    def _way(self, tensor: Tensor) -> "Communicator":
        """The communicator of these ranks that a tensor goes over."""
        small = tensor.device.type == "cpu" and tensor.numel() <= SMALL
        return self.on_host if self.on_host is not None and small else self

    def sum_(self, tensor: Tensor, comm_dtype: torch.dtype | None = None) -> Tensor:
        """Replace `tensor` by its sum over the ranks. Collective: this communicator.

        comm_dtype: dtype in which elements are sent and added (default: the tensor's).
        """
        self.begin_sum_(tensor, comm_dtype).wait_all()
        return tensor

    def begin_sum_(self, tensor: Tensor, comm_dtype: torch.dtype | None = None) -> Reduction:
        """Start `sum_`, bucket by bucket. Collective: this communicator.

        A tensor on another device than the communicator's is copied two buckets at a time, and its sum is
        complete when this method returns.
        """
        flat = tensor.view(-1)
        if self.size == 1:
            return Reduction([slice(0, flat.numel())])
        comm_dtype, away, size = comm_dtype or tensor.dtype, tensor.device != self.device, flat.numel()
        self.bytes_sent += size * comm_dtype.itemsize
        if (way := self._way(tensor)) is not self:
            return way.begin_sum_(tensor, comm_dtype)
        reduction = Reduction([slice(b, min(b + BUCKET, size)) for b in range(0, size, BUCKET)])
        for number, bucket in enumerate(reduction.buckets):
            part = flat[bucket]
            room = part
            if away:  # pinned blocks of the host are used again
                room = torch.empty(part.shape, dtype=part.dtype, device=self.device, pin_memory=part.is_cuda)
                room.copy_(part, non_blocking=not part.is_cuda)
            staging = room.to(comm_dtype)
            reduction.pending[number] = part, staging, self.backend.allreduce([staging])
            if away and number:
                reduction.wait(number - 1)
        if away:
            reduction.wait_all()
        return reduction

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` by the tensor of rank `root`. Collective: this communicator."""
        way = self._way(tensor)
        for part in tensor.view(-1).split(BUCKET) if self.size > 1 else ():
            staging = part.to(way.device)
            way.backend.broadcast(staging, root).wait()
            if staging is not part:
                part.copy_(staging)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one shape, in the order of ranks. Collective: this communicator."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for _ in range(self.size)]
        self.backend.allgather([parts], [tensor.contiguous()]).wait()
        return parts

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the byte strings of all ranks, in the order of ranks. Collective: this communicator."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.sum_(lengths)
        table = torch.zeros(self.size, max(1, int(lengths.max())), dtype=torch.uint8)
        if payload:
            table[self.rank, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.sum_(table)
        return [bytes(row[:length].tolist()) for row, length in zip(table, lengths.tolist(), strict=True)]

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """Return the byte string of rank `root`; those of other ranks are ignored. Collective: this
        communicator.
        """
        if self.size == 1:
            return payload
        length = int(self.broadcast_(torch.tensor(len(payload)), root))
        if length == 0:
            return b""
        if self.rank == root:
            self.broadcast_(torch.frombuffer(bytearray(payload), dtype=torch.uint8), root)
            return payload
        return self.broadcast_(torch.empty(length, dtype=torch.uint8), root).numpy().tobytes()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks as JSON returns them, in the order of ranks. Collective: this
        communicator.
        """
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode())]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of rank `root` as JSON returns it. Collective: this communicator."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode(), root))

    def set_timeout(self, seconds: float) -> None:
        """Let a collective raise an exception after waiting for another rank for longer than `seconds`."""
        if self.on_host is not None:
            self.on_host.set_timeout(seconds)
        if self.backend is not None:
            set_timeout = getattr(self.backend, "set_timeout", None) or self.backend._set_default_timeout
            set_timeout(timedelta(seconds=seconds))

    def barrier(self) -> None:
        """Wait for every rank. Collective: this communicator."""
        self.sum_(torch.zeros(1))

    @contextmanager
    def raise_on_all(self, doing: str) -> Iterator[None]:
        """Run a block without collectives on every rank; if one rank raises, all ranks raise.

        A `UsageError` on any rank becomes the same `UsageError` on all (that of the lowest rank). Any other
        exception is raised on its own rank and becomes a `PeerError` on the others. Collective: this
        communicator.
        """
        failure, kind = None, ""
        try:
            yield
        except Exception as error:
            failure, trouble = error, disk_trouble(error)
            if trouble is not None:
                failure = UsageError(f"{trouble} (while {doing}); fix that, and run the same command again")
            kind = "usage:" if isinstance(failure, UsageError) else "crash:"
        answers = self.gather(f"{kind}{failure or ''}")
        if failure is not None and kind == "crash:":
            raise failure
        for rank, text in enumerate(answers):
            if text.startswith("crash:"):
                raise PeerError(f"rank {rank} failed while {doing}: {text.removeprefix('crash:')}")
        for text in filter(None, answers):
            raise UsageError(text.removeprefix("usage:")) from None

    def on_first(self, doing: str, work: Callable[[], Any]) -> Any:
        """The result of `work` on rank 0, as JSON returns it, on every rank. If it raises, all ranks raise
        (`raise_on_all`). Collective: this communicator.
        """
        found = b""
        with self.raise_on_all(doing):
            if self.rank == 0:
                found = json.dumps(work()).encode()  # a value that is no JSON: all ranks raise
        return json.loads(self.broadcast_bytes(found))
