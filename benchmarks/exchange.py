"""What does it cost to average P values over G groups? All-reduce, reduce-scatter and all-gather, parameter
servers and gossip: bytes, rounds and seconds.

    python -m benchmarks.exchange count --json benchmarks/results/exchange.json
    python -m benchmarks.exchange measure --json benchmarks/results/exchange.json

`count`: what the busiest link carries, in each direction, and the seconds of the alpha-beta model

    seconds = rounds x latency + bytes that pass the busiest link one after another / bandwidth

with links that carry both directions at once. Reductions, headers and queues take no time in it.

`measure`: the same exchanges over gloo, by real processes on hosts that are network namespaces (as root;
namespaces.py): two of them with a cable, four with a switch, every link shaped to --mbit (tc tbf) in both
directions. Bytes are those of the interface's counters, headers and acknowledgements included. The floor, in
the same rounds: the same number of values, sent once from one host to another through a plain socket. Ways
alternate; the median and the quartiles over --repeats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import machine, spread, table, write_json
from harness.namespaces import NAMES, Hosts

ROOT = Path(__file__).parent.parent
GROUPS, VALUES = (2, 8, 64, 512), (10**8, 10**9, 10**10)
CLOSE = 1000  # gossip continues until the disagreement has fallen by this factor
FLOOR, TIMEOUT_S = "one transfer", 600


@dataclass(frozen=True)
class Cost:
    """Of one exchange, with bytes in units of the P values.

    sent, received: by the busiest node. serial: what its link carries, in either direction, one after
    another. rounds: messages one after another; those to several nodes at once are one. state: share of
    theta and of the outer optimizer's moments that the busiest node updates. left: share of the disagreement
    that is left; 0 where all have the mean.
    """

    sent: float
    received: float
    serial: float
    rounds: int
    state: float
    left: float = 0.0

    def seconds(self, values: float, latency_s: float, bytes_per_s: float) -> float:
        return self.rounds * latency_s + self.serial * 4 * values / bytes_per_s

    def repeated(self, factor: float) -> Cost:
        """Until at most 1 / `factor` of the disagreement is left."""
        times = math.ceil(math.log(factor) / -math.log(self.left)) if self.left else 1
        sent, received, serial = (times * part for part in (self.sent, self.received, self.serial))
        return Cost(sent, received, serial, times * self.rounds, self.state, self.left**times)


def ring(groups: int) -> Cost:
    """G - 1 rounds that add up, G - 1 that pass on; 1 / G of the values in each."""
    bytes_ = 2 * (groups - 1) / groups
    return Cost(bytes_, bytes_, bytes_, 2 * (groups - 1), 1.0)


def halving_doubling(groups: int) -> Cost:
    """Half of the values to a partner, a quarter to the next, and back; for a power of two."""
    bytes_ = 2 * (groups - 1) / groups
    return Cost(bytes_, bytes_, bytes_, 2 * round(math.log2(groups)), 1.0)


def sharded(groups: int) -> Cost:
    """Reduce-scatter, an outer step on 1 / G of the values, all-gather, both by a ring."""
    bytes_ = 2 * (groups - 1) / groups
    return Cost(bytes_, bytes_, bytes_, 2 * (groups - 1), 1 / groups)


def servers(groups: int, count: int) -> Cost:
    """The nodes of `count` groups serve 1 / count of the values each: all groups push, then all pull."""
    bytes_ = (groups + count - 2) / count  # as a server, and as a group
    return Cost(bytes_, bytes_, 2 * (groups - 1) / count, 2, 1 / count)


def pairs(groups: int) -> Cost:
    """Each averages with one partner, drawn again for each round.

    The squared disagreement falls by (G - 2) / (2 (G - 1)) in a round: a matching W is a projection, so that
    E W'W = E W = 1/2 I + 1/2 (J - I) / (G - 1).
    """
    return Cost(1.0, 1.0, 1.0, 1, 1.0, math.sqrt((groups - 2) / (2 * (groups - 1))))


def neighbours(groups: int) -> Cost:
    """Each takes the mean with both neighbours in a circle; the second eigenvalue of that matrix is left."""
    if groups == 2:
        return pairs(groups)
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / groups)) / 3 for k in range(1, groups)]
    return Cost(2.0, 2.0, 2.0, 1, 1.0, max(map(abs, eigenvalues)))


COSTS: dict[str, Callable[[int], Cost]] = {
    "all-reduce, ring": ring,
    "all-reduce, halving and doubling": halving_doubling,
    "reduce-scatter + all-gather": sharded,
    "one server": lambda groups: servers(groups, 1),
    "8 servers, at most G": lambda groups: servers(groups, min(8, groups)),
    "a server on each node": lambda groups: servers(groups, groups),
    "gossip in pairs, one round": pairs,
    f"gossip in pairs, to 1/{CLOSE}": lambda groups: pairs(groups).repeated(CLOSE),
    "gossip in a circle, one round": neighbours,
    f"gossip in a circle, to 1/{CLOSE}": lambda groups: neighbours(groups).repeated(CLOSE),
}


def count(latency_s: float, bytes_per_s: float) -> list[dict[str, Any]]:
    """One row for each way and number of groups; bytes and seconds by number of values."""
    return [
        {
            "way": way,
            "groups": groups,
            **asdict(cost := find(groups)),
            "bytes_sent": {f"{values:.0e}": round(cost.sent * 4 * values) for values in VALUES},
            "seconds": {f"{values:.0e}": cost.seconds(values, latency_s, bytes_per_s) for values in VALUES},
        }
        for way, find in COSTS.items()
        for groups in GROUPS
    ]


def show_counted(rows: Sequence[dict[str, Any]], values: str = "1e+09") -> str:
    """GB through the busiest link each way, rounds, seconds."""
    cells = {
        (row["way"], row["groups"]): f"{short(row['bytes_sent'][values] / 1e9)} GB, {row['rounds']:,},"
        f" {short(row['seconds'][values])} s"
        for row in rows
    }
    return table(
        ["way", *(f"G = {groups}" for groups in GROUPS)],
        [[way, *(cells[way, groups] for groups in GROUPS)] for way in COSTS],
    )


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def by_all_reduce(x: Tensor) -> None:
    dist.all_reduce(x)
    x.div_(dist.get_world_size())


def by_shards(x: Tensor) -> None:
    """A reduce-scatter of direct messages, since gloo's costs more (below); then gloo's all-gather."""
    size = dist.get_world_size()
    push(x, size)
    slices = list(x.chunk(size))
    dist.all_gather(slices, slices[dist.get_rank()].clone())


def by_gloo_reduce_scatter(x: Tensor) -> None:
    size = dist.get_world_size()
    part = torch.empty(x.numel() // size)
    dist.reduce_scatter(part, list(x.chunk(size)))
    dist.all_gather(list(x.chunk(size)), part.div_(size))


def by_servers(x: Tensor, count: int) -> None:
    """The first `count` ranks serve a slice each: all push, then all pull."""
    rank, size = dist.get_rank(), dist.get_world_size()
    push(x, count)
    slices = x.chunk(count)
    asking = [other for other in range(size) if other != rank] if rank < count else []
    wait_all(
        [
            *(dist.irecv(slices[number], number) for number in range(count) if number != rank),
            *(dist.isend(slices[rank], other) for other in asking),
        ]
    )


def push(x: Tensor, count: int) -> None:
    """Replace slice i of rank i by the mean of the slices i of all ranks, for the first `count` ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    slices = x.chunk(count)
    others = [other for other in range(size) if other != rank] if rank < count else []
    inbox = [torch.empty_like(slices[rank]) for _ in others]
    wait_all(
        [
            *(dist.irecv(box, other) for box, other in zip(inbox, others, strict=True)),
            *(dist.isend(slices[number], number) for number in range(count) if number != rank),
        ]
    )
    if rank < count:
        for box in inbox:
            slices[rank].add_(box)
        slices[rank].div_(size)


