"""The arithmetic of the benchmarks. exchange: counts against exchanges that are carried out message by
message, and among real processes. scaling: tasks are assigned as in a run, times agree with closed forms.
gpu: only a GPU can run it completely.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import exchange, scaling
from benchmarks.gpu import flops_of, mfu, peak_of, task_flops
from benchmarks.scaling import Case, assign_steps, claimed_times, group_times, useful_time
from fmmeta.config.algorithms import find
from fmmeta.planning.compute import count_matmuls
from fmmeta.tasks.schedule.meta_batches import Task, assign_to_groups
from harness.namespaces import Hosts
from tests.support.helpers import tables_of
from tests.support.launch import ROOT, python, run_ranks
from tests.support.learners import (
    RuleOn,
    batches_of,
    config_of,
    episode_of,
    llama,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message

VALUES = 16 * 3 * 7
POWERS = (2, 4, 8, 16)
Round = list[tuple[int, int, tuple[int, int], bool]]  # from, to, which values, whether they are added


def part(number: int, count: int) -> tuple[int, int]:
    """Begin and end of one of `count` equal parts of the values."""
    return number * VALUES // count, (number + 1) * VALUES // count


def ring(count: int) -> Iterator[Round]:
    """Parts are added up along the ring, and then passed on."""
    for step in range(2 * (count - 1)):
        add = step < count - 1
        first = -step if add else count - step  # the part of node 0
        yield [(n, (n + 1) % count, part((n + first) % count, count), add) for n in range(count)]


def halving_doubling(count: int) -> Iterator[Round]:
    """Halves of halves are added up, and then collected."""
    parts, distances = [(0, VALUES)] * count, [count >> step for step in range(1, count.bit_length())]
    for distance in distances:
        halves = [((begin, (begin + end) // 2), ((begin + end) // 2, end)) for begin, end in parts]
        kept = [bool(node & distance) for node in range(count)]
        yield [(node, node ^ distance, halves[node][not kept[node]], True) for node in range(count)]
        parts = [halves[node][kept[node]] for node in range(count)]
    for distance in distances[::-1]:
        yield [(node, node ^ distance, parts[node], False) for node in range(count)]
        pairs = [(parts[node], parts[node ^ distance]) for node in range(count)]
        parts = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs]


def servers(count: int, serving: int) -> Iterator[Round]:
    """Each server adds up its part, and sends it to all nodes."""
    pairs = [(node, server) for node in range(count) for server in range(serving) if node != server]
    yield [(node, server, part(server, serving), True) for node, server in pairs]
    yield [(server, node, part(server, serving), False) for node, server in pairs]


@pytest.mark.parametrize(
    ("count", "rounds", "cost"),
    [
        *((count, ring(count), exchange.ring(count)) for count in (2, 3, 4, 7, 8)),
        *((count, ring(count), exchange.sharded(count)) for count in (2, 3, 4, 7, 8)),
        *((count, halving_doubling(count), exchange.halving_doubling(count)) for count in POWERS),
        *(
            (count, servers(count, serving), exchange.servers(count, serving))
            for count, serving in ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 4), (8, 8))
        ),
    ],
)
def test_an_exchange_sends_what_is_counted(count, rounds, cost):
    """Carried out message by message, in units of all values, it leaves the mean."""
    values = np.random.default_rng(count).standard_normal((count, VALUES))
    mean, links, serial, listed = values.mean(0), np.zeros((2, count)), 0.0, list(rounds)
    for messages in listed:
        carried = np.zeros_like(links)
        for source, target, (begin, end), _ in messages:
            carried[[0, 1], [source, target]] += (end - begin) / VALUES
        arrived = [values[source, slice(*where)].copy() for source, _, where, _ in messages]
        for (_, target, where, add), sent in zip(messages, arrived, strict=True):
            values[target, slice(*where)] = sent + values[target, slice(*where)] * add
        links += carried
        serial += carried.max()
    assert np.allclose(values / count, mean)
    assert (*links.max(1), serial) == pytest.approx((cost.sent, cost.received, cost.serial))
    assert (len(listed), 0) == (cost.rounds, cost.left)


@pytest.mark.parametrize("count", POWERS)
def test_random_pairs_leave_the_counted_disagreement(count):
    disagreement = np.random.default_rng(0).standard_normal(count)
    disagreement -= disagreement.mean()
    ratios = []
    for number in range(3000):
        partners = exchange.draw_partners(number, count)
        assert all(partners[partner] == node != partner for node, partner in enumerate(partners))
        after = (disagreement + disagreement[partners]) / 2
        ratios.append((after @ after) / (disagreement @ disagreement))
    assert np.mean(ratios) == pytest.approx(exchange.pairs(count).left ** 2, rel=0.03, abs=1e-12)


@pytest.mark.parametrize("count", [3, 8, 9, 64])
def test_a_circle_needs_the_counted_rounds_in_the_worst_case(count):
    eye = np.eye(count)
    mixing = (eye + np.roll(eye, 1, 0) + np.roll(eye, -1, 0)) / 3
    rounds = exchange.neighbours(count).repeated(1000).rounds
    left = [
        np.linalg.norm(np.linalg.matrix_power(mixing, number) - 1 / count, 2)
        for number in (rounds - 1, rounds)
    ]
    assert left[1] <= 1e-3 + 1e-12
    assert left[0] > 1e-3 or rounds == 1


def test_seconds_are_latency_and_bandwidth():
    cost = exchange.ring(4)
    assert cost.seconds(1e9, 0.0, 4e9) == pytest.approx(1.5)
    assert cost.seconds(0, 0.01, 4e9) == pytest.approx(0.06)


def test_tables_in_the_docs_equal_the_results_and_the_counts():
    """The page shows the rows that its text is about."""
    results = json.loads((ROOT / "benchmarks/results/exchange.json").read_text())
    counted = results["counted"]
    found = exchange.count(counted["latency_us"] / 1e6, counted["gigabytes_per_s"] * 1e9)
    assert json.loads(json.dumps(found)) == counted["rows"]
    page = tables_of((ROOT / "docs/explanation/waiting.md").read_text())
    for printed in (exchange.show_counted(found), exchange.show_measured(results["measured"]["rows"])):
        ((header, rows),) = tables_of(printed).items()
        assert len(page[header]) in (6, 7)
        assert [row for row in page[header] if row not in rows] == []


def check_rows(rows: list[dict], tolerance: float, counted: tuple[str, ...] = ("sent",)) -> None:
    for row in [row for row in rows if row["way"] != exchange.FLOOR]:
        wanted = row["counted"]["sent"]
        assert all(wanted <= row[which] <= wanted * (1 + tolerance) for which in counted), row
        assert row["equal_bits"] == (row["off"] < 1e-6) == (row["counted"]["left"] == 0), row


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io")
@pytest.mark.parametrize("groups", [2, 4])
def test_ranks_over_gloo_send_the_counted_bytes(groups, tmp_path):
    """Bytes that each process writes, on loopback: payload and gloo's headers."""
    words = ["-m", "benchmarks.exchange", "rank", "--values", str(2**18), "--repeats", "1"]
    run_ranks([*words, "--folder", str(tmp_path)], groups).ok()
    rows = exchange.summary(tmp_path, groups, 2**18)
    assert len(rows) == 7
    check_rows(rows, 0.01)


