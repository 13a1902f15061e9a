"""What does the link between two hosts cost? An outer step of two hosts with two ranks each, against
bandwidth and delay.

    python -m benchmarks.hosts --json benchmarks/results/hosts.json --plot docs/hosts.svg
    python -m benchmarks.hosts --unplug --json benchmarks/results/unplugged.json

The hosts are network namespaces (namespaces.py) joined by a cable, a group of two ranks on each (ZeRO 2),
started by `torchrun` with c10d rendezvous or by `deepspeed --no_ssh` (--launcher). Over the cable goes one
reduction of each rank's shard per outer step. One launch serves all settings: the cable is set anew while the
run goes on, and the two steps around a change are left out.

    predicted = seconds without shaping + bytes that the cable then carried in a step / bandwidth
    predicted = seconds without delay + trips x delay; trips: calibrated on the longest delay only

Delays need the kernel's netem; without it a process between the hosts makes them (relay.py), without delay
too. --unplug pulls the cable during a run instead, under both launchers, and measures how long each host
takes to end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import plot, table, write_json
from harness.namespaces import ADDRESSES, NAMES, Hosts

ROOT = Path(__file__).parent.parent
LEAST_S = 10.0
FLAGS = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 4,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": 0,
    "eval_episodes": 0,
    "logging_steps": 1,
    "save_steps": 0,
    "group_size": 2,
    "deepspeed": "ds_configs/zero2.json",
    "check_replicas_steps": 0,
    "step_timeout": 300,
    "outer_steps": 10**6,
}


class Bench:
    """One launch over both hosts, and the seconds of its outer steps as they come."""

    def __init__(self, hosts: Hosts, folder: Path, launcher: str, **flags: Any) -> None:
        self.hosts, self.run, port = hosts, folder / "run", 29000 + os.getpid() % 1000
        words = [f"--{key}={value}" for key, value in {**FLAGS, **flags, "output_dir": self.run}.items()]
        (folder / "hostfile").write_text("".join(f"{name} slots=2\n" for name in NAMES))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        self.logs = [folder / f"{name}.log" for name in NAMES]
        self.processes = []
        for host, log in enumerate(self.logs):
            if launcher == "torchrun":
                start = [
                    "torchrun",
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    "--rdzv-backend=c10d",
                    "--rdzv-id=hosts",
                    f"--rdzv-endpoint={NAMES[0]}:{port}",
                ]
            else:
                start = [
                    "deepspeed",
                    "--hostfile",
                    str(folder / "hostfile"),
                    "--no_ssh",
                    "--node_rank",
                    str(host),
                    "--master_addr",
                    ADDRESSES[0],
                    "--master_port",
                    str(port),
                ]
            with log.open("w") as file:
                self.processes.append(
                    hosts.run(host, [*start, "launch/train.py", *words], file, cwd=ROOT, env=env)
                )

    def steps(self) -> list[dict[str, Any]]:
        """What is known of each outer step so far."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, count: int) -> list[dict[str, Any]]:
        """Until so many outer steps are done."""
        while len(found := self.steps()) < count:
            for process in self.processes:
                if process.poll():
                    raise SystemExit("\n".join(log.read_text()[-3000:] for log in self.logs))
            time.sleep(0.02)
        return found

    def measure(self, count: int) -> dict[str, Any]:
        """Seconds of the fastest of `count` steps, or of all in LEAST_S, after the next two; bytes on the
        cable in a step.

        The fastest, because other work on the cores can only add to it.
        """
        begun = len(self.wait(len(self.steps()) + 2))
        before, began = self.hosts.sent(), time.monotonic()
        self.wait(begun + count)
        time.sleep(max(0.0, LEAST_S - (time.monotonic() - began)))
        done = self.steps()
        sent = [
            (now - then) / (len(done) - begun) for now, then in zip(self.hosts.sent(), before, strict=True)
        ]
        seconds = [line["seconds"] for line in done[begun:]]
        middle = statistics.median(seconds)
        shards = 2 * done[-1]["comm_bytes"]  # of the two ranks of a host
        return {
            "seconds": min(seconds),
            "median": middle,
            "all": seconds,
            "bytes": max(sent),
            "shards": shards,
        }


