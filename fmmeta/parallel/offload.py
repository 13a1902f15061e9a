"""Stores the outer state of a rank (theta, summed meta-gradient, moments) on the device or in host memory.

    device (default)    beside the shards: work happens in place
    host (--offload_outer)    in the host's memory, pinned where there is a GPU; work happens on copies

Work goes in pieces (`chunk`). Offloading what is idle: Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840). On
CPUs both are the same memory; the copies are made all the same, so that one path is tested everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk(device: torch.device) -> int:
    """Elements that are worked on at a time: 4 MiB of a vector, which is new memory to a CPU only once
    (malloc gives blocks of 32 MiB, such as fp64 copies of larger pieces, back to the system every time); 16
    MiB on GPUs, for fewer kernels.
    """
    return 2**20 if device.type == "cpu" else 2**22


def pieces(device: torch.device, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length, cut alike."""
    return zip(*(vector.split(chunk(device)) for vector in vectors), strict=True)


@dataclass(frozen=True)
class OuterMemory:
    """`device`: where work happens; `offload`: whether idle vectors stay in host memory."""

    device: torch.device
    offload: bool

    def keep(self, vector: Tensor) -> Tensor:
        """The vector on the storage device: itself if it is there already, or a copy."""
        return self.zeros(vector).copy_(vector) if self.offload else vector.to(self.device)

    def zeros(self, like: Tensor) -> Tensor:
        """A vector of zeros at home, as long as `like`."""
        if not self.offload:
            return torch.zeros_like(like)
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def pieces(self, place: slice) -> Iterator[slice]:
        """`place` cut into what is worked on at a time: torch's AdamW needs as much again for its
        intermediate results.
        """
        size = chunk(self.device)
        for begin in range(place.start, place.stop, size):
            yield slice(begin, min(begin + size, place.stop))

    def fetch(self, part: Tensor) -> Tensor:
        """Part of a vector to work on: the part itself, or a copy on the device that `put` brings back."""
        return part.to(self.device, copy=True) if self.offload else part

    def put(self, part: Tensor, value: Tensor) -> None:
        """Bring a worked-on value home."""
        if part.data_ptr() != value.data_ptr():
            part.copy_(value)
