"""Exact meta-gradients of LoRA adapters by autograd: memory, time and error.

    python -m benchmarks.second_order --json benchmarks/results/second_order.json
    python -m benchmarks.second_order --json benchmarks/results/second_order.json --name SmolLM2 \
        --model FOLDER_OR_GGUF --task_type causal_lm --data ../shared/data/function_vectors --whole 0 \
        --parts memory time error
    python -m benchmarks.second_order --json benchmarks/results/second_order.json --parts peers

memory   peak resident bytes of one task's meta-gradient above the loaded model after one forward pass, for K
         inner steps: the median of runs, each in its own process; beside it the formula: what K = 1 takes,
         plus K - 1 times 1 + moments fp32 vectors of the adapters
peers    the same of learn2learn, higher and TorchOpt, which keep the graph of the whole inner loop: second
         order, the same model, adapters and episode. They are no dependencies: install them in an environment
         of their own (benchmarks/peers.py says how) and run this there. A library that is missing is named
time     CPU seconds of one task at K = 5, exact by FOMAML, in turn
error    relative error to the same recursion in fp64, K = 5: of the recursion, of fp32 autograd through the
         whole inner loop (meta/reference.py), and of differences of gradients; and the cosine of a bf16 base
         to the fp64 recursion on the same rounded base

One thread; MiniLM and clinc150, 5-way 5-shot, unless another model is given. Runs that the JSON file holds
are not done again. Asked: the memory of K = 50 at most 1.1 times that of K = 1 with r 8 on query and value,
the time ratio at most 3.5, the error at most twice that of the whole loop, the cosine at least 0.99. What
they gain on held-out tasks: experiments/second_order.yaml.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}  # freed blocks are returned
STEPS = (1, 5, 20, 50)
TARGETS = {"few": ["query", "value"], "all": ["all-linear"]}
TARGETS_LM = {"few": ["q_proj", "v_proj"], "all": ["all-linear"]}
ADAPTERS = {"few": 8, "all": 16}  # rank
PARTS = ["memory", "time", "error", "peers"]
LIBRARIES = ["learn2learn", "higher", "torchopt"]  # PEERS in benchmarks/peers.py
LAYERS = {"few": "r 8 on query and value", "all": "r 16 on all linears"}


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

        from fmmeta.learners.load import describe, load_learner, load_tokenizer
        from fmmeta.meta.algorithms.setup import setup
        from fmmeta.parallel.param_map import param_groups
        from fmmeta.parallel.workers.full_model import PlainWorker
        from fmmeta.tasks.augment import reading
        from fmmeta.tasks.batching import Batcher, Episode
        from fmmeta.tasks.schedule.meta_batches import Schedule
        from fmmeta.tasks.sources.base import transformed
        from fmmeta.tasks.sources.load import load_sources

        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        description = describe(config)
        tokenizer = load_tokenizer(config, description, lambda text: None)
        sources = load_sources(config, tokenizer, lambda text: None)
        source, numbers = sources.train, sources.numbers
        task = Schedule(source.items, 1, config.seed, 0).meta_batch(number)[0]
        self.rows = transformed(source.draw(task), reading(config, tokenizer, numbers))
        self.config = config
        learner = load_learner(config, replace(description, classes=len(numbers)))
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
        classes = len(numbers) if config.task_type == "classification" else 0
        self.setup = setup(config, self.worker, learner.head_names, classes, precision == "bf16")

    def gradient(self, algorithm: str = "maml") -> Any:
        """The meta-gradient of the adapters, fp64 on one vector by sorted names."""
        import torch

        from fmmeta.config.algorithms import find
        from fmmeta.meta.parameters import MetaGradient, MetaParameters
        from fmmeta.meta.task import TaskRun

        theta, rule = self.worker.read(), cast(Any, find(algorithm).rule)
        into = MetaGradient(theta)
        result = rule(TaskRun(self.setup, self.worker, MetaParameters(theta), self.batches, into))
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


def memory_cell(args: argparse.Namespace) -> dict[str, float]:
    """Peak bytes of a meta-gradient: fmmeta's, or that of `--library`, which must be the same to 1e-4."""
    from benchmarks.memory import resident

    config = settings(args, args.adapters, inner_steps=args.steps[0])
    task = Task(config)
    model = task.reference
    if args.library == "fmmeta":
        task.reference = None
    task.worker.forward(task.batches.query)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    found = task.gradient() if args.library == "fmmeta" else of_peer(args.library, model, task, config)
    peak = resident("VmHWM") - before
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[config.inner_optimizer]
    stored = 1 + (moments if config.inner_optimizer == "adamw" else 0)
    cell: dict[str, float] = {"bytes": peak, "vectors": stored * 4 * task.worker.params.numel}
    if args.library != "fmmeta":
        exact = task.gradient()
        cell["apart"] = float((found - exact).norm() / exact.norm())
    return cell


