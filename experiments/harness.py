"""harness.yaml: tasks of lm-evaluation-harness that a language model learns from five examples."""

import json
import random
from pathlib import Path
from typing import Any

from experiments.data import read_rows


def write_tasks(study: Any, cell: Any) -> Path:
    """Folder of the harness's tasks: 20 rows to take examples from, 50 to score."""
    folder = Path(study.folder, "tasks")
    rows = read_rows(study.data, "function_vectors", "all")
    for name in cell.settings["tasks"]:
        drawn = random.Random(name).sample([one for one in rows if one["task"] == name], 70)
        files = {}
        for split, some in (("train", drawn[:20]), ("test", drawn[20:])):
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in some))
            files[split] = str(file)
        task = {**cell.settings["task"], "task": name, "dataset_kwargs": {"data_files": files}}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Exact matches of each task in percent."""
    from lm_eval import simple_evaluate

    from fmmeta.adaptation.lm_eval import FewShotLM, known_tasks

    folder = str(write_tasks(study, cell))
    model = FewShotLM(study.model, include_path=folder, batch_size=1, **cell.settings["model"])
    score: Any = simple_evaluate
    found = score(
        model=model,
        tasks=cell.settings["tasks"],
        task_manager=known_tasks(folder),
        batch_size=1,
        bootstrap_iters=0,
        **cell.settings["evaluate"],
    )["results"]
    return {"exact_match": {name: 100 * found[name]["exact_match,none"] for name in cell.settings["tasks"]}}
