"""entities.yaml: entity F1 on domains that were not trained on, of initial and of meta-trained weights."""

import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from examples.generate_entities import rows
from fmmeta import evaluate

EPISODES = 54


def write(folder: Path) -> None:
    """The rows of all tasks, and their splits by domain."""
    found, tasks = [*rows(30)], list[str]()
    for row in found:
        tasks += [row["task"]] if row["task"] not in tasks else []
    parts = {"train": tasks[:24], "valid": tasks[24:30], "test": tasks[30:]}
    (folder / "splits.json").write_text(json.dumps(parts))
    (folder / "entities.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """F1 by domain, of both weights and of their difference, and CPU minutes."""
    write(Path(study.folder))
    (trained, seconds), train, began = study.trained(cell), cell.settings["train"], time.process_time()
    loop = json.loads(Path(trained).with_name("run.json").read_text())["held_out"]["baseline_inner_loop"]
    of_base = {"inner_lr": 0.1 * loop["scale"], "inner_steps": loop["steps"]}
    names = ("task_type", "dataset", "task_splits", "max_length", "num_query")
    same, found = {name: train[name] for name in names} | {"episodes": EPISODES}, dict[str, Any]()
    for name, model, more in (("base", study.model, of_base), ("trained", trained, {})):
        by_domain = defaultdict[str, list[float]](list)
        for score in evaluate(model, **same, **more)["cells"][0]["scores"]:
            by_domain[score["task"].split(":")[0]].append(score["metrics"]["f1"])
        found[name] = {domain: round(mean(values), 4) for domain, values in by_domain.items()}
    found["gain"] = {domain: round(f1 - found["base"][domain], 4) for domain, f1 in found["trained"].items()}
    minutes = (seconds + time.process_time() - began) / 60
    return {**found, "base_loop": of_base, "cpu_minutes": round(minutes, 1)}