def of_peer(library: str, model: Any, task: Task, config: Any) -> Any:
    """The meta-gradient of the adapters by a library that differentiates through the whole inner loop."""
    import torch

    from benchmarks.peers import PEERS
    from fmmeta.parallel.workers.full_model import twice_differentiable

    model.unpadded.works = False  # the model as transformers has it
    for param in model.head.parameters():
        torch.nn.init.zeros_(param)
    plain_adapters(model)
    with twice_differentiable(model):
        grads = PEERS[library](model, task.batches, config.inner_steps, config.inner_lr, exact=True)
    return torch.cat([grads[n].double().reshape(-1) for n in sorted(grads) if n not in model.head_names])


def plain_adapters(model: Any) -> None:
    """Replace peft's layers by modules of nn.Module alone: higher cannot derive from peft's classes."""
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.base_layer, self.lora_A, self.lora_B = layer.base_layer, layer.lora_A, layer.lora_B
            self.scaling = layer.scaling["default"]

        def forward(self, x: Any) -> Any:
            return self.base_layer(x) + self.scaling * self.lora_B["default"](self.lora_A["default"](x))

    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapted(module))


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
    """The result of a cell in its own process; flags given twice count as given last."""
    flags = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.second_order", *words, "--cell", kind, *flags],
        env={**os.environ, **MALLOC},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def missing_peers() -> list[str]:
    """The libraries that are not installed here; logs what to install."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        print(
            f"peers: {', '.join(missing)} are not installed and left out; give them a separate environment"
            " (benchmarks/peers.py says how)",
            flush=True,
        )
    return missing


def memory(
    args: argparse.Namespace, words: list[str], cells: dict[str, Any], add: Callable[..., None]
) -> str:
    """Measure the cells that are missing, and return the table of this model."""
    from benchmarks.common import table

    peers = "peers" in args.parts
    libraries = [name for name in LIBRARIES if name not in missing_peers()] if peers else []
    plan = [(adapters, "fmmeta") for adapters in args.adapters.split()] if "memory" in args.parts else []
    plan += [("few", library) for library in libraries]
    rows = []
    for adapters, library in plan:
        for k in args.steps:
            key = f"{args.name}, memory, {library}, {LAYERS[adapters]}, {args.inner_optimizer}, K {k}"
            if key not in cells:
                more = {"adapters": adapters, "library": library, "steps": k}
                runs = [run_cell("memory", words, **more) for _ in range(args.runs)]
                sizes = [run["bytes"] for run in runs]
                add(key, {**runs[0], "bytes": median(sizes), "runs": sizes})
    for key, cell in cells.items():
        name, kind, *texts = key.split(", ")
        if kind != "memory" or name != args.name:
            continue
        k = texts.pop()
        first = cells.get(", ".join([name, kind, *texts, "K 1"]))
        if first is not None:
            formula = first["bytes"] + (int(k[2:]) - 1) * cell["vectors"]
            formula = f"{formula / 1e6:.0f}" if texts[0] == "fmmeta" else ""
            by_first = f"{cell['bytes'] / first['bytes']:.3f}"
            rows.append([", ".join(texts), k, f"{cell['bytes'] / 1e6:.0f}", formula, by_first])
    return table(["adapters", "", "MB", "formula", "by K = 1"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="MiniLM", help="of the model, in the results")
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--task_type", default="classification")
    parser.add_argument("--inner_optimizer", default="sgd")
    parser.add_argument("--inner_lr", type=float, default=0.05)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="K of memory and peers")
    parser.add_argument("--adapters", default="few all", help="of memory: few, all, or both")
    parser.add_argument("--runs", type=int, default=3, help="processes of a cell of memory")
    parser.add_argument("--repeats", type=int, default=3, help="tasks of time and error")
    parser.add_argument(
        "--whole", type=int, default=1, help="0: no graph of the whole loop, for large models"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cell", choices=CELLS, help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=["fmmeta", *LIBRARIES], default="fmmeta", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(CELLS[args.cell](args)))
        return
    from benchmarks.common import keep, read, table

    cells = read(args.json) if args.json else {}
    of_model = ("model", "data", "task_type", "inner_optimizer", "inner_lr", "repeats", "whole")
    given = {name: getattr(args, name) for name in of_model}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]

    def add(key: str, cell: dict[str, Any]) -> None:
        cells[key] = cell
        print(f"{key}: {json.dumps(cell)}", flush=True)
        if args.json:
            keep(args.json, {key: cell})

    if {"memory", "peers"} & {*args.parts}:
        print(memory(args, words, cells, add))
    for part in ("time", "error"):
        key = f"{args.name}, {part}, {args.inner_optimizer}"
        if part in args.parts and key not in cells:
            add(key, run_cell(part, words))
        if part in args.parts:
            print(table([part, ""], [[name, f"{value:.3g}"] for name, value in cells[key].items()]))


if __name__ == "__main__":
    main()
