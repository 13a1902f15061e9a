"""How fast is a GPU kept? Tokens per second, share of its peak, memory and waits, beside a hand-written loop
on the same tensors and beside what `fmmeta plan` predicts.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json [--cases bert-base-fp32 llama-1b-bf16 ...]

FOMAML on 2 tasks of 5 classes (5 + 5 rows each, all of the same length), 5 inner steps, one rank, random
weights. After fmmeta's outer steps the floor does the work of the last one as often (floor.py, in bf16 over
fp32 weights where the case is in bf16). MFU counts the arithmetic that the model needs for the tokens of a
micro-batch: matrix products and attention, twice as much backward as forward (Chowdhery et al. 2022, arXiv
2204.02311, appendix B), by the peak of the GPU for the precision (--peak TFLOPS for one that is not in the
list). A wait is a call that makes the host wait for the device, as torch.cuda.set_sync_debug_mode reports it;
they are counted in one more step, with the line of fmmeta that they come from. Kernels are counted there too.
Without a GPU it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import spread, table, write_json
from benchmarks.floor import SETTINGS, Floor
from benchmarks.stepping import Cost, alone, prepare
from fmmeta.config.settings import Config
from fmmeta.learners.load import empty_learner, load_learner
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.planning.compute import MatmulCounts, count_matmuls
from fmmeta.planning.layouts import Planner
from fmmeta.planning.machines import find
from fmmeta.planning.settings import PlanConfig
from fmmeta.tasks.batching import IGNORE, Episode, MicroBatch

# dense TFLOPS by precision, from the vendors' data sheets; fp32 is without TF32, as torch computes by default
PEAKS = {
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "V100": {"bf16": 0.0, "fp32": 15.7},
}
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 2048}
SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", "max_position_embeddings": 512},
    # the sizes of Llama 3.2 1B and Llama 3.1 8B
    "llama-1b": {
        **LLAMA,
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **LLAMA,
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
# shape, tokens of a row, whether in bf16, settings, whether beside the floor
CASES: dict[str, tuple[str, int, bool, dict[str, Any], bool]] = {
    "bert-base-fp32": ("bert-base", 64, False, {}, True),
    "bert-base-bf16": ("bert-base", 64, True, {}, True),
    "bert-base-bf16-zero1": ("bert-base", 64, True, {"engine": "deepspeed", "deepspeed": "zero1"}, False),
    "bert-base-bf16-zero2": ("bert-base", 64, True, {"engine": "deepspeed", "deepspeed": "zero2"}, False),
    "bert-base-bf16-zero3": ("bert-base", 64, True, {"engine": "deepspeed", "deepspeed": "zero3"}, False),
    "llama-1b-bf16": ("llama-1b", 512, True, {}, True),
    "llama-1b-bf16-lora": ("llama-1b", 512, True, {"lora_r": 8}, False),
    "llama-8b-bf16-lora": ("llama-8b", 256, True, {"lora_r": 8, "micro_batch_size": 8}, False),
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
    """Of one pass over a set, padding included; the output layer of a language model sees the tokens before
    label tokens alone.
    """
    total, outputs = 0.0, asked.whole - asked.inside
    body = replace(asked, whole=asked.inside, trained=min(asked.trained, asked.inside))
    for batch in batches:
        ids, labels = batch.inputs["input_ids"], batch.targets["labels"]
        of_tokens = labels.ndim == 2
        total += ids.numel() * (body if of_tokens else asked).flops(ids.shape[1], backward, False)
        if of_tokens:
            total += int((labels[:, 1:] != IGNORE).sum()) * (3 if backward else 1) * 2 * outputs
    return total


def task_flops(asked: MatmulCounts, episode: Episode, inner_steps: int) -> float:
    """Of a task of FOMAML: a pass over the support set per inner step, one over the query set."""
    return inner_steps * flops_of(asked, episode.support, True) + flops_of(asked, episode.query, True)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Share of the peak."""
    return flops / (seconds * peak)


