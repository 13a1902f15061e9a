"""Stores the outer state of a rank (theta, summed meta-gradient, moments) on the device or in host memory.

    device (default)          next to the shards; vectors are processed in place
    host (--offload_outer)    in host memory, pinned if the device is a GPU; pieces are processed as copies

Vectors are processed in pieces (`chunk`). Offloading idle state: Ren et al. 2021, ZeRO-Offload (arXiv
2101.06840). On CPUs both are the same memory; the copies are made all the same, so that one path is tested
everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk(device: torch.device) -> int:
    """Elements that are processed at a time.

    4 MiB of a vector on CPUs: malloc reuses blocks of that size, and returns those from 32 MiB on (fp64
    copies of larger pieces) to the system every time. 16 MiB on GPUs, for fewer kernels.
    """
    return 2**20 if device.type == "cpu" else 2**22


def pieces(device: torch.device, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length, cut into the same pieces of `chunk` elements."""
    return zip(*(vector.split(chunk(device)) for vector in vectors), strict=True)


@dataclass(frozen=True)
class OuterMemory:
    """`device`: where vectors are processed; `offload`: whether they are stored in host memory meanwhile."""

    device: torch.device
    offload: bool

    def store(self, vector: Tensor) -> Tensor:
        """The vector on the storage device: itself if it is there already, or a copy."""
        return self.zeros(vector).copy_(vector) if self.offload else vector.to(self.device)

    def zeros(self, like: Tensor) -> Tensor:
        """A vector of zeros on the storage device, as long as `like`."""
        if not self.offload:
            return torch.zeros_like(like)
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def pieces(self, whole: slice) -> Iterator[slice]:
        """`whole` cut into slices of `chunk` elements: torch's AdamW allocates as much for its intermediate
        results.
        """
        size = chunk(self.device)
        for begin in range(whole.start, whole.stop, size):
            yield slice(begin, min(begin + size, whole.stop))

    def load(self, part: Tensor) -> Tensor:
        """Part of a vector to process: the part itself, or a copy on the device, for `write_back`."""
        return part.to(self.device, copy=True) if self.offload else part

    def write_back(self, part: Tensor, value: Tensor) -> None:
        """Copy a processed value to the part that it was loaded from."""
        if part.data_ptr() != value.data_ptr():
            part.copy_(value)