def by_pairs(x: Tensor, number: int) -> None:
    """One round of gossip."""
    partner = draw_partners(number, dist.get_world_size())[dist.get_rank()]
    other = torch.empty_like(x)
    wait_all([dist.irecv(other, partner), dist.isend(x, partner)])
    x.add_(other).div_(2)


def draw_partners(number: int, size: int) -> list[int]:
    """The partner of each rank in a round, from the round's number alone; `size` is even."""
    order = random.Random(number).sample(range(size), size)
    return [order[order.index(rank) ^ 1] for rank in range(size)]


def wait_all(pending: Sequence[Any]) -> None:
    for work in pending:
        work.wait()


class Wire:
    """A plain connection from rank 0 to rank 1, for the floor."""

    def __init__(self, store: dist.TCPStore, rank: int) -> None:
        self.rank = rank
        if rank == 1:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing; finds the local address
                address = probe.getsockname()[0]
            with socket.create_server((address, 0)) as listening:
                store.set("wire", f"{address}:{listening.getsockname()[1]}")
                self.end, _ = listening.accept()
        elif rank == 0:
            address, port = store.get("wire").decode().split(":")
            self.end = socket.create_connection((address, int(port)))

    def transfer(self, x: Tensor) -> None:
        if self.rank > 1:
            return
        bytes_ = x.numpy().data.cast("B")
        if self.rank == 0:
            self.end.sendall(bytes_)
            self.end.recv(1)
            return
        while bytes_:
            bytes_ = bytes_[self.end.recv_into(bytes_) :]
        self.end.sendall(b"x")


