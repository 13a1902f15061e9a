"""Whether groups that should hold the same vectors do, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from fmmeta.parallel.process_groups import ProcessGroups


def hash_vector(vector: Tensor) -> int:
    """A 64-bit hash of an fp32 vector's bits and their places, computed where the vector lives."""
    total, mask = 0, 2**64 - 1
    for number, part in enumerate(vector.split(2**20)):
        bits = part.contiguous().view(torch.int32).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device, dtype=torch.int64)
        total = (total * 1000003 + int((bits * (places * 2654435761 + number)).sum())) & mask
    return total


def equal_replicas(ranks: ProcessGroups, theta: Tensor) -> None:
    """Check that ranks with the same shard hold the same bits. Collective: world."""
    hashes = ranks.world.gather_bytes(str(hash_vector(theta)).encode())
    size = ranks.layout.group_size
    if any(hashes[rank] != hashes[rank % size] for rank in range(len(hashes))):
        raise RuntimeError(
            "theta differs between groups although it was broadcast; check the hardware and the network"
        )