def measured(
    launcher: str, count: int, settings: list[tuple[float | None, float]], relayed: bool
) -> tuple[list[dict[str, Any]], str]:
    """One launch through all settings (Mbit/s, ms); and why the kernel cannot delay, if it cannot."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, Hosts(relayed) as hosts:
        missing = netem_here(hosts)
        bench = Bench(hosts, Path(folder), launcher)  # ended with its hosts
        bench.wait(4)
        for mbit, delay in settings:
            if relayed:
                hosts.delay(delay)
            hosts.shape(mbit, 0.0 if relayed else delay)
            rows.append({"mbit": mbit, "delay_ms": delay, "relayed": relayed, **bench.measure(count)})
            print({key: value for key, value in rows[-1].items() if key != "all"}, flush=True)
    return rows, missing


def unplugged(launcher: str, step_timeout: float) -> dict[str, Any]:
    """Pull the cable during an outer step; when does the launcher of each host end, with which code, and what
    was said?
    """
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        bench = Bench(hosts, Path(folder), launcher, step_timeout=step_timeout, save_steps=5)
        bench.wait(7)  # in the next step; a save has a bound of its own
        hosts.unplug()
        pulled, ended = time.monotonic(), dict[int, float]()
        while len(ended) < 2 and time.monotonic() < pulled + 400:
            for host, process in enumerate(bench.processes):
                if host not in ended and process.poll() is not None:
                    ended[host] = time.monotonic() - pulled
            time.sleep(0.05)
        lines = [line for log in bench.logs for line in log.read_text().splitlines() if "watchdog" in line]
        codes = [process.poll() for process in bench.processes]
        saved = max(int(path.name.split("-")[1]) for path in bench.run.glob("checkpoint-*"))
        return {
            "launcher": launcher,
            "step_timeout": step_timeout,
            "seconds": [ended.get(host) for host in (0, 1)],
            "codes": codes,
            "steps": len(bench.steps()),
            "saved": saved,
            "said": lines,
        }


def predict_bandwidth(rows: list[dict[str, Any]]) -> None:
    """From the first row alone: what it took, and the bytes that it sent over the bandwidth of the others."""
    first = rows[0]
    for row in rows:
        row["predicted"] = first["seconds"] + (
            8 * first["bytes"] / (1e6 * row["mbit"]) if row["mbit"] else 0.0
        )


def predict_delay(rows: list[dict[str, Any]]) -> float:
    """From the undelayed row and the longest delay: trips of the link that an outer step waits for, one after
    another.
    """
    first, last = rows[0], rows[-1]
    trips = (last["seconds"] - first["seconds"]) / (last["delay_ms"] / 1000)
    for row in rows:
        row["predicted"] = first["seconds"] + trips * row["delay_ms"] / 1000
    return trips


def netem_here(hosts: Hosts) -> str:
    """Why packets cannot be delayed by the kernel; empty if they can."""
    try:
        hosts.shape(None, 1.0)
    except OSError as error:
        return str(error).partition(": ")[2]
    finally:
        hosts.shape(None)
    return ""


def show(rows: list[dict[str, Any]]) -> None:
    print(
        table(
            ["Mbit/s", "delay (ms)", "seconds", "predicted", "off"],
            [
                [
                    row["mbit"] or "not shaped",
                    row["delay_ms"],
                    f"{row['seconds']:.3f}",
                    f"{row['predicted']:.3f}",
                    f"{100 * (row['predicted'] / row['seconds'] - 1):+.0f} %",
                ]
                for row in rows
            ],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", choices=("torchrun", "deepspeed"), default="torchrun")
    parser.add_argument("--count", type=int, default=5, help="outer steps that are measured for each setting")
    parser.add_argument("--mbits", type=float, nargs="*", default=[100, 50, 20, 10, 5, 2, 1])
    parser.add_argument("--delays", type=float, nargs="*", default=[5, 20, 50], help="ms, one way")
    parser.add_argument("--unplug", action="store_true")
    parser.add_argument("--json", default=None)
    parser.add_argument("--plot", default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *of: sys.exit(143))  # the hosts are removed on the way out
    if args.unplug:
        ends = []
        for launcher in ("deepspeed", "torchrun"):
            ends.append(unplugged(launcher, 8.0))
            print(json.dumps(ends[-1], indent=1), flush=True)
            write_json(args.json, {"runs": ends})
        return
    rows, missing = measured(
        args.launcher, args.count, [(None, 0.0), *((mbit, 0.0) for mbit in args.mbits)], False
    )
    predict_bandwidth(rows)
    show(rows)
    results: dict[str, Any] = {
        "launcher": args.launcher,
        "settings": FLAGS,
        "netem": missing or "used",
        "bandwidth": rows,
    }
    write_json(args.json, results)
    if args.delays:
        delayed, _ = measured(
            args.launcher, args.count, [(None, delay) for delay in (0.0, *args.delays)], bool(missing)
        )
        trips = predict_delay(delayed)
        show(delayed)
        print(
            f"an outer step waits for {trips:.1f} trips of the link; delays by"
            f" {'relay.py: ' + missing if missing else 'netem'}"
        )
        write_json(args.json, {**results, "delay": delayed, "trips": trips})
    plot(args.plot, lambda axes: draw(axes, rows))


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    shaped = [row for row in rows if row["mbit"]]
    first = rows[0]
    curve = [10 ** (exponent / 50) for exponent in range(-5, 105)]
    axes.plot(
        curve,
        [first["seconds"] + 8 * first["bytes"] / (1e6 * mbit) for mbit in curve],
        color="#1f6f8b",
        label=f"predicted: {first['seconds']:.2f} s + {first['bytes'] / 1e6:.2f} MB / bandwidth",
    )
    axes.plot(
        [row["mbit"] for row in shaped],
        [row["seconds"] for row in shaped],
        "o",
        color="#c0504d",
        label="measured",
    )
    axes.axhline(first["seconds"], color="#777", linestyle="--", label="cable not shaped")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Mbit/s between two hosts")
    axes.set_ylabel("seconds of an outer step")
    axes.legend()


if __name__ == "__main__":
    main()