def write_model(folder: Path, shape: dict[str, Any]) -> str:
    """Random weights in bf16, and a tokenizer of bytes."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    if not folder.is_dir():
        config = AutoConfig.for_model(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        kind = AutoModelForCausalLM if shape["model_type"] == "llama" else AutoModel
        with torch.device("cuda"):
            torch.manual_seed(0)
            model = kind.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        byte_tokenizer(512).save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return str(folder)


def write_rows(file: Path, tokens: int) -> str:
    """20 classes of 12 texts of the same length: a byte is a token, <bos> is one more."""
    lines = [f"{f'{row} {row % 20} ' * tokens:.{tokens - 1}},class {row % 20}" for row in range(240)]
    file.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return str(file)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count calls that wait for the device, by the last two lines of library code before them."""
    found = Counter[str]()

    def count(message: Warning | str, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        stack = [
            f"{Path(each.filename).name}:{each.lineno}"
            for each in traceback.extract_stack()
            if "fmmeta/" in each.filename or "deepspeed/" in each.filename or "transformers/" in each.filename
        ]
        found[" > ".join(stack[-2:])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Traced:
    """Waits and kernels of what runs between `begin` and `end`."""

    def begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self.profile, self.counting = torch.profiler.profile(activities=activities), waits()
        self.profile.__enter__()
        self.waits = self.counting.__enter__()

    def end(self) -> None:
        self.counting.__exit__(None, None, None)
        torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        events = self.profile.key_averages()
        self.kernels = sum(event.count for event in events if not event.key.startswith(("Mem", "cuda")))

    def result(self, tasks: int) -> dict[str, Any]:
        return {
            "waits_per_task": sum(self.waits.values()) / tasks,
            "waits": dict(self.waits.most_common(12)),
            "kernels_per_task": self.kernels / tasks,
        }


def measure(config: Config, world: Any, ranks: Any, peak: float) -> tuple[dict[str, Any], Any, list[Episode]]:
    """Seconds, tokens per second, MFU, peak bytes, waits and kernels of fmmeta's outer steps; the description
    of the model, and the episodes of a step.
    """
    before = torch.cuda.memory_allocated()
    prepared, _ = prepare(config, world, ranks)
    asked = count_matmuls(empty_learner(config, prepared.inputs.description), config)
    work: list[tuple[float, int]] = []
    traced, episodes = Traced(), list[Episode]()

    def between(used: list[Episode]) -> None:
        torch.cuda.synchronize()
        work.append(
            (sum(task_flops(asked, e, config.inner_steps) for e in used), sum(e.tokens for e in used))
        )
        if len(work) == config.outer_steps - 1:
            traced.begin()
        elif len(work) == config.outer_steps:
            traced.end()
            episodes[:] = used

    ours = [cost.wall for cost in prepared.stepped(between)][:-1]  # the last one is traced
    rates = list(zip(work[1:-1], ours, strict=True))
    result: dict[str, Any] = {
        "seconds": spread(ours),
        "tokens_per_second": statistics.median(tokens / seconds for (_, tokens), seconds in rates),
        "mfu": statistics.median(mfu(flops, seconds, peak) for (flops, _), seconds in rates),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        **traced.result(config.meta_batch_size),
    }
    return result, prepared.inputs.description, episodes


def measure_floor(config: Config, description: Any, episodes: list[Episode], repeats: int) -> dict[str, Any]:
    """The same of the hand-written loop, on the episodes of one step."""
    before, device = torch.cuda.memory_allocated(), torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats()
    floor = Floor(load_learner(config, description).to(device), config)
    moved = [Episode(*([b.to(device) for b in part] for part in (e.support, e.query))) for e in episodes]

    def step() -> None:
        floor.step(moved)
        torch.cuda.synchronize()

    seconds = [Cost.of(step).wall for _ in range(repeats + 1)][1:]
    traced = Traced()
    traced.begin()
    floor.step(moved)
    traced.end()
    peak = torch.cuda.max_memory_allocated() - before
    return {"seconds": spread(seconds), "peak_bytes": peak, **traced.result(config.meta_batch_size)}


def planned(config: Config, tokens: int) -> dict[str, Any]:
    """What `fmmeta plan` says of this layout on an H100: seconds of an outer step, bytes."""
    names = {item.name for item in fields(PlanConfig)} - {"engine", "deepspeed"}
    given = {name: value for name, value in vars(config).items() if name in names}
    plan = PlanConfig(**{**given, "gpus": 1, "gpu_memory_gib": 80.0, "row_tokens": tokens, "offload": False})
    (one, *_) = Planner(plan, find("h100")).layouts()
    return {"seconds": one.step.total, "bytes": one.memory.total}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=8, help="outer steps that are measured")
    parser.add_argument("--folder", help="where random models are kept (default: a temporary folder)")
    parser.add_argument("--peak", type=float, help="TFLOPS of the GPU")
    parser.add_argument("--json")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: no GPU is there; benchmarks.floor measures the same on a CPU", file=sys.stderr)
        raise SystemExit(2)
    world, results = alone(), dict[str, Any]()
    ranks = world.split(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        for name in given.cases:
            shape, tokens, bf16, more, floors = CASES[name]
            config = Config(
                **{
                    **SETTINGS,
                    "model_name_or_path": write_model(folder / shape, SHAPES[shape]),
                    "dataset": [write_rows(folder / f"{tokens}.csv", tokens)],
                    "max_length": tokens,
                    "inner_steps": 5,
                    "meta_batch_size": 2,
                    "group_size": "1",
                    "outer_steps": given.repeats + 2,
                    "bf16": bf16,
                    **more,
                }
            )
            peak = peak_of(torch.cuda.get_device_name(0), "bf16" if bf16 else "fp32", given.peak)
            torch.cuda.reset_peak_memory_stats()
            found, description, episodes = measure(config, world, ranks, peak)
            found["planned"] = planned(config, tokens)
            results[name] = found
            gc.collect()  # a run holds itself in circles
            torch.cuda.empty_cache()
            if floors:
                found["floor"] = measure_floor(config, description, episodes, given.repeats)
                found["ratio"] = found["seconds"]["median"] / found["floor"]["seconds"]["median"]
            print(f"{name}: {results[name]}", flush=True)
            write_json(given.json, {"cases": results})
            torch.cuda.empty_cache()
    world.close()
    print(
        table(
            [
                "",
                "tokens/s",
                "MFU",
                "peak GiB",
                "planned",
                "s/step",
                "planned",
                "waits",
                "kernels",
                "by the floor",
            ],
            [
                [
                    name,
                    f"{r['tokens_per_second']:.0f}",
                    f"{100 * r['mfu']:.1f} %",
                    f"{r['peak_bytes'] / 2**30:.2f}",
                    f"{r['planned']['bytes'] / 2**30:.2f}",
                    f"{r['seconds']['median']:.3f}",
                    f"{r['planned']['seconds']:.3f}",
                    f"{r['waits_per_task']:.1f}",
                    f"{r['kernels_per_task']:.0f}",
                    f"{r['ratio']:.2f}" if "ratio" in r else "",
                ]
                for name, r in results.items()
            ],
        )
    )
    print(
        "gpu: "
        + ", ".join(
            f"{name} {r['tokens_per_second']:.0f} tokens/s, MFU {100 * r['mfu']:.1f} %"
            for name, r in results.items()
        )
    )


if __name__ == "__main__":
    main()
