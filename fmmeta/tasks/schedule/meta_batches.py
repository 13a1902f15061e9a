"""The schedule: meta-batches taken from a stratified order of tasks and assigned to the groups.

    global   order of all tasks --(outer_step)--> meta-batch --> shares of the groups
    node     each node has an order of its part of the tasks, which fills its slots of the meta-batch

In `global` mode the meta-batch is a pure function of (seed, outer_step): it does not depend on the number of
groups, on earlier draws, or on the calling rank. In `node` mode it depends on the number of nodes too. A
meta-batch may cross the end of an epoch; no task is dropped or repeated to avoid that. No function here
communicates, and a position is restored by arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.tasks.schedule.order import StratifiedOrder, splitmix64

WINDOW = 64  # outer steps over which the strata are assigned evenly


@dataclass(frozen=True)
class Item:
    """Something that tasks are drawn from: a named task, or a class that leads an N-way episode."""

    name: str
    stratum: str
    tokens: int  # expected tokens of one episode, support and query


class Items(Sequence[Item]):
    """Many items as columns of equal length: a million cost megabytes.

    `stratum` [n] holds codes, numbers into `strata`.
    """

    def __init__(self, names: Sequence[str], strata: Sequence[str], tokens: Sequence[int]) -> None:
        codes = {name: code for code, name in enumerate(sorted(set(strata)))}
        self.names, self.strata = names, list(codes)
        self.stratum = np.fromiter((codes[name] for name in strata), np.int32, len(names))
        self.tokens = np.fromiter(tokens, np.int64, len(names))

    @classmethod
    def of(cls, items: Iterable[Item]) -> Items:
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
    """One slot of a meta-batch. `seed` is all that drawing its episode depends on."""

    item: int
    name: str
    stratum: str
    tokens: int
    seed: tuple[int, ...]  # (seed, stream, outer step, slot)


Sizes = Callable[[int, tuple[int, ...]], int]
"""Expected tokens of the episode that (item, seed) will give, where that is known better than on average."""


class Schedule:
    """`tasks_per_step` tasks for every outer step. `stream` keeps train, valid and test apart.

    shares [strata]: of each stratum; None: in proportion to its items. nodes: in how many parts the items are
    kept apart. shuffle=False: in listed order, strata interleaved, the same for every seed (evaluation).
    Raises `UsageError` where the nodes cannot share the items or the tasks.
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
        self.items, self.tasks_per_step, self.seed, self.stream, self.nodes = (
            items,
            tasks_per_step,
            seed,
            stream,
            nodes,
        )
        self.sizes = sizes or (lambda item, _: int(items.tokens[item]))
        self.orders = [
            StratifiedOrder(part, items.stratum[part], (seed, stream, node), shares, shuffle)
            for node, part in enumerate(node_parts(items.stratum, nodes, seed))
        ]
        self._dealt: tuple[int, int, list[list[Task]], list[Counter[str]]] | None = None

    def meta_batch(self, outer_step: int) -> list[Task]:
        """All tasks of an outer step, over all groups; those of node 0 first."""
        per_node = self.tasks_per_step // self.nodes
        return [
            self._task(order.at(outer_step * per_node + turn), outer_step, node * per_node + turn)
            for node, order in enumerate(self.orders)
            for turn in range(per_node)
        ]

    def position(self, outer_step: int) -> tuple[int, int]:
        """Epoch and index inside it at which an outer step begins, on node 0."""
        return divmod(outer_step * (self.tasks_per_step // self.nodes), self.orders[0].epoch_length)

    def share(self, outer_step: int, num_groups: int, group_index: int) -> list[Task]:
        """The tasks of an outer step that one group runs; shares may be of unequal length, or empty."""
        first = outer_step - outer_step % WINDOW
        if self._dealt and self._dealt[0] == num_groups and first <= self._dealt[1] <= outer_step:
            _, last, shares, counted = self._dealt
            seen = [
                Counter(strata) for strata in counted
            ]  # copies of a schedule continue from here independently
        else:
            last, shares, seen = first - 1, [], [Counter() for _ in range(num_groups)]
        for step in range(last + 1, outer_step + 1):
            shares = self._deal(step, num_groups, seen)
        self._dealt = num_groups, outer_step, shares, seen
        return shares[group_index]

    def _deal(self, outer_step: int, num_groups: int, seen: list[Counter[str]]) -> list[list[Task]]:
        tasks, per_node, groups = (
            self.meta_batch(outer_step),
            self.tasks_per_step // self.nodes,
            num_groups // self.nodes,
        )
        return [
            share
            for node in range(self.nodes)
            for share in assign_to_groups(
                tasks[node * per_node : (node + 1) * per_node], groups, seen[node * groups :]
            )
        ]

    def _task(self, number: int, outer_step: int, slot: int) -> Task:
        seed = (self.seed, self.stream, outer_step, slot)
        item = self.items[number]
        return Task(number, item.name, item.stratum, self.sizes(number, seed), seed)


def node_parts(stratum: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """Cut items into disjoint parts that differ by one item at most, in all and in every stratum."""
    numbers = np.arange(len(stratum), dtype=np.int32)
    if nodes == 1:
        return [numbers]
    mixed = numbers[np.lexsort((splitmix64(seed, numbers), stratum))]
    return [np.sort(mixed[node::nodes]) for node in range(nodes)]


def assign_to_groups(
    tasks: Sequence[Task], num_groups: int, seen: Sequence[Counter[str]] | None = None
) -> list[list[Task]]:
    """Assign tasks to groups, largest first, each to the least loaded group.

    Among groups within 5 % of the mean load of the least, the one with fewest tasks, then with fewest of the
    stratum, is preferred; `seen` counts these per group from earlier calls and is updated.
    (Graham's LPT rule: at most 4/3 of the best makespan.)
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
