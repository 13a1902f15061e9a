"""The order of tasks: endless, stratified, reshuffled every epoch; any position is computed directly.

    members of strata --(seed, epoch)--> quota of each stratum --> its next members --> strata interleaved

A stratum's members come in passes; each pass holds every member once, in a new order. An epoch takes
`quota` members of each stratum. With natural quotas (as many as there are members) an epoch is one pass over
everything; with others it is virtual: rare strata come round several times while frequent ones have not yet
been seen whole. Shuffles are hashes of (seed, stream, stratum, pass, member): no history, the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

VIRTUAL = 100  # least tasks per stratum in a virtual epoch: shares are met to 1 %


class StratifiedOrder:
    """An order of `members` (numbers of tasks) whose strata are `strata` (codes, equally long), seeded by
    `key`.

    shares: of each code, adding up to 1; None: in proportion to members. shuffle=False: every epoch in listed
    order.
    """

    def __init__(
        self,
        members: np.ndarray,
        strata: np.ndarray,
        key: Sequence[int],
        shares: np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        by_stratum = np.argsort(strata, kind="stable")
        self.members = members[by_stratum].astype(np.int32)
        self.codes, self.sizes = np.unique(strata, return_counts=True)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.quota = self.sizes if shares is None else epoch_quotas(shares[self.codes], self.sizes)
        self.key, self.shuffle = key, shuffle
        self.epoch_length = int(self.quota.sum())
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def at(self, position: int) -> int:
        """The task at a position of the endless order."""
        epoch, index = divmod(position, self.epoch_length)
        return int(self.epoch(epoch)[index])

    def _epoch(self, epoch: int) -> np.ndarray:
        """Tasks of one epoch: the j-th of a stratum's q draws is at (j + u) / q, u in [0, 1) drawn per
        stratum.

        Every stretch then holds each stratum within about one of its share.
        """
        drawn, stratum = self._draws(epoch)
        count = self.quota[stratum]
        turn = np.arange(len(stratum)) - np.repeat(np.cumsum(self.quota) - self.quota, self.quota)
        u = np.full(len(self.codes), 0.5)
        if self.shuffle:
            u = splitmix64(*self.key, 1, epoch, self.codes) / 2.0**64
        return self.members[drawn[np.argsort((turn + u[stratum]) / count, kind="stable")]]

    def _draws(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """What each stratum gives in an epoch, stratum after stratum: places in `members`, and strata."""
        first = epoch * self.quota // self.sizes  # passes that the epoch touches
        passes = -(-(epoch + 1) * self.quota // self.sizes) - first
        block_stratum = np.repeat(np.arange(len(self.sizes)), passes)
        block_pass = np.arange(len(block_stratum)) - np.repeat(np.cumsum(passes) - passes - first, passes)
        length = self.sizes[block_stratum]
        block = np.repeat(np.arange(len(length), dtype=np.int32), length)
        member = np.arange(len(block)) - np.repeat(np.cumsum(length) - length, length)
        if self.shuffle:
            draw = splitmix64(*self.key, 0, block_pass[block], self.codes[block_stratum[block]], member)
            member = member[np.lexsort((draw, block))]
        begin = epoch * self.quota - first * self.sizes + np.cumsum(passes * self.sizes) - passes * self.sizes
        stratum = np.repeat(np.arange(len(self.quota)), self.quota)
        window = (
            np.repeat(begin, self.quota)
            + np.arange(len(stratum))
            - np.repeat(np.cumsum(self.quota) - self.quota, self.quota)
        )
        return self.starts[stratum] + member[window], stratum


def epoch_quotas(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Tasks of each stratum in a virtual epoch: the largest remainders of shares, at least one each."""
    total = max(int(sizes.sum()), VIRTUAL * len(sizes))
    exact = shares / shares.sum() * total
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]] += 1
    return np.maximum(whole, 1)


def splitmix64(*parts: int | np.ndarray) -> np.ndarray:
    """Uniform 64-bit integers from integers and arrays of them (the finaliser of SplitMix64: Steele et al.
    2014).
    """
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in parts:
            state = (np.asarray(part).astype(np.uint64) ^ state) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.atleast_1d(state)
