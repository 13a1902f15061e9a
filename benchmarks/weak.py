"""Weak scaling: two groups of one rank against two runs that know nothing of each other, on the same two
cores at the same time.

    python -m benchmarks.weak --json benchmarks/results/weak.json

FOMAML on MiniLM, `--meta_batch_size` tasks per group, one thread per process; each process trains as
`launch/train.py` does. In turn: two groups of one run, then two runs of one group. The first outer step of
each is left out. Tasks differ in tokens, so what is compared is tokens per second, those of both runs added
up. Besides, in two processes: a reduction of a vector as long as theta over loopback, and its share of an
outer step of the two groups; and comm_bytes in metrics.jsonl against the planner's formula. The last line has
the efficiency and the share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import spread, table, write_json
from benchmarks.floor import SETTINGS
from benchmarks.stepping import find_data, find_model
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, empty_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.memory import largest_part, rank_sizes
from fmmeta.parallel.process_groups import World, pick_device

ROOT = Path(__file__).parent.parent
REDUCTIONS = 5


def started(command: list[str], rank: int, size: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        **{key: str(value) for key, value in place.items()},
    }
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def ended(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(
            "weak: a process ended with an error:\n" + "\n".join(log.read_text()[-2000:] for log in logs)
        )


def trained(flags: dict[str, Any], groups: int, port: int) -> list[list[dict[str, Any]]]:
    """Lines of metrics.jsonl of one run of two groups, or of two runs of one group."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(run) for run in range(2)]
        logs = [folder.with_suffix(".log") for folder in folders]
        processes = []
        for process in range(2):
            words = {
                **flags,
                "meta_batch_size": groups * flags["meta_batch_size"],
                "output_dir": folders[0 if groups == 2 else process],
                "seed": 0 if groups == 2 else process,
            }
            command = [
                sys.executable,
                "launch/train.py",
                *(f"--{key}={value}" for key, value in words.items()),
            ]
            rank, size = (process, 2) if groups == 2 else (0, 1)
            processes.append(
                started(command, rank, size, port + (0 if groups == 2 else process), logs[process])
            )
        ended(processes, logs)
        files = [folder / "metrics.jsonl" for folder in folders[: 1 if groups == 2 else 2]]
        return [[json.loads(line) for line in file.read_text().splitlines()][1:] for file in files]


def rate(lines: list[dict[str, Any]]) -> float:
    """Tokens per second."""
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def reduce_rank(numel: int) -> None:
    """One of two processes: print seconds of each reduction of `numel` fp32 numbers, as fp32 and as bf16,
    and, of what buckets could hide behind it, of copies to bf16 and back and of an AdamW step.
    """
    torch.set_num_threads(1)
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    cross = world.split(1, default_group=False).cross
    vector, theta = torch.ones(numel), torch.ones(numel)
    theta.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([theta], foreach=True)
    works: dict[str, Callable[[], Any]] = {
        "fp32": lambda: cross.sum_(vector),
        "bf16": lambda: cross.sum_(vector, torch.bfloat16),
        "copies": lambda: vector.copy_(vector.to(torch.bfloat16)),
        "outer step": optimizer.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REDUCTIONS + 1):
        for name, work in works.items():
            world.comm.barrier()
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    print(json.dumps({name: each[1:] for name, each in seconds.items()}))
    world.close()


def reductions(numel: int, port: int) -> dict[str, list[float]]:
    """Seconds of each, of the slower of two processes."""
    with tempfile.TemporaryDirectory() as name:
        logs = [Path(name) / str(rank) for rank in range(2)]
        command = [sys.executable, "-m", "benchmarks.weak", "--reduce", str(numel)]
        processes = [started(command, rank, 2, port, log) for rank, log in enumerate(logs)]
        ended(processes, logs)
        first, second = (json.loads(log.read_text().splitlines()[-1]) for log in logs)
        return {kind: [max(pair) for pair in zip(first[kind], second[kind], strict=True)] for kind in first}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--data")
    parser.add_argument("--meta_batch_size", type=int, default=8, help="tasks per group and outer step")
    parser.add_argument("--outer_steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--reduce", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reduce:
        reduce_rank(given.reduce)
        return
    flags = {
        **SETTINGS,
        "model_name_or_path": find_model(given.model_name_or_path),
        "dataset": find_data(given.data),
        "inner_steps": 5,
        "group_size": 1,
        "meta_batch_size": given.meta_batch_size,
        "logging_steps": 1,
        "outer_steps": given.outer_steps + 1,
    }
    config = Config(**{**flags, "dataset": [flags["dataset"]], "group_size": "1"})
    learner = empty_learner(config, describe(config))
    sizes = rank_sizes(config, learner.hf.config, largest_part(config, learner, learner.hf.config), lazy=True)
    formula = sizes.crossing * sizes.params
    together, alone, steps, counted = list[float](), list[float](), list[float](), set[int]()
    for number in range(given.rounds):
        port = 29400 + 20 * number
        (lines,) = trained(flags, 2, port)
        together.append(rate(lines))
        steps += [line["seconds"] for line in lines]
        counted |= {line["comm_bytes"] for line in lines}
        alone.append(sum(map(rate, trained(flags, 1, port + 10))))
        print(f"tokens per second: {together[-1]:.0f} in two groups, {alone[-1]:.0f} in two runs", flush=True)
    seconds = reductions(sizes.params, 29390)
    efficiency = spread([a / b for a, b in zip(together, alone, strict=True)])
    cost = {kind: spread(each)["median"] for kind, each in seconds.items()}
    share = cost["fp32"] / spread(steps)["median"]
    result = {
        "settings": flags,
        "tokens_per_second": {"two groups": together, "two runs": alone},
        "efficiency": efficiency,
        "step_seconds": spread(steps),
        "reduction_seconds": cost,
        "share": share,
        "bytes": {"counted": sorted(counted), "formula": formula},
    }
    write_json(given.json, result)
    row = [
        f"{spread(together)['median']:.0f}",
        f"{spread(alone)['median']:.0f}",
        f"{efficiency['median']:.3f}",
        f"{spread(steps)['median']:.2f}",
        *(f"{one:.3f}" for one in cost.values()),
        f"{100 * share:.1f} %",
        formula,
    ]
    print(
        table(
            [
                "tokens/s in two groups",
                "in two runs",
                "efficiency",
                "step s",
                "reduction s",
                "as bf16",
                "copies",
                "AdamW",
                "share",
                "bytes",
            ],
            [row],
        )
    )
    if counted != {formula}:
        raise SystemExit(
            f"weak: {sorted(counted)} bytes crossed in an outer step, and the formula says {formula}"
        )
    print(f"weak: efficiency {efficiency['median']:.3f}, reduction {100 * share:.1f} % of a step")


if __name__ == "__main__":
    main()