@pytest.mark.cluster
@pytest.mark.parametrize("groups", [2, 4])
def test_hosts_send_the_counted_bytes(groups):
    """Bytes of the interfaces: headers and acknowledgements too."""
    try:
        Hosts().close()
    except OSError as error:
        pytest.skip(f"no hosts here: {error}")
    check_rows(exchange.measure(groups, 40, 2**18, 1), 0.15, ("sent", "received"))


@given(
    st.integers(1, 9), st.lists(st.lists(st.integers(1, 400), min_size=7, max_size=7), min_size=1, max_size=4)
)
def test_batched_assignment_equals_the_assignment_of_a_run(groups, rows):
    found = assign_steps(np.array(rows), groups)
    for row, owner in zip(rows, found, strict=True):
        tasks = [Task(i, f"t{i}", "s", tokens, (i,)) for i, tokens in enumerate(row)]
        shares = assign_to_groups(tasks, groups)
        assert [[task.item for task in share] for share in shares] == [
            np.flatnonzero(owner == g).tolist() for g in range(groups)
        ]


def test_groups_wait_for_the_longest(monkeypatch):
    monkeypatch.setattr(scaling, "FIXED", 0.0)
    assert useful_time(Case(per_group=2), 64, 3) == 1
    assert useful_time(Case(slow_share=1.0, slow_by=2.0), 8, 3) == pytest.approx(0.5)
    taken = np.random.default_rng(1).exponential(size=(20_000, 8))
    longest = group_times(np.ones_like(taken), taken, 8).max(1).mean()
    assert longest == pytest.approx(sum(1 / k for k in range(1, 9)), rel=0.01)  # E max of 8 exponentials


def test_claimed_tasks_run_on_the_group_that_is_free_first():
    """A group at half speed gets a third of equal tasks: 22 instead of 32 units of time for 32 tasks."""
    ones, slow = np.ones((1, 32)), np.array([[1.0, 2.0]])
    assert claimed_times(ones, ones, slow).tolist() == [[21.0, 22.0]]
    assert (group_times(ones, ones, 2) * slow).tolist() == [[16.0, 32.0]]
    sizes = np.array([[1.0, 3.0, 2.0, 2.0]])  # 3 | 2, then 2 on the second, 1 on the first
    assert claimed_times(sizes, sizes, np.ones((1, 2))).tolist() == [[4.0, 4.0]]


def test_flops_of_a_task_equal_torch():
    learner = llama()
    learner.hf.config._attn_implementation = "eager"
    config, episode = config_of(learner, inner_steps=3), batches_of(episode_of(learner))
    worker, counts = worker_of(learner, config), count_matmuls(copy.deepcopy(learner), config)
    with FlopCounterMode(display=False) as counted:
        task_gradient(RuleOn(find("fomaml").rule, setup_of(worker, config)), worker, episode)
    flops = task_flops(counts, episode, 3)
    assert flops == pytest.approx(counted.get_total_flops(), rel=1e-9)
    assert flops == 3 * flops_of(counts, episode.support, True) + flops_of(counts, episode.query, True)


def test_share_of_the_peak():
    assert mfu(3e12, 2.0, peak_of("NVIDIA A100-SXM4-80GB", "fp32", None)) == pytest.approx(3 / 39)
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16", None) == 989e12
    assert peak_of("some other", "bf16", 100.0) == 1e14
    with pytest.raises(SystemExit, match=r"some other in bf16 .* give it in TFLOPS"):
        peak_of("some other", "bf16", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_exits_with_2(tmp_path):
    ended = python(["-m", "benchmarks.gpu"], tmp_path)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    check_message(ended.stderr.strip().splitlines()[-1], "gpu: no GPU is there", "benchmarks.floor")
