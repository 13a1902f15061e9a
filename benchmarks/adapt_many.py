"""Many tasks in one command against one command per task, and against loops in one process.

    python -m benchmarks.adapt_many --json benchmarks/results/adapt_many.json [--tasks 100] [--shots 5 1]

MiniLM with LoRA of rank 8; 5-way tasks of clinc150. Rows: `fmmeta adapt --support DIRECTORY` and one `fmmeta
adapt --support FILE` per task, as processes with their imports; `fmmeta.adapt_many`, a loop of `fmmeta.adapt`
and the floor, in this process. The floor is a hand-written PyTorch loop over the tasks on a loaded model: the
same folds and steps, no files. One thread. `--commands N` runs only N of the commands and scales their
seconds up. The adapters of the commands must equal those of the single ones to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import fmmeta
from benchmarks.common import table, write_json
from benchmarks.stepping import Cost, find_data, find_model
from fmmeta.adaptation.task_learner import leave_out
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.models.load import describe, load_learner, load_tokenizer
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.data.rows import Table, data_files, read_file

WAYS = 5
Pairs = list[tuple[str, str]]


def draw_tasks(data: str, count: int, shots: int) -> dict[str, Pairs]:
    """Examples of each task by its name, drawn from the rows of a data set."""
    by_class: dict[str, list[str]] = defaultdict(list)
    for file in data_files(data) or []:
        for row in read_file(file):
            by_class[str(row.values["label"])].append(str(row.values["text"]))
    rng = random.Random(0)
    return {
        f"task-{number:04d}": [
            (text, label)
            for label in rng.sample(sorted(by_class), WAYS)
            for text in rng.sample(by_class[label], shots)
        ]
        for number in range(count)
    }


def command(flags: Sequence[str]) -> Cost:
    """Seconds of `fmmeta adapt` with these flags, from its start."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fmmeta", "adapt", *flags], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - began, cpu)


