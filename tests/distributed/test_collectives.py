"""What the ranks of a launch exchange and agree on: sums, bytes, errors, waits and replicas."""

import io
import platform
import time
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fmmeta.common.errors import MachineFault, PeerError, UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.load import load_learner
from fmmeta.meta.parameters import MetaGradient
from fmmeta.parallel import collectives, process_groups
from fmmeta.parallel.layout import Nodes
from fmmeta.parallel.workers.create import check_equal, fingerprint
from fmmeta.reliability.checks import check_replicas, hash_vector
from fmmeta.training.final import read_result
from fmmeta.training.run import StopAgreement
from tests.support import open_files
from tests.support.fake_runs import write_run
from tests.support.messages import check_message, refusal
from tests.support.ranks import built, elements, leave_at_once, on_ranks


def check_collectives(world):
    """The collectives of the ranks match."""
    sent = [b"", *(f"after {rank}".encode() for rank in range(1, world.comm.size))]
    assert world.comm.gather_bytes(sent[world.launch.global_rank]) == sent


@on_ranks(4, before=open_files.soft)
def test_a_soft_limit_of_open_files_is_raised_to_what_the_ranks_need(world):
    check_collectives(world)


def fail_on(world, rank, error):
    with world.comm.raise_on_all("testing"):
        if world.launch.global_rank == rank:
            raise error


def an_error_of_one_rank_is_raised_on_all(world):
    with pytest.raises(UsageError, match="value=1 is wrong; use 2"):
        fail_on(world, 1, UsageError("value=1 is wrong; use 2"))
    others = world.launch.global_rank > 0
    text = "rank 0 failed while testing: broken" if others else "^broken$"
    with pytest.raises(PeerError if others else RuntimeError, match=text):
        fail_on(world, 0, RuntimeError("broken"))
    check_collectives(world)


def ranks_that_share_a_gpu_are_refused_on_all_ranks(world):
    rank = world.launch.global_rank
    process_groups.refuse_shared_gpus(world.comm, f"GPU-{'abc'[rank]}")
    line = refusal(process_groups.refuse_shared_gpus, world.comm, f"GPU-{'aba'[rank]}")
    check_message(line.replace(platform.node(), "HOST"), "world_size=3: ranks 0 and 2", "--gpus-per-task=1")


def differing_replicas_are_named_on_all_ranks(world):
    """Three groups of one; the weights of one of them lose a bit."""
    ranks, theta = world.split(1), torch.arange(10.0)
    check_replicas(ranks, theta, "after outer step 6")
    if ranks.layout.group_index == 1:
        theta.view(torch.int32)[3] ^= 1
    with pytest.raises(MachineFault) as caught:
        check_replicas(ranks, theta, "after outer step 7")
    check_message(str(caught.value), "outer step 7", "ranks 1 differ", "nothing of it is saved")


def all_ranks_receive_the_bytes_of_one(world, folder):
    """No tensor that is sent is longer than metrics.jsonl of a run, however many ranks receive it."""
    rank, comm = world.launch.global_rank, world.comm
    received = [comm.broadcast_bytes(f"{rank} {'x' * rank}".encode(), root) for root in range(comm.size)]
    assert received == [b"0 ", b"1 x", b"2 xx"]
    assert comm.broadcast_bytes(b"" if rank == 0 else b"ignored") == b""
    assert comm.gather({"rank": rank, "none": None}) == [{"rank": n, "none": None} for n in range(comm.size)]
    assert [comm.broadcast([rank], root) for root in range(comm.size)] == [[0], [1], [2]]
    ran = []
    assert comm.on_first("testing", lambda: ran.append(rank) or (rank, "x")) == [0, "x"]
    assert ran == [0] * (rank == 0)
    with pytest.raises(PeerError if rank else ValueError, match="invalid literal"):
        comm.on_first("testing", lambda: int("one"))
    with pytest.raises(PeerError if rank else TypeError, match="not JSON serializable"):
        comm.on_first("testing", object)
    lengths, backend = [], comm.backend

    class Noting:
        def __getattr__(self, name):
            def call(tensors, *options):
                lengths.append(elements(tensors))
                return getattr(backend, name)(tensors, *options)

            return call

    comm.backend = Noting()
    if rank == 0:
        write_run(folder)
    comm.barrier()
    assert len(read_result(folder, comm).log_history) == 104
    size = sum((folder / name).stat().st_size for name in ("metrics.jsonl", "run.json"))
    assert size / 2 < max(lengths) < 1.1 * size


@on_ranks(3)
def test_what_three_ranks_exchange_and_refuse(world, tmp_path):
    """One launch for several checks."""
    for check in (
        an_error_of_one_rank_is_raised_on_all,
        ranks_that_share_a_gpu_are_refused_on_all_ranks,
        differing_replicas_are_named_on_all_ranks,
    ):
        check(world)
    all_ranks_receive_the_bytes_of_one(world, tmp_path / "run")


def all_groups_abandon_a_step_that_one_has_left(world):
    no_signal, no_save = SimpleNamespace(asked=None), SimpleNamespace(folder=None, done=False, failure=None)
    agreement = StopAgreement(world.split(1, False), cast(Any, no_signal))
    for left, stops in ((world.launch.global_rank == 1, True), (False, False)):
        assert agreement.agree_after_tasks(left, cast(Any, no_save)) == stops
        assert agreement.requested == stops


