"""Assigns ranks to nodes: groups inside a node, and the printed map of links. Does not communicate.

A group communicates in every pass, groups with each other once per outer step: a group belongs on one node
wherever it fits.
"""

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of
from fmmeta.parallel.layout import Launch, divisors

SHOWN = 16  # groups that a map shows one by one


@dataclass(frozen=True)
class Nodes:
    """node: the node of each rank, numbered in the order of first ranks. hosts: the name of each node."""

    node: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, comm: Any, launch: Launch) -> "Nodes":
        """Gather the node of every rank. comm: a Communicator. Collective: comm."""
        payload = json.dumps([identity(launch), platform.node()]).encode()
        gathered = [json.loads(text) for text in comm.gather_bytes(payload)]
        hosts = dict(reversed(gathered))
        names = list(dict.fromkeys(name for name, _ in gathered))
        return cls(tuple(names.index(name) for name, _ in gathered), tuple(hosts[name] for name in names))

    @property
    def sizes(self) -> list[int]:
        """Number of ranks of each node."""
        return [self.node.count(number) for number in range(len(self.hosts))]

    def first(self, rank: int) -> int:
        """The lowest rank of the same node."""
        return self.node.index(self.node[rank])

    def is_second(self, rank: int) -> bool:
        """Whether exactly one rank of the same node is lower."""
        return self.node[:rank].count(self.node[rank]) == 1

    def nodes_of_groups(self, group_size: int) -> list[list[int]]:
        """The nodes of each group."""
        groups = range(0, len(self.node), group_size)
        return [list(dict.fromkeys(self.node[start : start + group_size])) for start in groups]

    def are_groups_on_nodes(self, group_size: int) -> bool:
        """Whether every group is on one node."""
        return all(len(nodes) == 1 for nodes in self.nodes_of_groups(group_size))

    def check(self, group_size: int) -> str | None:
        """Refuse groups that span nodes although they fit on each; return a warning where they have to.

        Raises `UsageError`.
        """
        for group, nodes in enumerate(self.nodes_of_groups(group_size)):
            if len(nodes) == 1:
                continue
            where = f"group {group} ({ranks_of(group, group_size)}) is on {self.names(nodes)}"
            smallest = min(self.sizes)
            if group_size > smallest:
                return f"{where}: what it sends in every pass crosses the network"
            sizes = [n for n in divisors(len(self.node)) if n > smallest or self.are_groups_on_nodes(n)]
            raise UsageError(
                f"group_size={group_size} fits on a node, but {where}, and all that it sends in every pass"
                f" would cross the network; use group_size {any_of(map(str, sizes))}, or start consecutive"
                " ranks on each node (srun --distribution=block), as many as whole groups have"
            )
        return None

    def names(self, nodes: Sequence[int]) -> str:
        """Host names, with the node's number where several nodes have the same one."""
        hosts = [self.hosts[node] for node in nodes]
        labels = [
            f"{host} (node {node})" if self.hosts.count(host) > 1 else host
            for node, host in zip(nodes, hosts, strict=True)
        ]
        return " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))

    def map(self, group_size: int, inside: str, shard_bytes: float, device: str) -> list[str]:
        """Lines that show which ranks are where and what is sent on which link.

        inside: what a group sends in every pass.
        """
        of_groups = self.nodes_of_groups(group_size)
        lines = [
            f"group {group}: {ranks_of(group, group_size)} on {self.names(nodes)}"
            for group, nodes in enumerate(of_groups[:SHOWN])
        ]
        if len(of_groups) > SHOWN:
            rest = "all on one node each" if self.are_groups_on_nodes(group_size) else "alike"
            lines.append(f"and {len(of_groups) - SHOWN} more groups, {rest}")
        if group_size > 1:
            far = sum(len(nodes) > 1 for nodes in of_groups)
            link = f"between nodes in {far} of {len(of_groups)} groups" if far else "inside a node"
            lines.append(f"inside groups, {link}: {inside}, in every pass")
        if len(of_groups) > 1:
            near = all(len(set(self.node[member::group_size])) == 1 for member in range(group_size))
            name = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
            setting = f"between nodes ({name}={os.environ.get(name) or 'not set'})"
            lines.append(
                f"across groups, {'inside a node' if near else setting}: {size_of(shard_bytes)} of"
                " meta-gradient per rank, once per outer step"
            )
        link = "inside a node" if len(self.hosts) == 1 else "between nodes"
        lines.append(f"all ranks, {link}: agreement and numbers of each outer step (gloo)")
        return lines


def identity(launch: Launch) -> str:
    """What ranks of one node have in common and others do not: the launcher's number of the node, else host,
    boot and network namespace.
    """
    if launch.node:
        return f"node {launch.node}"
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([platform.node(), boot, link_of("/proc/self/ns/net")])


def link_of(path: str) -> str:
    """The target of a link; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def ranks_of(group: int, group_size: int) -> str:
    first, last = group * group_size, (group + 1) * group_size - 1
    if first == last:
        return f"rank {first}"
    return f"ranks {first} {'and' if last == first + 1 else 'to'} {last}"


def size_of(count: float) -> str:
    """Bytes for reading: 614400 -> 614 kB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
