"""Many tasks in one command against one command per task, and against loops in one process.

    python -m benchmarks.adapt_many --json benchmarks/results/adapt_many.json [--tasks 100] [--shots 5 1]

MiniLM with LoRA of rank 8; 5-way tasks of clinc150. Rows: `fmmeta adapt --support DIRECTORY` and one `fmmeta
adapt --support FILE` per task, as processes with their imports; `fmmeta.adapt_many`, a loop of `fmmeta.adapt`
and the floor, in this process. The floor is a hand-written PyTorch loop over the tasks on a loaded model: the
same folds and steps, no files. One thread. The adapters of `adapt_many` and of the command must equal those
of single ones to 1e-5.

    5-shot         the number of steps is chosen on examples left out, which is most of the time
    5-shot, fixed  --early_stopping false: 5 steps
    1-shot         5 steps: a class of one example leaves none out

`--commands N` and `--in_process N` run N tasks, evenly chosen, and scale their seconds up to all tasks: the
table says so in the row. Cells are added to those that the JSON file holds.
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
from benchmarks.common import keep, table
from benchmarks.stepping import Cost, find_data, find_model
from fmmeta.adaptation.task_learner import leave_out
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.tasks.data.encode import encode_texts
from fmmeta.tasks.data.files import data_files, read_file
from fmmeta.tasks.data.rows import Table

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

    def __init__(self, config: Config, chooses: bool) -> None:
        self.chooses = chooses
        description = describe(config)
        self.config = config
        self.tokenizer = load_tokenizer(config, description, lambda text: None)
        self.model = load_learner(config, description)
        self.params: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.params]
        self.pad = description.hf_config.pad_token_id

    def inputs(self, pairs: Pairs) -> tuple[dict[str, Tensor], Tensor]:
        labels = sorted({label for _, label in pairs})
        rows = encode_texts(self.tokenizer, [text for text, _ in pairs], self.config.max_length)
        length = max(map(len, rows))
        ids = torch.tensor([[*row, *[self.pad] * (length - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
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
        if folds and self.chooses:
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


def evenly(names: Sequence[str], count: int) -> list[str]:
    """`count` of the names at equal distances; all if there are no more."""
    count = min(count, len(names))
    return [names[number * len(names) // count] for number in range(count)]


def scaled(costs: Sequence[Cost], tasks: int, measured: int) -> dict[str, float]:
    """Seconds of all tasks from those of some; `measured` says of how many."""
    times = tasks / measured
    wall, cpu = (times * sum(getattr(one, kind) for one in costs) for kind in ("wall", "cpu"))
    return {"wall": wall, "cpu": cpu, "measured": measured}


def measure(
    model: str, tasks: Mapping[str, Pairs], commands: int, in_process: int, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Costs of every row, for these tasks."""
    costs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), list(tasks)
        support = folder / "support"
        support.mkdir()
        for task, pairs in tasks.items():
            rows = [json.dumps({"text": text, "label": label}) for text, label in pairs]
            (support / f"{task}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        given = [f"--{key}={value}" for key, value in {"model_name_or_path": model, **flags}.items()]
        one = command([*given, f"--support={support}", f"--output_dir={folder / 'many'}"])
        costs["one command"] = scaled([one], 1, 1)
        singles = evenly(names, commands)
        found = [
            command([*given, f"--support={support / task}.jsonl", f"--output_dir={folder / task}"])
            for task in singles
        ]
        costs["a command per task"] = scaled(found, len(tasks), len(singles))
        here = {task: tasks[task] for task in evenly(names, in_process)}
        config = AdaptConfig(model_name_or_path=model, **flags)
        floor = Floor(config.run_config(n_way=WAYS), config.early_stopping)
        works: dict[str, Callable[[], Any]] = {
            "adapt_many": lambda: fmmeta.adapt_many(model, here, output_dir=folder / "in process", **flags),
            "loop of adapt": lambda: [
                fmmeta.adapt(model, pairs, output_dir=folder / f"loop-{task}", **flags)
                for task, pairs in here.items()
            ],
            "floor": lambda: [floor.adapt(pairs) for pairs in here.values()],
        }
        for key, work in works.items():
            costs[key] = scaled([Cost.of(work)], len(tasks), len(here))
        far = [apart(folder / "many" / task, folder / task) for task in singles]
        far += [apart(folder / "in process" / task, folder / f"loop-{task}") for task in here]
    return {"tasks": len(tasks), "costs": costs, "apart": max(far), "compared": len(far)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument(
        "--data", help="folder that holds clinc150 (default: ../shared/data beside the checkout)"
    )
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--commands", type=int, default=10, help="single commands that are run")
    parser.add_argument("--in_process", type=int, default=100, help="tasks of the rows in this process")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    model, data, found = find_model(given.model_name_or_path), find_data(given.data), dict[str, Any]()
    if data == "letters":
        raise SystemExit("--data is needed: the texts of the tasks come from a data set on disk")
    flags = {"lora_r": 8, "max_length": 64, "inner_lr": 0.5}
    for name in given.cells:
        shots, more = CELLS[name]
        tasks = draw_tasks(data, given.tasks, shots)
        found[name] = measure(model, tasks, given.commands, given.in_process, {**flags, **more})
        if given.json:
            keep(given.json, {name: {"settings": {**flags, **more}, **found[name]}})
    rows = [
        [name, label(key, cost, cell["tasks"]), f"{cost['cpu']:.1f}", f"{cost['wall']:.1f}"]
        + [f"{cost['cpu'] / cell['costs'][base]['cpu']:.2f}" for base in COLUMNS]
        for name, cell in found.items()
        for key, cost in cell["costs"].items()
    ]
    print(table(["", "", "CPU s", "wall s", *(f"CPU s by {base}" for base in COLUMNS)], rows))
    for name, cell in found.items():
        one, each, many, loop = (
            cell["costs"][key]["cpu"]
            for key in ("one command", "a command per task", "adapt_many", "loop of adapt")
        )
        print(
            f"{name}: {each / one:.1f} times fewer CPU seconds than {cell['tasks']} commands,"
            f" {loop / many:.2f} times fewer than a loop in one process; {cell['compared']} adapters at most"
            f" {cell['apart']:.1e} apart"
        )
    for name, cell in found.items():
        if not cell["apart"] < 1e-5:
            raise SystemExit(
                f"adapt_many: {name}: adapters are {cell['apart']:.1e} from those of single ones"
            )


def label(key: str, cost: Mapping[str, float], tasks: int) -> str:
    """The row's name, with the number of tasks that were measured if not all were."""
    of_all = key == "one command" or cost["measured"] == tasks
    return key if of_all else f"{key} ({tasks} extrapolated from {cost['measured']:.0f})"


CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "5-shot": (5, {}),
    "5-shot, fixed": (5, {"early_stopping": False}),
    "1-shot": (1, {}),
}
COLUMNS = ["floor", "a command per task"]


if __name__ == "__main__":
    main()