def a_reduction_finishes_bucket_by_bucket(world):
    """Each bucket is whole when it comes, whatever travels; the mean is that of the whole."""
    collectives.BUCKET = 8
    comm, share = world.comm, world.launch.global_rank + 1.0
    buckets = [slice(0, 8), slice(8, 16), slice(16, 20)]
    for wire in (None, torch.bfloat16):
        vector = torch.arange(20.0) * share
        reduction = comm.begin_sum_(vector, wire)
        assert list(reduction.buckets) == buckets
        for number, bucket in enumerate(buckets):
            reduction.wait(number)
            assert torch.equal(vector[bucket], 3 * torch.arange(20.0)[bucket])
    meta = MetaGradient(torch.zeros(20), {"rates": torch.zeros(2, 2)})
    meta.sum += share
    meta.extra["rates"] += share
    mean = meta.begin_reduce(comm, 3.0)
    assert mean.finish("rates").tolist() == [[1.0, 1.0], [1.0, 1.0]]
    for number, bucket in enumerate(buckets):
        mean.reductions["theta"].wait(number)
        assert (meta.sum[bucket].div_(mean.weight) == 1).all()


def differing_replicas_inside_a_group_are_named(world):
    """Two ranks of a group that both hold the whole model (ZeRO 0); shards of two ranks differ anyway."""
    ranks, theta = world.split(2), torch.arange(10.0)
    check_replicas(ranks, theta, "after outer step 6", whole=True)
    theta[0] += ranks.group.rank
    check_replicas(ranks, theta, "after outer step 7")
    with pytest.raises(MachineFault, match=r"\(ranks 0, 1 differ\)"):
        check_replicas(ranks, theta, "after outer step 7", whole=True)


def a_node_that_is_done_waits_for_a_slower_one(world):
    """Longer than the timeout of its communicator, up to prepare_timeout."""
    world.nodes = Nodes((0, 1), ("a", "b"))
    world.comm.set_timeout(1)
    world.run_on_first_rank_of_node("reading", lambda: time.sleep(3 * world.launch.global_rank), 3600)


@on_ranks(2)
def test_what_two_ranks_sum_compare_and_wait_for(world):
    """One launch for several checks."""
    for check in (
        all_groups_abandon_a_step_that_one_has_left,
        a_reduction_finishes_bucket_by_bucket,
        differing_replicas_inside_a_group_are_named,
        a_node_that_is_done_waits_for_a_slower_one,
    ):
        check(world)


@on_ranks(2)
def begin_with_other_weights(world):
    """The hash of theta at the start, whether it was moved there, and how replicas that differ are refused.

    Every rank makes its own weights, as a broken initialisation would.
    """
    rank = world.launch.global_rank
    config = Config(task_type="causal_lm", dataset=["words"], group_size="1", seed=rank)
    inputs, ranks, parts = built(world, config)
    theta = parts.meta_params.theta
    own = load_learner(config, inputs.description).named_parameters()
    same = [
        torch.equal(parts.worker.gather_param(theta, name, p.shape), p) for name, p in own if p.requires_grad
    ]
    begun = hash_vector(theta)
    theta[rank] += rank
    with pytest.raises(MachineFault, match=r"\(ranks 0, 1 differ\)"):
        check_replicas(ranks, theta, "although it was broadcast")
    with pytest.raises(UsageError, match="the frozen weights and buffers are not"):
        check_equal(ranks, fingerprint([("table", torch.full((3,), float(rank)))]))
    return begun, all(same)


def test_initial_weights_are_made_equal_and_checked():
    (first, stayed), (second, too) = begin_with_other_weights()
    assert first == second
    assert (stayed, too) == (True, False)


@on_ranks(3)
def prepare(world, file):
    """What a rank finds, logs and raises: the first of the node works, fails, then never comes."""
    process_groups.LOG_S = 0.3
    first = world.launch.local_rank == 0

    def read():
        if first:
            time.sleep(1)
            file.write_text("what rank 0 left")
            return "nothing"
        return file.read_text()

    def broken():
        assert first, "the others have nothing to do"
        raise UsageError("dataset=x is broken; fix it")

    leave_at_once(world)  # rank 0 does not answer
    on_first, late = world.run_on_first_rank_of_node, None
    with redirect_stdout(io.StringIO()) as log, redirect_stderr(log):
        found = on_first("reading the data", read, 60)
        assert refusal(on_first, "reading", broken, 60) == "dataset=x is broken; fix it"
        if first:
            time.sleep(2)
        else:
            late = refusal(on_first, "reading slowly", lambda: None, 0.5)
    return found, log.getvalue().splitlines(), late


def test_one_rank_of_a_node_prepares_and_the_others_wait_for_it(tmp_path):
    first, (found, log, late), third = prepare(tmp_path / "prepared")
    assert first == ("nothing", [], None)
    assert found == "what rank 0 left"
    assert third == (found, [], late.replace("rank 1", "rank 2"))  # one waiting rank logs
    waits = ("rank 1 waits for rank 0 on ", "(reading the data)", "0 s so far", "60 s at most")
    check_message(log[0], *waits)
    assert log[-1] == f"fmmeta: error: {late}"
    here = ("has waited 1 s for rank 0", platform.node(), "(reading slowly)", "raise it")
    check_message(late, "prepare_timeout=0.5: rank 1 ", *here)
