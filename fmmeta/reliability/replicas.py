"""Compares vectors that must be equal in all groups, bit for bit."""

from collections import Counter

import torch
from torch import Tensor

from fmmeta.common.errors import MachineFault
from fmmeta.parallel.process_groups import ProcessGroups


def hash_vector(vector: Tensor) -> int:
    """A 64-bit hash of the bits of an fp32 vector [S] and their positions, computed on its device."""
    total, mask = 0, 2**64 - 1
    for number, part in enumerate(vector.split(2**20)):
        bits = part.contiguous().view(torch.int32).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device, dtype=torch.int64)
        total = (total * 1000003 + int((bits * (places * 2654435761 + number)).sum())) & mask
    return total


def check_replicas(ranks: ProcessGroups, theta: Tensor, when: str) -> None:
    """Check that ranks with the same shard hold the same bits. when: for the message.

    Raises `MachineFault` on all ranks, with the ranks that differ from the majority of the groups; all of a
    shard's ranks if there is no majority. Collective: all groups.
    """
    if ranks.cross.size == 1:
        return
    size = ranks.layout.group_size
    hashes = ranks.all_groups.gather_bytes(str(hash_vector(theta)).encode())
    odd = []
    for group_rank in range(size):
        (majority, count), *others = Counter(hashes[group_rank::size]).most_common()
        tied = bool(others) and others[0][1] == count
        odd += [rank for rank in range(group_rank, len(hashes), size) if tied or hashes[rank] != majority]
    if odd:
        raise MachineFault(
            f"theta is not the same in all groups {when} (ranks {', '.join(map(str, sorted(odd)))} differ);"
            " nothing of it is saved; check their machines, then run the same command again"
        )
