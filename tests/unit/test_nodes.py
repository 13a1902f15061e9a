"""Ranks on nodes: groups that stay inside one, groups that are refused, the map of links."""

import json
import math
import platform
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.common.errors import UsageError
from fmmeta.parallel import memory
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import Launch, Nodes, divisors, identity, size_of
from tests.support.memory import SIZES
from tests.support.messages import check_message, refusal


class FixedGather:
    """A communicator that gathers fixed names, the own ones among them."""

    def __init__(self, names):
        self.words = names

    def gather_bytes(self, payload):
        assert json.loads(payload)[1] == platform.node()
        return [json.dumps(word).encode() for word in self.words]


def nodes_of(*sizes: int) -> Nodes:
    return Nodes(
        tuple(n for n, size in enumerate(sizes) for _ in range(size)),
        tuple(f"gpu{n}" for n in range(len(sizes))),
    )


def test_nodes_are_counted_by_their_first_ranks():
    found = Nodes.of(FixedGather([["b", "x"], ["a", "y"], ["b", "x"], ["a", "y"]]), Launch())
    assert found == Nodes((0, 1, 0, 1), ("x", "y"))
    assert found.sizes == [2, 2]
    assert [found.first(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [found.is_second(rank) for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("env", "node"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "3"}, "3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "CROSS_RANK": "1"}, "1"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "5"}, "5"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_launchers_number_the_nodes(env, node):
    launch = Launch.from_env({**env, "MASTER_ADDR": "n0"})
    assert launch.node == node
    assert identity(launch) == f"node {node}" if node else identity(launch).startswith(f"{platform.node()}/")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 30))
def test_a_group_that_fits_on_a_node_is_on_one_node_or_refused(sizes, group_size):
    """Against a count by hand of the nodes under each group."""
    nodes = nodes_of(*sizes)
    if len(nodes.node) % group_size:
        return
    places = [set(nodes.node[start : start + group_size]) for start in range(0, len(nodes.node), group_size)]
    across = any(len(place) > 1 for place in places)
    if across and group_size <= min(sizes):
        with pytest.raises(UsageError):
            nodes.check(group_size)
    else:
        assert (nodes.check(group_size) is not None) == across
    assert nodes.are_groups_on_nodes(group_size) != across


def test_the_refusal_names_group_nodes_and_sizes_that_work():
    check_message(
        refusal(nodes_of(6, 6).check, 4),
        "group_size=4",
        "group 1 (ranks 4 to 7)",
        "gpu0 and gpu1",
        "use group_size 1, 2, 3, 6 or 12",
    )
    cyclic = Nodes((0, 1, 0, 1), ("a", "a"))
    check_message(refusal(cyclic.check, 2), "group 0 (ranks 0 and 1)", "a (node 0) and a (node 1)")
    assert cyclic.check(1) is None


def test_a_group_larger_than_a_node_is_logged():
    check_message(nodes_of(4, 4, 4, 4).check(8) or "", "group 0 (ranks 0 to 7)", "gpu0 and gpu1")
    assert nodes_of(4, 4, 4, 4).check(4) is None


def test_the_layout_map_names_groups_and_links(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert nodes_of(4, 4).map(2, "gradients", 614_400, "cuda") == [
        "group 0: ranks 0 and 1 on gpu0",
        "group 1: ranks 2 and 3 on gpu0",
        "group 2: ranks 4 and 5 on gpu1",
        "group 3: ranks 6 and 7 on gpu1",
        "inside groups, inside a node: gradients, in every pass",
        (
            "across groups, between nodes (NCCL_SOCKET_IFNAME=ib): 614 kB of meta-gradient per rank, once per"
            " outer step"
        ),
        "all ranks, between nodes: agreement and numbers of each outer step (gloo)",
    ]
    assert nodes_of(2).map(1, "nothing", 4e9, "cpu") == [
        "group 0: rank 0 on gpu0",
        "group 1: rank 1 on gpu0",
        "across groups, inside a node: 4 GB of meta-gradient per rank, once per outer step",
        "all ranks, inside a node: agreement and numbers of each outer step (gloo)",
    ]
    assert nodes_of(2, 2).map(4, "weights", 1, "cpu")[:2] == [
        "group 0: ranks 0 to 3 on gpu0 and gpu1",
        "inside groups, between nodes in 1 of 1 groups: weights, in every pass",
    ]
    many = nodes_of(*[8] * 8).map(1, "nothing", 1, "cpu")
    assert many[15:17] == ["group 15: rank 15 on gpu1", "and 48 more groups, all on one node each"]
    assert "(GLOO_SOCKET_IFNAME=not set)" in many[17]


def test_sizes_have_units():
    assert [size_of(n) for n in (0, 999, 1000, 614_400, 4e9, 4e13)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "614 kB",
        "4 GB",
        "4e+04 GB",
    ]


@pytest.mark.parametrize("sizes", [(6, 6), (4, 4), (3, 3), (4, 2), (1, 1)])
def test_groups_chosen_automatically_stay_inside_nodes(sizes, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, local: 1)
    precision = DeepSpeedSettings(3, False, False)
    for least in divisors(sum(sizes)):
        free = int(memory.estimate(SIZES, precision, least).total / memory.HEADROOM) + 1
        comm = SimpleNamespace(gather_bytes=lambda own, free=free: [json.dumps([free, free]).encode()])
        launch = Launch(0, sum(sizes), 0, sizes[0])
        world: Any = SimpleNamespace(nodes=nodes_of(*sizes), device=None, launch=launch, comm=comm)
        fits = [size for size in divisors(math.gcd(*sizes)) if size >= least]
        if fits:
            assert memory.choose_group_size(world, lambda data: SIZES, precision)[0] == fits[0]
        else:
            refusal(memory.choose_group_size, world, lambda data: SIZES, precision)
