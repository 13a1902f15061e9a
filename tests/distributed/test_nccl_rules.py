"""Every rule of NCCL that a communicator is checked for is broken once, and the break is found.

The rules hold in the whole parity matrix: its ranks run under them (tests/support/run_cases.py).
"""

from __future__ import annotations

import json

import pytest
import torch

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import OuterMemory
from tests.support import nccl_rules
from tests.support.launch import run_ranks
from tests.support.nccl_breaks import ALONE, GLOO_ONLY, TOGETHER

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs the backend is NCCL itself")
RULES = {"thread", "order", "interleaving", "dtype", "operation", "dense", "host", "abort"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank of two groups of two has raised, by name of the break."""
    folder = tmp_path_factory.mktemp("breaks")
    run_ranks(["-m", "tests.support.nccl_breaks", str(folder)], 4, timeout_s=100).ok()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


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
        assert int(raised.pop("counted")) == len(raised)


class OnDevice:
    """A backend that returns the tensor's double at once, and refuses tensors in host memory."""

    def allreduce(self, tensors):
        assert not nccl_rules.is_host(tensors[0])
        tensors[0].mul_(2)
        return self

    def broadcast(self, tensor, root):
        assert not nccl_rules.is_host(tensor)
        tensor.fill_(7)
        return self

    def wait(self):
        pass


def test_a_communicator_copies_a_vector_in_host_memory_to_the_device():
    """As on a GPU: the backend gets a copy, and the vector the result."""
    comm = Communicator(OnDevice(), 0, 2, torch.device("cpu"))
    vector = nccl_rules.mark_host(torch.ones(5))
    with nccl_rules.AsOnGpu():
        reduction = comm.begin_sum_(vector[1:])
        assert not reduction.pending  # complete on return
        assert vector.tolist() == [1, 2, 2, 2, 2]
        comm.broadcast_(vector)
    assert vector.tolist() == [7] * 5


def test_a_mark_ends_with_its_memory():
    nccl_rules.HOST.clear()
    vector = nccl_rules.mark_host(OuterMemory(torch.device("cpu"), True).zeros(torch.zeros(100)))
    assert nccl_rules.is_host(vector[3:])
    address = vector.untyped_storage().data_ptr()
    del vector
    assert nccl_rules.HOST[address].expired()
