"""Exact meta-gradients of LoRA adapters by autograd: memory, time and error.

    python -m benchmarks.second_order --json benchmarks/results/second_order.json
    python -m benchmarks.second_order --model FOLDER --task_type causal_lm --data FILE.jsonl

memory   peak resident bytes of one task's meta-gradient above the loaded model after one forward pass, for K
         inner steps, each in its own process; beside it the formula: what K = 1 takes, plus K - 1 times
         1 + moments fp32 vectors of the adapters
time     CPU seconds of one task at K = 5, exact by FOMAML, in turn
error    relative error to the same recursion in fp64, K = 5: of the recursion, of fp32 autograd through the
         whole inner loop (meta/reference.py), and of differences of gradients
bf16     cosine to the fp64 recursion on the same rounded base

One thread; MiniLM and clinc150, 5-way 5-shot, unless another model is given. The last line has what is asked:
the memory of K = 50 by that of K = 1 (at most 1.1 with r 8 on query and value), the time ratio (at most 3.5),
the error by that of the whole loop (at most 2), the cosine (at least 0.99).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}  # freed blocks are returned
STEPS = (1, 5, 20, 50)
TARGETS = {"few": ["query", "value"], "all": ["all-linear"]}
TARGETS_LM = {"few": ["q_proj", "v_proj"], "all": ["all-linear"]}
ADAPTERS = {"few": 8, "all": 16}  # rank


def settings(args: argparse.Namespace, adapters: str = "few", **more: Any) -> Any:
    from benchmarks.stepping import find_data, find_model
    from fmmeta.config.settings import Config

    causal = args.task_type == "causal_lm"
    targets = TARGETS_LM if causal else TARGETS
    of_inner = {"inner_optimizer": args.inner_optimizer, "inner_lr": args.inner_lr}
    ways = {} if causal else {"n_way": 5, "pooling": "mean"}
    return Config(
        model_name_or_path=find_model(args.model),
        dataset=[args.data or find_data(None)],
        task_type=args.task_type,
        algorithm="maml",
        lora_r=ADAPTERS[adapters],
        lora_target_modules=targets[adapters],
        k_shot=5,
        num_query=5,
        max_length=64,
        micro_batch_size=32,
        **{"inner_steps": 5, **ways, **of_inner, **more},
    )


class Task:
    """A plain worker and the batches of one episode, in fp32, fp64 or bf16."""

    def __init__(self, config: Any, number: int = 0, precision: str = "fp32", rounded: bool = False) -> None:
        import torch

        from fmmeta.meta.algorithms.setup import setup
        from fmmeta.models.load import describe, load_learner, load_tokenizer
        from fmmeta.parallel.param_map import param_groups
        from fmmeta.parallel.workers.full_model import PlainWorker
        from fmmeta.tasks.batching import Batcher, Episode
        from fmmeta.tasks.schedule.meta_batches import Schedule
        from fmmeta.tasks.sources.load import load_sources

        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        description = describe(config)
        tokenizer = load_tokenizer(config, description, lambda text: None)
        source = load_sources(config, tokenizer, lambda text: None).train
        task = Schedule(source.items, 1, config.seed, 0).meta_batch(number)[0]
        self.rows, self.config = source.draw(task).episode(), config
        learner = load_learner(config, replace(description, classes=len(source.classes)))
        draw = torch.Generator().manual_seed(0)
        for name, param in learner.named_parameters():  # adapters after some training: B is not zero
            if "lora_B" in name:
                param.data.copy_(0.02 * torch.randn(param.shape, generator=draw))
            elif rounded and not param.requires_grad:
                param.data = param.data.bfloat16().float()
        torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
        learner = learner.double() if precision == "fp64" else learner
        self.reference = copy.deepcopy(learner) if precision != "bf16" else None
        groups = param_groups(learner, learner.head_names, weight_decay=True)
        self.worker = PlainWorker(learner, groups, torch.device("cpu"), precision == "bf16")
        batcher = Batcher(tokenizer.pad_token_id or 0, config.micro_batch_size)
        self.batches = Episode(batcher.split(self.rows.support), batcher.split(self.rows.query))
        classes = len(source.classes) if config.task_type == "classification" else 0
        self.setup = setup(config, self.worker, learner.head_names, classes, precision == "bf16")

    def gradient(self, algorithm: str = "maml") -> Any:
        """The meta-gradient of the adapters, fp64 on one vector by sorted names."""
        import torch

        from fmmeta.config.algorithms import find
        from fmmeta.meta.parameters import MetaGradient, MetaParameters

        theta = self.worker.read()
        into = MetaGradient(theta)
        result = (
            find(algorithm)
            .rule(self.setup, 0)
            .task_gradient(self.worker, MetaParameters(theta), self.batches, into)
        )
        assert result.finite
        trained = self.worker.trained_params
        heads = self.worker.learner.head_names
        return torch.cat(
            [
                self.worker.gather_param(into.sum, name, tuple(trained[name].shape)).double().reshape(-1)
                for name in sorted(trained)
                if name not in heads
            ]
        )

    def whole_loop(self) -> Any:
        """The same by autograd through the unrolled inner loop."""
        import torch

        from fmmeta.meta.reference import reference_gradient

        learner = self.reference
        assert learner is not None
        theta = {n: p.detach().clone() for n, p in learner.named_parameters() if p.requires_grad}
        found, *_ = reference_gradient(learner, theta, self.rows, self.config, False)
        return torch.cat(
            [found[n].double().reshape(-1) for n in sorted(found) if n not in learner.head_names]
        )


def high_water() -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_cell(args: argparse.Namespace) -> dict[str, float]:
    config = settings(args, args.adapters, inner_steps=args.steps)
    task = Task(config)
    task.reference = None
    task.worker.forward(task.batches.query)
    before = resident()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # VmHWM begins again
    task.gradient()
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[config.inner_optimizer]
    stored = 1 + (moments if config.inner_optimizer == "adamw" else 0)
    return {"bytes": high_water() - before, "vectors": stored * 4 * task.worker.params.numel}


def time_cell(args: argparse.Namespace) -> dict[str, float]:
    from benchmarks.stepping import Cost

    task, seconds = Task(settings(args)), {"fomaml": [], "maml": []}
    for _ in range(args.repeats + 1):
        for algorithm, costs in seconds.items():
            costs.append(Cost.of(lambda name=algorithm: task.gradient(name)).cpu)
    exact, first = (median(seconds[name][1:]) for name in ("maml", "fomaml"))
    return {"exact": exact, "first_order": first, "ratio": exact / first}


def error_cell(args: argparse.Namespace) -> dict[str, float]:
    from torch.nn.functional import cosine_similarity

    found: dict[str, list[float]] = {"recursion": [], "whole loop": [], "differences": [], "bf16": []}
    for number in range(args.repeats):
        config = settings(args)
        exact = Task(config, number, "fp64").gradient()
        task = Task(config, number)
        others = {"recursion": task.gradient()}
        if args.whole:
            others["whole loop"] = task.whole_loop()
        if config.inner_optimizer != "adamw":
            others["differences"] = Task(replace(config, second_order="differences"), number).gradient()
        for name, vector in others.items():
            found[name].append(float((vector - exact).norm() / exact.norm()))
        on_rounded = Task(config, number, "fp64", rounded=True).gradient()
        half = Task(config, number, "bf16").gradient()
        found["bf16"].append(float(cosine_similarity(half, on_rounded, 0)))
    return {name: mean(values) for name, values in found.items() if values}


CELLS = {"memory": memory_cell, "time": time_cell, "error": error_cell}


def run_cell(kind: str, words: list[str], **more: Any) -> dict[str, Any]:
    flags = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.second_order", *words, "--cell", kind, *flags],
        env={**os.environ, **MALLOC},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from benchmarks.common import table, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--task_type", default="classification")
    parser.add_argument("--inner_optimizer", default="sgd")
    parser.add_argument("--inner_lr", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--whole", type=int, default=1, help="0: no graph of the whole loop, for large models"
    )
    parser.add_argument("--json")
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--adapters", choices=ADAPTERS, default="few")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(CELLS[args.cell](args)))
        return
    words = sys.argv[1:]
    for name in ("--json",):
        if name in words:
            at = words.index(name)
            words = words[:at] + words[at + 2 :]
    results: dict[str, Any] = {"settings": vars(args), "memory": {}}
    rows = []
    for adapters, rank in ADAPTERS.items():
        cells = {k: run_cell("memory", words, adapters=adapters, steps=k) for k in STEPS}
        results["memory"][adapters] = cells
        first = cells[STEPS[0]]["bytes"]
        for k, cell in cells.items():
            formula = first + (k - 1) * cell["vectors"]
            mib, of_formula = (f"{value / 2**20:.0f}" for value in (cell["bytes"], formula))
            layers = "query, value" if adapters == "few" else "all linears"
            rows.append([f"r {rank} on {layers}", k, mib, of_formula, f"{cell['bytes'] / first:.3f}"])
            print(f"r {rank}, K {k}: {mib} MiB", flush=True)
    print(table(["adapters", "K", "MiB", "formula", "by K = 1"], rows))
    results["time"], results["error"] = run_cell("time", words), run_cell("error", words)
    print(table(["", "value"], [[k, f"{v:.3g}"] for k, v in {**results["time"], **results["error"]}.items()]))
    few, error = results["memory"]["few"], results["error"]
    growth = few[STEPS[-1]]["bytes"] / few[STEPS[0]]["bytes"]
    whole = (
        f"error {error['recursion'] / error['whole loop']:.2f} of the whole loop's, " if args.whole else ""
    )
    print(
        f"second_order: memory {growth:.3f} times K = 1, time {results['time']['ratio']:.2f} times FOMAML's,"
        f" {whole}bf16 cosine {error['bf16']:.4f}"
    )
    write_json(args.json, results)


if __name__ == "__main__":
    main()
