"""Every rule of NCCL that a communicator is checked for is broken once, and the break is found.

The rules hold in the whole parity matrix: its ranks run under them (tests/support/run_cases.py). `ALONE` are
breaks by one rank alone that NCCL refuses too, `GLOO_ONLY` others by one rank, `TOGETHER` those that take
two: the second of them raises.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.process_groups import World
from tests.support import nccl_rules
from tests.support.nccl_breaks import ALONE, Call, reduction
from tests.support.ranks import leave_at_once, on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs the backend is NCCL itself")
RULES = {"thread", "order", "interleaving", "dtype", "operation", "dense", "abort"}


def aborted(group: Any, device: torch.device) -> None:
    group.abort()
    group.allreduce([torch.zeros(2, device=device)])


GLOO_ONLY: dict[str, tuple[str, Call]] = {  # NCCL takes these, with another result or none at all
    "a sum of truth values": (
        "dtype",
        lambda group, device: group.allreduce([torch.ones(2, dtype=torch.bool)]),
    ),
    "a sum of 8-bit floats": (
        "dtype",
        lambda group, device: group.allreduce([torch.ones(2).to(torch.float8_e4m3fn)]),
    ),
    "a monitored barrier": ("operation", lambda group, device: group.monitored_barrier()),
    "a second thread": ("thread", lambda group, device: in_thread(group)),
    "abort": ("abort", aborted),
}
TOGETHER: dict[str, tuple[str, Call, Call]] = {  # rule, what the first rank does, what the second does
    "shapes": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(3)]),
        lambda group, cross: group.allreduce([torch.zeros(4)]),
    ),
    "dtypes": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(2, dtype=torch.float64)]),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "reductions": (
        "order",
        lambda group, cross: group.allreduce([torch.zeros(2)], reduction(dist.ReduceOp.MAX)),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "operations": (
        "order",
        lambda group, cross: group.broadcast([torch.zeros(2)]),
        lambda group, cross: group.allreduce([torch.zeros(2)]),
    ),
    "roots": (
        "order",
        lambda group, cross: group.broadcast(torch.zeros(2), 0),
        lambda group, cross: group.broadcast(torch.zeros(2), 1),
    ),
    "order of two": (
        "order",
        lambda group, cross: [
            dist.broadcast(torch.zeros(2), 0, group=group, async_op=True),
            dist.all_reduce(torch.zeros(2), group=group, async_op=True),
        ],
        lambda group, cross: [
            dist.all_reduce(torch.zeros(2), group=group, async_op=True),
            dist.broadcast(torch.zeros(2), 0, group=group, async_op=True),
        ],
    ),
    "numbers": (
        "order",
        lambda group, cross: group.broadcast(torch.zeros(2), 0),
        lambda group, cross: group.shutdown(),
    ),
    "a send of another shape": (
        "order",
        lambda group, cross: group.send([torch.zeros(2)], 1, 0),
        lambda group, cross: group.recv([torch.zeros(3)], 0, 0),
    ),
    "two sends": (
        "order",
        lambda group, cross: group.send([torch.zeros(2)], 1, 0),
        lambda group, cross: group.send([torch.zeros(2)], 0, 0),
    ),
    "cross before group": (
        "interleaving",
        lambda group, cross: [cross.allreduce([torch.zeros(2)]), group.allreduce([torch.zeros(2)])],
        lambda group, cross: [group.allreduce([torch.zeros(2)]), cross.allreduce([torch.zeros(2)])],
    ),
}


def in_thread(group: Any) -> None:
    """Issue one operation in this thread and one in another, whose error is raised here."""
    group.broadcast(torch.zeros(2), 0).wait()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: group.broadcast(torch.zeros(2), 0).wait()).result()


def attempt(call: Callable[[], Any]) -> str:
    """What a call raises; pending operations are left alone."""
    try:
        call()
    except nccl_rules.RuleBroken as error:
        return str(error)
    return ""


@on_ranks(4, rules=True)
def breaks(world: World) -> dict[str, Any]:
    """What this rank of two groups of two raises, by name of the break."""
    ranks = world.split(2)
    cpu, cross, first = torch.device("cpu"), ranks.cross.backend, ranks.group.rank == 0
    found = {}
    for name, (_, call) in {**ALONE, **GLOO_ONLY}.items():
        group = dist.new_group([0, 1])
        found[name] = attempt(lambda: call(group, cpu))  # noqa: B023
    for name, (_, *calls) in TOGETHER.items():
        group = dist.new_group([0, 1])
        if first:
            pending = calls[0](group, cross)  # noqa: F841
        world.comm.barrier()
        if not first:
            found[name] = attempt(lambda: calls[1](group, cross))  # noqa: B023
    found["on cross"] = attempt(lambda: ALONE["bits"][1](cross, cpu))
    found["by torch.distributed"] = attempt(
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int64), dist.ReduceOp.BXOR)
    )
    found["counted"] = len(nccl_rules.broken)
    world.comm.barrier()
    leave_at_once(world)  # the first ranks' operations are pending
    return found


@pytest.fixture(scope="module")
def found():
    return breaks()


@pytest.mark.parametrize("name", [*ALONE, *GLOO_ONLY])
def test_a_rank_that_breaks_a_rule_raises(name, found):
    rule = {**ALONE, **GLOO_ONLY}[name][0]
    for rank, raised in enumerate(found):
        assert raised[name].startswith(f"NCCL rule broken: {rule}: rank {rank % 2} of subgroup: ")


@pytest.mark.parametrize("name", TOGETHER)
def test_the_later_of_two_ranks_that_differ_raises(name, found):
    rule = TOGETHER[name][0]
    for raised in found[1::2]:
        assert raised[name].startswith(f"NCCL rule broken: {rule}: rank 1 of subgroup: operation 0: ")
        assert "; rank 0: " in raised[name]  # what the other rank has issued there


def test_cross_and_the_collectives_of_torch_are_checked(found):
    for rank, raised in enumerate(found):
        assert raised["on cross"].startswith(f"NCCL rule broken: operation: rank {rank // 2} of cross: ")
        assert raised["by torch.distributed"].startswith(
            f"NCCL rule broken: operation: rank {rank % 2} of group: allreduce BXOR int64[2] after "
        )


def test_every_rule_is_broken_and_none_is_forgotten(found):
    """The list of broken rules has them all, so that a caught error is found at the end."""
    assert {rule for rule, *_ in {**ALONE, **GLOO_ONLY, **TOGETHER}.values()} == RULES
    for raised in found:
        assert raised.pop("counted") == len(raised)


class OfDevice:
    """A backend that returns the tensor's double at once, and is never given the memory of `vector`."""

    def __init__(self, vector):
        self.host = vector.untyped_storage().data_ptr()

    def allreduce(self, tensors):
        assert tensors[0].untyped_storage().data_ptr() != self.host
        tensors[0].mul_(2)
        return self

    def broadcast(self, tensor, root):
        assert tensor.untyped_storage().data_ptr() != self.host
        tensor.fill_(7)
        return self

    def wait(self):
        pass


def test_a_communicator_copies_a_vector_in_host_memory_to_the_device():
    """As on a GPU: the backend gets a copy, and the vector the result."""
    vector = torch.ones(5)
    comm = Communicator(OfDevice(vector), 0, 2, torch.device("cpu", 0))  # for torch another device than "cpu"
    reduction = comm.begin_sum_(vector[1:])
    assert not reduction.pending  # complete on return
    assert vector.tolist() == [1, 2, 2, 2, 2]
    comm.broadcast_(vector)
    assert vector.tolist() == [7] * 5