def exchanges(wire: Wire) -> dict[str, Callable[[Tensor, int], None]]:
    """What is measured; each gets the values of a rank, and the number of the round."""
    return {
        FLOOR: lambda x, _: wire.transfer(x),
        "all-reduce, ring": lambda x, _: by_all_reduce(x),
        "reduce-scatter + all-gather": lambda x, _: by_shards(x),
        "the same with gloo's reduce_scatter": lambda x, _: by_gloo_reduce_scatter(x),
        "one server": lambda x, _: by_servers(x, 1),
        "a server on each node": lambda x, _: by_servers(x, dist.get_world_size()),
        "gossip in pairs, one round": by_pairs,
    }


def expected(way: str, groups: int) -> Cost:
    """The count of a measured way; gloo's reduce_scatter is an all-reduce of which a slice is kept."""
    if way == FLOOR:
        return Cost(1.0, 1.0, 1.0, 1, 1.0)
    if way in COSTS:
        return COSTS[way](groups)
    share = (groups - 1) / groups
    return Cost(3 * share, 3 * share, 3 * share, 3 * (groups - 1), 1 / groups)


def traffic(interface: str | None) -> tuple[int, int]:
    """Bytes sent and received so far: by the interface, or (sent only) by write calls of this process."""
    if interface:
        counters = Path(f"/sys/class/net/{interface}/statistics")
        return int((counters / "tx_bytes").read_text()), int((counters / "rx_bytes").read_text())
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"]), 0


def rank_main(values: int, repeats: int, interface: str | None, folder: Path) -> None:
    """All exchanges in turn, as one rank; the first round checks results and is not measured."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    starts = [torch.randn(values, generator=torch.Generator().manual_seed(seed)) for seed in range(size)]
    start, mean = starts[rank], torch.stack(starts).double().mean(0)
    del starts
    ways = exchanges(Wire(store, rank))
    results: dict[str, dict[str, Any]] = {way: {"seconds": [], "sent": [], "received": []} for way in ways}
    for number in range(repeats + 1):
        for way, exchange in ways.items():
            x = start.clone()
            dist.barrier()
            before, began = traffic(interface), time.monotonic()
            exchange(x, number)
            seconds = time.monotonic() - began
            dist.barrier()  # what is sent has arrived
            after, result = traffic(interface), results[way]
            if number == 0:
                result["off"] = float((x - mean).norm() / (start - mean).norm())
                result["hash"] = hashlib.sha256(x.numpy().tobytes()).hexdigest()
                continue
            result["seconds"].append(seconds)
            result["sent"].append(after[0] - before[0])
            result["received"].append(after[1] - before[1])
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def summary(folder: Path, size: int, values: int) -> list[dict[str, Any]]:
    """One row for each way, over ranks and repeats. Bytes in units of the values."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
    rows = []
    for way in ranks[0]:
        found = [rank[way] for rank in ranks]
        busiest = {
            key: max(spread(rank[key])["median"] for rank in found) / (4 * values)
            for key in ("sent", "received")
        }
        seconds = spread([max(each) for each in zip(*(rank["seconds"] for rank in found), strict=True)])
        rows.append(
            {
                "way": way,
                "groups": size,
                "values": values,
                "counted": asdict(expected(way, size)),
                **busiest,
                "seconds": seconds,
                "equal_bits": len({rank["hash"] for rank in found}) == 1,
                "off": max(rank["off"] for rank in found),
            }
        )
    floor = rows[0]["seconds"]["median"]
    return [{**row, "by_floor": row["seconds"]["median"] / floor} for row in rows]


