"""The schedule: meta-batches taken from a stratified order of tasks and assigned to the groups.

    global   order of all tasks --(outer_step)--> meta-batch --> shares of the groups
    node     each node has an order of its part of the tasks, which fills its slots of the meta-batch

In `global` mode the meta-batch is a pure function of (seed, outer_step): it does not depend on the number of
groups, on earlier draws, or on the calling rank. In `node` mode it depends on the number of nodes too. A
meta-batch may cross the end of an epoch; no task is dropped or repeated to avoid that. No function here
communicates, and a position is restored by arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.tasks.schedule.order import StratifiedOrder, splitmix64

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
        near = [g for g in range(num_groups) if load[g] <= min(load) + slack]
        g = min(near, key=lambda g: (len(shares[g]), seen[g][task.stratum], load[g], g))
        shares[g].append((slot, task))
        load[g] += task.tokens
        seen[g][task.stratum] += 1
    return [[task for _, task in sorted(share, key=lambda entry: entry[0])] for share in shares]
