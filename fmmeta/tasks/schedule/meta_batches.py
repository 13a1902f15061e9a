"""The schedule: a stratified order of tasks, cut into meta-batches that are assigned to the groups.

    tasks of strata --(seed, epoch)--> quota of each stratum --> its next tasks --> strata interleaved
    global   order of all tasks --(outer_step)--> meta-batch --> shares of the groups
    node     each node has an order of its part of the tasks, which fills its slots of the meta-batch
    dynamic  meta-batch --(largest first)--> queue of the outer step, from which groups claim tasks

The order is endless. Each stratum is drawn in passes; a pass holds every task of the stratum once, in a new
order. An epoch draws `quota` tasks of each stratum. If the quotas are the sizes of the strata, an epoch is
one pass over all tasks. Otherwise it is virtual: a rare stratum may be passed through several times while a
frequent one is not yet drawn completely. Shuffles are hashes of (seed, stream, stratum, pass, task): they
need no history and are the same on every machine.

In `global` mode the meta-batch is a pure function of (seed, outer_step): it does not depend on the number of
groups, on earlier draws, or on the calling rank. In `node` mode it depends on the number of nodes too. A
meta-batch may cross the end of an epoch; no task is dropped or repeated to avoid that. No function here
communicates, and a position is restored by arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fmmeta.common.errors import UsageError

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
        self.members = members[np.argsort(strata, kind="stable")].astype(np.int32)
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


WINDOW = 64  # outer steps over which the strata are assigned evenly


@dataclass(frozen=True)
class Item:
    """A source of tasks: a named task, or the anchor class of N-way episodes."""

    name: str
    stratum: str
    tokens: int  # expected tokens of one episode, support and query


class Items(Sequence[Item]):
    """Items as columns of equal length, so that a million of them take megabytes.

    stratum [n]: indices into `strata`.
    """

    def __init__(self, names: Sequence[str], strata: Sequence[str], tokens: Sequence[int]) -> None:
        codes = {name: code for code, name in enumerate(sorted(set(strata)))}
        self.names, self.strata = names, list(codes)
        self.stratum = np.fromiter((codes[name] for name in strata), np.int32, len(names))
        self.tokens = np.fromiter(tokens, np.int64, len(names))

    @classmethod
    def of(cls, items: Iterable[Item]) -> "Items":
        listed = list(items)
        return cls(
            [item.name for item in listed],
            [item.stratum for item in listed],
            [item.tokens for item in listed],
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        return Item(self.names[index], self.strata[self.stratum[index]], int(self.tokens[index]))


@dataclass(frozen=True)
class Task:
    """One slot of a meta-batch. Its episode depends on `item` and `seed` only."""

    item: int
    name: str
    stratum: str
    tokens: int
    seed: tuple[int, ...]  # (seed, stream, outer step, slot)


Sizes = Callable[[int, tuple[int, ...]], int]
"""Expected tokens of the episode of (item, seed)."""


class Schedule:
    """`tasks_per_step` tasks for every outer step.

    stream: part of every seed; training, validation and evaluation have different ones. shares [strata]:
    share of each stratum in the tasks; None: in proportion to its items. nodes: number of disjoint parts of
    the items. shuffle=False: in listed order, strata interleaved, the same for every seed (evaluation).
    sizes: expected tokens of an episode; default: those of its item. Raises `UsageError` if the nodes cannot
    share the items or the tasks.
    """

    def __init__(
        self,
        items: Items,
        tasks_per_step: int,
        seed: int,
        stream: int = 0,
        *,
        shares: np.ndarray | None = None,
        nodes: int = 1,
        shuffle: bool = True,
        sizes: Sizes | None = None,
    ) -> None:
        if tasks_per_step % nodes:
            raise UsageError(
                f"meta_batch_size: {tasks_per_step} tasks per outer step cannot be shared evenly by {nodes}"
                " nodes (task_sharding=node); use a multiple of their number, or --task_sharding global"
            )
        if len(items) < nodes:
            raise UsageError(
                f"task_sharding=node: {len(items)} tasks are too few for {nodes} nodes; use --task_sharding"
                " global"
            )
        self.items, self.seed, self.stream, self.nodes = items, seed, stream, nodes
        self.tasks_per_step, self.per_node = tasks_per_step, tasks_per_step // nodes
        self.sizes = sizes or (lambda item, _: int(items.tokens[item]))
        self.orders = [
            StratifiedOrder(part, items.stratum[part], (seed, stream, node), shares, shuffle)
            for node, part in enumerate(node_parts(items.stratum, nodes, seed))
        ]
        # groups, outer step, tasks of each group in it, tasks of each stratum that each group has had
        self._last: tuple[int, int, list[list[Task]], list[Counter[str]]] = 0, -1, [], []

    def meta_batch(self, outer_step: int) -> list[Task]:
        """All tasks of an outer step, over all groups; those of node 0 first."""
        tasks = []
        for slot in range(self.tasks_per_step):
            node, turn = divmod(slot, self.per_node)
            number = self.orders[node].at(outer_step * self.per_node + turn)
            seed, item = (self.seed, self.stream, outer_step, slot), self.items[number]
            tasks.append(Task(number, item.name, item.stratum, self.sizes(number, seed), seed))
        return tasks

    def position(self, outer_step: int) -> tuple[int, int]:
        """Epoch, and index in it, at which an outer step begins on node 0."""
        return divmod(outer_step * self.per_node, self.orders[0].epoch_length)

    def queue(self, outer_step: int, part: int = 0) -> list[Task]:
        """The tasks of an outer step that the groups of one node (`part`) claim, in the order of the claims.

        With one node they are the whole meta-batch.
        """
        own = self.meta_batch(outer_step)[part * self.per_node : (part + 1) * self.per_node]
        return sorted(own, key=claim_order)

    def share(self, outer_step: int, num_groups: int, group_index: int) -> list[Task]:
        """The tasks of an outer step that one group runs; shares may be of unequal length, or empty."""
        first = outer_step - outer_step % WINDOW
        groups, last, shares, counted = self._last
        if groups != num_groups or not first <= last <= outer_step:
            last, counted = first - 1, [Counter() for _ in range(num_groups)]
        seen = [Counter(strata) for strata in counted]  # copies: a copied schedule continues independently
        per_node = num_groups // self.nodes
        for step in range(last + 1, outer_step + 1):
            tasks, shares = self.meta_batch(step), []
            for node in range(self.nodes):
                own = tasks[node * self.per_node : (node + 1) * self.per_node]
                shares += assign_to_groups(own, per_node, seen[node * per_node :])
        self._last = num_groups, outer_step, shares, seen
        return shares[group_index]


def claim_order(task: Task) -> tuple[int, int, int]:
    """Sort key of the endless queue from which groups claim tasks (training/claims.py).

    Outer step after outer step, the tasks of a step by expected size, largest first.
    """
    return task.seed[2], -task.tokens, task.seed[3]


def node_parts(stratum: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """Split items into disjoint parts whose sizes differ by at most one, in total and in every stratum."""
    numbers = np.arange(len(stratum), dtype=np.int32)
    if nodes == 1:
        return [numbers]
    mixed = numbers[np.lexsort((splitmix64(seed, numbers), stratum))]
    return [np.sort(mixed[node::nodes]) for node in range(nodes)]


def assign_to_groups(
    tasks: Sequence[Task], num_groups: int, seen: Sequence[Counter[str]] | None = None
) -> list[list[Task]]:
    """Assign tasks to groups, largest first, each to the least loaded group.

    Of the groups whose load is at most 5 % of the mean load above the least, it takes the one with the fewest
    tasks, then with the fewest of the stratum. seen: tasks of each stratum per group from earlier calls;
    updated. (Graham's LPT rule: at most 4/3 of the best makespan.)
    """
    seen = seen or [Counter() for _ in range(num_groups)]
    shares: list[list[tuple[int, Task]]] = [[] for _ in range(num_groups)]
    load = [0] * num_groups
    slack = 0.05 * sum(task.tokens for task in tasks) / num_groups
    for slot, task in sorted(enumerate(tasks), key=lambda entry: (-entry[1].tokens, entry[0])):
        most = min(load) + slack
        near = [g for g in range(num_groups) if load[g] <= most]
        g = min(near, key=lambda g: (len(shares[g]), seen[g][task.stratum], load[g], g))
        shares[g].append((slot, task))
        load[g] += task.tokens
        seen[g][task.stratum] += 1
    return [[task for _, task in sorted(share, key=lambda entry: entry[0])] for share in shares]