def measure(groups: int, mbit: float, values: int, repeats: int) -> list[dict[str, Any]]:
    """One launch on so many hosts."""
    names = (*NAMES, "gamma", "delta")[:groups]
    with tempfile.TemporaryDirectory() as folder, Hosts(names=names) as hosts:
        hosts.shape(mbit)
        log = Path(folder) / "log"
        words = [sys.executable, "-m", "benchmarks.exchange", "rank", "--folder", folder]
        words += ["--values", str(values), "--repeats", str(repeats)]
        launch = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500", "WORLD_SIZE": str(groups)}
        with log.open("w") as file:
            started = [
                hosts.run(
                    rank,
                    [*words, "--interface", cable],
                    file,
                    cwd=ROOT,
                    env={
                        **os.environ,
                        **launch,
                        "RANK": str(rank),
                        "GLOO_SOCKET_IFNAME": cable,
                        "OMP_NUM_THREADS": "1",
                    },
                )
                for rank, cable in enumerate(hosts.cables)
            ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in started]
        except subprocess.TimeoutExpired:
            codes = [1]
        if any(codes):
            raise SystemExit(log.read_text()[-4000:])
        return [{"mbit": mbit, **row} for row in summary(Path(folder), groups, values)]


def show_measured(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes of the busiest host by those of the values; seconds by those of the floor; beside the counts."""
    cells = []
    for row in rows:
        middle, low, high = (row["seconds"][key] for key in ("median", "low", "high"))
        bits = "-" if row["way"] == FLOOR else "yes" if row["equal_bits"] else "no"
        off = "-" if row["way"] == FLOOR else f"{row['off']:.1g}"
        cells.append(
            [
                *(row["way"], row["groups"], f"{row['counted']['sent']:.2f}"),
                *(f"{row['sent']:.2f}", f"{row['received']:.2f}"),
                *(f"{middle:.2f} ({low:.2f}, {high:.2f})", f"{row['counted']['serial']:.2f}"),
                *(f"{row['by_floor']:.2f}", bits, off),
            ]
        )
    header = (
        "way, G, bytes counted, sent, received, seconds, time counted, by floor, equal bits, off the mean"
    )
    return table(header.split(", "), cells)


def store(path: str | None, part: str, results: dict[str, Any]) -> None:
    """Write the results of a part beside those of the other one."""
    before = json.loads(Path(path).read_text()) if path and Path(path).is_file() else {}
    write_json(path, {**before, part: {"machine": machine(), **results}})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("count", "measure", "rank"))
    parser.add_argument("--latency_us", type=float, default=30, help="of a message")
    parser.add_argument("--gigabytes_per_s", type=float, default=40, help="of a link, each way")
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], choices=(2, 4))
    parser.add_argument("--mbit", type=float, default=40, help="of a link, each way")
    parser.add_argument("--values", type=int, default=2**20, help="divisible by the number of hosts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--interface", help="of a rank; without it the bytes that it writes are counted")
    parser.add_argument("--folder", type=Path, help="for the results of the ranks")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.part == "rank":
        return rank_main(given.values, given.repeats, given.interface, given.folder)
    if given.part == "count":
        rows = count(given.latency_us / 1e6, given.gigabytes_per_s * 1e9)
        for values in VALUES:
            print(f"P = {values:.0e}: through the busiest link each way, rounds, seconds")
            print(show_counted(rows, f"{values:.0e}"))
        model = {"latency_us": given.latency_us, "gigabytes_per_s": given.gigabytes_per_s}
        return store(given.json, "counted", {**model, "rows": rows})
    rows = [row for hosts in given.hosts for row in measure(hosts, given.mbit, given.values, given.repeats)]
    print(show_measured(rows))
    return store(given.json, "measured", {"repeats": given.repeats, "rows": rows})


if __name__ == "__main__":
    main()
