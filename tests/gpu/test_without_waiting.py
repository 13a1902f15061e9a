"""What the host decides, adds to its own memory and closes beside a GPU that is still busy."""

import pytest
import torch

from fmmeta.meta.parameters import MetaGradient
from fmmeta.parallel.collectives import SMALL
from fmmeta.parallel.param_map import OuterMemory, add_to
from fmmeta.reliability.checks import hash_vector
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("pretended"),
]


@on_ranks(2)
def decided(world):
    """What two ranks of a group exchange: results, collectives of NCCL, waits for the device."""
    from tests.support.pretended_cuda.events import count

    group = world.split(2).group
    found = []
    for tensor in (torch.ones(3), torch.ones(SMALL + 1), torch.ones(3, device=world.device)):
        with count() as counted:
            group.broadcast_(group.sum_(tensor))
        found.append((float(tensor.max()), sum(counted.collectives.values()), sum(counted.waits.values())))
    with count() as counted:
        texts = group.gather_bytes(b"no" if group.rank else b"yes")
    return found, texts, sum(counted.collectives.values()) + sum(counted.waits.values())


def test_decisions_of_the_host_do_not_go_over_nccl():
    for (small, large, of_device), texts, counted in decided():
        assert small == (2.0, 0, 0)
        assert large[:2] == (2.0, 2)
        assert of_device == (2.0, 2, 0)
        assert (texts, counted) == ([b"yes", b"no"], 0)


@on_ranks(1)
def added(world):
    """A sum in pinned memory: waits while a device adds to it, waits of its reader, and its values."""
    from tests.support.pretended_cuda.events import count

    memory, ones = OuterMemory(world.device, offload=True), torch.ones(5, device=world.device)
    total = MetaGradient(memory.store(ones))
    with count() as adding:
        total.add(ones, 2.0)
        add_to(total.running[1:3], ones[1:3], -1.0)
        memory.write_back(total.running[4:], memory.load(total.running[4:]).mul_(3))
    with count() as reading:
        values = total.sum.tolist()
    return dict(adding.waits), list(reading.waits.values()), values


def test_a_sum_in_host_memory_is_waited_for_when_it_is_read():
    assert added() == [({}, [1], [2.0, 1.0, 1.0, 2.0, 6.0])]


@on_ranks(1)
def hashed(world):
    from tests.support.pretended_cuda.events import count

    vector = torch.arange(2.0**20 * 2 + 5)
    there = vector.to(world.device)
    with count() as counted:
        found = hash_vector(there)
    return found == hash_vector(vector), sum(counted.waits.values())


def test_a_hash_is_read_once():
    assert hashed() == [(True, 1)]


@on_ranks(2)
def closed(world, failing):
    """What became of the communicator across groups."""
    cross = world.split(1).cross.backend
    try:
        if failing:
            raise ValueError("a rank fails")
    except ValueError:
        world.close()
    else:
        world.close()
    return cross.ended


@pytest.mark.parametrize(("failing", "end"), [(False, "shutdown"), (True, "abort")])
def test_communicators_of_gpus_are_closed(failing, end):
    assert closed(failing) == [f"{end} was called before"] * 2
