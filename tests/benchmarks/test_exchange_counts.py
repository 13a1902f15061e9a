"""The counts of benchmarks/exchange.py, against exchanges that are carried out message by message, and the
tables of docs/explanation/waiting.md.
"""

import json

import numpy as np
import pytest

from benchmarks import exchange
from tests.support.helpers import ROOT

VALUES = 512
POWERS = (2, 4, 8, 16)


class Nodes:
    """Values on `count` nodes, and what their links have carried, in units of all values."""

    def __init__(self, count: int) -> None:
        self.values = np.random.default_rng(count).standard_normal((count, VALUES))
        self.mean = self.values.mean(0)
        self.sent, self.received = np.zeros(count), np.zeros(count)
        self.serial, self.rounds = 0.0, 0

    def slices(self, node: int, count: int) -> list[np.ndarray]:
        """Views of equal lengths."""
        return np.split(self.values[node], count)

    def send(self, messages: list[tuple[int, int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
        """One round of messages (from, to, values); what arrives where."""
        sent, received = np.zeros_like(self.sent), np.zeros_like(self.sent)
        for source, target, values in messages:
            sent[source] += len(values) / VALUES
            received[target] += len(values) / VALUES
        self.sent += sent
        self.received += received
        self.serial += max(sent.max(), received.max())
        self.rounds += 1
        return [(target, values.copy()) for _, target, values in messages]

    def check(self, cost: exchange.Cost) -> None:
        assert np.allclose(self.values, self.mean)
        assert (self.sent.max(), self.received.max()) == pytest.approx((cost.sent, cost.received))
        assert (self.serial, self.rounds) == (pytest.approx(cost.serial), cost.rounds)
        assert cost.left == 0


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("cost", [exchange.ring, exchange.sharded])
def test_a_ring_sends_what_is_counted(count, cost):
    nodes = Nodes(count)
    nodes.values = nodes.values[:, : (size := VALUES // count * count)]
    nodes.mean = nodes.mean[:size]
    for step in range(2 * (count - 1)):
        add = step < count - 1
        chunk = [(node - step if add else node + 1 - (step - count + 1)) % count for node in range(count)]
        messages = [
            (node, (node + 1) % count, nodes.slices(node, count)[chunk[node]]) for node in range(count)
        ]
        for source, (target, values) in enumerate(nodes.send(messages)):
            slice_ = nodes.slices(target, count)[chunk[source]]
            slice_[:] = values + slice_ if add else values
    nodes.values /= count
    nodes.sent, nodes.received, nodes.serial = (
        part * VALUES / size for part in (nodes.sent, nodes.received, nodes.serial)
    )
    nodes.check(cost(count))


@pytest.mark.parametrize("count", POWERS)
def test_halving_and_doubling_sends_what_is_counted(count):
    nodes, parts = Nodes(count), [slice(0, VALUES)] * count
    distances = [count >> step for step in range(1, count.bit_length())]
    for distance in distances:
        halves = []
        for node, part in enumerate(parts):
            middle = (part.start + part.stop) // 2
            both = [slice(part.start, middle), slice(middle, part.stop)]
            halves.append(both[::-1] if node & distance else both)  # what is kept, what is sent
        messages = [
            (node, node ^ distance, nodes.values[node, given]) for node, (_, given) in enumerate(halves)
        ]
        parts = [kept for kept, _ in halves]
        for target, values in nodes.send(messages):
            nodes.values[target, parts[target]] += values
    for distance in distances[::-1]:
        messages = [(node, node ^ distance, nodes.values[node, parts[node]]) for node in range(count)]
        for source, (target, values) in enumerate(nodes.send(messages)):
            nodes.values[target, parts[source]] = values
        joined = [(parts[node], parts[node ^ distance]) for node in range(count)]
        parts = [slice(min(a.start, b.start), max(a.stop, b.stop)) for a, b in joined]
    nodes.values /= count
    nodes.check(exchange.halving_doubling(count))


@pytest.mark.parametrize(("count", "serving"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 4), (8, 8)])
def test_servers_send_what_is_counted(count, serving):
    nodes = Nodes(count)
    pairs = [(node, server) for node in range(count) for server in range(serving) if node != server]
    arrived = nodes.send([(node, server, nodes.slices(node, serving)[server]) for node, server in pairs])
    for server, values in arrived:
        nodes.slices(server, serving)[server][:] += values
    for server in range(serving):
        nodes.slices(server, serving)[server][:] /= count
    pulled = nodes.send([(server, node, nodes.slices(server, serving)[server]) for node, server in pairs])
    for (_, server), (node, values) in zip(pairs, pulled, strict=True):
        nodes.slices(node, serving)[server][:] = values
    nodes.check(exchange.servers(count, serving))


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
    disagreement = np.cos(2 * np.pi * np.arange(count) / count)
    rounds = exchange.neighbours(count).repeated(1000).rounds
    left = [
        np.linalg.norm(np.linalg.matrix_power(mixing, number) @ disagreement) / np.linalg.norm(disagreement)
        for number in (rounds - 1, rounds)
    ]
    assert left[1] <= 1e-3
    assert left[0] > 1e-3 or rounds == 1
    assert np.linalg.norm(np.linalg.matrix_power(mixing, rounds) - 1 / count, 2) <= 1e-3 + 1e-12


def test_seconds_are_latency_and_bandwidth():
    cost = exchange.ring(4)
    assert cost.seconds(1e9, 0.0, 4e9) == pytest.approx(1.5)
    assert cost.seconds(0, 0.01, 4e9) == pytest.approx(0.06)


def cells(text: str) -> list[list[str]]:
    """Cells of the lines of Markdown tables, whatever their alignment."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_tables_in_the_docs_equal_the_results_and_the_counts():
    results = json.loads((ROOT / "benchmarks/results/exchange.json").read_text())
    counted = results["counted"]
    found = exchange.count(counted["latency_us"] / 1e6, counted["gigabytes_per_s"] * 1e9)
    assert json.loads(json.dumps(found)) == counted["rows"]
    page = cells((ROOT / "docs/explanation/waiting.md").read_text())
    counted, measured = (
        cells(text)
        for text in (exchange.show_counted(found), exchange.show_measured(results["measured"]["rows"]))
    )
    for printed, rows in ((counted, 6), (measured, 7)):  # the page shows the rows that its text is about
        start = page.index(printed[0])
        shown = page[start + 1 : start + 1 + rows]
        assert [row for row in shown if row not in printed] == []
