"""Is the loader ever the bottleneck? Its tokens per second over num_workers x prefetch x pinning, beside what
the model eats.

    python -m benchmarks.loader --model_name_or_path M --dataset D --json benchmarks/results/loader.json \
        --plot docs/how-to/loader.svg

The floor is the model: tokens per second of FOMAML outer steps on this machine, measured in the same run by
two ranks that train for real. The last line is the ratio of the slowest loader to the two ranks together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import plot, spread, table, write_json
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.loader import EpisodeLoader, LoadEpisode, TaskSampler
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.load import load_sources


def measure(
    load: LoadEpisode,
    schedule: Schedule,
    num_workers: int,
    prefetch: int,
    pin: bool,
    episodes: int,
    repeats: int,
) -> dict[str, Any]:
    """Tokens per second of a warm loader, `repeats` times `episodes` episodes."""

    def upcoming(task: Task):
        return (one for one in TaskSampler(schedule, first=task.seed[2]) if one.seed >= task.seed)

    loader, stream = (
        EpisodeLoader(load, upcoming, str(num_workers), prefetch, pin),
        iter(TaskSampler(schedule)),
    )
    began = time.perf_counter()
    loader.fetch([next(stream)])
    first, rates = time.perf_counter() - began, []
    for _ in range(repeats):
        tasks = [next(stream) for _ in range(episodes)]
        began = time.perf_counter()
        loaded = loader.fetch(tasks)
        seconds = time.perf_counter() - began
        rates.append(sum(one.batches.tokens for one in loaded if one.batches) / seconds)
    loader.close()
    return {
        "num_workers": num_workers,
        "prefetch_factor": prefetch,
        "pin": pin,
        "first_s": round(first, 3),
        "tokens_per_s": spread(rates),
    }


def train(flags: list[str], num_workers: str, steps: int) -> dict[str, float]:
    """Two ranks train; tokens per second of both, and the share of an outer step that they wait for data."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "outer_steps": steps,
            "eval_episodes": 0,
            "logging_steps": 1,
            "save_steps": 0,
            "output_dir": folder,
            "num_workers": num_workers,
            "group_size": 1,
        }
        command = [
            sys.executable,
            "launch/train.py",
            *flags,
            *(f"--{key}={value}" for key, value in settings.items()),
        ]
        ranks = []
        for rank in range(2):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        if any(rank.wait() for rank in ranks):
            raise SystemExit("the training run failed; run it by hand: " + " ".join(command))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][
            2:
        ]  # warm
    seconds = sum(line["seconds"] for line in lines)
    return {
        "tokens_per_s": sum(line["tokens"] for line in lines) / seconds,
        "data_share": sum(line["data_seconds"] for line in lines) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", default="tiny")
    parser.add_argument("--dataset", nargs="+", default=["letters"])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--episodes", type=int, default=200, help="per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="outer steps of the training runs")
    parser.add_argument("--json")
    parser.add_argument("--plot", help="SVG file")
    given = parser.parse_args()
    flags = ["--model_name_or_path", given.model_name_or_path, "--dataset", *given.dataset]
    config = Config(model_name_or_path=given.model_name_or_path, dataset=given.dataset)
    tokenizer = load_tokenizer(config, describe(config), print)
    source = load_sources(config, tokenizer, print).train
    schedule, load = (
        Schedule(source.items, config.meta_batch_size, config.seed),
        LoadEpisode(source, Batcher(tokenizer.pad_token_id or 0)),
    )
    pins = [False, True] if torch.cuda.is_available() else [False]
    chosen = [
        one
        for one in itertools.product(given.workers, given.prefetch, pins)
        if one[0] or one[1] == given.prefetch[0]
    ]
    rows = [measure(load, schedule, *one, given.episodes, given.repeats) for one in chosen]
    runs = {workers: train(flags, workers, given.steps) for workers in ("0", "1")}
    eaten = max(run["tokens_per_s"] for run in runs.values())
    print("\nLoader alone, one rank, warm\n")
    print(
        table(
            [
                "num_workers",
                "prefetch_factor",
                "pinned",
                "tokens/s",
                "quartiles",
                "first episode",
                "times training",
            ],
            [
                [
                    r["num_workers"],
                    r["prefetch_factor"] if r["num_workers"] else "-",
                    "yes" if r["pin"] else "no",
                    f"{r['tokens_per_s']['median']:,.0f}",
                    f"{r['tokens_per_s']['low']:,.0f} to {r['tokens_per_s']['high']:,.0f}",
                    f"{r['first_s']:.2f} s",
                    f"{r['tokens_per_s']['median'] / eaten:.1f}",
                ]
                for r in rows
            ],
        )
    )
    print("\nTwo ranks training\n")
    shares = [
        [workers, f"{run['tokens_per_s']:,.0f}", f"{100 * run['data_share']:.2f} %"]
        for workers, run in runs.items()
    ]
    print(table(["num_workers", "tokens/s, both ranks", "of a step spent waiting for data"], shares))
    ratio = min(r["tokens_per_s"]["median"] for r in rows) / eaten
    write_json(
        given.json, {"loader": rows, "training": runs, "ratio_of_the_slowest_loader_to_two_ranks": ratio}
    )

    def draw(axes: Any) -> None:
        labels = [f"{r['num_workers']} / {r['prefetch_factor']}" if r["num_workers"] else "0" for r in rows]
        medians = [r["tokens_per_s"]["median"] for r in rows]
        errors = [
            [r["tokens_per_s"]["median"] - r["tokens_per_s"]["low"] for r in rows],
            [r["tokens_per_s"]["high"] - r["tokens_per_s"]["median"] for r in rows],
        ]
        axes.bar(labels, medians, yerr=errors, capsize=3)
        axes.axhline(eaten, color="tab:red", label=f"two ranks train: {eaten:,.0f} tokens/s")
        axes.set(
            yscale="log",
            xlabel="num_workers / prefetch_factor",
            ylabel="tokens per second",
            title="Loader of one rank",
        )
        axes.legend()

    plot(given.plot, draw)
    print(f"\n{ratio:.1f}")


if __name__ == "__main__":
    main()
