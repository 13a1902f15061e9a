"""How fast is a GPU kept? Tokens per second, share of its peak, memory, and the ratio to a hand-written loop
on the same tensors.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json

FOMAML on 4 tasks of clinc150, one rank, fp32 and bf16; in fp32 after each of fmmeta's outer steps the floor's
(floor.py). MFU counts the arithmetic that the model needs for the tokens of a micro-batch, padding included:
matrix products and attention, twice as much backward as forward (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B), by the peak of the GPU for the precision (--peak TFLOPS for one that is not in the list). Without
a GPU it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

from benchmarks.common import spread, table, write_json
from benchmarks.floor import SETTINGS, Floor
from benchmarks.stepping import Cost, alone, find_data, find_model, prepare
from fmmeta.config.settings import Config
from fmmeta.models.load import empty_learner, load_learner
from fmmeta.planning.compute import MatmulCounts, count_matmuls
from fmmeta.tasks.batching import Episode, MicroBatch

# dense TFLOPS by precision, from the vendors' data sheets; fp32 is without TF32, as torch computes by default
PEAKS = {
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "V100": {"bf16": 0.0, "fp32": 15.7},
}


def peak_of(name: str, precision: str, given: float | None) -> float:
    """Flops per second of a GPU. Ends the program for one that is not known."""
    found = given or next((rates[precision] for gpu, rates in PEAKS.items() if gpu in name), 0.0)
    if not found:
        raise SystemExit(
            f"--peak is missing: the peak of {name} in {precision} is not known here; give it in TFLOPS"
        )
    return found * 1e12


def flops_of(asked: MatmulCounts, batches: list[MicroBatch], backward: bool) -> float:
    """Of one pass over a set, padding included."""
    ids = [batch.inputs["input_ids"] for batch in batches]
    return sum(each.numel() * asked.flops(each.shape[1], backward, False) for each in ids)


def task_flops(asked: MatmulCounts, episode: Episode, inner_steps: int) -> float:
    """Of a task of FOMAML: a pass over the support set per inner step, one over the query set."""
    return inner_steps * flops_of(asked, episode.support, True) + flops_of(asked, episode.query, True)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Share of the peak."""
    return flops / (seconds * peak)


def measure(config: Config, world: Any, ranks: Any, peak: float, floors: bool) -> tuple[dict[str, Any], Any]:
    """Tokens per second, MFU and peak bytes of fmmeta's outer steps; and of the floor's seconds, where it is
    asked for.
    """
    prepared, ranks = prepare(config, world, ranks)
    device = ranks.device
    asked = count_matmuls(empty_learner(config, prepared.inputs.description), config)
    floor = Floor(load_learner(config, prepared.inputs.description).to(device), config) if floors else None
    work: list[tuple[float, int]] = []
    theirs: list[Cost] = []

    def between(used: list[Episode]) -> None:
        work.append(
            (sum(task_flops(asked, e, config.inner_steps) for e in used), sum(e.tokens for e in used))
        )
        if floor is not None:
            moved = [Episode(*([b.to(device) for b in part] for part in (e.support, e.query))) for e in used]
            theirs.append(Cost.of(lambda floor=floor: (floor.step(moved), torch.cuda.synchronize(device))))

    torch.cuda.reset_peak_memory_stats(device)
    ours = [cost.wall for cost in prepared.stepped(between)]
    work, theirs = work[1:], theirs[1:]
    result: dict[str, Any] = {
        "seconds": spread(ours),
        "tokens_per_second": statistics.median(
            tokens / seconds for (_, tokens), seconds in zip(work, ours, strict=True)
        ),
        "mfu": statistics.median(
            mfu(flops, seconds, peak) for (flops, _), seconds in zip(work, ours, strict=True)
        ),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }
    if theirs:
        result["ratio"] = spread([a / b.wall for a, b in zip(ours, theirs, strict=True)])
    return result, ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--data")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--meta_batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peak", type=float, help="TFLOPS of the GPU")
    parser.add_argument("--json")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: no GPU is there; benchmarks.floor measures the same on a CPU", file=sys.stderr)
        raise SystemExit(2)
    world, ranks, results = alone(), None, {}
    for precision in given.precisions:
        config = Config(
            **{**SETTINGS, "lr_scheduler_type": "constant"},
            model_name_or_path=find_model(given.model_name_or_path),
            dataset=[find_data(given.data)],
            inner_steps=5,
            meta_batch_size=given.meta_batch_size,
            group_size="1",
            outer_steps=given.repeats + 1,
            bf16=precision == "bf16",
        )
        peak = peak_of(torch.cuda.get_device_name(0), precision, given.peak)
        results[precision], ranks = measure(config, world, ranks, peak, precision == "fp32")
    world.close()
    print(
        table(
            ["", "tokens/s", "MFU", "peak GiB", "by the floor"],
            [
                [
                    name,
                    f"{r['tokens_per_second']:.0f}",
                    f"{100 * r['mfu']:.1f} %",
                    f"{r['peak_bytes'] / 2**30:.2f}",
                    f"{r['ratio']['median']:.2f}" if "ratio" in r else "",
                ]
                for name, r in results.items()
            ],
        )
    )
    write_json(given.json, {"gpu": results})
    print(
        "gpu: "
        + ", ".join(
            f"{name} {r['tokens_per_second']:.0f} tokens/s, MFU {100 * r['mfu']:.1f} %"
            for name, r in results.items()
        )
    )


if __name__ == "__main__":
    main()
