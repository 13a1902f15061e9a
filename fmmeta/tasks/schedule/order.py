"""The order of tasks: endless, stratified, reshuffled every epoch; any position is computed directly.

    tasks of strata --(seed, epoch)--> quota of each stratum --> its next tasks --> strata interleaved

Each stratum is drawn in passes; a pass holds every task of the stratum once, in a new order. An epoch draws
`quota` tasks of each stratum. If the quotas are the sizes of the strata, an epoch is one pass over all tasks.
Otherwise it is virtual: a rare stratum may be passed through several times while a frequent one is not yet
drawn completely. Shuffles are hashes of (seed, stream, stratum, pass, task): they need no history and are
the same on every machine.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

VIRTUAL = 100  # least mean number of tasks per stratum in a virtual epoch: shares are exact to 1 %


class StratifiedOrder:
    """An order of `members` (numbers of tasks) whose strata are `strata` (codes, equally long), seeded by
    `key`.

    shares [codes]: share of each stratum, with sum 1; None: in proportion to its members. shuffle=False:
    every epoch in listed order.
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

        So every interval of the epoch holds each stratum within about one task of its share.
        """
        stratum, turn = np.repeat(np.arange(len(self.quota)), self.quota), ragged_arange(self.quota)
        u = np.full(len(self.codes), 0.5)
        if self.shuffle:
            u = splitmix64(*self.key, 1, epoch, self.codes) / 2.0**64
        position = (turn + u[stratum]) / self.quota[stratum]
        return self.members[self._draws(epoch, stratum, turn)[np.argsort(position, kind="stable")]]

    def _draws(self, epoch: int, stratum: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """Indices into `members` of the draws of an epoch, the `turn`-th draw of each `stratum`."""
        first = epoch * self.quota // self.sizes  # first pass of each stratum in the epoch
        passes = -(-(epoch + 1) * self.quota // self.sizes) - first
        # a block is one pass over one stratum
        block_stratum = np.repeat(np.arange(len(self.sizes)), passes)
        block_pass = ragged_arange(passes) + first[block_stratum]
        length = self.sizes[block_stratum]
        member = ragged_arange(length)
        if self.shuffle:
            block = np.repeat(np.arange(len(length), dtype=np.int32), length)
            draw = splitmix64(*self.key, 0, block_pass[block], self.codes[block_stratum[block]], member)
            member = member[np.lexsort((draw, block))]
        begin = epoch * self.quota - first * self.sizes + np.cumsum(passes * self.sizes) - passes * self.sizes
        return self.starts[stratum] + member[begin[stratum] + turn]


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., count - 1 for each count, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def epoch_quotas(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Tasks of each stratum in a virtual epoch: shares rounded by largest remainders, at least one each."""
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