class Floor:
    """Cross-validation and adaptation of one task after the other, as one would write them for one model."""

    def __init__(self, config: Config) -> None:
        description = describe(config)
        self.config = config
        self.tokenizer = load_tokenizer(config, description, lambda text: None)
        self.model = load_learner(config, description)
        self.params: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.params]
        self.pad = description.hf_config.pad_token_id

    def inputs(self, pairs: Pairs) -> tuple[dict[str, Tensor], Tensor]:
        labels = sorted({label for _, label in pairs})
        rows = encode(self.tokenizer, self.config, [text for text, _ in pairs], [label for _, label in pairs])
        length = max(len(row.input_ids) for row in rows)
        ids = torch.tensor([[*row.input_ids, *[self.pad] * (length - len(row.input_ids))] for row in rows])
        mask = torch.tensor([[1] * len(row.input_ids) + [0] * (length - len(row.input_ids)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}, torch.tensor(
            [labels.index(one) for _, one in pairs]
        )

    def loss(self, rows: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(self.model(**rows[0]), rows[1])

    def learn(self, support: Pairs, steps: int, held_out: Pairs | None = None) -> list[float]:
        """Take the steps from the start; the losses on `held_out` after each of them."""
        rows, losses = self.inputs(support), list[float]()
        others = None if held_out is None else self.inputs(held_out)
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.start)
        for _ in range(steps):
            grads = torch.autograd.grad(self.loss(rows), self.params)
            with torch.no_grad():
                torch._foreach_sub_(self.params, list(grads), alpha=self.config.inner_lr)
                if others is not None:
                    losses.append(float(self.loss(others)))
        return losses

    def adapt(self, pairs: Pairs) -> None:
        columns = Table([], [], [], [text for text, _ in pairs], [label for _, label in pairs])
        folds, steps = leave_out(columns, [label for _, label in pairs]), self.config.inner_steps
        if folds:
            scores = [
                self.learn(
                    [one for index, one in enumerate(pairs) if index not in fold],
                    2 * steps,
                    [pairs[index] for index in fold],
                )
                for fold in folds
            ]
            means = torch.tensor(scores).mean(0)
            steps = 1 + int(means.argmin())
        self.learn(pairs, steps)


def apart(one: Path, other: Path) -> float:
    """The largest difference of two adapter folders."""
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def measure(
    model: str, tasks: Mapping[str, Pairs], commands: int, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Costs of every row, for these tasks."""
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "support").mkdir()
        for task, pairs in tasks.items():
            rows = [json.dumps({"text": text, "label": label}) for text, label in pairs]
            (folder / "support" / f"{task}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        given = [f"--{key}={value}" for key, value in {"model_name_or_path": model, **flags}.items()]
        support = folder / "support"
        costs["one command"] = command([*given, f"--support={support}", f"--output_dir={folder / 'many'}"])
        single = [
            command([*given, f"--support={support / task}.jsonl", f"--output_dir={folder / task}"])
            for task in list(tasks)[:commands]
        ]
        scale = len(tasks) / len(single)
        costs["a command per task"] = Cost(
            scale * sum(one.wall for one in single), scale * sum(one.cpu for one in single)
        )
        far = max(apart(folder / "many" / task, folder / task) for task in list(tasks)[:commands])
        floor = Floor(AdaptConfig(model_name_or_path=model, **flags).run_config(n_way=WAYS))
        works: dict[str, Callable[[], Any]] = {
            "adapt_many": lambda: fmmeta.adapt_many(model, tasks, output_dir=folder / "in process", **flags),
            "loop of adapt": lambda: [
                fmmeta.adapt(model, pairs, output_dir=folder / f"loop-{task}", **flags)
                for task, pairs in tasks.items()
            ],
            "floor": lambda: [floor.adapt(pairs) for pairs in tasks.values()],
        }
        for key, work in works.items():
            costs[key] = Cost.of(work)
    return {"costs": {key: vars(cost) for key, cost in costs.items()}, "commands": len(single), "apart": far}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument(
        "--data", help="folder that holds clinc150 (default: ../shared/data beside the checkout)"
    )
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--commands", type=int, default=0, help="single commands that are run; 0: all")
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 1])
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    model, data, found = find_model(given.model_name_or_path), find_data(given.data), dict[str, Any]()
    if data == "letters":
        raise SystemExit("--data is needed: the texts of the tasks come from a data set on disk")
    flags = {"lora_r": 8, "max_length": 64, "inner_lr": 0.5}
    for shots in given.shots:
        tasks = draw_tasks(data, given.tasks, shots)
        found[f"{shots}-shot"] = measure(model, tasks, given.commands or given.tasks, flags)
        write_json(given.json, {"tasks": given.tasks, "settings": flags, "cells": found})
    rows = [
        [shots, key, f"{cost['cpu']:.1f}", f"{cost['wall']:.1f}"]
        + [f"{cost[kind] / cell['costs'][base][kind]:.2f}" for base, kind in COLUMNS]
        for shots, cell in found.items()
        for key, cost in cell["costs"].items()
    ]
    print(table(["", "", "CPU s", "wall s", *(f"by {base} ({kind})" for base, kind in COLUMNS)], rows))
    for shots, cell in found.items():
        one, each = (cell["costs"][key] for key in ("one command", "a command per task"))
        many, loop = (cell["costs"][key] for key in ("adapt_many", "loop of adapt"))
        print(
            f"{shots}: {each['cpu'] / one['cpu']:.1f} times fewer CPU seconds than {given.tasks} commands"
            f" ({each['wall'] / one['wall']:.1f} wall), {loop['cpu'] / many['cpu']:.2f} times fewer than a"
            f" loop in one process ({loop['wall'] / many['wall']:.2f} wall); adapters apart"
            f" {cell['apart']:.1e}"
        )
        if not cell["apart"] < 1e-5:
            raise SystemExit(
                f"adapt_many: {shots} adapters are {cell['apart']:.1e} from those of single commands"
            )


COLUMNS = [("floor", "cpu"), ("floor", "wall"), ("a command per task", "cpu")]


if __name__ == "__main__":
    main()
