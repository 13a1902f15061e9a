"""Assigns ranks to nodes: groups inside a node, and the printed map of links. Does not communicate.

A group sends something in every pass, groups among each other once per outer step: a group belongs on one
node wherever it fits.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of
from fmmeta.parallel.layout import Launch, divisors

SHOWN = 16  # groups that a map shows one by one


class Gathers(Protocol):
    def gather_bytes(self, payload: bytes, /) -> list[bytes]: ...


@dataclass(frozen=True)
class Nodes:
    """node: the node of each rank, numbered in the order of first ranks. hosts: the name of each node."""

    node: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, comm: Gathers, launch: Launch) -> Nodes:
        """Ask every rank where it is. Collective: comm."""
        told = [
            json.loads(text)
            for text in comm.gather_bytes(json.dumps([identity(launch), platform.node()]).encode())
        ]
        order = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in told))}
        hosts = {order[name]: host for name, host in told}
        return cls(
            tuple(order[name] for name, _ in told), tuple(hosts[number] for number in range(len(order)))
        )

    @property
    def sizes(self) -> list[int]:
        """Ranks of each node."""
        counted = Counter(self.node)
        return [counted[number] for number in range(len(self.hosts))]

    def first(self, rank: int) -> int:
        """The lowest rank of the same node."""
        return self.node.index(self.node[rank])

    def is_second(self, rank: int) -> bool:
        """Whether exactly one rank of the same node is lower."""
        return self.node[:rank].count(self.node[rank]) == 1

    def spanned(self, group_size: int) -> list[list[int]]:
        """The nodes of each group."""
        groups = range(0, len(self.node), group_size)
        return [list(dict.fromkeys(self.node[start : start + group_size])) for start in groups]

    def are_groups_on_nodes(self, group_size: int) -> bool:
        """Whether every group is on one node."""
        return all(len(nodes) == 1 for nodes in self.spanned(group_size))

    def check(self, group_size: int) -> str | None:
        """Refuse groups that span nodes although they fit into each; say so where they have to.

        Raises `UsageError`.
        """
        spanned = self.spanned(group_size)
        across = [group for group, nodes in enumerate(spanned) if len(nodes) > 1]
        if not across:
            return None
        first = across[0]
        where = f"group {first} ({ranks_of(first, group_size)}) is on {self.names(spanned[first])}"
        if group_size <= min(self.sizes):
            sizes = divisors(len(self.node))
            good = [str(size) for size in sizes if self.are_groups_on_nodes(size) or size > min(self.sizes)]
            raise UsageError(
                f"group_size={group_size} fits on a node, but {where}, and all that it sends in every pass"
                f" would cross the network; use group_size {any_of(good)}, or start consecutive ranks on each"
                " node (srun --distribution=block), as many as whole groups have"
            )
        return f"{where}: what it sends in every pass crosses the network"

    def names(self, nodes: Sequence[int]) -> str:
        return " and ".join(
            [", ".join(self.name(node) for node in nodes[:-1]), self.name(nodes[-1])]
            if nodes[1:]
            else [self.name(nodes[0])]
        )

    def name(self, node: int) -> str:
        """The host's name; with the node's number where several nodes have it."""
        host = self.hosts[node]
        return f"{host} (node {node})" if self.hosts.count(host) > 1 else host

    def map(self, group_size: int, inside: str, shard_bytes: float, device: str) -> list[str]:
        """Lines that show who is where and what travels on which link. inside: what a group sends in every
        pass.
        """
        spanned, world_size = self.spanned(group_size), len(self.node)
        lines = [
            f"group {group}: {ranks_of(group, group_size)} on {self.names(nodes)}"
            for group, nodes in enumerate(spanned[:SHOWN])
        ]
        if len(spanned) > SHOWN:
            lines.append(
                f"and {len(spanned) - SHOWN} more groups,"
                f" {'all on one node each' if self.are_groups_on_nodes(group_size) else 'alike'}"
            )
        if group_size > 1:
            far = sum(len(nodes) > 1 for nodes in spanned)
            link = "inside a node" if not far else f"between nodes in {far} of {len(spanned)} groups"
            lines.append(f"inside groups, {link}: {inside}, in every pass")
        if len(spanned) > 1:
            link = "inside a node"
            if any(
                len({self.node[rank] for rank in range(member, world_size, group_size)}) > 1
                for member in range(group_size)
            ):
                name = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
                link = f"between nodes ({name}={os.environ.get(name) or 'not set'})"
            lines.append(
                f"across groups, {link}: {size_of(shard_bytes)} of meta-gradient per rank, once per outer"
                " step"
            )
        link = "inside a node" if len(self.hosts) == 1 else "between nodes"
        lines.append(f"all ranks, {link}: agreement and numbers of each outer step (gloo)")
        return lines


def identity(launch: Launch) -> str:
    """What ranks of one node have in common and others do not: the launcher's number of the node, else host,
    boot and network.
    """
    if launch.node:
        return f"node {launch.node}"
    return "/".join(
        [platform.node(), text_of("/proc/sys/kernel/random/boot_id"), link_of("/proc/self/ns/net")]
    )


def text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def link_of(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def ranks_of(group: int, group_size: int) -> str:
    first, last = group * group_size, (group + 1) * group_size - 1
    return (
        f"rank {first}" if first == last else f"ranks {first} {'and' if last == first + 1 else 'to'} {last}"
    )


def size_of(count: float) -> str:
    """Bytes for reading: 614400 -> 614 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError
