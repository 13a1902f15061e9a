"""gradient_steps.yaml: tasks on which class means fail, and the class of the nearest example."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from experiments.data import Encoder, records, regrouped
from experiments.run import evaluated


def write_tasks(study: Any, cell: Any) -> dict[str, list[list[str]]]:
    """The data set of a family; the texts of each class of each test task."""
    folder, rows, tested = Path(study.folder, cell.axes["family"]), list[dict[str, str]](), {}
    draw = {"records": records, "regrouped": regrouped}[folder.name](study.data, random.Random(0))
    splits = {
        split: [f"{split} {n}" for n in range(count)] for split, count in cell.settings["tasks"].items()
    }
    for split, task in [(split, task) for split, tasks in splits.items() for task in tasks]:
        tested[task] = [[] for _ in range(5)]
        for place, text in draw(split):
            rows.append({"task": task, "label": f"team {place + 1}", "text": text})
            tested[task][place].append(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "task_splits.json").write_text(json.dumps(splits))
    return {task: tested[task] for task in splits["test"]}


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """As the runner measures; `nearest` on other draws from the same tasks."""
    tasks = write_tasks(study, cell)
    if cell.axes["method"] != "nearest":
        return evaluated(study, cell)
    encode, found = Encoder(study.trained(cell)[0]), dict[str, str]()
    for name, settings in cell.settings["passes"].items():
        shots, rng, right = int(name), random.Random(1), list[float]()
        for texts in [*tasks.values()][: settings["episodes"]]:
            drawn = [encode(rng.sample(of_class, shots + 10)) for of_class in texts]
            support, query = (
                torch.cat([one[:shots] for one in drawn]),
                torch.cat([one[shots:] for one in drawn]),
            )
            nearest = (query @ support.T).argmax(1) // shots
            right.append(float((nearest == torch.arange(5).repeat_interleave(10)).double().mean()))
        found[name] = " ".join(f"{100 * one:g}" for one in right)
    return {"accuracy": found}
